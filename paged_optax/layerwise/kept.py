"""What is kept of each layer: its input, and what it keeps for the epilogue.

The forward pass stores both. The backward pass reads each layer's input, of which it
computes again, and the gradients by what the layer kept.

For the epilogue a layer may keep any tree of arrays. One more thing to keep is one more
field of `Activations`, and what `of_layer` reads of it for `backward`. What a layer
returns, `forward.ModelFunctions.run_layer` takes apart, and `pull_layer` pulls back;
`layerwise_model` runs layers too.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array, lax
from jaxtyping import PyTree

from paged_optax.backend.memory import HOST
from paged_optax.layerwise.slabs import LayerIndex, put, slab
from paged_optax.layerwise.weights import Slabs

#: `run(i, slabs, x)` returns layer i's output, and what it keeps.
RunLayer = Callable[[LayerIndex, Slabs, PyTree], tuple[PyTree, PyTree]]


class Activations(NamedTuple):
    """What a forward pass has computed so far.

    Attributes:
      x: The next layer's input; in the end the last layer's output.
      inputs: Every layer's input, stacked, of which the backward pass computes again.
      kept: What the layers keep for the epilogue, stacked.
    """

    x: PyTree[Array]
    inputs: PyTree[Array]
    kept: PyTree[Array]

    @classmethod
    def before(
        cls,
        x: PyTree[Array],
        kept: PyTree[jax.ShapeDtypeStruct],
        length: int,
        on_host: bool,
    ) -> "Activations":
        """Those before the first layer.

        Args:
          x: The first layer's input.
          kept: Shapes of what one layer keeps.
          length: How many layers there are.
          on_host: Whether their inputs wait in host memory.
        """
        # Empty, for each layer writes its own before anything reads it.
        blank = lambda x: lax.empty((length, *x.shape), x.dtype)
        inputs = jax.tree.map(blank, x)
        if on_host:
            inputs = jax.device_put(inputs, HOST)
        return cls(x, inputs, jax.tree.map(blank, kept))

    def after(self, i: LayerIndex, slabs: Slabs, run: RunLayer) -> "Activations":
        """Those after layer i, which `run` runs."""
        store = lambda to, x: put(to, x[None], i)
        inputs = jax.tree.map(store, self.inputs, self.x)
        x, kept = run(i, slabs, self.x)
        return Activations(x, inputs, jax.tree.map(store, self.kept, kept))


def of_layer(
    i: LayerIndex, inputs: PyTree[Array], kept_gradients: list[Array]
) -> tuple[PyTree[Array], list[Array]]:
    """Layer i's input, and the gradients by what it kept.

    Args:
      i: The layer's number.
      inputs: `Activations.inputs`.
      kept_gradients: The gradients by what is differentiable of `Activations.kept`.
    """
    cut = lambda stack: slab(stack, i)[0]
    return jax.tree.map(cut, inputs), jax.tree.map(cut, kept_gradients)
