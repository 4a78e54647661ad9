"""Rates of this machine's link.

The link is measured inside `jit` with pinned buffers: each direction, then both at the
same time, as one transfer of a buffer and page by page in a loop as the engine does.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Int

from paged_optax.backend.compiler_options import addressing_options, overlap_options
from paged_optax.backend.memory import PINNED_HOST, memory_kinds, typed_by_memory

#: Bytes of a buffer, large enough for the link's rate.
SIZE = 256 << 20
COLUMNS = 1024
PAGE_ROWS = (16 << 20) // (4 * COLUMNS)  # 16 MiB, the engine's default page

#: By name, whether each source is in host memory; its target is in the other one.
_DIRECTIONS = {
    "host to device": (True,),
    "device to host": (False,),
    "both at once": (True, False),
}


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


def whole(sources: Sequence[Array], targets: Sequence[Array]) -> list[Array]:
    """Copies sources to the memories of the targets, whose buffers are donated."""
    memories = [jax.typeof(x).memory_space for x in targets]
    return list(map(jax.device_put, sources, memories))


def in_pages(sources: Sequence[Array], targets: Sequence[Array]) -> list[Array]:
    """Copies sources to targets page by page, in one loop over the rows."""

    def body(
        carry: tuple[Int[Array, ""], list[Array]],
    ) -> tuple[Int[Array, ""], list[Array]]:
        row, targets = carry
        cut = lambda x: lax.dynamic_slice_in_dim(x, row, PAGE_ROWS)
        put = lambda target, page: lax.dynamic_update_slice_in_dim(target, page, row, 0)
        pages = whole([*map(cut, sources)], targets)
        return row + PAGE_ROWS, [*map(put, targets, pages)]

    rows = sources[0].shape[0]
    return lax.while_loop(lambda c: c[0] < rows, body, (jnp.int32(0), [*targets]))[1]


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
    page_bytes = 4 * COLUMNS * PAGE_ROWS
    for suffix, copy, transfer in (
        ("", whole, size),
        (", in pages", in_pages, page_bytes),
    ):
        for direction, on_host in _DIRECTIONS.items():
            name = f"{direction}{suffix}"
            if jax.default_backend() == "cpu" or PINNED_HOST not in memory_kinds():
                yield Rate(name, reason="not measured: no link to pinned host memory")
                continue
            try:
                seconds = _seconds(copy, on_host, size, repeats)
            except Exception as error:  # one program's failure is a result
                first = str(error).splitlines()[0][:300]
                yield Rate(name, reason=f"{type(error).__name__}: {first}")
            else:
                rates = tuple(len(on_host) * size / s / 1e9 for s in seconds)
                yield Rate(name, rates, len(on_host), transfer)


def _seconds(
    copy: Callable[..., list[Array]],
    on_host: Sequence[bool],
    size: int,
    repeats: int,
) -> list[float]:
    memories = both_memories()
    shape = size // (4 * COLUMNS), COLUMNS
    values = 1 + lax.broadcasted_iota(jnp.float32, shape, 0)
    sources = [jax.device_put(values, memories[x]) for x in on_host]
    targets = [jax.device_put(0 * values, memories[not x]) for x in on_host]
    # `whole` needs its unused target for the target's buffer.
    jitted = jax.jit(
        copy,
        donate_argnums=1,
        out_shardings=[x.sharding for x in targets],
        keep_unused=True,
        compiler_options=compiler_options(),
    )
    jax.block_until_ready((sources, targets))
    seconds = []
    for _ in range(repeats + 1):  # the first call compiles
        started = time.perf_counter()
        targets = jax.block_until_ready(jitted(sources, targets))
        seconds.append(time.perf_counter() - started)
    for x in targets:
        if not np.array_equal(np.asarray(x), np.asarray(values)):
            raise AssertionError("the values that arrived are not those that were sent")
    return seconds[1:]
