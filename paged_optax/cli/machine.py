"""This machine: what it is, what memory is left, the rates of link and products.

The link is measured inside `jit` with pinned buffers: each direction by itself, then
both at once; as one transfer of a whole buffer, and page by page in a loop, as the
engine moves them.
"""

import dataclasses
import datetime
import functools
import importlib.metadata
import os
import pathlib
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Float, Int, PyTree

from paged_optax.backend.compiler_options import compute_capability, overlap_options
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

#: Most of the free memory that a measurement takes. On the CPU backend the device's
#: memory is the machine's, which other programs may be using too.
HOST_SHARE = 0.65
DEVICE_SHARE = 0.95


def describe() -> dict[str, PyTree[str | int | float]]:
    """Versions, the device, and the load of the machine."""
    from paged_optax import __version__

    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "optax": optax.__version__,
            "numpy": np.__version__,
            "paged_optax": __version__,
        },
        "backend": jax.default_backend(),
        "device_kind": device.device_kind,
        "device_bytes": device_memory()[0] or None,
        "devices": jax.device_count(),
        "platform_version": device.client.platform_version.splitlines()[0],
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "host_bytes_available": host_available(),
        "load_average": list(os.getloadavg()),
    }


def both_memories() -> tuple[NamedSharding, NamedSharding]:
    """The default memory of the first device, and pinned memory of its host.

    The types of arrays and of traced values show these placements.
    """
    device = jax.devices()[0]
    # Arrays of a `SingleDeviceSharding` all have the type of device memory.
    sharding = typed_by_memory(SingleDeviceSharding(device))
    return (
        sharding.with_memory_kind(device.default_memory().kind),
        sharding.with_memory_kind(PINNED_HOST),
    )


def typed_shapes(tree: PyTree[Array]) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes of arrays that state which of the two memories each is in."""
    device, host = both_memories()
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=host if x.sharding.memory_kind == PINNED_HOST else device,
        ),
        tree,
    )


def host_available() -> int:
    """Bytes of memory that this machine, or this container, has left."""
    try:
        text = pathlib.Path("/proc/meminfo").read_text()
        (kilobytes,) = re.findall(r"^MemAvailable:\s+(\d+)", text, re.M)
        left = 1024 * int(kilobytes)
    except (OSError, ValueError):  # not Linux: take half of all there is
        left = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        group = pathlib.Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        left = min(left, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no container, or no limit
    return left


def shortage(device_bytes: int, host_bytes: int) -> str | None:
    """Why this much memory cannot be had, or None if it can.

    On the CPU backend device and host are one memory, and are counted together.
    """
    limit, _ = device_memory()
    free = host_available() * HOST_SHARE
    # On the CPU backend, which has no limit, both are the machine's memory.
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
    # XLA:GPU takes pinned memory of a pool, which has a limit of its own.
    pool = pool_limit()
    if jax.default_backend() == "gpu" and host_bytes > pool:
        return (
            f"needs {host_bytes / 1e9:.1f} GB of pinned memory; XLA's pool holds "
            f"{pool / 1e9:.1f} ({POOL_LIMIT})"
        )
    return None


def _cpu() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
        return re.findall(r"^model name\s*:\s*(.*)", text, re.M)[0]
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


#: Bytes of a buffer that is large enough for a link's rate, and quickly there.
SIZE = 256 << 20

COLUMNS = 1024
PAGE_ROWS = (16 << 20) // (4 * COLUMNS)  # 16 MiB, the engine's default page

#: Rows and columns of matrices that are large enough for a card's rate of products.
SIDE = 8192
# Products of one call, beside which the time of the call itself is small.
_PRODUCTS = 8

Row = Int[Array, ""]
Square = Float[Array, "side side"]


def whole(source: Array, target: Array, to: object) -> Array:
    """`source` in the memory of `target`, whose buffer it takes over."""
    del target
    return jax.device_put(source, to)


def pages(source: Array, target: Array, to: object) -> Array:
    """The same page by page; the loop's variable is the row, as in the engine."""

    def body(carry: tuple[Row, Array]) -> tuple[Row, Array]:
        row, target = carry
        page = lax.dynamic_slice_in_dim(source, row, PAGE_ROWS)
        page = jax.device_put(page, to)
        return row + PAGE_ROWS, lax.dynamic_update_slice_in_dim(target, page, row, 0)

    rows = source.shape[0]
    return lax.while_loop(lambda c: c[0] < rows, body, (jnp.int32(0), target))[1]


def both_in_pages(
    up: Array, down: Array, up_target: Array, down_target: Array
) -> tuple[Array, Array]:
    """One loop: a page to the device and another to the host in each turn."""

    def body(carry: tuple[Row, Array, Array]) -> tuple[Row, Array, Array]:
        row, up_target, down_target = carry
        read = lambda x, to: jax.device_put(
            lax.dynamic_slice_in_dim(x, row, PAGE_ROWS), to
        )
        write = lambda x, page: lax.dynamic_update_slice_in_dim(x, page, row, 0)
        return (
            row + PAGE_ROWS,
            write(up_target, read(up, DEVICE)),
            write(down_target, read(down, HOST)),
        )

    rows = up.shape[0]
    carry = (jnp.int32(0), up_target, down_target)
    return lax.while_loop(lambda c: c[0] < rows, body, carry)[1:]


def programs() -> dict[str, tuple[Callable[..., PyTree[Array]], str, str]]:
    """Name to function, and memories of sources and targets: h(ost) or d(evice)."""
    up = functools.partial(whole, to=DEVICE)
    down = functools.partial(whole, to=HOST)
    return {
        "host to device": (up, "h", "d"),
        "device to host": (down, "d", "h"),
        "both at once": (lambda a, b, x, y: (up(a, x), down(b, y)), "hd", "dh"),
        "host to device, in pages": (functools.partial(pages, to=DEVICE), "h", "d"),
        "device to host, in pages": (functools.partial(pages, to=HOST), "d", "h"),
        "both at once, in pages": (both_in_pages, "hd", "dh"),
    }


