"""A layerwise step on a mesh of explicit axes, on which types say what is divided.

The step runs on automatic axes: its buffers are divided as XLA likes, and what is
traced of a transformation knows no axes. So do the model's functions, if they can. They
cannot if they say themselves how something is divided, by `out_sharding=` or
`jax.sharding.reshard`: then each call of them is on the explicit axes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
    Sharding,
)
from jaxtyping import PyTree

from paged_optax.backend.meshes import axis_types, with_automatic_axes
from paged_optax.layerwise.loss import WeightedLoss, parted_loss
from paged_optax.layerwise.model import Model, refuse_other_input
from paged_optax.layerwise.parts import Parts
from paged_optax.layerwise.stacks import length_of
from paged_optax.transform.context import current, sharding_in_type, telling


def told_automatically(
    function: Callable[..., PyTree], arguments: Sequence[PyTree], results: PyTree
) -> PyTree:
    """As `with_automatic_axes`; within, `update` is told the types of the arguments."""
    leaves = jax.tree.leaves(arguments)
    types = [jax.typeof(x).sharding if hasattr(x, "dtype") else None for x in leaves]
    types = [x if _is_explicit(x) else None for x in types]

    def run(*given: PyTree) -> PyTree:
        with telling(jax.tree.leaves(given), types):
            return function(*given)

    return with_automatic_axes(run, arguments, results)


def on_its_axes(model: Model, parts: Parts, batch: PyTree, several: bool) -> Model:
    """The model, on explicit axes if it runs on no others.

    Args:
      model: The model.
      parts: The parameters.
      batch: What prologue and epilogue get.
      several: Whether that is several micro-batches, stacked.

    Raises:
      Exception: What the model raises if it runs on neither: on explicit axes if it
        says how something is divided, and else on automatic ones.
    """
    if not any(map(_is_explicit, current().shardings.values())):
        return model
    fixed = model.frozen
    given = _Given(
        _typed(parts.rest),
        _typed(parts.layers, 1),
        _typed(batch, int(several)),
        _typed(fixed and fixed.rest),
        _typed(fixed and fixed.layers, 1),
    )
    meshes = (x.sharding.mesh for x in jax.tree.leaves(given) if x.sharding)
    mesh = next(meshes, None)
    if mesh is None or AxisType.Manual in mesh.axis_types:
        return model
    length = length_of(parts.layers)
    try:
        _traced(model, jax.tree.map(_on(None), given), length)
        return model
    except Exception as error:  # JAX has no class of its own for it
        failed = error
    given = jax.tree.map(_on(mesh), given)
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            return _on_axes(model, mesh, given, _traced(model, given, length))
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


class _Given(NamedTuple):
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


class _Made(NamedTuple):
    """How it is divided what a model's functions hand to each other.

    Attributes:
      x: What a layer hands to the next one.
      context: What all layers see.
      kept: What layers kept, stacked.
    """

    x: list[PartitionSpec]
    context: list[PartitionSpec]
    kept: list[PartitionSpec]


def _traced(model: Model, given: _Given, length: int) -> _Made:
    """Traces the model's functions and their gradients, on the axes around."""
    found: list[_Made] = []

    def total(trained: tuple[PyTree, PyTree], others: tuple[PyTree, ...]) -> Array:
        (rest, weights), (batch, fixed_rest, fixed) = trained, others
        frozen = model.frozen and dataclasses.replace(model.frozen, rest=fixed_rest)
        one = dataclasses.replace(model, frozen=frozen)
        x, context = one.enter(rest, batch)
        through = lambda x: one.through(weights, fixed, x, context, jnp.int32(0))
        made, kept = through(x)
        if _specs(made) != _specs(x):
            # The second layer is the first one that gets what a layer makes.
            refuse_other_input(x, made)
            made, kept = through(made)
        stack = lambda x: jnp.broadcast_to(x, (length, *x.shape))
        kept = jax.tree.map(stack, kept)
        found.append(_Made(*map(_specs, (made, context, kept))))
        loss, _ = parted_loss(one.finished(rest, made, kept, batch))
        return jnp.asarray(loss.total if isinstance(loss, WeightedLoss) else loss)

    def gradients(trained: tuple[PyTree, PyTree], others: tuple[PyTree, ...]) -> PyTree:
        value, pull = jax.vjp(lambda trained: total(trained, others), trained)
        return pull(value)

    rest, weights, *others = given
    jax.eval_shape(gradients, (rest, weights), tuple(others))
    return found[0]


def _on_axes(model: Model, mesh: AbstractMesh, given: _Given, made: _Made) -> Model:
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

    rest, weights, batch, fixed_rest, fixed = map(_specs, given)
    return dataclasses.replace(
        model,
        prologue=on(model.prologue, rest, fixed_rest, batch),
        layer=on(model.layer, weights, fixed, made.x, made.context, [PartitionSpec()]),
        epilogue=on(model.epilogue, rest, fixed_rest, made.x, made.kept, batch),
    )


def _typed(tree: PyTree[Array], stacked: int = 0) -> PyTree[jax.ShapeDtypeStruct]:
    """The types that arguments had, without so many leading axes."""

    def typed(x: Array) -> jax.ShapeDtypeStruct:
        here, sharding = jax.typeof(x), sharding_in_type(x)
        spec = PartitionSpec(*sharding.spec[stacked:])
        return jax.ShapeDtypeStruct(
            here.shape[stacked:],
            here.dtype,
            sharding=NamedSharding(sharding.mesh, spec)
            if _is_explicit(sharding)
            else None,
            weak_type=here.weak_type,
        )

    return jax.tree.map(typed, tree)


def _on(
    mesh: AbstractMesh | None,
) -> Callable[[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """Puts a type on a mesh of explicit axes; None: on none."""
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return lambda x: jax.ShapeDtypeStruct(
        x.shape,
        x.dtype,
        sharding=whole and (x.sharding or whole),
        weak_type=x.weak_type,
    )


def _is_explicit(sharding: Sharding | None) -> bool:
    return AxisType.Explicit in axis_types(sharding)


def _specs(tree: PyTree) -> list[PartitionSpec]:
    """How types say that a tree's arrays are divided."""
    return [jax.typeof(x).sharding.spec for x in jax.tree.leaves(tree)]
