"""Rates of this machine's link.

The link is measured inside `jit` with pinned buffers: each direction, then both at the
same time, as one transfer of a buffer and page by page in a loop as the engine does.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Int, PyTree

from paged_optax.backend.compiler_options import addressing_options, overlap_options
from paged_optax.backend.memory import (
    DEVICE,
    HOST,
    PINNED_HOST,
    memory_kinds,
    typed_by_memory,
)

#: Bytes of a buffer, large enough for the link's rate.
SIZE = 256 << 20
COLUMNS = 1024
PAGE_ROWS = (16 << 20) // (4 * COLUMNS)  # 16 MiB, the engine's default page

Memories = tuple[object, ...]


def compiler_options() -> dict[str, Any]:
    """The options that `jit_step` compiles steps with on this machine's device."""
    device = jax.local_devices()[0]
    return {**overlap_options(device), **addressing_options(device)}


def both_memories() -> tuple[Sharding, ...]:
    """Shardings of the first device's default memory, and of pinned host memory."""
    device = jax.devices()[0]
    # Arrays with a `SingleDeviceSharding` all have the type of device memory.
    sharding = typed_by_memory(SingleDeviceSharding(device))
    kinds = device.default_memory().kind, PINNED_HOST
    return tuple(map(sharding.with_memory_kind, kinds))


def whole(to: Memories, *arrays: Array) -> tuple[Array, ...]:
    """Copies the sources to other memories, into the buffers of the donated targets."""
    return tuple(map(jax.device_put, arrays[: len(to)], to))


def in_pages(to: Memories, *arrays: Array) -> tuple[Array, ...]:
    """Copies the sources to the targets page by page, in one loop over the rows."""
    sources, targets = arrays[: len(to)], arrays[len(to) :]

    def body(
        carry: tuple[Int[Array, ""], tuple[Array, ...]],
    ) -> tuple[Int[Array, ""], tuple[Array, ...]]:
        row, targets = carry
        cut = lambda x: lax.dynamic_slice_in_dim(x, row, PAGE_ROWS)
        pages = [*map(jax.device_put, map(cut, sources), to)]
        put = lambda target, page: lax.dynamic_update_slice_in_dim(target, page, row, 0)
        return row + PAGE_ROWS, tuple(map(put, targets, pages))

    rows = sources[0].shape[0]
    return lax.while_loop(lambda c: c[0] < rows, body, (jnp.int32(0), targets))[1]


def programs() -> dict[str, tuple[Callable[..., PyTree[Array]], str, str]]:
    """By name: a program, and the memories of its sources and targets, h or d."""
    directions = {
        "host to device": ((DEVICE,), "h", "d"),
        "device to host": ((HOST,), "d", "h"),
        "both at once": ((DEVICE, HOST), "hd", "dh"),
    }
    return {
        f"{name}{suffix}": (functools.partial(copy, to), sources, targets)
        for suffix, copy in (("", whole), (", in pages", in_pages))
        for name, (to, sources, targets) in directions.items()
    }


@dataclasses.dataclass(frozen=True)
class Rate:
    """The rate of one program, or the reason why there is none."""

    name: str
    gigabytes_per_second: tuple[float, ...] = ()  # of all repeats, all directions
    directions: int = 1
    page_bytes: int = 0  # of one transfer
    reason: str = ""

    @property
    def median(self) -> float:
        """The median rate."""
        return statistics.median(self.gigabytes_per_second)


def measure(size: int, repeats: int) -> Iterator[Rate]:
    """Measures all programs with buffers of `size` bytes, whole pages of 16 MiB.

    One transfer before the repeats is not timed.
    """
    for name, (function, sources, targets) in programs().items():
        if jax.default_backend() == "cpu" or PINNED_HOST not in memory_kinds():
            yield Rate(name, reason="not measured: no link to pinned host memory")
            continue
        try:
            seconds = _seconds(function, sources, targets, size, repeats)
        except Exception as error:  # one program's failure is a result
            first = str(error).splitlines()[0][:300]
            yield Rate(name, reason=f"{type(error).__name__}: {first}")
        else:
            rates = tuple(len(sources) * size / s / 1e9 for s in seconds)
            page_bytes = 4 * COLUMNS * PAGE_ROWS if "pages" in name else size
            yield Rate(name, rates, len(sources), page_bytes)


def _seconds(
    function: Callable[..., PyTree[Array]],
    sources: str,
    targets: str,
    size: int,
    repeats: int,
) -> list[float]:
    placements = dict(zip("dh", both_memories(), strict=True))
    # `whole` needs its unused target for the target's buffer.
    jitted = jax.jit(
        function,
        donate_argnums=tuple(range(len(sources), len(sources + targets))),
        out_shardings=tuple(placements[kind] for kind in targets),
        keep_unused=True,
        compiler_options=compiler_options(),
    )
    rows = size // (4 * COLUMNS)
    values = jnp.arange(1, rows + 1, dtype=jnp.float32)[:, None]
    values = jnp.broadcast_to(values, (rows, COLUMNS))
    arrays = [jax.device_put(values, placements[kind]) for kind in sources]
    moved = [jax.device_put(0 * values, placements[kind]) for kind in targets]
    jax.block_until_ready((arrays, moved))
    seconds = []
    for _ in range(repeats + 1):  # the first call compiles
        started = time.perf_counter()
        moved = jax.tree.leaves(jax.block_until_ready(jitted(*arrays, *moved)))
        seconds.append(time.perf_counter() - started)
    for x in moved:
        if not np.array_equal(np.asarray(x), np.asarray(values)):
            raise AssertionError("the values that arrived are not those that were sent")
    return seconds[1:]
