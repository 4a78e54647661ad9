"""Input that others wrote, or somebody wrecked: drawn, and given to each reader.

A reader reads it, or raises one ValueError that names the file, or the argument, and
the field. What it takes of memory is measured.
"""

import atexit
import collections
import contextlib
import dataclasses
import functools
import logging
import pathlib
import resource
import shutil
import sys
import tempfile
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from hypothesis import strategies as st

import paged_optax as po
from helpers import hostile_files as files
from helpers.hostile_files import CONFIG, NAMES, NUMBERS, WEIRD, Case
from helpers.reference import kinds
from paged_optax.backend.text import parse_bytes
from paged_optax.planning.checkpoint import checkpoint_shapes
from paged_optax.planning.models import module_shapes

#: Most bytes that reading one file may take.
MOST = 100 * 10**6


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader, what it is given, and how the cases of a run are shared out."""

    cases: st.SearchStrategy[Case]  # draws a case
    #: Reads it; it may write files into the folder first, and checks what it read.
    read: Callable[[Any, pathlib.Path], object]
    share: float  # of a run's cases


# -- Orbax ------------------------------------------------------------------------


@functools.cache
def _saved() -> tuple[pathlib.Path, dict[str, bytes]]:
    """A checkpoint, which is removed at the end, and its files."""
    temporary = tempfile.mkdtemp(prefix="paged_optax_hostile_")
    atexit.register(shutil.rmtree, temporary)
    folder = pathlib.Path(temporary) / "saved"
    params = {"kernel": jnp.ones((8, 4)), "count": jnp.zeros((), int)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, {"params": params, "mu": [jnp.ones(3)]})
    every = [x for x in sorted(folder.rglob("*")) if x.is_file()]
    return folder, {str(x.relative_to(folder)): x.read_bytes() for x in every}


@st.composite
def _orbax_cases(draw: st.DrawFn) -> Case:
    _, saved = _saved()
    texts = [x for x, text in saved.items() if text[:1] == b"{"]
    as_text = draw(st.integers(0, 2))
    name = draw(st.sampled_from(texts if as_text else [*saved]))
    ways = files.wrecked(saved[name])
    if as_text:
        ways = st.one_of(files.altered(saved[name]), ways, files.monsters())
    new = draw(ways)
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
    """In place of an array: short, of another dtype, or none at all.

    NumPy refuses ragged lists, and arrays that fit no memory, in its own words.
    """
    arrays = [right[..., :-1], right[:0], right[None]]
    arrays += map(right.astype, ("f8", object, str))
    return st.sampled_from([*arrays, np.float32(1), "12", {}, None, [], object()])


STEPS = st.sampled_from(
    [-5, 2**40, 2**31, -1, 1.5, float("nan"), float("inf"), "12", "many", None, [], {}]
) | st.sampled_from([[1, 2], 2**70, object(), np.ones(10**6)])


@st.composite
def _bitsandbytes_cases(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(["adamw", "ademamix"]))
    entries = _states()[name][1]
    way = draw(st.integers(0, 6))
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
        return Case((name, entries | {parameter: entry}), names, True)
    if way > 4:
        return _nested(name, parameter, draw(st.none() | NAMES | NUMBERS))
    if field == "step":
        entry[field] = draw(STEPS | st.integers(0, 2**31 - 1))
        right = isinstance(entry[field], int) and 0 <= entry[field] < 2**31
        return Case((name, entries | {parameter: entry}), names, not right)
    entry[field] = draw(_wrong_arrays(entry[field]))
    # Codes and scales that do not fit together are named by one of both.
    return Case((name, entries | {parameter: entry}), names[:1], None)


def _nested(name: str, parameter: str, bad: Any) -> Case:
    """An entry whose arrays are nested: as they should be, or in a number."""
    entries, nested = _states()[name][1], "__bnb_optimizer_quant_state__"
    entry = dict(entries[parameter])
    if bad is None:
        inner = {key: entry.pop(key) for key in [*entry] if key != "step"}
        case = entries | {parameter: entry | {nested: inner}}
        return Case((name, case), bad=False)
    case = entries | {parameter: entry | {nested: bad}}
    return Case((name, case), (repr(parameter), repr(nested)), True)


def _read_bitsandbytes(given: tuple[str, Any], folder: pathlib.Path) -> object:
    del folder
    name, entries = given
    state, _ = _states()[name]
    with warnings.catch_warnings():
        # One parameter's step is another, and the state has one count for all.
        warnings.filterwarnings("ignore", message="the entry of .*per_parameter_steps")
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
    "safetensors": Reader(files.safetensors_cases(), files.read_safetensors, 0.4),
    "json": Reader(files.json_cases(), files.read_json, 0.1),
    "config": Reader(files.documents("config.json", CONFIG), files.read_document, 0.1),
    "bitsandbytes": Reader(_bitsandbytes_cases(), _read_bitsandbytes, 0.15),
    "orbax": Reader(st.deferred(_orbax_cases), _read_orbax, 0.05),
    "--module": Reader(_module_cases(), _read_module, 0.1),
    "sizes and names": Reader(_text_cases(), _read_text, 0.1),
}


# -- a run ------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """How the cases of a reader ended."""

    ended: collections.Counter[str]  # how many were read, and how many were refused
    most_bytes: int  # the most that was allocated at once while one was read, beside it


@contextlib.contextmanager
def measured() -> Iterator[None]:
    """What Python and NumPy allocate is counted."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


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
            with measured():  # but not what Hypothesis does, which takes long
                ended, most = read(reader.read, case, pathlib.Path(folder))
            outcome.ended[ended] += 1
            outcome.most_bytes = max(outcome.most_bytes, most)

        before = logging.root.manager.disable
        logging.disable(logging.ERROR)
        try:
            one()
        finally:
            logging.disable(before)
    return outcome


def most_resident() -> int:
    """The most memory that this process has had, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
