"""What the update of a whole tree computes of each leaf, and of one layer's part."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.flat import trace
from paged_optax.analysis.program import (
    FILLS,
    Analysis,
    Constant,
    Evaluation,
    LeafUpdate,
)
from paged_optax.analysis.split import analyse
from paged_optax.layerwise.slices import LayerIndex, slab


@dataclasses.dataclass(frozen=True)
class Programs:
    """An update, taken apart into one program a leaf.

    It is traced of whole stacks, so that what Optax chooses by shapes (masks, labels)
    is chosen as in an ordinary step.

    Attributes:
      analysis: The programs.
      constants: What they close over, by number.
      stacks: Positions of the outputs that are stacks of layers, updated in slabs.
    """

    analysis: Analysis
    constants: Mapping[int, ArrayLike] = dataclasses.field(compare=False)
    stacks: frozenset[int]

    @classmethod
    def of(
        cls,
        update: Callable[[LayerIndex, PyTree, PyTree, PyTree], PyTree],
        gradients: PyTree,
        state: PyTree,
        params: PyTree,
        stacks: Collection[int],
        name: Callable[[int], str],
    ) -> "Programs":
        """Traces an update.

        Args:
          update: `update(i, gradients, state, params)` of layer i.
          gradients: The gradients, or their shapes.
          state: The state, or its shapes.
          params: The parameters, or their shapes.
          stacks: Positions of outputs, as above.
          name: A parameter's name, by its number.

        Returns:
          The programs.
        """
        closed, _ = trace(update, jnp.int32(0), gradients, state, params)
        count = len(jax.tree.leaves(params))
        states = len(jax.tree.leaves(state))
        analysis, constants = analyse(
            closed,
            [None, *range(count), *[None] * states, *range(count)],
            [*range(count), *[None] * (len(closed.out_avals) - count)],
            name,
            range(1, 1 + len(closed.out_avals)),
        )
        return cls(analysis, constants, frozenset(stacks))

    @property
    def whole(self) -> frozenset[int]:
        """Positions of the stacks that are not updated element by element."""
        return self.stacks - self.analysis.elementwise

    @property
    def not_elementwise(self) -> int | None:
        """The first of these positions; None: of none."""
        return min(self.whole, default=None)

    def run(
        self,
        arguments: Sequence[ArrayLike | None],
        i: LayerIndex,
        wanted: Collection[int],
        length: int,
    ) -> list[Array]:
        """One layer's part of some stacks.

        Args:
          arguments: Gradients, state and parameters. Those that make a wanted stack
            are slabs. The others are not read.
          i: The layer.
          wanted: The positions of the stacks, in ascending order.
          length: How many layers there are.

        Returns:
          What becomes of their slabs.
        """

        def cut(x: ArrayLike | None, shape: tuple[int, ...]) -> ArrayLike:
            assert x is not None  # all that a stack is made of is given
            # Arrays that the transformation closes over are whole stacks.
            return slab(x, i, length) if _is_whole(x, shape) else x

        def run(leaf: LeafUpdate) -> Sequence[ArrayLike | None]:
            if not set(leaf.outputs) & set(wanted):
                return [None] * len(leaf.avals)
            shape = (leaf.shape[0] // length, *leaf.shape[1:])
            inputs = [cut(x, leaf.shape) for x in evaluation.inputs(leaf)]
            return leaf.program(inputs, shape)

        evaluation = Evaluation(self.analysis, [i, *arguments], self.constants)
        results = evaluation.results(list(map(run, self.analysis.leaves)))
        return [results[position] for position in wanted]

    def differences(self, other: "Programs") -> list[int]:
        """Positions of the stacks that another update computes in another way.

        Shapes do not count. If the equations of any stacks differ, it is those.
        Otherwise it is those that take other values from outside.
        """
        differ = lambda parts: [
            position
            for position in sorted(self.stacks)
            if parts(self._chosen(position)) != parts(other._chosen(position))
        ]
        return differ(lambda chosen: chosen[0]) or differ(lambda chosen: chosen)

    def _chosen(self, position: int) -> tuple[Sequence[object], tuple[object, ...]]:
        """The equations that make a stack, and what they are given."""
        plain = lambda x: (
            (np.asarray(x.value).tobytes(), x.key[1:]) if isinstance(x, Constant) else x
        )
        for leaf in self.analysis.leaves:
            if position in leaf.outputs:
                equations = [
                    (
                        equation.primitive.name,
                        equation.primitive.name in FILLS or equation.params,
                        [plain(x) for x in equation.inputs],
                        equation.outputs,
                    )
                    for equation in leaf.program.equations
                ]
                return equations, (leaf.inputs, leaf.outputs, leaf.between)
        return [plain(x) for p, x in self.analysis.direct if p == position], ()


def _is_whole(
    x: ArrayLike | None, shape: tuple[int, ...]
) -> TypeGuard[Array | np.ndarray]:
    """Whether an operand has the shape of a whole leaf, and not of one layer's slab."""
    return x is not None and jnp.shape(x) == shape
