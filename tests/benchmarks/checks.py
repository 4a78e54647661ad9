"""Whether a backend computes Optax's numbers, and the same ones in every way.

`run.py` runs each check in a process of its own. A row has what was found, and whether
that is right. Errors are relative to a leaf's largest value: what went to a wrong place
is wrong by about 1.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import graphs
import jax
import jax.numpy as jnp
import optax
from tables import Row

import paged_optax as po
from paged_optax.cli import machine, self_test

# One compiler's fused multiply-add is another's two roundings.
_ELEMENTWISE, _WITHIN_LEAF = 1e-5, 1e-2
# With graphs and without the kernels are the same. Where activations wait elsewhere,
# another program may add products up in another order.
_SAME_KERNELS, _OTHER_PROGRAM = 1e-5, 1e-4


def _optimizers() -> dict[str, tuple[optax.GradientTransformation, float]]:
    """Each with the difference at which it is wrong."""
    schedule = optax.linear_schedule(1e-3, 1e-4, 10)
    return {
        "adamw": (optax.adamw(schedule, weight_decay=0.1), _ELEMENTWISE),
        "lamb": (optax.lamb(1e-3), _WITHIN_LEAF),
        "adamw, bfloat16 mu": (optax.adamw(1e-3, mu_dtype=jnp.bfloat16), 1e-2),
        "nadamw": (optax.nadamw(1e-3), _ELEMENTWISE),
        "rmsprop": (optax.rmsprop(1e-3, momentum=0.9), _ELEMENTWISE),
        "muon": (optax.contrib.muon(1e-3), _WITHIN_LEAF),
    }


def numbers(quick: bool) -> list[Row]:
    """One row an optimizer: values, bit differences, worst errors, a verdict."""
    optimizers = list(_optimizers().items())[: 2 if quick else None]
    steps = 3 if quick else 10
    return [_compare(name, *rest, steps) for name, rest in optimizers]


def _compare(
    name: str, inner: optax.GradientTransformation, tolerance: float, steps: int
) -> Row:
    found = self_test.compare_with_optax(inner, steps)
    cut = [x for x in found.moments if x.on_host and x.pages > 1]
    return {
        "section": "numbers",
        "name": name,
        "steps": steps,
        "most_pages_a_leaf": max((x.pages for x in found.moments), default=0),
        "leaves_in_pages": len(cut),
        "leaves_with_a_smaller_last_page": sum(
            x.pages * x.page_bytes != x.bytes for x in cut
        ),
        "state_values": found.state.values,
        "state_values_that_differ": found.state.differing,
        "parameters": found.parameters.values,
        "parameters_that_differ": found.parameters.differing,
        "most_ulps_between_parameters": found.parameters.ulps,
        "worst_relative_error": found.error,
        "tolerance": tolerance,
        "right": bool(found.error <= tolerance),
    }


def link(size: int, repeats: int) -> list[Row]:
    """Gigabytes a second of each program of `paged_optax.cli.machine`, or why not.

    Args:
      size: Bytes of one buffer; whole pages of 16 MiB.
      repeats: Transfers timed, after one that is not.
    """
    rows = list[Row]()
    for rate in machine.measure(size, repeats):
        rows.append({"section": "link", "name": rate.name})
        if rate.reason:
            rows[-1] |= {"reason": rate.reason}
            continue
        each = rate.gigabytes_per_second
        rows[-1] |= {
            "gigabytes_per_second": rate.median,
            "gigabytes_per_second_range": [min(each), max(each)],
            "directions": rate.directions,
            "buffer_bytes": size,
            "page_bytes": rate.page_bytes,
            "repeats": repeats,
        }
    return rows


def _verdict(found: Any, tolerance: float, **more: Any) -> Row:
    right = bool(found.error <= tolerance)
    return {"right": right, "tolerance": tolerance, **dataclasses.asdict(found), **more}


def with_graphs(small: bool) -> Row:
    """Steps with CUDA graphs and without."""
    steps = 2 if small else 20
    return _verdict(graphs.compare_graphs(steps, 55), _SAME_KERNELS, steps=steps)


def half_budget(small: bool) -> Row:
    """Donated moments on the device beside others that travel, and Optax's."""
    steps = 5 if small else 200
    sizes = self_test.compare_with_optax(optax.adamw(1e-3), 1).moments
    budget = sum(x.bytes for x in sizes) // 2
    found = self_test.compare_with_optax(optax.adamw(1e-3), steps, budget)
    if {x.on_host for x in found.moments} != {True, False}:
        raise AssertionError(f"moments are all in one memory, with {budget} bytes")
    return _verdict(found.parameters, _SAME_KERNELS, steps=steps, device_budget=budget)


def large_leaves(small: bool) -> Row:
    """Moments whose last rows lie beyond 2^31 and 2^32 bytes, as far as they fit."""
    import large_leaves

    wrong, sizes = large_leaves.check(small)
    return {"right": not any(wrong.values()), "wrong_values": wrong, **sizes}


def activations(small: bool) -> Row:
    """Layerwise steps whose activations wait on the host, and on the device."""
    sizes = (4, 128, 64) if small else (8, 1024, 4096)
    params, batches = graphs.drawn(*sizes, steps=3)
    # In full precision, and of sums: a rounding elsewhere stays a rounding.
    tx = po.paged_sgd(0.1, momentum=0.9, min_paged_size=0)
    with jax.default_matmul_precision("highest"):
        there, here = (
            graphs.layerwise(params, batches, tx, activations_on_host=on_host)
            for on_host in (True, False)
        )
    graphs.refuse_not_finite(here)
    return _verdict(self_test.difference(there, here), _OTHER_PROGRAM)


def ends(small: bool) -> Row:
    """Transfers of the first and the last layer in loops of their own, or whole."""
    from paged_optax.layerwise import slices

    with_loops = _losses(small)
    slices.GPU_FETCHES_AHEAD = False
    return alike(with_loops, _losses(small))


def optimized(small: bool) -> Row:
    """XLA's level O1, of which `jit_step` switches passes off: wrong addresses."""
    before = _losses(small)
    jax.config.update("jax_optimization_level", "O1")
    return alike(before, _losses(small))


def _losses(small: bool) -> list[float]:
    """The losses of steps of Llama-3-8B, or of a small decoder."""
    import tokens

    model = "small" if small else "Llama-3-8B"
    return tokens.measure(model, tokens.LAYERWISE, count=1, steps=3)["losses"]


def alike(losses: list[float], others: list[float]) -> Row:
    """Wrong if steps that compute the same have other losses."""
    apart = max(abs(a / b - 1) for a, b in zip(losses, others, strict=True))
    return {"right": apart <= _OTHER_PROGRAM, "error": apart}


#: Each takes whether sizes are small.
CHECKS: dict[str, Callable[[bool], Row]] = {
    "graphs": with_graphs,
    "half budget": half_budget,
    "large leaves": large_leaves,
    "activations": activations,
    "ends": ends,
    "O1": optimized,
}


def check(name: str, small: bool) -> Row:
    """The row of one check."""
    return {"section": "checks", "name": name, **CHECKS[name](small)}
