"""JSON and safetensors files, drawn and wrecked, and how each is read."""

import contextlib
import copy
import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import safetensors
from hypothesis import strategies as st

from paged_optax.planning.checkpoint import checkpoint_shapes
from paged_optax.planning.hugging_face import Fields


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to read.

    Attributes:
      given: What the reader gets.
      names: What its error has to name.
      bad: Whether it must be refused; None: the reader decides.
    """

    given: Any
    names: tuple[str, ...] = ()
    bad: bool | None = None


# -- JSON -------------------------------------------------------------------------

NAMES = st.text(max_size=8) | st.sampled_from(["w", "__metadata__", "a.b", "\0", "é"])
NUMBERS = st.sampled_from([-5, -1, 0, 1, 2, 7, 1.5, 2**31, 2**53, 2**60, 2**63, 2**64])
WEIRD = (
    NUMBERS
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | NAMES
    | st.sampled_from(["12", "F32", [], {}, [-5, 3], [1.5], [[]], [True], [2**62] * 9])
)
JSON = st.recursive(
    WEIRD,
    lambda x: st.lists(x, max_size=4) | st.dictionaries(NAMES, x, max_size=4),
    max_leaves=12,
)
#: Texts that no bounded reader can take for JSON of a model, and why.
MONSTERS = {
    "deep lists": b"[" * 10**6 + b"]" * 10**6,
    "deep objects": b'{"a":' * 10**6 + b"0" + b"}" * 10**6,
    "many lists": b"[" + b"[]," * 2**20 + b"[]]",
    "many keys": b"{" + b",".join(b'"%d":0' % i for i in range(2**20)) + b"}",
    "long text": b'"' + b"a" * 2**24 + b'"',
    "wide letters": b'["' + "\U0001f600".encode() * 2**21 + b'"]',
    "long number": b"9" * 10**5,
    "not a number": b"NaN",
    "infinite": b"[-Infinity]",
    "not text": b"\xff\xfe\x00",
    "nothing": b"",
}
_LARGE = ["deep lists", "deep objects", "many lists", "many keys", "long text"]


def monsters() -> st.SearchStrategy[bytes]:
    few = [text for name, text in MONSTERS.items() if name not in _LARGE]
    large = [MONSTERS[name] for name in _LARGE]
    # Those of megabytes once in a while: they take the most time.
    return st.integers(0, 59).flatmap(
        lambda i: st.sampled_from(large) if i == 0 else st.sampled_from(few)
    )


@st.composite
def wrecked(draw: st.DrawFn, text: bytes) -> bytes:
    """A file with a few bytes changed, lost or put in."""
    found = bytearray(text)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(found) - 1)))
        way = draw(st.integers(0, 3))
        if way == 0 and found:
            found[at] = draw(st.integers(0, 255))
        elif way == 1:
            del found[at:]
        elif way == 2:
            del found[at : at + draw(st.integers(1, 16))]
        else:
            found[at:at] = draw(st.binary(max_size=16) | st.just(b"[" * 2000))
    return bytes(found)


def paths_in(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value of a JSON tree is."""
    yield path
    items = tree.items() if isinstance(tree, dict) else ()
    for key, x in enumerate(tree) if isinstance(tree, list) else items:
        yield from paths_in(x, (*path, key))


def put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A JSON tree with a value replaced."""
    if not path:
        return value
    tree = copy.copy(tree)
    tree[path[0]] = put(tree[path[0]], path[1:], value)
    return tree


@st.composite
def altered(draw: st.DrawFn, text: bytes) -> bytes:
    """JSON of which one value became another."""
    tree = json.loads(text)
    path = draw(st.sampled_from([*paths_in(tree)]))
    return json.dumps(put(tree, path, draw(JSON))).encode()


def read_json(given: bytes, folder: pathlib.Path) -> object:
    path = folder / "config.json"
    path.write_bytes(given)
    return Fields.of_file(path)


def json_cases() -> st.SearchStrategy[Case]:
    named = lambda bad: lambda x: Case(x, ("config.json",), bad)
    config = json.dumps({"hidden_size": 64, "rope": {"theta": 1e6}, "a": [1, 2]})
    every = st.dictionaries(NAMES, JSON, max_size=4)
    every = every.map(lambda x: json.dumps(x).encode()).map(named(False))
    others = st.binary(max_size=40) | wrecked(config.encode())
    return every | others.map(named(None)) | monsters().map(named(True))


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "torch_dtype": "float32",
}
INDEX = {
    "metadata": {"total_size": 4096},
    "weight_map": {"a": "1.safetensors", "b": "2.safetensors"},
}


def documents(name: str, right: dict[str, Any]) -> st.SearchStrategy[Case]:
    text = json.dumps(right).encode()
    others = st.one_of(altered(text), wrecked(text), monsters())
    return others.map(lambda x: Case((name, x), (name,)))


def read_document(given: tuple[str, bytes], folder: pathlib.Path) -> object:
    name, text = given
    (folder / name).write_bytes(text)
    return checkpoint_shapes(folder / name)


# -- safetensors ------------------------------------------------------------------

_BITS = {"F32": 32, "BF16": 16, "F16": 16, "F8_E4M3": 8, "I64": 64, "F4": 4, "C64": 64}


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A right header, and how many bytes follow it."""
    header: dict[str, Any] = {}
    end = 0
    for name in draw(st.lists(NAMES, min_size=1, max_size=4, unique=True)):
        if name == "__metadata__":
            header[name] = draw(st.dictionaries(NAMES, NAMES, max_size=2))
            continue
        dtype = draw(st.sampled_from([*_BITS]))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        if dtype == "F4":
            shape = [*shape, 2]
        size = int(np.prod(shape)) * _BITS[dtype] // 8
        place = [end, end + size]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": place}
        end += size
    return header, end


