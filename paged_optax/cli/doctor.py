"""Rates of this machine's link, and a test of paging on it."""

import argparse
import importlib.metadata
import platform
from collections.abc import Iterator

import jax
import optax

from paged_optax.backend.memory import PINNED_HOST, device_memory, memory_kinds
from paged_optax.backend.pinned_pool import POOL_LIMIT, pool_limit
from paged_optax.backend.platforms import GPU_NEEDS_RAW_INDEX
from paged_optax.backend.text import readable_bytes, table
from paged_optax.cli import machine, self_test
from paged_optax.engine import backend_check
from paged_optax.planning.cards import local_card

# Relative to a leaf's largest value: a misplaced row is wrong by about 1, and a fused
# multiply-add by one rounding.
_TOLERANCE = 1e-5


def run(options: argparse.Namespace) -> int:
    """Prints the machine, the link's rates, and a verdict."""
    del options
    print(table(("machine", ""), _machine()))
    if jax.default_backend() == "cpu":
        print("\nNo accelerator: for a GPU install jax[cuda13], for a TPU jax[tpu].")
    print()
    rates = machine.measure(machine.SIZE, 3)
    rows = [(rate.name, rate.reason or f"{rate.median:.1f}") for rate in rates]
    print(table(("link", "GB/s"), rows))
    print()
    rows = [*_self_test()]
    print(table(("self-test", "", ""), rows))
    right = all(row[-1] == "passed" for row in rows)
    invalid = (
        "Do not train with paged moments here. Install jax 0.11.2 or newer, and open an"
        " issue with this page."
    )
    print(f"\n{'Paging is right on this backend.' if right else invalid}")
    return 0 if right else 1


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    from paged_optax import __version__

    packages = "jax", "jaxlib", "optax", "numpy"
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "paged_optax": __version__,
    }


def _machine() -> Iterator[tuple[str, str]]:
    device = jax.devices()[0]
    yield "platform", jax.default_backend()
    yield "device", f"{jax.device_count()} x {device.device_kind}"
    yield "driver", device.client.platform_version.splitlines()[0]
    yield from versions().items()
    yield "memory kinds, the device's own first", ", ".join(memory_kinds())
    size = device_memory()[0]
    taken = readable_bytes(size) if size else "the host's"
    yield "memory XLA may take of a device", taken
    card = local_card()
    if jax.default_backend() in ("cpu", "METAL") or (card and card.unified_memory):
        yield "device and host memory", "one: the bytes of both add up"
    if jax.default_backend() == "gpu":
        pool = f"{readable_bytes(pool_limit())} ({POOL_LIMIT})"
        yield "pinned memory XLA hands out", pool
        in_turn = "in turn, in twice the time: install jax 0.11.2 or newer"
        yield "reads and writes", in_turn if GPU_NEEDS_RAW_INDEX else "both at once"
        if options := machine.compiler_options():
            yield "compiler_options= of your own jax.jit", str(options)


def _self_test() -> Iterator[tuple[str, str, str]]:
    # Without pinned host memory nothing is paged.
    if PINNED_HOST not in memory_kinds():
        missing = "missing: host_memory_kind='auto' keeps moments on the device"
        yield PINNED_HOST, missing, "FAILED"
        return
    try:
        backend_check.run_check(jax.default_backend())
        yield "distinct pages", "come back as they were sent", "passed"
        for name in ("adamw", "lion"):
            inner = getattr(optax, name)(1e-3)
            comparison = self_test.compare_with_optax(inner, steps=5)
            verdict = "passed" if comparison.error <= _TOLERANCE else "FAILED"
            pages = max(x.pages for x in comparison.moments)
            yield f"5 steps of {name}", f"in up to {pages} pages", verdict
            yield "its state", str(comparison.state), verdict
            yield "its parameters", str(comparison.parameters), verdict
    except Exception as error:  # any failure is a result
        yield "self-test", f"{type(error).__name__}: {error}", "FAILED"
