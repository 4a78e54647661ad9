"""Input that others wrote, or somebody wrecked: drawn, and given to each reader.

A reader reads it, or raises one ValueError that names the file, or the argument, and
the field. What it takes of memory is measured.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import json
import logging
import pathlib
import resource
import shutil
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import safetensors
from hypothesis import strategies as st

import paged_optax as po
from helpers.reference import kinds
from paged_optax.backend.sizes import parse_bytes
from paged_optax.planning.shapes import checkpoint_shapes, module_shapes
from paged_optax.planning.shapes.untrusted import Fields

#: Most bytes that reading one file may take.
MOST = 100 * 10**6


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


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader, what it is given, and how the cases of a run are shared out.

    Attributes:
      cases: Draws a case.
      read: Reads it; it may write files into the folder first, and checks what it read.
      share: Of a run's cases.
    """

    cases: st.SearchStrategy[Case]
    read: Callable[[Any, pathlib.Path], object]
    share: float


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
    "twice": b'{"w": 1, "w": 2}',
}
_LARGE = ["deep lists", "deep objects", "many lists", "many keys", "long text"]


def _monsters() -> st.SearchStrategy[bytes]:
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


def _read_json(given: bytes, folder: pathlib.Path) -> object:
    path = folder / "config.json"
    path.write_bytes(given)
    return Fields.of_file(path)


def _json_cases() -> st.SearchStrategy[Case]:
    named = lambda bad: lambda x: Case(x, ("config.json",), bad)
    config = json.dumps({"hidden_size": 64, "rope": {"theta": 1e6}, "a": [1, 2]})
    every = st.dictionaries(NAMES, JSON, max_size=4)
    every = every.map(lambda x: json.dumps(x).encode()).map(named(False))
    others = st.binary(max_size=40) | wrecked(config.encode())
    return every | others.map(named(None)) | _monsters().map(named(True))


_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "torch_dtype": "float32",
}
_INDEX = {
    "metadata": {"total_size": 4096},
    "weight_map": {"a": "1.safetensors", "b": "2.safetensors"},
}


def _documents(name: str, right: dict[str, Any]) -> st.SearchStrategy[Case]:
    text = json.dumps(right).encode()
    others = st.one_of(altered(text), wrecked(text), _monsters())
    return others.map(lambda x: Case((name, x), (name,)))


def _read_document(given: tuple[str, bytes], folder: pathlib.Path) -> object:
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
def _safetensors_cases(draw: st.DrawFn) -> Case:
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
        # Where sizes do not fit together, offsets are as wrong as the shape is.
        return Case(laid_out(text, following), (*file, repr(name)[1:-1]), True)
    if way == 1 and arrays:  # Two overlap, or the arrays end elsewhere.
        name = draw(st.sampled_from(arrays))
        first, last = header[name]["data_offsets"]
        shift = draw(st.sampled_from([-8, -1, 1, 8]))
        place = [first + shift, last + shift]
        header = put(header, (name, "data_offsets"), place)
        bad = None if first == last else True
        text = json.dumps(header).encode()
        return Case(laid_out(text, following), file, bad)
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
        return Case(laid_out(draw(_monsters()), following), file, True)
    parameters = [name for name in arrays if header[name]["dtype"] != "I64"]
    return Case(laid_out(text, following), file, None if not parameters else False)


