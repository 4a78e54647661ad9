"""Whether paged optimizers compute Optax's numbers on this backend.

Every transformation runs twice, as `paged_optax.cli.self_test` compares them.
"""

from typing import Any

import jax.numpy as jnp
import optax

from paged_optax.cli.self_test import compare_with_optax

SECTION = "numbers"
# Relative to a leaf's largest value. Rows that went to a wrong place are wrong by
# about 1; one compiler's fused multiply-add is another's two roundings.
_ELEMENTWISE, _WITHIN_LEAF = 1e-5, 1e-2


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


def check(quick: bool) -> list[dict[str, Any]]:
    """One row an optimizer: values, bit differences, worst errors, a verdict."""
    optimizers = list(_optimizers().items())[: 2 if quick else None]
    steps = 3 if quick else 10
    return [_compare(name, *rest, steps) for name, rest in optimizers]


def _compare(
    name: str, inner: optax.GradientTransformation, tolerance: float, steps: int
) -> dict[str, Any]:
    found = compare_with_optax(inner, steps)
    cut = [x for x in found.moments if x.on_host and x.pages > 1]
    return {
        "section": SECTION,
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
