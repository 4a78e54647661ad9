"""Agreement of processes on the program that they are about to compile.

Fingerprints are compared through the coordinator of `jax.distributed.initialize`, with
a timeout. A collective, such as `jax.experimental.multihost_utils.assert_equal`, would
block the devices if one process never calls it, and cannot run while a `jax.jit` is
traced.
"""

import hashlib
import itertools
import json
import threading
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
_agreed: set[str] = set()


def store_of_processes() -> Any:
    """Returns the coordinator's key-value store, private in JAX; None without one."""
    from jax._src import distributed

    return distributed.global_state.client


def spans_processes(tree: PyTree) -> bool:
    """Returns whether any array of a tree is on devices of several processes."""

    def spans(x: object) -> bool:
        if isinstance(x, Array) and not is_traced(x):
            return not x.is_fully_addressable
        mesh = jax.typeof(x).sharding.mesh
        return not mesh.empty and mesh.size > jax.local_device_count()

    return jax.process_count() > 1 and any(map(spans, jax.tree.leaves(tree)))


def compare(call: str, values: Values, once: bool = True) -> None:
    """Raises in every process unless all call this with equal values.

    The error names the `call`, and what differs or who is missing. With `once` values
    that were compared before are skipped.
    """
    flat = {name + path: x for name, xs in values.items() for path, x in xs.items()}
    local = json.dumps({"the call": call, **flat})
    store = store_of_processes()
    if store is None or (once and local in _agreed):
        return
    if error := _error(store, f"paged_optax/{next(_numbers)}", local):
        raise ValueError(f"{call}: {error}")
    _agreed.add(local)


def _error(store: Any, key: str, local: str) -> str:
    """Compares fingerprints, and reads values only if these differ."""
    process, fingerprint = jax.process_index(), hashlib.sha256(local.encode())
    store.key_value_set(f"{key}/values/{process}", local)
    store.key_value_set(f"{key}/fingerprints/{process}", fingerprint.hexdigest())
    late, milliseconds = list[str](), int(1000 * PATIENCE)

    def wait() -> None:
        try:
            store.wait_at_barrier(key, milliseconds)
        except jax.errors.JaxRuntimeError as error:
            late.append(str(error))

    # Python handles interrupts while it waits for a thread, and not within the client.
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join()
    entries = store.key_value_dir_get(f"{key}/fingerprints")
    found = {name.rpartition("/")[2]: value for name, value in entries}
    for i in range(jax.process_count()):
        if str(i) not in found:
            return (
                f"process {i} has not come to it within {PATIENCE:.0f} seconds. All"
                " processes make the same calls, in the same order."
            )
        if found[str(i)] != found["0"]:
            read = lambda i: store.blocking_key_value_get(
                f"{key}/values/{i}", milliseconds
            )
            return _difference(json.loads(read(0)), json.loads(read(i)), i)
    return "".join(late)


def _difference(one: dict[str, str], other: dict[str, str], process: int) -> str:
    lines = [
        f"{name} is {one.get(name, 'absent')} in process 0,"
        f" {other.get(name, 'absent')} in process {process}"
        for name in one | other
        if one.get(name) != other.get(name)
    ]
    more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
    return (
        f"processes were given different things: {'; '.join(lines[:3])}{more}. They"
        " would compile other programs, and wait for each other forever: build the same"
        " in every process."
    )
