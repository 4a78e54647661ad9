"""What this machine offers, measured, and whether paging is right."""

import argparse
from collections.abc import Iterator

import jax
import optax

from paged_optax.backend.memory import PINNED_HOST, host_pool_bytes, memory_kinds
from paged_optax.backend.progress import track
from paged_optax.backend.sizes import readable_bytes
from paged_optax.backend.text_table import show
from paged_optax.backend.versions import GPU_NEEDS_RAW_INDEX
from paged_optax.cli import bandwidth, machine, this_card
from paged_optax.cli.comparison import Difference, compare
from paged_optax.engine import backend_check

#: What follows the program's name.
EXAMPLE = "doctor"

# Relative to a leaf's largest value: rows that went to a wrong place are wrong by
# about 1; one compiler's fused multiply-add is another's two roundings.
_TOLERANCE = 1e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares no arguments: there are none."""
    del parser


def run(given: argparse.Namespace) -> int:
    """Prints what is there, what was measured, and a verdict."""
    del given
    try:
        show(("machine", ""), _machine())
    except RuntimeError as error:  # JAX found no backend.
        print(f"JAX does not start: {error}")
        return 1
    if jax.default_backend() == "cpu":
        print("\nNo accelerator: for a GPU install jax[cuda13], for a TPU jax[tpu].")
    print()
    rates = bandwidth.measure(bandwidth.SIZE, 3)
    count = len(bandwidth.programs())
    show(("link", "GB/s"), map(_rate, track(rates, "measuring the link", count)))
    print()
    show(("products", "TFLOP/s"), [("bfloat16", _products())])
    print()
    right, rows = _self_test()
    show(("self-test", "", ""), rows)
    print("\nPaging is right on this backend." if right else f"\n{_WRONG}")
    return 0 if right else 1


_WRONG = (
    "Do not train with paged moments here. Install jax 0.11.2 or newer, and open an"
    " issue with this page."
)


def _machine() -> Iterator[tuple[str, str]]:
    found = machine.describe()
    yield "platform", found["backend"]
    yield "device", f"{found['devices']} x {found['device_kind']}"
    yield "driver", found["platform_version"]
    yield from found["versions"].items()
    kinds = memory_kinds()
    yield "memory kinds, the device's own first", ", ".join(kinds)
    size = found["device_bytes"]
    yield (
        "memory XLA may take of a device",
        readable_bytes(size) if size else "the host's",
    )
    yield "memory free on the host", readable_bytes(found["host_bytes_available"])
    if jax.default_backend() == "gpu":
        pool = (
            f"{readable_bytes(host_pool_bytes())} (XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB)"
        )
        yield "pinned memory XLA hands out", pool
        in_turn = "in turn, in twice the time: install jax 0.11.2 or newer"
        both = "both at once"
        yield "reads and writes", in_turn if GPU_NEEDS_RAW_INDEX else both


def _rate(rate: bandwidth.Rate) -> tuple[str, str]:
    return rate.name, rate.reason or f"{rate.median:.1f}"


def _products() -> str:
    if jax.default_backend() == "cpu":
        return "not measured: no accelerator"
    reason = machine.shortage(4 * 2 * this_card.SIDE**2, 0)
    return reason or f"{this_card.teraflops():.1f}"


def _self_test() -> tuple[bool, list[tuple[str, str, str]]]:
    """Whether all is right, and what was looked at, with the way out."""
    rows = []
    if PINNED_HOST not in memory_kinds():
        missing = "missing: host_memory_kind='auto' keeps moments on the device"
        return False, [(PINNED_HOST, missing, "FAILED")]
    tests = {"adamw": optax.adamw(1e-3), "lion": optax.lion(1e-3)}
    try:
        backend_check.run_check(jax.default_backend())
        rows.append(("distinct pages", "come back as they were sent", "passed"))
        for name, inner in track(tests.items(), "self-test", len(tests)):
            found = compare(inner, steps=5)
            passed = found.error <= _TOLERANCE
            pages = max(x.pages for x in found.moments)
            verdict = "passed" if passed else "FAILED"
            rows += [
                (f"5 steps of {name}", f"in up to {pages} pages", verdict),
                ("its state", _apart(found.state), verdict),
                ("its parameters", _apart(found.parameters), verdict),
            ]
    except Exception as error:  # Whatever breaks is the finding.
        rows.append(("self-test", f"{type(error).__name__}: {error}", "FAILED"))
    return all(row[-1] == "passed" for row in rows), rows


def _apart(difference: Difference) -> str:
    if difference.differing == 0:
        return "Optax's bit for bit"
    return (
        f"within {difference.ulps} ulp ({difference.differing} of"
        f" {difference.values} values differ)"
    )
