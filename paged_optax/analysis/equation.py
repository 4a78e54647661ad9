"""One primitive applied to numbered values: equal where they do the same."""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence

import jax
import numpy as np
from jax import Array
from jax.core import ShapedArray
from jax.extend import core, source_info_util
from jax.typing import ArrayLike

#: Primitives that fill an array of the leaf's shape where their operand is a scalar.
#: They may move the values of any other operand; a page then needs other pages' values.
FILLS = frozenset(["broadcast_in_dim", "reshape"])


@dataclasses.dataclass(frozen=True)
class Constant:
    """A literal of the computation, compared by value, dtype and weak type."""

    key: tuple[Hashable, ...]
    value: ArrayLike = dataclasses.field(compare=False)

    @classmethod
    def of(cls, literal: core.Literal) -> "Constant":
        """Wraps a jaxpr's literal."""
        aval = literal.aval
        assert isinstance(aval, ShapedArray)
        array = np.asarray(literal.val)
        key = (array.tobytes(), array.shape, str(aval.dtype), aval.weak_type)
        return cls(key, literal.val)


@dataclasses.dataclass(frozen=True)
class Opaque:
    """A parameter that is compared by another key: a jaxpr, or what has no hash."""

    value: object = dataclasses.field(compare=False)
    key: Hashable


#: An operand: the number of a value, or a constant.
Operand = int | Constant


@dataclasses.dataclass(frozen=True)
class Equation:
    """One primitive applied to numbered values."""

    primitive: core.Primitive
    params: tuple[tuple[str, Hashable], ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[int, ...]
    traced: core.JaxprEqn | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    @property
    def line(self) -> str | None:
        """The line of the user's code that it was traced from, if it is known."""
        if self.traced is None:
            return None
        return source_info_util.summarize(self.traced.source_info) or None

    @property
    def where(self) -> str:
        """That line, or what it computes."""
        return self.line or f"a `{self.primitive.name}` of no known line"

    def of(
        self,
        inputs: Iterable[Operand],
        outputs: Iterable[int],
        traced: "Equation | None" = None,
    ) -> "Equation":
        """The same of other values; `traced` is one from whose line it is."""
        where = self.traced if traced is None else traced.traced
        return dataclasses.replace(
            self, inputs=tuple(inputs), outputs=tuple(outputs), traced=where
        )

    def bind(
        self, operands: Sequence[ArrayLike], shape: tuple[int, ...] | None
    ) -> list[Array]:
        """Applies the primitive; `shape` is the page's, or None for whole leaves."""
        if shape is not None and self.primitive.name in FILLS:
            # Traced with the shape of the whole leaf.
            return [jax.lax.broadcast(operands[0], shape)]
        params = {
            name: value.value if isinstance(value, Opaque) else value
            for name, value in self.params
            if name  # without one, it is there to be compared
        }
        params = self.primitive.get_bind_params(params)
        result = self.primitive.bind(*operands, **params)
        return list(result) if self.primitive.multiple_results else [result]
