"""A model on a mesh of explicit axes, whose types state how arrays are divided.

A step runs on automatic axes: XLA divides its buffers, and the trace of a
transformation has no axes. The model's functions run on automatic axes too if they can.
Functions that use `out_sharding=` or `jax.sharding.reshard` cannot; each call of them
runs on the explicit axes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

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
    length = stack_length(partition.layers)
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
        # JAX refuses `out_sharding=` on automatic axes (0.10.2 and 0.12.0.1). Otherwise
        # the first error is the model's own.
        of_axes = any(words in str(failed) for words in ("of type Auto", "mesh"))
        raise error if of_axes else failed from None


class _InputTypes(NamedTuple):
    """Types of the model's arguments, of one layer and one micro-batch."""

    rest: PyTree[jax.ShapeDtypeStruct]
    weights: PyTree[jax.ShapeDtypeStruct]
    batch: PyTree[jax.ShapeDtypeStruct]
    fixed_rest: PyTree[jax.ShapeDtypeStruct]
    fixed: PyTree[jax.ShapeDtypeStruct]


class _OutputSpecs(NamedTuple):
    """Shardings of the activations between prologue, layers and epilogue."""

    x: list[PartitionSpec]
    context: list[PartitionSpec]
    kept: list[PartitionSpec]


def _traced(model: ModelFunctions, types: _InputTypes, length: int) -> _OutputSpecs:
    """Traces the model's functions and their gradients, on the current axes."""
    specs: list[_OutputSpecs] = []

    def total(trained: tuple[PyTree, PyTree], remaining: tuple[PyTree, ...]) -> Array:
        (rest, weights), (batch, fixed_rest, fixed) = trained, remaining
        frozen = model.frozen and dataclasses.replace(model.frozen, rest=fixed_rest)
        one = dataclasses.replace(model, frozen=frozen)
        x, context = one.run_prologue(rest, batch)
        run = lambda x: one.run_layer(weights, fixed, x, context, jnp.int32(0))
        output, kept = run(x)
        if _specs(output) != _specs(x):
            # The second layer is the first one with a layer's output as its input.
            check_same_input(x, output)
            output, kept = run(output)
        stack = lambda x: jnp.broadcast_to(x, (length, *x.shape))
        kept = jax.tree.map(stack, kept)
        specs.append(_OutputSpecs(*map(_specs, (output, context, kept))))
        loss, _ = loss_and_metrics(one.run_epilogue(rest, output, kept, batch))
        return jnp.asarray(loss.total if isinstance(loss, WeightedLoss) else loss)

    def grads(trained: tuple[PyTree, PyTree], remaining: tuple[PyTree, ...]) -> PyTree:
        value, pull = jax.vjp(lambda trained: total(trained, remaining), trained)
        return pull(value)

    rest, weights, *remaining = types
    jax.eval_shape(grads, (rest, weights), tuple(remaining))
    return specs[0]


def _on_axes(
    model: ModelFunctions, mesh: AbstractMesh, types: _InputTypes, specs: _OutputSpecs
) -> ModelFunctions:
    """The model for callers on automatic axes, with its functions on explicit axes."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in kinds if kind is AxisType.Explicit)

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
    """The explicit types of arguments, without `stacked` leading axes."""

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
    """Places a type on a mesh of explicit axes; None removes its sharding."""
    replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return lambda x: jax.ShapeDtypeStruct(
        x.shape,
        x.dtype,
        sharding=replicated and (x.sharding or replicated),
        weak_type=x.weak_type,
    )


def _specs(tree: PyTree) -> list[PartitionSpec]:
    return [jax.typeof(x).sharding.spec for x in jax.tree.leaves(tree)]
