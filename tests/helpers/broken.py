"""What is broken on purpose where the variable `BROKEN` names it: the fuzz must notice.

`break_by_name` breaks it in the process that compares.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from jax import lax

from paged_optax.analysis.flat import Flat
from paged_optax.engine.buffers import PagedBuffer
from paged_optax.engine.loop import Loop
from paged_optax.engine.paged_array import PagedArray
from paged_optax.splitting.pieces import Pieces
from paged_optax.splitting.scans import Whole
from paged_optax.transform import precision

#: By name a class or a module, its function, and what makes another one of that.
Breakages = dict[str, tuple[Any, str, Callable[..., Any]]]

_first = lambda at: at._replace(start=0 * at.start, first_unit=0 * at.first_unit)
_changed = dataclasses.replace


def _decoded_too_much(decode: Callable[..., Any]) -> Callable[..., Any]:
    return lambda array, *given: (
        decode(array, *given) if array.codec is None else 1.01 * decode(array, *given)
    )


def _masters_go_on(beside: Callable[..., Any]) -> Callable[..., Any]:
    return lambda parameter, master: (
        beside(parameter, master) if parameter.dtype == master.dtype else master
    )


def _derivatives_lost(init: Callable[..., Any]) -> Callable[..., Any]:
    lost = lambda how: {name: name == "derivatives" or x for name, x in how.items()}
    return lambda self, *given, **how: init(self, *given, **lost(how))


def _second_stays(layer: Callable[..., Any]) -> Callable[..., Any]:
    stays = lambda kind: _changed(kind, carried={0: kind.carried[0]})
    return lambda self, kind, *given: layer(self, stays(kind), *given)


def _nothing_learned(prologue: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: Pieces, given: Any) -> Any:
        x, context = prologue(self, given)
        return x, lax.stop_gradient(context)

    return wrong


ENGINE: Breakages = {
    "always the first page": (
        *(PagedBuffer, "write"),
        lambda write: lambda part, x, page, at: write(part, x, page, _first(at)),
    ),
    "gates are not read": (
        *(Loop, "__call__"),
        lambda call: lambda loop, buffers, gate: call(loop, buffers, None),
    ),
    "codecs decode too much": (PagedArray, "decode", _decoded_too_much),
    "masters go on": (precision, "current_master", _masters_go_on),
}
SPLITTING: Breakages = {
    "always the first row": (
        *(Pieces, "_layer"),
        lambda layer: lambda self, kind, w, i, *x: layer(self, kind, w, 0 * i, *x),
    ),
    "layers of one kind": (
        *(Pieces, "layer"),
        lambda layer: lambda self, *x: layer(_changed(self, kinds=self.kinds[:1]), *x),
    ),
    "what the first layer kept": (
        *(Pieces, "epilogue"),
        lambda epilogue: (
            lambda self, given, x, kept: epilogue(
                self, given, x, [0 * y + y[:1] for y in kept]
            )
        ),
    ),
    "derivatives are lost": (Flat, "__init__", _derivatives_lost),
    "the second value stays": (Pieces, "_layer", _second_stays),
    "what all see has no gradient": (Pieces, "prologue", _nothing_learned),
    "stacks are not prepared": (
        *(Whole, "one"),
        lambda call: lambda self, x, axis: call(_changed(self, eqns=()), x, axis),
    ),
}


def break_by_name() -> None:
    """Breaks what `BROKEN` names, if it names anything."""
    if name := os.environ.get("BROKEN"):
        owner, method, broken = (ENGINE | SPLITTING)[name]
        setattr(owner, method, broken(getattr(owner, method)))
