"""What to run first on a GPU: is paging right there? One command, ten minutes at most.

    python tests/benchmarks/first_minutes.py
    python tests/benchmarks/first_minutes.py --quick    # small, as without a GPU

The most valuable check comes first:

- graphs: 20 steps with CUDA graphs and without compute the same numbers;
- half budget: 200 steps of AdamW with half of the moments on the device compute Optax's
  numbers, bit for bit where the compiler adds alike;
- link: its rate in each direction alone and in both at once, with what arrives
  compared;
- large leaves: moments beyond 2^32 bytes come back bit for bit, by page and whole;
- activations: `layerwise_step` computes the same with `activations_on_host`;
- benchmark: what `run.py` measures on the device, in the time that is left.

Each runs in processes of its own, within its limit, whatever came of those before it.
After each the outcomes are written, with versions and device, to
`tests/benchmarks/results/first-minutes-<backend>-<device>-jax<version>.json`; where
sizes are small, only where `--out` says. Exits with 1 if a check failed.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from run import FOLDER, PartError, path_of, run_part
from tables import Row

#: Seconds for all, and for each check.
BUDGET = 580
LIMITS = {
    "graphs": 150,
    "half budget": 60,
    "link": 60,
    "large leaves": 120,
    "activations": 100,
}

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"
# Errors are relative to a leaf's largest value: what went to a wrong place is wrong by
# about 1. With graphs and without the kernels are the same. Where activations wait
# elsewhere, another program may add products up in another order.
_SAME_KERNELS, _OTHER_PROGRAM = 1e-5, 1e-4


# --- The checks -------------------------------------------------------------------


def graphs(small: bool) -> Row:
    """Steps with CUDA graphs and without."""
    from graphs import GRAPH_STEPS, compare_graphs

    steps = 2 if small else GRAPH_STEPS
    found = compare_graphs(steps, limit=LIMITS["graphs"] / 2 - 5)
    return {"steps": steps} | _verdict(found, _SAME_KERNELS)


def half_budget(small: bool) -> Row:
    """Donated moments on the device beside others that travel."""
    import optax

    from paged_optax.cli.self_test import compare_with_optax

    steps = 5 if small else 200
    sizes = compare_with_optax(optax.adamw(1e-3), 1).moments
    budget = sum(x.bytes for x in sizes) // 2
    found = compare_with_optax(optax.adamw(1e-3), steps, budget)
    places = {x.on_host for x in found.moments}
    if places != {True, False}:
        raise AssertionError(f"moments are all in one memory, with {budget} bytes")
    verdict = _verdict(found.parameters, _SAME_KERNELS)
    return {"steps": steps, "device_budget": budget} | verdict


def link(small: bool) -> Row:
    """The link's rates; what arrives is compared with what was sent."""
    from link import rows

    size, repeats = ((64 if small else 256) << 20), (1 if small else 5)
    found = rows(size, repeats)
    reasons = dict.fromkeys(row["reason"] for row in found if "reason" in row)
    if not reasons:
        return {"outcome": PASSED, "rows": found}
    unmeasured = all(x.startswith(("not measured", "needs")) for x in reasons)
    outcome = NOT_RUN if unmeasured else FAILED
    return {"outcome": outcome, "rows": found, "reason": "; ".join(reasons)}


def large_leaves(small: bool) -> Row:
    """Moments whose last rows lie beyond 2^31 and 2^32 bytes, as far as they fit."""
    from large_leaves import check

    wrong, sizes = check(small)
    outcome = FAILED if any(wrong.values()) else PASSED
    return {"outcome": outcome, "wrong_values": wrong, **sizes}


def activations(small: bool) -> Row:
    """Layerwise steps whose activations wait on the host, and on the device."""
    from activations import compare

    sizes = (4, 128, 64) if small else (8, 1024, 4096)
    return _verdict(compare(*sizes), _OTHER_PROGRAM)


#: Each takes whether sizes are small, and returns its outcome and what it found.
CHECKS: dict[str, Callable[..., Row]] = {
    "graphs": graphs,
    "half budget": half_budget,
    "link": link,
    "large leaves": large_leaves,
    "activations": activations,
}


def _verdict(found: Any, tolerance: float) -> Row:
    outcome = PASSED if found.error <= tolerance else FAILED
    return {"outcome": outcome, "tolerance": tolerance, **dataclasses.asdict(found)}


# --- The whole --------------------------------------------------------------------


def attempt(check: Callable[[], Row]) -> Row:
    """What a check found, its outcome and seconds; a check that breaks has failed."""
    started = time.monotonic()
    try:
        found = check()
    except PartError as error:
        found = {"outcome": FAILED, "reason": str(error)}
    return found | {"seconds": round(time.monotonic() - started, 1)}


def benchmark(small: bool, left: float, out: pathlib.Path | None) -> Row:
    """Runs `run.py`, which writes a file of its own."""
    command = [sys.executable, str(FOLDER / "run.py"), "--budget", str(left)]
    command += ["--device-only"]
    command += ["--quick"] * small + (["--out", str(out)] if out else [])
    status = subprocess.run(command).returncode
    return {"outcome": FAILED if status else PASSED, "status": status}


def run(small: bool, out: pathlib.Path | None, with_benchmark: bool = True) -> Row:
    """All checks, one after the other.

    Args:
      small: Whether sizes are small in any case.
      out: Where the files go; None: nowhere if sizes are small, or beside this file.
      with_benchmark: Whether `run.py` is run too.

    Returns:
      What was written: the machine, and the outcome of each check by name.
    """
    started = time.monotonic()
    left = lambda: BUDGET - (time.monotonic() - started)
    machine = run_part("machine", timeout=120)
    sizes = "small, as asked" if small else "full"
    if machine["backend"] != "gpu":
        small, sizes = True, "small: there is no GPU"
    if out is None and not small:
        out = FOLDER / "results"
    result: Row = {"program": "tests/benchmarks/first_minutes.py", **machine}
    result |= {"sizes": sizes, "checks": {}}
    print(f"{machine['backend']}: {machine['device_kind']}; sizes: {sizes}", flush=True)
    part = lambda name: run_part(
        "first minutes",
        timeout=min(LIMITS[name], left()),
        name=name,
        small=small,
    )
    for name in CHECKS:
        result["checks"][name] = attempt(lambda name=name: part(name))
        keep(result, name, out)
    if with_benchmark:
        found = attempt(lambda: benchmark(small, left(), out))
        result["checks"]["benchmark"] = found
        keep(result, "benchmark", out)
    return result


def keep(result: Row, name: str, out: pathlib.Path | None) -> None:
    """Prints the outcome of a check, and writes all that is known so far."""
    found = result["checks"][name]
    reason = f": {found['reason']}" if found.get("reason") else ""
    print(f"{found['seconds']:6.1f} s  {name}: {found['outcome']}{reason}", flush=True)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        path = path_of(result, out)
        path = path.with_name(f"first-minutes-{path.name}")
        path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    """Runs everything; 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=(__doc__ or "").partition("\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument(
        "--without-benchmark", action="store_true", help="the checks alone"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="FOLDER", help="where the files go"
    )
    given = parser.parse_args()
    result = run(given.quick, given.out, not given.without_benchmark)
    outcomes = [found["outcome"] for found in result["checks"].values()]
    return 1 if FAILED in outcomes else 0


if __name__ == "__main__":
    raise SystemExit(main())
