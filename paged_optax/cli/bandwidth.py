"""The rate of the link between host and device, inside `jit`, pinned buffers.

Each direction alone, then both at once; as one transfer of a whole buffer, and page
by page in a loop, which is how the engine moves them.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Sharding
from jaxtyping import Int, PyTree

from paged_optax.backend.memory import DEVICE, HOST, PINNED_HOST, memory_kinds
from paged_optax.cli import machine

#: Bytes of a buffer that is large enough for a link's rate, and quickly there.
SIZE = 256 << 20

COLUMNS = 1024
PAGE_ROWS = (16 << 20) // (4 * COLUMNS)  # 16 MiB, the engine's default page

Row = Int[Array, ""]


def whole(source: Array, target: Array, to: object) -> Array:
    """`source` in the memory of `target`, whose buffer it takes over."""
    del target
    return jax.device_put(source, to)


def pages(source: Array, target: Array, to: object) -> Array:
    """The same page by page; the loop's own variable is the row."""

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
    """Name to function, kinds of its sources, kinds of its targets: h(ost), d."""
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
    return jax.jit(
        function,
        donate_argnums=tuple(range(first, first + len(targets))),
        out_shardings=tuple(places) if len(places) > 1 else places[0],
        keep_unused=True,
    )


@dataclasses.dataclass(frozen=True)
class Rate:
    """What one program reached.

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
    """Measures the rate of each program, one after the other.

    Args:
      size: Bytes of one buffer; whole pages of 16 MiB.
      repeats: Transfers timed, after one that is not.

    Yields:
      The rate, or the reason why there is none.
    """
    names = list(programs())
    if jax.default_backend() == "cpu":
        reason = "not measured: no link"
    elif PINNED_HOST not in memory_kinds():
        reason = "not measured: no pinned host memory"
    else:
        # Two buffers a direction, in each memory.
        reason = machine.shortage(2 * size, 2 * size)
    if reason is not None:
        yield from (Rate(name, reason=reason) for name in names)
        return
    shardings = dict(zip("dh", machine.both_memories(), strict=True))
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
    for _ in range(n + 1):
        started = time.perf_counter()
        moved = jax.block_until_ready(jitted(*sources, *targets))
        seconds.append(time.perf_counter() - started)
        targets = list(moved) if isinstance(moved, tuple) else [moved]
    for source, target in zip(sources, targets, strict=True):
        if not np.array_equal(np.asarray(source), np.asarray(target)):
            raise AssertionError("the values that arrived are not those that were sent")
    return seconds[1:]