def laid_out(header: bytes, following: int, claimed: int | None = None) -> bytes:
    """A safetensors file."""
    length = len(header) if claimed is None else claimed
    return length.to_bytes(8, "little") + header + bytes(following)


WRONG = {
    "dtype": st.none() | st.sampled_from([1, "F33", "f32", [], {}]),
    "shape": st.none()
    | st.sampled_from(["12", [-5, 3], [1.5], {}, [None], [True], [2**60, 2**60], "F"])
    | st.lists(st.integers(5, 2**64), min_size=1, max_size=3),
    "data_offsets": st.none()
    | st.sampled_from([[], [0], [1, 0], [0, 2**60], [-4, 0], "12", [0.0, 4.0], [0] * 3])
    | st.tuples(st.integers(10**6, 2**64), st.integers(10**6, 2**64)).map(list),
}


@st.composite
def safetensors_cases(draw: st.DrawFn) -> Case:
    header, following = draw(headers())
    file = ("model.safetensors",)
    arrays = [name for name in header if name != "__metadata__"]
    way = draw(st.integers(0, 6))
    if way == 0 and arrays:  # One field is missing, or is something else.
        name = draw(st.sampled_from(arrays))
        field = draw(st.sampled_from([*WRONG]))
        value = draw(WRONG[field])
        header = put(header, (name, field), value)
        if value is None and draw(st.booleans()):
            del header[name][field]
        text = json.dumps(header).encode()
        # Whether sizes fit together is for the reader of the arrays.
        whole = isinstance(value, list) and all(
            type(n) is int and n >= 0 for n in value
        )
        names = (*file, *([] if whole else [repr(name)[1:-1]]))
        return Case(laid_out(text, following), names, None if whole else True)
    if way == 1 and arrays:  # Two overlap, or the arrays end elsewhere.
        name = draw(st.sampled_from(arrays))
        first, last = header[name]["data_offsets"]
        shift = draw(st.sampled_from([-8, -1, 1, 8]))
        place = [first + shift, last + shift]
        header = put(header, (name, "data_offsets"), place)
        text = json.dumps(header).encode()
        return Case(laid_out(text, following), file)
    text = json.dumps(header).encode()
    if way == 2:
        lengths = st.sampled_from([2**60, 2**64 - 1, 2**24 + 1, 0, len(text) - 1])
        bad = Case(laid_out(text, following, draw(lengths)), file, True)
        return bad if header else dataclasses.replace(bad, bad=None)
    if way == 3:
        return Case(draw(wrecked(laid_out(text, following))), file)
    if way == 4:
        other = json.dumps(draw(JSON)).encode() if draw(st.booleans()) else None
        return Case(laid_out(other or draw(altered(text)), following), file)
    if way == 5:
        return Case(laid_out(draw(monsters()), following), file, True)
    parameters = [name for name in arrays if header[name]["dtype"] != "I64"]
    return Case(laid_out(text, following), file, None if not parameters else False)


def _theirs(path: pathlib.Path) -> dict[str, Any] | None:
    """What the package of safetensors reads: the shapes of all arrays, by name."""
    try:
        with safetensors.safe_open(path, "np") as file:
            return {x: file.get_slice(x).get_shape() for x in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError:
        return None


def read_safetensors(given: bytes, folder: pathlib.Path) -> object:
    path = folder / "model.safetensors"
    path.write_bytes(given)
    if len(given) > 10**6:
        return checkpoint_shapes(path)  # for which their reader takes much memory
    # The header is enough for ours: the arrays that it describes are put behind it.
    length = int.from_bytes(given[:8], "little")
    with contextlib.suppress(Exception):
        header = json.loads(given[8 : 8 + length])
        header.pop("__metadata__", None)
        end = max((x["data_offsets"][1] for x in header.values()), default=0)
        if end < 10**6:
            path.write_bytes(given[: 8 + length] + bytes(end))
    theirs = _theirs(path)
    path.write_bytes(given)
    try:
        found = checkpoint_shapes(path)
    except ValueError as error:
        # Bounds apart, what they read is read, but where nothing is a parameter.
        ours = ("no JSON", "no floating point arrays", "no model has", "of a tensor")
        assert theirs is None or any(x in str(error) for x in ours), (theirs, error)
        raise
    # Where arrays lie is not looked at.
    for name, x in found.items() if theirs else ():
        assert [*x.shape] == theirs[name]
    return found
