"""Random models, taken apart by code that is broken on purpose, as `BROKEN` says."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from jax import lax

from helpers import apart, split_fuzz
from paged_optax.analysis.flat import Flat
from paged_optax.splitting.pieces import Pieces
from paged_optax.splitting.scans import Whole


def _first_row(layer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, kind, weights, i, *given: layer(
        self, kind, weights, 0 * i, *given
    )


def _one_kind(layer: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: Pieces, *given: Any) -> Any:
        return layer(dataclasses.replace(self, kinds=self.kinds[:1]), *given)

    return wrong


def _first_kept(epilogue: Callable[..., Any]) -> Callable[..., Any]:
    first = lambda kept: [0 * x + x[:1] for x in kept]
    return lambda self, given, x, kept: epilogue(self, given, x, first(kept))


def _derivatives_lost(init: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *given, **how: init(
        self, *given, **how | ({"derivatives": True} if "derivatives" in how else {})
    )


def _second_stays(layer: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: Pieces, kind: Any, *given: Any) -> Any:
        stays = dataclasses.replace(kind, carried={0: kind.carried[0]})
        return layer(self, stays, *given)

    return wrong


def _nothing_learned(prologue: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: Pieces, given: Any) -> Any:
        x, context = prologue(self, given)
        return x, lax.stop_gradient(context)

    return wrong


def _not_prepared(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, x, axis: call(dataclasses.replace(self, eqns=()), x, axis)


#: What is broken, by name: a class, its function, and what takes that one's place.
BREAKAGES: apart.Breakages = {
    "always the first row": (Pieces, "_layer", _first_row),
    "layers of one kind": (Pieces, "layer", _one_kind),
    "what the first layer kept": (Pieces, "epilogue", _first_kept),
    "derivatives are lost": (Flat, "__init__", _derivatives_lost),
    "the second value stays": (Pieces, "_layer", _second_stays),
    "what all see has no gradient": (Pieces, "prologue", _nothing_learned),
    "stacks are not prepared": (Whole, "one", _not_prepared),
}

if __name__ == "__main__":
    apart.break_by_name(BREAKAGES)
    sys.exit(split_fuzz.serve())
