"""Flax NNX's variables: boxes around the arrays of a model and of its optimizer.

`nnx.Optimizer` gives `init` parameters in their variables, puts each array of the state
into one, and calls `update` with bare arrays. So everything is named, divided and
computed by bare arrays here, and gets its variables back at the end. A transformation
that is called with variables sees them, for its masks and labels may be in variables
too. Checked with Flax 0.12.8 and 0.12.12.
"""

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from paged_optax.backend.types import ArrayOrShape, is_traced

if TYPE_CHECKING:
    from flax import nnx


def as_pure(tree: PyTree) -> PyTree:
    """A tree without its variables, as `nnx.Optimizer` gives it to `update`."""
    nnx = sys.modules.get("flax.nnx")  # else nothing can be in a variable
    return tree if nnx is None else nnx.as_pure(tree)


def unflatten_like(tree: PyTree, new: PyTree) -> PyTree:
    """A tree's containers and variables, with the leaves of a new one."""
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(new))


def with_variables_of(
    tree: PyTree, inner: optax.GradientTransformationExtraArgs
) -> optax.GradientTransformationExtraArgs:
    """`inner` for bare arrays, which it is given in the variables of a tree."""
    if jax.tree.structure(tree) == jax.tree.structure(as_pure(tree)):
        return inner
    boxed = lambda arrays: unflatten_like(tree, arrays)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        types = jax.eval_shape(inner.init, boxed(updates if params is None else params))
        params = None if params is None else boxed(params)
        state = unflatten_like(types, state)
        return as_pure(inner.update(boxed(updates), state, params, **extra_args))

    return optax.GradientTransformationExtraArgs(
        lambda params: as_pure(inner.init(boxed(params))), update
    )


def optimizer_shardings(tree: PyTree) -> list[NamedSharding | None]:
    """How Flax is told to divide the moments of each parameter; None if it is not.

    `nnx.Optimizer` divides what `init` makes in a variable by the variable's metadata
    `optimizer_sharding`, and not as the parameter is divided (ZeRO-1).
    """
    return _each(tree, _optimizer_sharding)


def parameter_shardings(tree: PyTree) -> list[NamedSharding | None]:
    """How Flax divides each traced parameter: by its variable's `out_sharding`.

    Over automatic axes nothing else says so of a model that is made in a `jax.jit`. It
    is None if nothing is told of a leaf, or its array says so itself.
    """
    return _each(tree, _parameter_sharding)


def _each(
    tree: PyTree,
    read: Callable[["nnx.Variable[ArrayOrShape]", ArrayOrShape], NamedSharding | None],
) -> list[NamedSharding | None]:
    """What is read of the metadata of each leaf's variable, if it is in one."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return [None] * len(jax.tree.leaves(tree))
    is_variable = lambda x: isinstance(x, nnx.Variable)
    return [
        read(x, array) if is_variable(x) else None
        for x in jax.tree.leaves(tree, is_leaf=is_variable)
        for array in jax.tree.leaves(x)
    ]


def _parameter_sharding(
    variable: "nnx.Variable[ArrayOrShape]", array: ArrayOrShape
) -> NamedSharding | None:
    told = variable.get_metadata("out_sharding", None)
    if not told or not is_traced(array):
        return None
    sharding = _sharding(variable, array, told)
    fits = sharding is not None and len(sharding.spec) <= len(array.shape)
    return sharding if fits else None


def _optimizer_sharding(
    variable: "nnx.Variable[ArrayOrShape]", array: ArrayOrShape
) -> NamedSharding | None:
    told = variable.get_metadata("optimizer_sharding", None)
    if not told or not variable.get_metadata("eager_sharding", True):
        return None  # Flax divides nothing itself
    sharding = _sharding(variable, array, told)
    if sharding is None:
        raise ValueError(
            f"optimizer_sharding={told!r} divides the moments of a parameter of shape"
            f" {array.shape}, and there is no mesh around with these axes: enter"
            " jax.set_mesh(mesh)."
        )
    return sharding


def _sharding(
    variable: "nnx.Variable[ArrayOrShape]", array: ArrayOrShape, told: object
) -> NamedSharding | None:
    """What metadata of a variable means; None if no mesh is known that has its axes."""
    rules = variable.get_metadata("sharding_rules", None)
    spec = sys.modules["flax.core.spmd"].get_pspec(told, rules)
    if isinstance(spec, NamedSharding):
        return spec
    if not isinstance(spec, PartitionSpec):
        return None
    entries = [(x,) if isinstance(x, str) else x or () for x in spec]
    for mesh in _meshes(variable, array):
        if {name for names in entries for name in names} <= {*mesh.axis_names}:
            return NamedSharding(mesh, spec)
    return None


def _meshes(
    variable: "nnx.Variable[ArrayOrShape]", array: ArrayOrShape
) -> Iterator[Mesh | AbstractMesh]:
    """The meshes that a variable's sharding may mean, of real devices if it can."""
    if (mesh := variable.get_metadata("mesh", None)) is not None:
        yield mesh
    for x in (getattr(array, "sharding", None), jax.typeof(array).sharding):
        if isinstance(x, NamedSharding):
            yield x.mesh
    around = jax.sharding.get_abstract_mesh()
    yield around if is_traced(array) or around.empty else jax.sharding.get_mesh()


def fixed_variables(state: PyTree) -> PyTree:
    """A new state whose variables Flax leaves as they are, where they are."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return state
    is_variable = lambda x: isinstance(x, nnx.Variable)

    def settle(x: PyTree) -> PyTree:
        if not is_variable(x):
            return x
        names = filter(x.has_metadata, ("out_sharding", "optimizer_sharding"))
        told = {name: x.get_metadata(name) for name in names}

        def copied(value: ArrayOrShape) -> "nnx.Variable[ArrayOrShape]":
            # `nnx.eval_shape` refuses metadata of more axes than its array has, such as
            # a codec's scales.
            rank = lambda told: len(getattr(told, "spec", told) or ())
            wrong = [name for name in told if rank(told[name]) > len(value.shape)]
            # `nnx.Optimizer` moves what a variable with sharding metadata holds, to
            # device memory, unless the variable says not to.
            stays = {"eager_sharding": False} if told else {}
            return x.copy(value, **stays, **dict.fromkeys(wrong))

        # Flax makes one mapping of all that a variable holds, so what is stored in
        # several arrays has a variable for each.
        return jax.tree.map(copied, x.get_raw_value())

    return jax.tree.map(settle, state, is_leaf=is_variable)
