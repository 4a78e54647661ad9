"""A model as three functions: what comes before its layers, one layer, what follows.

On a mesh of explicit axes types say what is divided. The step runs on automatic axes:
its buffers are divided as XLA likes, and what is traced of a transformation knows no
axes. So do the model's functions, if they can. They cannot if they say themselves how
something is divided, by `out_sharding=` or `jax.sharding.reshard`: then each call of
them is on the explicit axes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
)
from jax.typing import DTypeLike
from jaxtyping import Int, PyTree

from paged_optax.backend.types import is_explicit, with_automatic_axes
from paged_optax.backend.validation import check_function
from paged_optax.layerwise.clipping import widest
from paged_optax.layerwise.forward import ModelFunctions, refuse_other_input
from paged_optax.layerwise.layer_tree import LayerTree
from paged_optax.layerwise.loss import WeightedLoss, has_metrics, loss_and_metrics, over
from paged_optax.layerwise.parameters import Partition, from_numpy, length_of
from paged_optax.layerwise.weights import Frozen, on_device
from paged_optax.layerwise.workspace import GradientWorkspace
from paged_optax.transform.context import current, known_shardings, sharding_in_type


@dataclasses.dataclass(frozen=True)
class LayerwiseModel:
    """A model that `layerwise_step` trains, as three functions by hand.

    `split_layers` makes one of an ordinary loss. With frozen parameters the functions
    get them as a second argument: `prologue(rest, frozen_rest, batch)`,
    `layer(weights, frozen_weights, x, context, i)` and
    `epilogue(rest, frozen_rest, x, kept, batch)`.

    Attributes:
      prologue: `prologue(rest, batch)` returns the first layer's input, and anything
        that all layers may see (masks, rotary tables, dropout keys; stacked tables to
        be indexed by layer), or None. `rest` is the parameters without the layers, by
        name; it is trained through the context too.
      layer: `layer(weights, x, context, i)` returns the next layer's input, and
        anything to keep of this layer (a balancing loss), or None. `i` is the layer's
        number, to fold into keys. Wrap in `jax.checkpoint` what it should compute again
        within its own backward pass.
      epilogue: `epilogue(rest, x, kept, batch)` returns the loss, or the loss and
        metrics. The loss is a mean, or a sum and its weight: a `WeightedLoss`. `kept`
        has what the layers kept, stacked.

    Raises:
      TypeError: If one of them is not a function.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> model = po.LayerwiseModel(
      ...     lambda rest, batch: (batch, None),
      ...     lambda weights, x, context, i: (x + x @ weights["kernel"], None),
      ...     lambda rest, x, kept, batch: jnp.mean((x - 1.0) ** 2),
      ... )
      >>> params = {"layers": {"kernel": jnp.full((3, 64, 64), 0.01)}}
      >>> float(model.loss(params, jnp.zeros((8, 64))))
      1.0
    """

    prologue: Callable[..., tuple[PyTree, PyTree]]
    layer: Callable[..., tuple[PyTree, PyTree]]
    epilogue: Callable[..., PyTree]

    def __post_init__(self) -> None:
        for name in ("prologue", "layer", "epilogue"):
            check_function(name, getattr(self, name))

    @property
    def layer_tree(self) -> LayerTree | None:
        """The tree of the layers that the transformation sees; None: that of stacks."""
        return None

    def init(self, tx: optax.GradientTransformation, params: PyTree) -> optax.OptState:
        """Makes the state of `tx` for stacked parameters.

        Args:
          tx: The transformation.
          params: All parameters, the layers' stacked.

        Returns:
          The state.
        """
        return tx.init(params)

    def functions(
        self, params: Partition, frozen: Frozen | None, activations_on_host: bool
    ) -> ModelFunctions:
        """The three functions for parameters of these types; steps call it.

        Args:
          params: The parameters, or their types.
          frozen: The frozen parameters; None: the functions take none.
          activations_on_host: Whether the layers' inputs wait in host memory.

        Returns:
          The functions.
        """
        calls = self.prologue, self.layer, self.epilogue
        return ModelFunctions(*calls, activations_on_host, frozen)

    def workspace(
        self,
        params: PyTree,
        *,
        accumulate: str = "*norm*",
        dtype: DTypeLike | None = None,
        host_dtype: DTypeLike | None = None,
        rest: PyTree | bool | None = None,
        layers: str = "layers",
    ) -> GradientWorkspace:
        """Allocates the workspace for all parameters.

        Args:
          params: All parameters, the layers' stacked, or their shapes.
          accumulate: As for `GradientWorkspace.allocate`.
          dtype: As there.
          host_dtype: As there.
          rest: As there; True: all parameters but the layers'.
          layers: The key of the layers' parameters.

        Returns:
          The workspace, all zeros.

        Raises:
          ValueError: As `GradientWorkspace.allocate`.
        """
        partition = Partition.of(params, layers)
        if isinstance(rest, bool):
            rest = partition.rest if rest else None
        return GradientWorkspace.allocate(
            partition.layers,
            accumulate=accumulate,
            dtype=dtype,
            host_dtype=host_dtype,
            rest=rest,
        )

    def loss(
        self,
        params: PyTree,
        *frozen_and_batch: PyTree,
        layers: str = "layers",
    ) -> PyTree:
        """The model's loss, for `jax.grad` and to evaluate.

        Stacks in host memory are fetched a layer at a time, and stay there. So do their
        gradients.

        Args:
          params: All parameters, the layers' stacked.
          *frozen_and_batch: The batch; before it the frozen parameters, if there are
            any.
          layers: The key of the layers' parameters.

        Returns:
          The loss, or the loss and metrics where `epilogue` returns both. Of a
          `WeightedLoss` it is the total by the weight.

        Raises:
          ValueError: If `params` is no mapping with that key, or if the layers are not
            stacked alike.
        """
        run = functools.partial(self._loss, layers)
        return on_automatic_axes(run, from_numpy((params, *frozen_and_batch)), None)

    def _loss(self, layers: str, params: PyTree, *frozen_and_batch: PyTree) -> PyTree:
        *frozen_params, batch = frozen_and_batch
        partition = Partition.of(params, layers)
        count = length_of(partition.layers)
        frozen = None
        if frozen_params:
            frozen = Frozen.of(frozen_params[0], layers, count)
        model = self.functions(partition, frozen, False)
        model = on_explicit_axes(model, partition, batch, False)
        x, context = model.run_prologue(partition.rest, batch)

        def run(
            x: PyTree[Array], turn: tuple[Int[Array, ""], PyTree[Array], PyTree[Array]]
        ) -> tuple[PyTree[Array], PyTree[Array]]:
            i, *stacks = turn
            weights, fixed = jax.tree.map(on_device, stacks)
            output, kept = model.run_layer(weights, fixed, x, context, i)
            refuse_other_input(x, output)
            return output, kept

        # The stacks are scanned over. If they were indexed, the gradients of those in
        # host memory would be added up there, where nothing can compute.
        turns = jnp.arange(count), partition.layers, frozen and frozen.layers
        x, kept = lax.scan(run, x, turns)
        output = model.run_epilogue(partition.rest, x, kept, batch)
        value, metrics = loss_and_metrics(output)
        if isinstance(value, WeightedLoss):
            total, weight = map(jnp.asarray, value)
            value = over(total, lax.stop_gradient(weight).astype(widest(total)))
        return (value, metrics) if has_metrics(output) else value


def on_automatic_axes(
    function: Callable[..., PyTree], arguments: Sequence[PyTree], results: PyTree
) -> PyTree:
    """As `automatically`; within, `update` is told the types that arguments had."""
    leaves = jax.tree.leaves(arguments)
    types = [jax.typeof(x).sharding if hasattr(x, "dtype") else None for x in leaves]
    types = [x if is_explicit(x) else None for x in types]

    def run(*arguments: PyTree) -> PyTree:
        with known_shardings(jax.tree.leaves(arguments), types):
            return function(*arguments)

    return with_automatic_axes(run, arguments, results)


def on_explicit_axes(
    model: ModelFunctions, partition: Partition, batch: PyTree, several: bool
) -> ModelFunctions:
    """The model, on explicit axes if it runs on no others.

    Args:
      model: The model.
      partition: The parameters.
      batch: What prologue and epilogue get.
      several: Whether that is several micro-batches, stacked.

    Raises:
      Exception: What the model raises if it runs on neither: on explicit axes if it
        says how something is divided, and else on automatic ones.
    """
    if not any(map(is_explicit, current().shardings.values())):
        return model
    fixed = model.frozen
    types = _InputTypes(
        _typed(partition.rest),
        _typed(partition.layers, 1),
        _typed(batch, int(several)),
        _typed(fixed and fixed.rest),
        _typed(fixed and fixed.layers, 1),
    )
    meshes = (x.sharding.mesh for x in jax.tree.leaves(types) if x.sharding)
    mesh = next(meshes, None)
    if mesh is None or AxisType.Manual in mesh.axis_types:
        return model
    length = length_of(partition.layers)
    try:
        _traced(model, jax.tree.map(_on(None), types), length)
        return model
    except Exception as error:  # JAX has no class of its own for it
        failed = error
    types = jax.tree.map(_on(mesh), types)
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            return _on_axes(model, mesh, types, _traced(model, types, length))
    except Exception as error:
        if not _tells_of_axes(failed):
            raise failed from None  # on explicit axes a right part may fail before
        words = str(failed).partition("\n")[0]
        error.add_note(
            "So fails the model on the mesh's explicit axes. On automatic axes, where"
            f" layerwise_step runs a model that can: {type(failed).__name__}: {words}"
        )
        raise error from failed


def _tells_of_axes(error: Exception) -> bool:
    """Whether JAX refuses `out_sharding=` on automatic axes (0.10.2 and 0.12.0.1)."""
    return any(words in str(error) for words in ("of type Auto", "mesh"))


class _InputTypes(NamedTuple):
    """The types of what a model is called with.

    Attributes:
      rest: The parameters without the layers'.
      weights: One layer's.
      batch: One micro-batch.
      fixed_rest: The frozen parameters without the layers'.
      fixed: One layer's frozen parameters.
    """

    rest: PyTree[jax.ShapeDtypeStruct]
    weights: PyTree[jax.ShapeDtypeStruct]
    batch: PyTree[jax.ShapeDtypeStruct]
    fixed_rest: PyTree[jax.ShapeDtypeStruct]
    fixed: PyTree[jax.ShapeDtypeStruct]


class _OutputSpecs(NamedTuple):
    """How what a model's functions hand to each other is divided.

    Attributes:
      x: What a layer hands to the next one.
      context: What all layers see.
      kept: What layers kept, stacked.
    """

    x: list[PartitionSpec]
    context: list[PartitionSpec]
    kept: list[PartitionSpec]


def _traced(model: ModelFunctions, types: _InputTypes, length: int) -> _OutputSpecs:
    """Traces the model's functions and their gradients, on the axes around."""
    specs: list[_OutputSpecs] = []

    def total(trained: tuple[PyTree, PyTree], others: tuple[PyTree, ...]) -> Array:
        (rest, weights), (batch, fixed_rest, fixed) = trained, others
        frozen = model.frozen and dataclasses.replace(model.frozen, rest=fixed_rest)
        one = dataclasses.replace(model, frozen=frozen)
        x, context = one.run_prologue(rest, batch)
        run = lambda x: one.run_layer(weights, fixed, x, context, jnp.int32(0))
        output, kept = run(x)
        if _specs(output) != _specs(x):
            # The second layer is the first one that gets what a layer returns.
            refuse_other_input(x, output)
            output, kept = run(output)
        stack = lambda x: jnp.broadcast_to(x, (length, *x.shape))
        kept = jax.tree.map(stack, kept)
        specs.append(_OutputSpecs(*map(_specs, (output, context, kept))))
        loss, _ = loss_and_metrics(one.run_epilogue(rest, output, kept, batch))
        return jnp.asarray(loss.total if isinstance(loss, WeightedLoss) else loss)

    def gradients(trained: tuple[PyTree, PyTree], others: tuple[PyTree, ...]) -> PyTree:
        value, pull = jax.vjp(lambda trained: total(trained, others), trained)
        return pull(value)

    rest, weights, *others = types
    jax.eval_shape(gradients, (rest, weights), tuple(others))
    return specs[0]


