"""One primitive applied to numbered values: equal where they do the same."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

#: Primitives that fill an array of the leaf's shape where their operand is a scalar. Of
#: any other operand they may move the values, so that no page is made of its own alone.
FILLS = frozenset(["broadcast_in_dim", "reshape"])


@dataclasses.dataclass(frozen=True)
class Constant:
    """A literal of the computation, compared by value, dtype and weak type."""

    key: tuple[Any, ...]
    value: Any = dataclasses.field(compare=False)

    @classmethod
    def of(cls, literal: Any) -> "Constant":
        """Wraps a jaxpr's literal."""
        aval = literal.aval
        array = np.asarray(literal.val)
        weak = getattr(aval, "weak_type", False)
        return cls((array.tobytes(), array.shape, str(aval.dtype), weak), literal.val)


@dataclasses.dataclass(frozen=True)
class Opaque:
    """A parameter that is compared by another key: a jaxpr, or what has no hash."""

    value: Any = dataclasses.field(compare=False)
    key: Any


#: An operand: the number of a value, or a constant.
Operand = int | Constant


@dataclasses.dataclass(frozen=True)
class Equation:
    """One primitive applied to numbered values."""

    primitive: core.Primitive
    params: tuple[tuple[str, Any], ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[int, ...]

    def bind(self, operands: Sequence[Any], shape: tuple[int, ...] | None) -> list[Any]:
        """Applies the primitive; `shape` is the page's, or None for whole leaves."""
        if shape is not None and self.primitive.name in FILLS:
            # Traced with the shape of the whole leaf.
            return [jax.lax.broadcast(operands[0], shape)]
        params = {
            name: value.value if isinstance(value, Opaque) else value
            for name, value in self.params
        }
        params = self.primitive.get_bind_params(params)
        result = self.primitive.bind(*operands, **params)
        return list(result) if self.primitive.multiple_results else [result]
