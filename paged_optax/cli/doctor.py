"""What this machine offers, measured, and whether paging is right."""

import argparse
from collections.abc import Iterator

import jax
import optax

from paged_optax.backend.compiler_options import overlap_options
from paged_optax.backend.memory import PINNED_HOST, memory_kinds
from paged_optax.backend.pinned_pool import POOL_LIMIT, pool_limit
from paged_optax.backend.platforms import GPU_NEEDS_RAW_INDEX
from paged_optax.backend.text import print_table, readable_bytes, track
from paged_optax.cli import machine, self_test
from paged_optax.cli.self_test import Difference
from paged_optax.engine import backend_check
from paged_optax.planning.cards import CARDS, Card, card_name
from paged_optax.planning.footprints import wrap_text

#: What follows the program's name.
EXAMPLE = "doctor"

# The share of the machine's free memory that XLA's pool may grow to.
_POOL_SHARE = 7 / 8
# Relative to a leaf's largest value: rows that went to a wrong place are wrong by
# about 1; one compiler's fused multiply-add is another's two roundings.
_TOLERANCE = 1e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares nothing: there are no arguments."""
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
    card = _known_card()
    rates = machine.measure(machine.SIZE, 3)
    count = len(machine.programs())
    rows = (_rate(x, card) for x in track(rates, "measuring the link", count))
    stated = ("stated",) if card else ()
    print_table(("link", "GB/s", *stated), rows)
    print()
    dtypes = ("bfloat16",) if machine.knows_bfloat16() else ("float16", "bfloat16")
    rows = (
        (dtype, _products(dtype), *_stated(card and card.products(dtype)))
        for dtype in dtypes
    )
    print_table(("products", "TFLOP/s", *stated), rows)
    if card and card.advice:
        print(f"\n{wrap_text(card.advice)}")
    print()
    right, rows = _self_test()
    print_table(("self-test", "", ""), rows)
    print("\nPaging is right on this backend." if right else f"\n{_WRONG}")
    if jax.default_backend() == "gpu":
        print()
        same, row = _with_graphs()
        print_table(("CUDA graphs", "", ""), [row])
        if not same:
            print(f"\n{_WITHOUT_GRAPHS}")
        right = right and same
    return 0 if right else 1


_WRONG = (
    "Do not train with paged moments here. Install jax 0.11.2 or newer, and open an"
    " issue with this page."
)
_WITHOUT_GRAPHS = (
    "Train without CUDA graphs, and open an issue with this page. Before JAX starts:\n"
    f"export XLA_FLAGS={self_test.NO_GRAPHS}"
)


def _machine() -> Iterator[tuple[str, str]]:
    facts = machine.describe()
    yield "platform", facts["backend"]
    known = card_name(facts["device_kind"])
    name = f", known as {known}" if known else ""
    yield "device", f"{facts['devices']} x {facts['device_kind']}{name}"
    yield "driver", facts["platform_version"]
    yield from facts["versions"].items()
    kinds = memory_kinds()
    yield "memory kinds, the device's own first", ", ".join(kinds)
    size = facts["device_bytes"]
    yield (
        "memory XLA may take of a device",
        readable_bytes(size) if size else "the host's",
    )
    yield "memory free on the host", readable_bytes(facts["host_bytes_available"])
    if jax.default_backend() == "gpu":
        pool = f"{readable_bytes(pool_limit())} ({POOL_LIMIT})"
        yield "pinned memory XLA hands out", pool
        in_turn = "in turn, in twice the time: install jax 0.11.2 or newer"
        both = "both at once"
        yield "reads and writes", in_turn if GPU_NEEDS_RAW_INDEX else both
        if options := overlap_options(jax.local_devices()[0]):
            yield "compiler_options= of your own jax.jit", str(options)


def _pool_advice() -> str:
    """How to keep XLA's pool within the free memory; empty if it is."""
    pool, free = pool_limit(), machine.host_available()
    if pool <= free:
        return ""
    text = (
        "XLA's pool of pinned memory grows by doubling, to twice what is needed and to"
        f" {readable_bytes(pool)}. {readable_bytes(free)} are free. Before JAX starts:"
    )
    gigabytes = max(1, int(_POOL_SHARE * free) >> 30)
    return f"{wrap_text(text)}\nexport {POOL_LIMIT}={gigabytes}"


def _known_card() -> Card | None:
    """The data sheet of this machine's card, if its name is known."""
    name = card_name(jax.devices()[0].device_kind)
    return CARDS[name] if name else None


def _rate(rate: machine.Rate, card: Card | None) -> tuple[str, ...]:
    both = rate.name.startswith("both")
    stated = card and (card.both_ways if both else card.link)
    return rate.name, rate.reason or f"{rate.median:.1f}", *_stated(stated)


def _stated(rate: float | None) -> tuple[str, ...]:
    """The cell of the column of stated rates, which only known cards have."""
    return () if rate is None else (f"{rate:g}",)


def _products(dtype: str) -> str:
    if jax.default_backend() == "cpu":
        return "not measured: no accelerator"
    reason = machine.shortage(4 * 2 * machine.SIDE**2, 0)
    return reason or f"{machine.teraflops(dtype=dtype):.1f}"


def _self_test() -> tuple[bool, list[tuple[str, str, str]]]:
    """Whether all tests passed, and a row for each."""
    rows = []
    # Without it nothing is paged, and nothing can be tested.
    if PINNED_HOST not in memory_kinds():
        missing = "missing: host_memory_kind='auto' keeps moments on the device"
        return False, [(PINNED_HOST, missing, "FAILED")]
    tests = {"adamw": optax.adamw(1e-3), "lion": optax.lion(1e-3)}
    try:
        backend_check.run_check(jax.default_backend())
        rows.append(("distinct pages", "come back as they were sent", "passed"))
        for name, inner in track(tests.items(), "self-test", len(tests)):
            comparison = self_test.compare_with_optax(inner, steps=5)
            passed = comparison.error <= _TOLERANCE
            pages = max(x.pages for x in comparison.moments)
            verdict = "passed" if passed else "FAILED"
            rows += [
                (f"5 steps of {name}", f"in up to {pages} pages", verdict),
                ("its state", _distance(comparison.state), verdict),
                ("its parameters", _distance(comparison.parameters), verdict),
            ]
    except Exception as error:  # Whatever breaks is the finding.
        rows.append(("self-test", f"{type(error).__name__}: {error}", "FAILED"))
    return all(row[-1] == "passed" for row in rows), rows


def _with_graphs() -> tuple[bool, tuple[str, str, str]]:
    """Whether steps compute the same with graphs and without, and the row of it."""
    name = f"{self_test.GRAPH_STEPS} steps, ordinary and layerwise"
    try:
        difference = self_test.compare_graphs()
    except Exception as error:  # Whatever breaks is the finding.
        return False, (name, f"{type(error).__name__}: {error}", "FAILED")
    same = difference.error <= _TOLERANCE
    verdict = "passed" if same else "FAILED"
    return same, (name, _distance(difference, "those without graphs"), verdict)


def _distance(difference: Difference, others: str = "Optax's") -> str:
    if difference.differing == 0:
        return f"{others} bit for bit"
    return (
        f"within {difference.ulps} ulp ({difference.differing} of"
        f" {difference.values} values differ)"
    )
