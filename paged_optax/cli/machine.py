"""Rates of this machine's link and products, and its free memory.

The link is measured inside `jit` with pinned buffers: each direction, then both at the
same time, as one transfer of a buffer and page by page in a loop as the engine does.
"""

import dataclasses
import functools
import os
import pathlib
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Float, Int, PyTree

from paged_optax.backend.compiler_options import (
    addressing_options,
    compute_capability,
    overlap_options,
)
from paged_optax.backend.memory import (
    DEVICE,
    HOST,
    PINNED_HOST,
    device_memory,
    device_share,
    memory_kinds,
    typed_by_memory,
)
from paged_optax.backend.pinned_pool import POOL_LIMIT, pool_limit
from paged_optax.planning.cards import Card

#: Largest share of the free memory that a measurement allocates.
HOST_SHARE, DEVICE_SHARE = 0.65, 0.95
#: Bytes of a buffer, large enough for the link's rate.
SIZE = 256 << 20
COLUMNS = 1024
PAGE_ROWS = (16 << 20) // (4 * COLUMNS)  # 16 MiB, the engine's default page
#: Rows and columns of a matrix, large enough for the rate of products.
SIDE = 8192
_PRODUCTS = 8  # of one call

Memories = tuple[object, ...]
Square = Float[Array, "side side"]
Carry = tuple[Int[Array, ""], tuple[Array, ...]]


def compiler_options() -> dict[str, Any]:
    """The options that `jit_step` compiles steps with on this machine's device."""
    device = jax.local_devices()[0]
    return {**overlap_options(device), **addressing_options(device)}


def both_memories() -> tuple[NamedSharding, NamedSharding]:
    """Shardings of the first device's default memory, and of pinned host memory."""
    device = jax.devices()[0]
    # Arrays with a `SingleDeviceSharding` all have the type of device memory.
    sharding = typed_by_memory(SingleDeviceSharding(device))
    return (
        sharding.with_memory_kind(device.default_memory().kind),
        sharding.with_memory_kind(PINNED_HOST),
    )


def host_available() -> int:
    """Bytes of free memory of this machine, or of this container."""
    try:
        text = pathlib.Path("/proc/meminfo").read_text()
        (kilobytes,) = re.findall(r"^MemAvailable:\s+(\d+)", text, re.M)
        free = 1024 * int(kilobytes)
    except (OSError, ValueError):  # not Linux: half of the physical memory
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        group = pathlib.Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        return min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no container, or no limit
        return free


def shortage(device_bytes: int, host_bytes: int) -> str | None:
    """The reason why so much memory is not available; None if it is."""
    limit, _ = device_memory()
    free = host_available() * HOST_SHARE
    # The CPU backend has no limit: device and host share the machine's memory.
    if not limit:
        device_bytes, host_bytes = 0, device_bytes + host_bytes
    elif device_bytes > limit * DEVICE_SHARE:
        return (
            f"needs {device_bytes / 1e9:.1f} GB on the device; "
            f"XLA may take {limit / 1e9:.1f}"
        )
    if host_bytes > free:
        return (
            f"needs {host_bytes / 1e9:.1f} GB of the machine's memory; "
            f"{free / HOST_SHARE / 1e9:.1f} GB are free, of which at most "
            f"{HOST_SHARE:.0%} are used here"
        )
    if jax.default_backend() == "gpu" and host_bytes > pool_limit():
        return (
            f"needs {host_bytes / 1e9:.1f} GB of pinned memory; XLA's pool holds "
            f"{pool_limit() / 1e9:.1f} ({POOL_LIMIT})"
        )
    return None


def whole(to: Memories, *arrays: Array) -> tuple[Array, ...]:
    """Copies the sources to other memories, into the buffers of the donated targets."""
    sources = arrays[: len(to)]
    return tuple(
        jax.device_put(x, memory) for x, memory in zip(sources, to, strict=True)
    )