def _on_axes(
    model: ModelFunctions, mesh: AbstractMesh, types: _InputTypes, specs: _OutputSpecs
) -> ModelFunctions:
    """The model, called from automatic axes, its functions on explicit ones."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in kinds if kind is AxisType.Explicit)

    def on(
        function: Callable[..., PyTree], *specs: list[PartitionSpec]
    ) -> Callable[..., PyTree]:
        flat = tuple(spec for some in specs for spec in some)

        def run(*arguments: PyTree) -> PyTree:
            leaves, structure = jax.tree.flatten(arguments)
            call = lambda *leaves: function(*structure.unflatten(leaves))
            typed = jax.sharding.explicit_axes(call, axes=axes, in_sharding=flat)
            return typed(*leaves)

        return run

    rest, weights, batch, fixed_rest, fixed = map(_specs, types)
    return dataclasses.replace(
        model,
        prologue=on(model.prologue, rest, fixed_rest, batch),
        layer=on(
            model.layer, weights, fixed, specs.x, specs.context, [PartitionSpec()]
        ),
        epilogue=on(model.epilogue, rest, fixed_rest, specs.x, specs.kept, batch),
    )


def _typed(tree: PyTree[Array], stacked: int = 0) -> PyTree[jax.ShapeDtypeStruct]:
    """The types that arguments had, without so many leading axes."""

    def typed(x: Array) -> jax.ShapeDtypeStruct:
        kind, sharding = jax.typeof(x), sharding_in_type(x)
        spec = PartitionSpec(*sharding.spec[stacked:])
        return jax.ShapeDtypeStruct(
            kind.shape[stacked:],
            kind.dtype,
            sharding=NamedSharding(sharding.mesh, spec)
            if is_explicit(sharding)
            else None,
            weak_type=kind.weak_type,
        )

    return jax.tree.map(typed, tree)


def _on(
    mesh: AbstractMesh | None,
) -> Callable[[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """Puts a type on a mesh of explicit axes; None: on none."""
    replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return lambda x: jax.ShapeDtypeStruct(
        x.shape,
        x.dtype,
        sharding=replicated and (x.sharding or replicated),
        weak_type=x.weak_type,
    )


def _specs(tree: PyTree) -> list[PartitionSpec]:
    """How types say that a tree's arrays are divided."""
    return [jax.typeof(x).sharding.spec for x in jax.tree.leaves(tree)]