def _theirs(path: pathlib.Path) -> dict[str, Any] | None:
    """What the package of safetensors reads: the shapes of all arrays, by name."""
    try:
        with safetensors.safe_open(path, "np") as file:
            return {x: file.get_slice(x).get_shape() for x in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError:
        return None


def _read_safetensors(given: bytes, folder: pathlib.Path) -> object:
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
        ours = ("no JSON", "no floating point arrays", "no model has", "the shape of")
        assert theirs is None or any(x in str(error) for x in ours), (theirs, error)
        raise
    assert theirs is not None, found
    for name, x in found.items():
        assert [*x.shape] == theirs[name]
    return found


# -- Orbax ------------------------------------------------------------------------


@functools.cache
def _saved() -> tuple[pathlib.Path, dict[str, bytes]]:
    """A checkpoint, and its files."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="paged_optax_")) / "saved"
    params = {"kernel": jnp.ones((8, 4)), "count": jnp.zeros((), int)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, {"params": params, "mu": [jnp.ones(3)]})
    files = {
        str(x.relative_to(folder)): x.read_bytes()
        for x in sorted(folder.rglob("*"))
        if x.is_file()
    }
    return folder, files


@st.composite
def _orbax_cases(draw: st.DrawFn) -> Case:
    _, files = _saved()
    texts = [x for x, text in files.items() if text[:1] == b"{"]
    if draw(st.integers(0, 2)):
        name = draw(st.sampled_from(texts))
        new = draw(st.one_of(altered(files[name]), wrecked(files[name]), _monsters()))
    else:
        name = draw(st.sampled_from([*files]))
        new = draw(wrecked(files[name]))
    return Case((name, new), ("checkpoint",))


def _read_orbax(given: tuple[str, bytes], folder: pathlib.Path) -> object:
    name, new = given
    path = folder / "checkpoint"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(_saved()[0], path)
    (path / name).write_bytes(new)
    return checkpoint_shapes(path)


# -- bitsandbytes -----------------------------------------------------------------


@functools.cache
def _states() -> dict[str, tuple[Any, Any]]:
    """States of two optimizers, and the entries that bitsandbytes would have."""
    params = {"w": jnp.ones((64, 128)), "v": jnp.ones(8)}
    states = {
        "adamw": po.paged_adamw_8bit(1e-3).init(params),
        "ademamix": po.paged_ademamix_8bit(1e-3).init(params),
    }
    return {x: (state, po.to_bitsandbytes(state)) for x, state in states.items()}


def _wrong_arrays(right: np.ndarray) -> st.SearchStrategy[Any]:
    """In place of an array: ragged or short, of another dtype, or none at all."""
    return st.sampled_from(
        [
            right[..., :-1],
            right[:0],
            right[None],
            right.astype("f8"),
            right.astype(object),
            right.astype(str),
            right.tolist()[:-1] + [[1, 2, 3]],
            [[1, 2], [3]],
            np.float32(1),
            np.broadcast_to(right.reshape(-1)[0], (2**30, 2**29)),
            "12",
            {},
            None,
            [],
            object(),
        ]
    )


STEPS = st.sampled_from(
    [-5, 2**40, 2**31, -1, 1.5, float("nan"), float("inf"), "12", "many", None, [], {}]
) | st.sampled_from([[1, 2], [[1], [2, 3]], 2**70, object(), np.ones(10**6)])


@st.composite
def _bitsandbytes_cases(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(["adamw", "ademamix"]))
    entries = _states()[name][1]
    way = draw(st.integers(0, 4))
    parameter = draw(st.sampled_from([*entries]))
    if way == 0:
        bad = draw(st.none() | st.lists(NUMBERS) | NAMES | NUMBERS)
        return Case((name, bad), ("entries",), True)
    if way == 1:
        bad = draw(st.none() | st.lists(NUMBERS) | NAMES | NUMBERS)
        return Case((name, entries | {parameter: bad}), (repr(parameter),), True)
    field = draw(st.sampled_from([*entries[parameter]]))
    names = repr(parameter), repr(field)
    entry = dict(entries[parameter])
    if way == 2:
        del entry[field]
        bad = field != "step"
        return Case((name, entries | {parameter: entry}), names, bad)
    if field == "step":
        entry[field] = draw(STEPS | st.integers(0, 2**31 - 1))
        right = isinstance(entry[field], int) and 0 <= entry[field] < 2**31
        return Case((name, entries | {parameter: entry}), names, not right)
    entry[field] = draw(_wrong_arrays(entry[field]))
    return Case((name, entries | {parameter: entry}), names, None)


def _read_bitsandbytes(given: tuple[str, Any], folder: pathlib.Path) -> object:
    del folder
    name, entries = given
    state, _ = _states()[name]
    found = po.from_bitsandbytes(state, entries)
    describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert describe(found) == describe(state) and kinds(found) == kinds(state)
    return found


# -- the command line, and what else is text ----------------------------------------

_MODULE = """
import jax.numpy as jnp
number, text, nothing = 3, "text", None
def good(): return {"w": jnp.ones((4, 4))}
def numbers(): return [1.5, 2]
def texts(): return {"w": "weights"}
def objects(): return object()
def functions(): return good
def types(): return [int]
class Inner:
    good = staticmethod(good)
    number = 3
"""
_ATTRIBUTES = "good number text nothing numbers texts objects functions types Inner"
_ATTRIBUTES += " Inner.good Inner.number Inner.missing missing Inner..good .good"


def _module_cases() -> st.SearchStrategy[Case]:
    letters = st.text(st.sampled_from(":./\\ \0é\n-_aZ09$"), max_size=10)
    place = st.sampled_from(["hostile_models", "hostile_models.sub", "", ".", "..x"])
    attribute = st.sampled_from(_ATTRIBUTES.split()) | letters
    names = st.tuples(place | letters, attribute).map(":".join) | letters
    good = st.sampled_from(["hostile_models:good", "hostile_models:Inner.good"])
    return (names | good).map(lambda x: Case(x, (repr(x),)))


def _read_module(given: str, folder: pathlib.Path) -> object:
    (folder / "hostile_models.py").write_text(_MODULE)
    sys.path.insert(0, str(folder))
    try:
        return module_shapes(given)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("hostile_models", None)


def _text_cases() -> st.SearchStrategy[Case]:
    digits = st.text(st.sampled_from("0123456789."), max_size=400)
    units = st.sampled_from(["B", "M", "MiB", "GiB", "TiB", "KB", "", " b", "e9"])
    texts = st.tuples(digits, units).map("".join) | st.text(max_size=12) | WEIRD
    which = st.sampled_from(["model", "device_memory"])
    return st.tuples(which, texts).map(lambda x: Case(x, (x[0],)))


def _read_text(given: tuple[str, Any], folder: pathlib.Path) -> object:
    del folder
    what, text = given
    return po.model_shapes(text) if what == "model" else parse_bytes(what, text)


#: A reader more is a line more.
READERS = {
    "safetensors": Reader(_safetensors_cases(), _read_safetensors, 0.4),
    "json": Reader(_json_cases(), _read_json, 0.1),
    "config": Reader(_documents("config.json", _CONFIG), _read_document, 0.05),
    "index": Reader(_documents("a.index.json", _INDEX), _read_document, 0.05),
    "bitsandbytes": Reader(_bitsandbytes_cases(), _read_bitsandbytes, 0.15),
    "orbax": Reader(st.deferred(_orbax_cases), _read_orbax, 0.05),
    "--module": Reader(_module_cases(), _read_module, 0.1),
    "sizes and names": Reader(_text_cases(), _read_text, 0.1),
}


# -- a run ------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """How the cases of a reader ended.

    Attributes:
      ended: How many were read, and how many were refused.
      most_bytes: The most that was allocated at once while one was read, beside it.
    """

    ended: collections.Counter[str]
    most_bytes: int


@contextlib.contextmanager
def measured() -> Iterator[None]:
    """What Python and NumPy allocate is counted."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def read(
    reader: Callable[[Any, pathlib.Path], object], case: Case, folder: pathlib.Path
) -> tuple[str, int]:
    """Reads a case, and fails where it ends otherwise than it should.

    Returns:
      How it ended, and the most that was allocated at once: where `measured`.
    """
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        reader(case.given, folder)
    except ValueError as error:
        ended = "refused"
        assert case.bad is not False, error
        for name in case.names:
            assert name in str(error), (name, error)
        assert len(str(error)) < 2000
    else:
        ended = "read"
        assert not case.bad, "should have been refused"
    _, most = tracemalloc.get_traced_memory()
    assert most - before < MOST, most - before
    return ended, most - before


def fuzz(name: str, count: int, seed: int) -> Outcome:
    """Gives a reader so many cases."""
    reader, outcome = READERS[name], Outcome(collections.Counter(), 0)
    with tempfile.TemporaryDirectory() as folder:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count,
            database=None,
            deadline=None,
            suppress_health_check=[*hypothesis.HealthCheck],
        )
        @hypothesis.given(reader.cases)
        def one(case: Case) -> None:
            ended, most = read(reader.read, case, pathlib.Path(folder))
            outcome.ended[ended] += 1
            outcome.most_bytes = max(outcome.most_bytes, most)

        with measured(), _quiet():
            one()
    return outcome


def most_resident() -> int:
    """The most memory that this process has had, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
