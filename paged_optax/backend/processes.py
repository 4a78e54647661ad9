"""What several processes say to each other before they compute together.

Nothing here runs on a device: a collective of one process that the others do not join
would block its devices, and this is there to find such a process. The values go through
the coordinator that `jax.distributed.initialize` starts.
"""

import itertools
import json
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import jax
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.types import is_traced

#: Seconds within which every process comes, as JAX gives them to start.
PATIENCE = 300.0

# Which comparison of this run it is: each process counts alike.
_numbers = itertools.count()
# What was compared, in the same order in all processes.
_agreed: set[bytes] = set()


@runtime_checkable
class Store(Protocol):
    """The coordinator's values, by key."""

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        """Writes a value."""

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Waits for a value."""
        ...


def store_of_processes() -> Store | None:
    """The coordinator's values; None if this JAX does not give them.

    It has no public name. What depends on it is an error message alone.
    """
    try:
        from jax._src import distributed

        return distributed.global_state.client
    except (AttributeError, ImportError):
        return None


def spans_processes(tree: PyTree) -> bool:
    """Whether any array of a tree is on devices of several processes."""
    if jax.process_count() == 1:
        return False
    return any(map(_spans, jax.tree.leaves(tree)))


def _spans(x: object) -> bool:
    if isinstance(x, Array) and not is_traced(x):
        return not x.is_fully_addressable
    mesh = jax.typeof(x).sharding.mesh
    return not mesh.empty and mesh.size > jax.local_device_count()


def compare(
    what: str, said: Mapping[str, Mapping[str, str]], once: bool = True
) -> None:
    """Compares what this process says with what the others say, and raises in each.

    Args:
      what: What they are about to do together, for messages.
      said: By name, what must be the same in all processes: by path, or under the empty
        name if it is one value.
      once: Whether what was compared before is not compared again, for a trace may be
        repeated in one process alone.
    """
    mine = zlib.compress(json.dumps([what, said]).encode())
    store = store_of_processes()
    if store is None or (once and mine in _agreed):
        return
    key = f"paged_optax/{next(_numbers)}"
    verdict = _Comparison(store, key, time.monotonic() + PATIENCE).verdict(mine)
    if verdict:
        raise ValueError(f"{what}: {verdict}")
    _agreed.add(mine)


class _Comparison:
    """One comparison: all compare themselves with process 0, which tells them all."""

    def __init__(self, store: Store, key: str, deadline: float):
        self._store, self._key, self._deadline = store, key, deadline

    def verdict(self, mine: bytes) -> str:
        """What differs, or who is missing; empty if all agree."""
        process = jax.process_index()
        if process == 0:
            self._write("0", mine)
            others = range(1, jax.process_count())
            said = (self._read(str(other)) for other in others)
            lines = (
                _missing(other) if line is None else line.decode()
                for other, line in zip(others, said, strict=True)
            )
            verdict = next(filter(None, lines), "")
            self._write("all", verdict.encode())
            return verdict
        first = self._read("0")
        if first is None:
            return _missing(0)
        self._write(str(process), _difference(first, mine, process).encode())
        # Process 0 may wait for another one as long as this one did for it.
        self._deadline += PATIENCE
        verdict = self._read("all")
        return _missing(0) if verdict is None else verdict.decode()

    def _write(self, name: str, value: bytes) -> None:
        self._store.key_value_set_bytes(f"{self._key}/{name}", b"=" + value)

    def _read(self, name: str) -> bytes | None:
        """A value; None if it does not come in time."""
        while (left := self._deadline - time.monotonic()) > 0:
            try:
                # In short turns, between which Python takes an interrupt.
                value = self._store.blocking_key_value_get_bytes(
                    f"{self._key}/{name}", max(1, int(1000 * min(left, 1.0)))
                )
                return value[1:]
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        return None


def _missing(process: int) -> str:
    return (
        f"process {process} has not come to it within {PATIENCE:.0f} seconds. All"
        " processes make the same calls, in the same order."
    )


def _difference(first: bytes, mine: bytes, process: int) -> str:
    """What differs between process 0 and this one; empty if nothing does."""
    if first == mine:
        return ""
    (call, values), (my_call, my_values) = (
        json.loads(zlib.decompress(each)) for each in (first, mine)
    )
    if call != my_call:
        return (
            f"process 0 calls {call}, and process {process} {my_call}. All processes"
            " make the same calls, in the same order: if one restores a state, all do."
        )
    lines = [*_differences(values, my_values, process)]
    more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
    return (
        f"processes were given different things: {'; '.join(lines[:3])}{more}. They"
        " would compile other programs, and wait for each other forever: build the same"
        " in every process."
    )


def _differences(
    values: Mapping[str, Mapping[str, str]],
    my_values: Mapping[str, Mapping[str, str]],
    process: int,
) -> Iterator[str]:
    for name in {**values, **my_values}:
        first, mine = values.get(name, {}), my_values.get(name, {})
        for path in {**first, **mine}:
            one, other = first.get(path, "absent"), mine.get(path, "absent")
            if one != other:
                where = f"{one} in process 0, {other} in process {process}"
                yield f"{name}{path} is {where}"
