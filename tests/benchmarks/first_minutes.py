"""What to run first on a GPU: one command, fifteen minutes at most.

    python tests/benchmarks/first_minutes.py
    python tests/benchmarks/first_minutes.py --quick    # small, as without a GPU

The most valuable comes first:

- numbers: six optimizers against Optax's;
- graphs: 20 steps with CUDA graphs and without compute the same numbers;
- half budget: 200 steps of AdamW with half of the moments on the device compute Optax's
  numbers, bit for bit where the compiler adds alike;
- large leaves: moments beyond 2^32 bytes come back bit for bit, by page and whole;
- activations: `layerwise_step` computes the same with `activations_on_host`;
- link: its rate in each direction alone and in both at once, with what arrives
  compared;
- tokens: tokens a second of Llama-3-8B at 128 micro-batches, layerwise and resident;
- profile: where the time of these steps goes, at one micro-batch, by XLA's trace;
- pages: updates of leaves of 1, 4, 16 and 64 MiB in pages of 1 MiB and by default;
- ends: the first and the last layer's transfers in loops of their own, and without;
- remainders: master remainders in 16 bits and in 8;
- O1: XLA's optimization level, with the passes off that compute wrong addresses.

Each runs in a process of its own, within its limit, whatever came of those before it.
After each the outcomes are written, with versions and device, to
`tests/benchmarks/results/first-minutes-<backend>-<device>-jax<version>.json`; where
sizes are small, only where `--out` says. Exits with 1 if a check failed.
"""

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from run import FOLDER, MEMORY, PartError, path_of, run_part
from tables import Row, show

#: Seconds for all, and for each check.
BUDGET = 870
LIMITS = {
    "numbers": 60,
    "graphs": 120,
    "half budget": 45,
    "large leaves": 60,
    "activations": 60,
    "link": 45,
    "tokens": 180,
    "tokens, resident": 180,
    "profile": 150,
    "pages": 90,
    "ends": 120,
    "remainders": 120,
    "O1": 120,
}

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"
# Errors are relative to a leaf's largest value: what went to a wrong place is wrong by
# about 1. With graphs and without the kernels are the same. Where activations wait
# elsewhere, another program may add products up in another order.
_SAME_KERNELS, _OTHER_PROGRAM = 1e-5, 1e-4


# --- The checks -------------------------------------------------------------------


def numbers(small: bool) -> Row:
    """Paged optimizers beside Optax's."""
    from checks import check

    rows = check(small)
    outcome = PASSED if all(row["right"] for row in rows) else FAILED
    return {"outcome": outcome, "rows": rows}


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


def tokens(small: bool) -> Row:
    """Tokens a second of many micro-batches, layer by layer."""
    return _steps(small, [{}], many=True)


def tokens_resident(small: bool) -> Row:
    """The same with everything on the device."""
    from tokens import RESIDENT

    return _steps(small, [{"way": RESIDENT}], many=True)


def profile(small: bool) -> Row:
    """Steps, and where their time goes."""
    from tokens import LAYERWISE, RESIDENT

    ways = [{"way": way, "traced": True} for way in (LAYERWISE, RESIDENT)]
    return _steps(small, ways)


def pages(small: bool) -> Row:
    """Updates by the rule for pages, and in the smallest ones."""
    from updates import DEFAULT, MEBIBYTE, measure

    rows = list[Row]()
    for width in (512,) if small else (512, 1024, 2048, 4096):
        size, names = f"8 x {width}x{width}", (DEFAULT, MEBIBYTE)
        rows += measure(size, seconds=8, rounds=2 if small else 9, names=names)
    return {"outcome": PASSED, "rows": rows}


def ends(small: bool) -> Row:
    """Transfers of the first and the last layer in loops of their own, or whole."""
    from paged_optax.layerwise import slices

    if not hasattr(slices, "GPU_FETCHES_AHEAD"):
        return {"outcome": NOT_RUN, "reason": "no longer in the code"}
    with_loops = _steps(small, [{}])
    slices.GPU_FETCHES_AHEAD = False
    return _alike(with_loops["rows"] + _steps(small, [{}])["rows"])