def in_pages(to: Memories, *arrays: Array) -> tuple[Array, ...]:
    """Copies the sources to the targets page by page, in one loop over the rows."""
    sources, targets = arrays[: len(to)], arrays[len(to) :]

    def body(carry: Carry) -> Carry:
        row, targets = carry
        pages = [
            jax.device_put(lax.dynamic_slice_in_dim(x, row, PAGE_ROWS), memory)
            for x, memory in zip(sources, to, strict=True)
        ]
        return row + PAGE_ROWS, tuple(
            lax.dynamic_update_slice_in_dim(target, page, row, 0)
            for target, page in zip(targets, pages, strict=True)
        )

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
    if jax.default_backend() == "cpu":
        reason = "not measured: no link"
    elif PINNED_HOST not in memory_kinds():
        reason = "not measured: no pinned host memory"
    else:
        # Two buffers a direction, in both memories.
        reason = shortage(2 * size, 2 * size)
    shardings = {} if reason else dict(zip("dh", both_memories(), strict=True))
    for name, (function, sources, targets) in programs().items():
        if reason:
            yield Rate(name, reason=reason)
            continue
        try:
            jitted = _jit(function, sources, targets, shardings)
            shape = (size // (4 * COLUMNS), COLUMNS)
            arrays = [_array(shape, shardings[kind], 1.0) for kind in sources]
            buffers = [_array(shape, shardings[kind], 0.0) for kind in targets]
            seconds = _seconds(jitted, arrays, buffers, repeats)
        except Exception as error:  # one program's failure is a result
            first = str(error).splitlines()[0][:300]
            yield Rate(name, reason=f"{type(error).__name__}: {first}")
            continue
        yield Rate(
            name,
            tuple(len(sources) * size / s / 1e9 for s in seconds),
            len(sources),
            4 * COLUMNS * PAGE_ROWS if "pages" in name else size,
        )


def _jit(
    function: Callable[..., PyTree[Array]],
    sources: str,
    targets: str,
    shardings: Mapping[str, Sharding],
) -> Callable[..., PyTree[Array]]:
    first = len(sources)
    # `whole` needs its unused target for the target's buffer.
    return jax.jit(
        function,
        donate_argnums=tuple(range(first, first + len(targets))),
        out_shardings=tuple(shardings[kind] for kind in targets),
        keep_unused=True,
        compiler_options=compiler_options(),
    )


def _array(shape: tuple[int, int], sharding: Sharding, scale: float) -> Array:
    values = scale * jnp.arange(1, shape[0] + 1, dtype=jnp.float32)[:, None]
    return jax.device_put(jnp.broadcast_to(values, shape), sharding).block_until_ready()


def _seconds(
    jitted: Callable[..., PyTree[Array]],
    sources: list[Array],
    targets: list[Array],
    repeats: int,
) -> list[float]:
    seconds = []
    for _ in range(repeats + 1):  # the first call compiles
        started = time.perf_counter()
        targets = jax.tree.leaves(jax.block_until_ready(jitted(*sources, *targets)))
        seconds.append(time.perf_counter() - started)
    for source, target in zip(sources, targets, strict=True):
        if not np.array_equal(np.asarray(source), np.asarray(target)):
            raise AssertionError("the values that arrived are not those that were sent")
    return seconds[1:]


def knows_bfloat16() -> bool:
    """True if tensor cores support bfloat16: from compute capability 8.0 on."""
    capability = compute_capability(jax.local_devices()[0])
    return capability is None or capability >= 8


def teraflops(
    side: int = SIDE, repeats: int = 3, *, dtype: DTypeLike = jnp.bfloat16
) -> float:
    """Rate of products of square matrices, in 10^12 operations a second."""

    def products(x: Square, w: Square) -> Square:
        return lax.fori_loop(0, _PRODUCTS, lambda _, x: x @ w, x)

    w = jnp.full((side, side), 1 / side, dtype)
    x, jitted, seconds = jnp.ones_like(w), jax.jit(products), []
    for _ in range(repeats + 1):  # the first call compiles
        started = time.perf_counter()
        jax.block_until_ready(jitted(x, w))
        seconds.append(time.perf_counter() - started)
    return _PRODUCTS * 2 * side**3 / statistics.median(seconds[1:]) / 1e12


def measured_card() -> Card:
    """This machine's card with measured rates; the link's are the rates of pages."""
    rates = {rate.name: rate for rate in measure(SIZE, 3)}
    for rate in rates.values():
        if rate.reason:
            raise ValueError(
                f"--card measured: {rate.reason}; pass --device-memory, --link and"
                " --teraflops."
            )
    paged = [rate for name, rate in rates.items() if name.endswith("in pages")]
    gpu = jax.default_backend() == "gpu"
    limit, _ = device_memory()
    return Card(
        # JAX reports its share of a GPU's memory.
        int(limit / device_share()) if gpu else limit,
        min(rate.median for rate in paged if rate.directions == 1),
        max(rate.median for rate in paged if rate.directions == 2),
        teraflops(dtype=jnp.bfloat16 if knows_bfloat16() else jnp.float16),
        gpu,
        None if knows_bfloat16() else teraflops(),
        host_available(),
    )
