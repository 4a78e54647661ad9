"""Agreement of processes on the program that they are about to compile.

Values are exchanged through the coordinator of `jax.distributed.initialize`, with a
timeout. A collective, such as `jax.experimental.multihost_utils.assert_equal`, would
block the devices if one process never calls it, and cannot run while a `jax.jit` is
traced.
"""

import itertools
import json
import time
import zlib
from collections.abc import Mapping
from typing import Any

import jax
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.types import is_traced

#: Seconds to wait for another process, as long as JAX waits for its start.
PATIENCE = 300.0

#: By name, the values that must be equal: by path, or under the empty path.
Values = Mapping[str, Mapping[str, str]]

# The number of this comparison, equal in all processes.
_numbers = itertools.count()
# Values compared before: one process alone may repeat a trace.
_agreed: set[bytes] = set()


def store_of_processes() -> Any:
    """Returns the coordinator's key-value store, private in JAX; None without one."""
    from jax._src import distributed

    return distributed.global_state.client


def spans_processes(tree: PyTree) -> bool:
    """Returns whether any array of a tree is on devices of several processes."""
    return jax.process_count() > 1 and any(map(_spans, jax.tree.leaves(tree)))


def _spans(x: object) -> bool:
    if isinstance(x, Array) and not is_traced(x):
        return not x.is_fully_addressable
    mesh = jax.typeof(x).sharding.mesh
    return not mesh.empty and mesh.size > jax.local_device_count()


def compare(call: str, values: Values, once: bool = True) -> None:
    """Raises in every process unless all call this with equal values.

    The error names the `call`, and what differs or who is missing. With `once` values
    that were compared before are skipped.
    """
    flat = {name + path: x for name, xs in values.items() for path, x in xs.items()}
    local = zlib.compress(json.dumps({"the call": call, **flat}).encode())
    store = store_of_processes()
    if store is None or (once and local in _agreed):
        return
    if error := _error(store, f"paged_optax/{next(_numbers)}", local):
        raise ValueError(f"{call}: {error}")
    _agreed.add(local)


def _error(store: Any, key: str, local: bytes) -> str:
    """Process 0 publishes its values, collects differences, and publishes the first."""
    write = lambda name, value: store.key_value_set_bytes(f"{key}/{name}", b"=" + value)
    deadline, process = time.monotonic() + PATIENCE, jax.process_index()
    if process == 0:
        write("0", local)
        errors = [
            _missing(other) if x is None else x.decode()
            for other in range(1, jax.process_count())
            for x in [_read(store, f"{key}/{other}", deadline)]
        ]
        error = next(filter(None, errors), "")
        write("all", error.encode())
        return error
    first = _read(store, f"{key}/0", deadline)
    if first is None:
        return _missing(0)
    write(str(process), _difference(first, local, process).encode())
    # Process 0 may wait as long for another process.
    error = _read(store, f"{key}/all", deadline + PATIENCE)
    return _missing(0) if error is None else error.decode()


def _read(store: Any, key: str, deadline: float) -> bytes | None:
    while (left := deadline - time.monotonic()) > 0:
        try:
            # Python handles interrupts between short waits.
            milliseconds = max(1, int(1000 * min(left, 1.0)))
            return store.blocking_key_value_get_bytes(key, milliseconds)[1:]
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
    return None


def _missing(process: int) -> str:
    return (
        f"process {process} has not come to it within {PATIENCE:.0f} seconds. All"
        " processes make the same calls, in the same order."
    )


def _difference(first: bytes, local: bytes, process: int) -> str:
    one, other = (json.loads(zlib.decompress(x)) for x in (first, local))
    lines = [
        f"{name} is {one.get(name, 'absent')} in process 0,"
        f" {other.get(name, 'absent')} in process {process}"
        for name in one | other
        if one.get(name) != other.get(name)
    ]
    if not lines:
        return ""
    more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
    where = "; ".join(lines[:3])
    return (
        f"processes were given different things: {where}{more}. They would compile"
        " other programs, and wait for each other forever: build the same in every"
        " process."
    )