def remainders(small: bool) -> Row:
    """Master remainders of 16 bits, and of 8."""
    names = "layerwise, 8 bits, remainders", "layerwise, 8 bits, remainders in 8 bits"
    try:
        return _steps(small, [{"way": way} for way in names])
    except (TypeError, ValueError) as error:
        return {"outcome": NOT_RUN, "reason": f"not built: {error}"}


def optimized(small: bool) -> Row:
    """XLA's optimization level O1, by `jit_step`, which switches passes off."""
    import jax

    before = _steps(small, [{}])["rows"]
    jax.config.update("jax_optimization_level", "O1")
    return _alike(before + _steps(small, [{}])["rows"])


def _steps(small: bool, each: Sequence[Row], many: bool = False) -> Row:
    """Training steps of Llama-3-8B, or of a small decoder."""
    from tokens import LAYERWISE, measure

    model = "small" if small else "Llama-3-8B"
    count = (3 if small else 128) if many else 1
    how = {"model": model, "way": LAYERWISE, "count": count}
    how["steps"] = 1 if many else 3
    return {"outcome": PASSED, "rows": [measure(**how | more) for more in each]}


def _alike(rows: Sequence[Row]) -> Row:
    """Fails if rows that compute the same have other losses."""
    apart = max(
        abs(a / b - 1) for a, b in zip(*(r["losses"] for r in rows), strict=True)
    )
    outcome = PASSED if apart <= _OTHER_PROGRAM else FAILED
    return {"outcome": outcome, "losses_apart": apart, "rows": list(rows)}


#: Each takes whether sizes are small, and returns its outcome and what it found.
CHECKS: dict[str, Callable[..., Row]] = {
    "numbers": numbers,
    "graphs": graphs,
    "half budget": half_budget,
    "large leaves": large_leaves,
    "activations": activations,
    "link": link,
    "tokens": tokens,
    "tokens, resident": tokens_resident,
    "profile": profile,
    "pages": pages,
    "ends": ends,
    "remainders": remainders,
    "O1": optimized,
}


def _verdict(found: Any, tolerance: float) -> Row:
    outcome = PASSED if found.error <= tolerance else FAILED
    return {"outcome": outcome, "tolerance": tolerance, **dataclasses.asdict(found)}


# --- The whole --------------------------------------------------------------------


def attempt(check: Callable[[], Row], left: float) -> Row:
    """What a check found, its outcome and seconds; a check that breaks has failed."""
    started = time.monotonic()
    try:
        late = {"outcome": NOT_RUN, "reason": "no time is left"}
        found = late if left < 5 else check()
    except PartError as error:
        found = {"outcome": FAILED, "reason": str(error)}
    return found | {"seconds": round(time.monotonic() - started, 1)}


def run(small: bool, out: pathlib.Path | None) -> Row:
    """All checks, one after the other.

    Args:
      small: Whether sizes are small in any case.
      out: Where the files go; None: nowhere if sizes are small, or beside this file.

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
        env=MEMORY,
    )
    for name in CHECKS:
        result["checks"][name] = attempt(lambda name=name: part(name), left())
        keep(result, name, out)
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
        "--out", type=pathlib.Path, metavar="FOLDER", help="where the files go"
    )
    given = parser.parse_args()
    result = run(given.quick, given.out)
    rows = [row for x in result["checks"].values() for row in x.get("rows", ())]
    ran = [row for row in rows if "reason" not in row]
    print(show({"rows": ran, "not_run": []}), flush=True)
    outcomes = [found["outcome"] for found in result["checks"].values()]
    return 1 if FAILED in outcomes else 0


if __name__ == "__main__":
    raise SystemExit(main())
