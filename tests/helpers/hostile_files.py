"""JSON and safetensors files, drawn and wrecked, and how each is read."""

import copy
import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import safetensors.numpy
from hypothesis import strategies as st

from paged_optax.planning.checkpoint import checkpoint_shapes
from paged_optax.planning.hugging_face import Fields


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to read."""

    given: Any  # what the reader gets
    names: tuple[str, ...] = ()  # what its error has to name
    bad: bool | None = None  # whether it must be refused; None: the reader decides


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
    return Fields(path)


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


def documents(name: str, right: dict[str, Any]) -> st.SearchStrategy[Case]:
    text = json.dumps(right).encode()
    others = st.one_of(altered(text), wrecked(text), monsters())
    return others.map(lambda x: Case((name, x), (name,)))


def read_document(given: tuple[str, bytes], folder: pathlib.Path) -> object:
    name, text = given
    (folder / name).write_bytes(text)
    return checkpoint_shapes(folder / name)


# -- safetensors ------------------------------------------------------------------


def laid_out(header: bytes, following: int) -> bytes:
    """A safetensors file."""
    return len(header).to_bytes(8, "little") + header + bytes(following)


def safetensors_cases() -> st.SearchStrategy[Case]:
    arrays = {"w": np.ones((4, 2), np.float32), "count": np.arange(3)}
    right = safetensors.numpy.save(arrays, {"format": "pt"})
    named = lambda bad: lambda x: Case(x, ("model.safetensors",), bad)
    others = st.just(right).map(named(False)) | wrecked(right).map(named(None))
    headers = monsters() | altered(right[8 : right.index(b"}}") + 2])
    return others | headers.map(lambda x: laid_out(x, 56)).map(named(None))


def read_safetensors(given: bytes, folder: pathlib.Path) -> object:
    path = folder / "model.safetensors"
    path.write_bytes(given)
    return checkpoint_shapes(path)
