"""A model on a mesh of explicit axes, whose types state how arrays are divided.

A step runs on automatic axes: XLA divides its buffers, and the trace of a
transformation has no axes. The model's functions run on automatic axes too if they can.
Functions that use `out_sharding=` or `jax.sharding.reshard` cannot; each call of them
runs on the explicit axes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from paged_optax.backend.types import is_explicit, with_automatic_axes
from paged_optax.layerwise.forward import ModelFunctions, check_same_input
from paged_optax.layerwise.loss import WeightedLoss, loss_and_metrics
from paged_optax.layerwise.parameters import Partition, stack_length
from paged_optax.transform.context import current, known_shardings, sharding_in_type


def on_automatic_axes(
    function: Callable[..., PyTree], args: Sequence[PyTree], results: PyTree
) -> PyTree:
    """Calls a function on automatic axes; `update` reads the explicit types there."""
    leaves = jax.tree.leaves(args)
    types = [jax.typeof(x).sharding if hasattr(x, "dtype") else None for x in leaves]
    types = [x if is_explicit(x) else None for x in types]

    def run(*args: PyTree) -> PyTree:
        with known_shardings(jax.tree.leaves(args), types):
            return function(*args)

    return with_automatic_axes(run, args, results)


def on_explicit_axes(
    model: ModelFunctions, partition: Partition, batch: PyTree, several: bool
) -> ModelFunctions:
    """The model, on explicit axes if it does not run on automatic ones.

    Raises:
      Exception: The model's own error if it runs on neither kind of axes.
    """
    if not any(map(is_explicit, current().shardings.values())):
        return model
    fixed = model.frozen
    args = [(partition.rest, 0), (partition.layers, 1), (batch, int(several))]
    args += [(fixed and fixed.rest, 0), (fixed and fixed.layers, 1)]
    shardings = [sharding_in_type(x) for x in jax.tree.leaves([x for x, _ in args])]
    mesh = next((x.mesh.abstract_mesh for x in shardings if is_explicit(x)), None)
    if mesh is None or AxisType.Manual in mesh.axis_types:
        return model
    types = lambda mesh: [
        jax.tree.map(functools.partial(_typed, mesh, stacked), tree)
        for tree, stacked in args
    ]
    length = stack_length(partition.layers)
    try:
        _traced(model, length, *types(None))
        return model
    except Exception as error:  # JAX has no class of its own for it
        failed = error
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            return _on_axes(model, mesh, length, *types(mesh))
    except Exception as error:
        # JAX refuses `out_sharding=` on automatic axes (0.10.2 and 0.12.0.1). Otherwise
        # the first error is the model's own.
        of_axes = any(words in str(failed) for words in ("of type Auto", "mesh"))
        raise error if of_axes else failed from None


def _traced(
    model: ModelFunctions, length: int, *types: PyTree
) -> list[list[PartitionSpec]]:
    """Traces the model's functions and their gradients, on the current axes.

    Returns:
      The shardings of a layer's output, of the context, and of the kept outputs.
    """
    specs: list[list[PartitionSpec]] = []

    def total(
        rest: PyTree, weights: PyTree, batch: PyTree, fixed_rest: PyTree, fixed: PyTree
    ) -> Array:
        frozen = model.frozen and dataclasses.replace(model.frozen, rest=fixed_rest)
        one = dataclasses.replace(model, frozen=frozen)
        x, context = one.run_prologue(rest, batch)
        run = lambda x: one.run_layer(weights, fixed, x, context, jnp.int32(0))
        output, kept = run(x)
        if _specs(output) != _specs(x):
            # The second layer is the first one with a layer's output as its input.
            check_same_input(x, output)
            output, kept = run(output)
        kept = jax.tree.map(lambda x: jnp.broadcast_to(x, (length, *x.shape)), kept)
        specs.extend(map(_specs, (output, context, kept)))
        loss, _ = loss_and_metrics(one.run_epilogue(rest, output, kept, batch))
        return jnp.asarray(loss.total if isinstance(loss, WeightedLoss) else loss)

    jax.eval_shape(jax.grad(total, argnums=(0, 1)), *types)
    return specs


def _on_axes(
    model: ModelFunctions, mesh: AbstractMesh, length: int, *types: PyTree
) -> ModelFunctions:
    """The model for callers on automatic axes, with its functions on explicit axes."""
    axes = mesh.explicit_axes

    def on(
        function: Callable[..., PyTree], *specs: list[PartitionSpec]
    ) -> Callable[..., PyTree]:
        flat = tuple(spec for some in specs for spec in some)

        def run(*args: PyTree) -> PyTree:
            leaves, structure = jax.tree.flatten(args)
            call = lambda *leaves: function(*structure.unflatten(leaves))
            typed = jax.sharding.explicit_axes(call, axes=axes, in_sharding=flat)
            return typed(*leaves)

        return run

    x, context, kept = _traced(model, length, *types)
    rest, weights, batch, fixed_rest, fixed = map(_specs, types)
    return dataclasses.replace(
        model,
        prologue=on(model.prologue, rest, fixed_rest, batch),
        layer=on(model.layer, weights, fixed, x, context, [PartitionSpec()]),
        epilogue=on(model.epilogue, rest, fixed_rest, x, kept, batch),
    )


def _typed(mesh: AbstractMesh | None, stacked: int, x: Array) -> jax.ShapeDtypeStruct:
    """The type of an argument, without `stacked` leading axes.

    On a mesh of explicit axes it has its sharding, and otherwise none.
    """
    kind, sharding = jax.typeof(x), sharding_in_type(x)
    spec = PartitionSpec(*sharding.spec[stacked:] if is_explicit(sharding) else ())
    return jax.ShapeDtypeStruct(
        kind.shape[stacked:],
        kind.dtype,
        sharding=mesh and NamedSharding(mesh, spec),
        weak_type=kind.weak_type,
    )


def _specs(tree: PyTree) -> list[PartitionSpec]:
    return [jax.typeof(x).sharding.spec for x in jax.tree.leaves(tree)]
