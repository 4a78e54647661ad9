"""A step whose gradients are not all finite, skipped whole."""

import dataclasses

import optax
from jax import Array
from jaxtyping import Bool, PyTree

from paged_optax.layerwise.norms import Measure
from paged_optax.transform.context import Gate
from paged_optax.wrappers import IfFinite


@dataclasses.dataclass(frozen=True)
class Guard:
    """What an `apply_if_finite` around the whole transformation decides.

    It tests all gradients, and one layer's are there at a time. So the step tests them,
    and Optax's own code counts the errors.

    Attributes:
      tx: The transformation inside; without the wrapper, the whole.
      state: The state of `tx`.
      outer: The wrapper's state, or None.
      wrapper: The wrapper, or None.
    """

    tx: optax.GradientTransformation
    state: PyTree
    outer: PyTree = None
    wrapper: IfFinite | None = None

    @classmethod
    def of(cls, tx: optax.GradientTransformation, state: PyTree) -> "Guard":
        """Takes the wrapper off a transformation and its state.

        Raises:
          ValueError: If the state is not the wrapper's.
        """
        wrapper = wrapper_of(tx)
        if wrapper is None:
            return cls(tx, state)
        return cls(wrapper.inner, wrapper.inside(state), state, wrapper)

    def refuse_unknown(self, known: bool) -> None:
        """Refuses to update layers before all gradients are known."""
        if self.wrapper is not None and not known:
            raise ValueError(
                "tx is an apply_if_finite, whose `reduce_and` combines all gradients,"
                " and here each layer is updated before the next one's are there. They"
                " are all known first with a workspace of"
                " GradientWorkspace.allocate(..., host_dtype='float32');"
                " or with max_norm= (and clip='global'), at the price of a second"
                " backward pass."
            )

    def passes(self, measure: Measure) -> Gate:
        """Whether the update happens."""
        return True if self.wrapper is None else self._decided(measure)[0]

    def around(self, state: PyTree, measure: Measure | None) -> PyTree:
        """The whole state.

        Args:
          state: That of `tx`.
          measure: What is measured of the gradients; None if there are none.
        """
        if self.wrapper is None:
            return state
        outer = self.outer if measure is None else self._decided(measure)[1]
        return outer._replace(inner_state=state)

    def _decided(self, measure: Measure) -> tuple[Bool[Array, ""], PyTree]:
        assert self.wrapper is not None and measure.finite is not None
        return self.wrapper.decided(measure.finite, self.outer)


def wrapper_of(tx: optax.GradientTransformation) -> IfFinite | None:
    """The `apply_if_finite` that a transformation is; None if it is none."""
    wrapper = getattr(tx.update, "__self__", None)
    return wrapper if isinstance(wrapper, IfFinite) else None