def jit(
    function: Callable[..., PyTree[Array]],
    sources: str,
    targets: str,
    shardings: Mapping[str, Sharding],
) -> Callable[..., PyTree[Array]]:
    """Jits a program, its targets donated."""
    places = [shardings[kind] for kind in targets]
    first = len(sources)
    # Unused arguments stay: `whole` takes its target only for the target's buffer.
    # Compiled as `jit_step` compiles, so that both ways are at once where they can be.
    return jax.jit(
        function,
        donate_argnums=tuple(range(first, first + len(targets))),
        out_shardings=tuple(places) if len(places) > 1 else places[0],
        keep_unused=True,
        compiler_options=overlap_options(jax.local_devices()[0]),
    )


@dataclasses.dataclass(frozen=True)
class Rate:
    """The rate that one program reached.

    Attributes:
      name: Which way, and whether in pages.
      gigabytes_per_second: The rates of all repeats, both ways together, in 10^9 bytes.
      directions: 1, or 2 for both at once.
      page_bytes: Bytes of one transfer.
      reason: Why nothing was measured, if nothing was.
    """

    name: str
    gigabytes_per_second: tuple[float, ...] = ()
    directions: int = 1
    page_bytes: int = 0
    reason: str = ""

    @property
    def median(self) -> float:
        """The median rate."""
        return statistics.median(self.gigabytes_per_second)


def measure(size: int, repeats: int) -> Iterator[Rate]:
    """Measures the rate of each program, or says why there is none.

    Buffers are whole pages of 16 MiB. One transfer before the repeats is not timed.
    """
    names = list(programs())
    if jax.default_backend() == "cpu":
        reason = "not measured: no link"
    elif PINNED_HOST not in memory_kinds():
        reason = "not measured: no pinned host memory"
    else:
        # Two buffers a direction, in each memory.
        reason = shortage(2 * size, 2 * size)
    if reason is not None:
        yield from (Rate(name, reason=reason) for name in names)
        return
    shardings = dict(zip("dh", both_memories(), strict=True))
    shape = (size // (4 * COLUMNS), COLUMNS)
    for name, (function, sources, targets) in programs().items():
        try:
            seconds = _time(
                jit(function, sources, targets, shardings),
                [_make(shape, shardings[kind], 1.0) for kind in sources],
                [_make(shape, shardings[kind], 0.0) for kind in targets],
                repeats,
            )
        except Exception as error:  # A crash of one program is a finding.
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
            yield Rate(name, reason=reason)
            continue
        yield Rate(
            name,
            tuple(len(sources) * size / s / 1e9 for s in seconds),
            len(sources),
            4 * COLUMNS * PAGE_ROWS if "pages" in name else size,
        )


def _make(shape: tuple[int, int], sharding: Sharding, scale: float) -> Array:
    values = scale * jnp.arange(1, shape[0] + 1, dtype=jnp.float32)[:, None]
    return jax.device_put(jnp.broadcast_to(values, shape), sharding).block_until_ready()


def _time(
    jitted: Callable[..., PyTree[Array]],
    sources: list[Array],
    targets: list[Array],
    n: int,
) -> list[float]:
    """Seconds of each of `n` calls, after one; raises if values were not moved."""
    seconds = []
    # The first call compiles.
    for _ in range(n + 1):
        started = time.perf_counter()
        moved = jax.block_until_ready(jitted(*sources, *targets))
        seconds.append(time.perf_counter() - started)
        targets = list(moved) if isinstance(moved, tuple) else [moved]
    for source, target in zip(sources, targets, strict=True):
        if not np.array_equal(np.asarray(source), np.asarray(target)):
            raise AssertionError("the values that arrived are not those that were sent")
    return seconds[1:]


def products(x: Square, w: Square) -> Square:
    """`x` times `w`, times `w`, and so on."""
    return lax.fori_loop(0, _PRODUCTS, lambda _, x: x @ w, x)


def knows_bfloat16() -> bool:
    """Whether tensor cores compute it: on a GPU of compute capability 8.0 or more."""
    capability = compute_capability(jax.local_devices()[0])
    return capability is None or capability >= 8


def teraflops(
    side: int = SIDE, repeats: int = 3, *, dtype: DTypeLike = jnp.bfloat16
) -> float:
    """The rate of products of square matrices, in 10^12 operations a second.

    One call before the repeats is not timed.
    """
    w = jnp.full((side, side), 1 / side, dtype)
    x, jitted, seconds = jnp.ones_like(w), jax.jit(products), []
    # The first call compiles.
    for _ in range(repeats + 1):
        started = time.perf_counter()
        jax.block_until_ready(jitted(x, w))
        seconds.append(time.perf_counter() - started)
    return _PRODUCTS * 2 * side**3 / statistics.median(seconds[1:]) / 1e12


def measured_card() -> Card:
    """This machine's card: its memory, and the rates that were measured.

    The link's are those of page by page, of the slower direction, and of both at once.

    Raises:
      ValueError: If there is none, or too little memory is left to measure.
    """
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
    fast = jnp.bfloat16 if knows_bfloat16() else jnp.float16
    return Card(
        # JAX tells of its share of a GPU's memory; a card has all of it.
        int(limit / device_share()) if gpu else limit,
        min(rate.median for rate in paged if rate.directions == 1),
        max(rate.median for rate in paged if rate.directions == 2),
        teraflops(dtype=fast),
        gpu,
        None if knows_bfloat16() else teraflops(),
        host_available(),
    )
