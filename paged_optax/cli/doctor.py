"""Rates of this machine, and a test of paging on it."""

import argparse
import importlib.metadata
import platform
from collections.abc import Iterator

import jax
import optax

from paged_optax.backend.memory import PINNED_HOST, device_memory, memory_kinds
from paged_optax.backend.pinned_pool import POOL_LIMIT, pool_limit
from paged_optax.backend.platforms import GPU_NEEDS_RAW_INDEX
from paged_optax.backend.text import print_table, readable_bytes, track
from paged_optax.cli import machine, self_test
from paged_optax.cli.self_test import Difference
from paged_optax.engine import backend_check
from paged_optax.planning.cards import Card, card_name, local_card
from paged_optax.planning.footprints import wrap_text

#: Command line after the program's name.
EXAMPLE = "doctor"

_POOL_SHARE = 7 / 8  # of the free host memory, for XLA's pool
# Relative to a leaf's largest value: a misplaced row is wrong by about 1, and a fused
# multiply-add by one rounding.
_TOLERANCE = 1e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares no arguments."""
    del parser


def run(options: argparse.Namespace) -> int:
    """Prints the machine, the measured rates, and a verdict."""
    del options
    try:
        print_table(("machine", ""), _machine())
    except RuntimeError as error:  # JAX found no backend.
        print(f"JAX does not start: {error}")
        return 1
    if jax.default_backend() == "cpu":
        print("\nNo accelerator: for a GPU install jax[cuda13], for a TPU jax[tpu].")
    if jax.default_backend() == "gpu" and (note := _pool_advice()):
        print(f"\n{note}")
    print()
    card = local_card()
    rates, count = machine.measure(machine.SIZE, 3), len(machine.programs())
    rows = (_rate(x, card) for x in track(rates, "measuring the link", count))
    stated = ("stated",) if card else ()
    print_table(("link", "GB/s", *stated), rows)
    print()
    dtypes = ("bfloat16",) if machine.knows_bfloat16() else ("float16", "bfloat16")
    rows = ((x, _products(x), *_stated(card and card.products(x))) for x in dtypes)
    print_table(("products", "TFLOP/s", *stated), rows)
    if card and card.advice:
        print(f"\n{wrap_text(card.advice)}")
    print()
    right, rows = _self_test()
    print_table(("self-test", "", ""), rows)
    print("\nPaging is right on this backend." if right else f"\n{_WRONG}")
    return 0 if right else 1


_WRONG = (
    "Do not train with paged moments here. Install jax 0.11.2 or newer, and open an"
    " issue with this page."
)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    packages = "jax", "jaxlib", "optax", "numpy"
    from paged_optax import __version__

    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "paged_optax": __version__,
    }


def _machine() -> Iterator[tuple[str, str]]:
    device = jax.devices()[0]
    yield "platform", jax.default_backend()
    known = card_name(device.device_kind)
    name = f", known as {known}" if known else ""
    yield "device", f"{jax.device_count()} x {device.device_kind}{name}"
    yield "driver", device.client.platform_version.splitlines()[0]
    yield from versions().items()
    yield "memory kinds, the device's own first", ", ".join(memory_kinds())
    size = device_memory()[0]
    taken = readable_bytes(size) if size else "the host's"
    yield "memory XLA may take of a device", taken
    yield "memory free on the host", readable_bytes(machine.host_available())
    if jax.default_backend() == "gpu":
        pool = f"{readable_bytes(pool_limit())} ({POOL_LIMIT})"
        yield "pinned memory XLA hands out", pool
        in_turn = "in turn, in twice the time: install jax 0.11.2 or newer"
        yield "reads and writes", in_turn if GPU_NEEDS_RAW_INDEX else "both at once"
        if options := machine.compiler_options():
            yield "compiler_options= of your own jax.jit", str(options)


def _pool_advice() -> str:
    """A limit that keeps XLA's pool within the free memory; empty if it is."""
    pool, free = pool_limit(), machine.host_available()
    if pool <= free:
        return ""
    text = (
        "XLA's pool of pinned memory grows by doubling, to twice what is needed and to"
        f" {readable_bytes(pool)}. {readable_bytes(free)} are free. Before JAX starts:"
    )
    gigabytes = max(1, int(_POOL_SHARE * free) >> 30)
    return f"{wrap_text(text)}\nexport {POOL_LIMIT}={gigabytes}"


def _rate(rate: machine.Rate, card: Card | None) -> tuple[str, ...]:
    stated = card and (card.link if rate.directions == 1 else card.both_ways)
    return rate.name, rate.reason or f"{rate.median:.1f}", *_stated(stated)


def _stated(rate: float | None) -> tuple[str, ...]:
    """The cell of the column of stated rates; none without a card."""
    return () if rate is None else (f"{rate:g}",)


def _products(dtype: str) -> str:
    if jax.default_backend() == "cpu":
        return "not measured: no accelerator"
    reason = machine.shortage(4 * 2 * machine.SIDE**2, 0)
    return reason or f"{machine.teraflops(dtype=dtype):.1f}"


def _self_test() -> tuple[bool, list[tuple[str, str, str]]]:
    """True if all tests passed, and a row for each."""
    # Without pinned host memory nothing is paged.
    if PINNED_HOST not in memory_kinds():
        missing = "missing: host_memory_kind='auto' keeps moments on the device"
        return False, [(PINNED_HOST, missing, "FAILED")]
    tests, rows = {"adamw": optax.adamw(1e-3), "lion": optax.lion(1e-3)}, []
    try:
        backend_check.run_check(jax.default_backend())
        rows.append(("distinct pages", "come back as they were sent", "passed"))
        for name, inner in track(tests.items(), "self-test", len(tests)):
            comparison = self_test.compare_with_optax(inner, steps=5)
            verdict = "passed" if comparison.error <= _TOLERANCE else "FAILED"
            pages = max(x.pages for x in comparison.moments)
            rows += [
                (f"5 steps of {name}", f"in up to {pages} pages", verdict),
                ("its state", _distance(comparison.state), verdict),
                ("its parameters", _distance(comparison.parameters), verdict),
            ]
    except Exception as error:  # any failure is a result
        rows.append(("self-test", f"{type(error).__name__}: {error}", "FAILED"))
    return all(row[-1] == "passed" for row in rows), rows


def _distance(difference: Difference) -> str:
    if difference.differing == 0:
        return "Optax's bit for bit"
    return (
        f"within {difference.ulps} ulp ({difference.differing} of"
        f" {difference.values} values differ)"
    )
