"""Flax NNX's variables around the arrays of a model and its optimizer.

`nnx.Optimizer` passes parameters in variables to `init`, wraps each array of the state
in a variable, and passes bare arrays to `update`. Names, shardings and computation here
use bare arrays; the variables are restored at the end. A transformation that is called
with variables receives variables, as its masks and labels may be in variables too.
Checked with Flax 0.12.8 and 0.12.12.
"""

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from paged_optax.backend.text import keystr
from paged_optax.backend.types import ArrayOrShape, KeyPath, is_traced

if TYPE_CHECKING:
    from flax import nnx

    Variable: TypeAlias = nnx.Variable[ArrayOrShape]


def as_pure(tree: PyTree) -> PyTree:
    """Returns a tree without its variables."""
    nnx = sys.modules.get("flax.nnx")  # without it there are no variables
    return tree if nnx is None else nnx.as_pure(tree)


def _is_a(x: object, module: str, name: str) -> bool:
    # Without the module there are none.
    return module in sys.modules and isinstance(x, getattr(sys.modules[module], name))


def _is_variable(x: object) -> bool:
    return _is_a(x, "flax.nnx", "Variable")


def running_statistics(tree: PyTree) -> Iterator[tuple[KeyPath, ArrayOrShape]]:
    """Yields leaves of `nnx.BatchStat`, `batch_stats` and `equinox.nn.State`."""
    is_equinox = lambda x: _is_a(x, "equinox.nn", "State")
    flat = jax.tree_util.tree_leaves_with_path
    for path, x in flat(tree, is_leaf=lambda x: _is_variable(x) or is_equinox(x)):
        is_state = is_equinox(x) or _is_a(x, "flax.nnx", "BatchStat")
        if is_state or "batch_stats" in keystr(path):
            yield from ((path + inner, leaf) for inner, leaf in flat(x))


def unflatten_like(tree: PyTree, new: PyTree) -> PyTree:
    """Returns the leaves of `new` in the containers and variables of `tree`."""
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(new))


def with_variables_of(
    tree: PyTree, inner: optax.GradientTransformationExtraArgs
) -> optax.GradientTransformationExtraArgs:
    """Wraps `inner`, which expects the variables of a tree, for bare arrays."""
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
    """Returns Flax's sharding of each parameter's moments, or None.

    `nnx.Optimizer` shards a variable of the state by the metadata `optimizer_sharding`
    of the parameter's variable, which may differ from the parameter's sharding
    (ZeRO-1).
    """

    def read(variable: "Variable", array: ArrayOrShape) -> NamedSharding | None:
        names = variable.get_metadata("optimizer_sharding", None)
        if not names or not variable.get_metadata("eager_sharding", True):
            return None  # Flax divides nothing itself
        if (sharding := _sharding(variable, array, names)) is None:
            raise ValueError(
                f"optimizer_sharding={names!r} divides the moments of a parameter of"
                f" shape {array.shape}, and there is no mesh around with these axes:"
                " enter jax.set_mesh(mesh)."
            )
        return sharding

    return _each(tree, read)


def parameter_shardings(tree: PyTree) -> list[NamedSharding | None]:
    """Returns Flax's sharding of each traced parameter, or None.

    Over automatic axes only the metadata `out_sharding` has the sharding of a model
    that is created in a `jax.jit`. None without it, or if the array itself has a
    sharding.
    """

    def read(variable: "Variable", array: ArrayOrShape) -> NamedSharding | None:
        names = variable.get_metadata("out_sharding", None)
        if not names or not is_traced(array):
            return None
        sharding = _sharding(variable, array, names)
        return sharding if sharding and len(sharding.spec) <= array.ndim else None

    return _each(tree, read)


def _each(
    tree: PyTree, read: Callable[["Variable", ArrayOrShape], NamedSharding | None]
) -> list[NamedSharding | None]:
    return [
        read(x, array) if _is_variable(x) else None
        for x in jax.tree.leaves(tree, is_leaf=_is_variable)
        for array in jax.tree.leaves(x)
    ]


def _sharding(
    variable: "Variable", array: ArrayOrShape, names: object
) -> NamedSharding | None:
    """Returns the sharding in a variable's metadata, or None without a mesh for it."""
    rules = variable.get_metadata("sharding_rules", None)
    spec = sys.modules["flax.core.spmd"].get_pspec(names, rules)
    if isinstance(spec, NamedSharding):
        return spec
    if not isinstance(spec, PartitionSpec):
        return None
    entries = [(x,) if isinstance(x, str) else x or () for x in spec]
    for mesh in _meshes(variable, array):
        if {name for entry in entries for name in entry} <= {*mesh.axis_names}:
            return NamedSharding(mesh, spec)
    return None


def _meshes(variable: "Variable", array: ArrayOrShape) -> Iterator[Mesh | AbstractMesh]:
    """Yields candidate meshes of a variable's sharding, concrete ones first."""
    if (mesh := variable.get_metadata("mesh", None)) is not None:
        yield mesh
    for x in (getattr(array, "sharding", None), jax.typeof(array).sharding):
        if isinstance(x, NamedSharding):
            yield x.mesh
    around = jax.sharding.get_abstract_mesh()
    yield around if is_traced(array) or around.empty else jax.sharding.get_mesh()


def fixed_variables(state: PyTree) -> PyTree:
    """Returns a new state whose variables Flax does not move or reshard."""

    def settle(x: PyTree) -> PyTree:
        if not _is_variable(x):
            return x
        names = filter(x.has_metadata, ("out_sharding", "optimizer_sharding"))
        specs = {name: x.get_metadata(name) for name in names}

        def copied(value: ArrayOrShape) -> "Variable":
            # `nnx.eval_shape` refuses metadata with more axes than the array has, such
            # as a codec's scales.
            rank = lambda spec: len(getattr(spec, "spec", spec) or ())
            invalid = [name for name in specs if rank(specs[name]) > len(value.shape)]
            # `nnx.Optimizer` would move arrays with sharding metadata to the device.
            stays = {"eager_sharding": False} if specs else {}
            return x.copy(value, **stays, **dict.fromkeys(invalid))

        # A variable holds one array, so that codes and scales have one each.
        value = x.get_raw_value()
        return jax.tree.map(copied, value) if jax.tree.leaves(value) else x

    return jax.tree.map(settle, state, is_leaf=_is_variable)
