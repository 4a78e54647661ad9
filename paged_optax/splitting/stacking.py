"""Stacks the layers' parameters, and unstacks them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from paged_optax.backend.memory import DEVICE, HOST, nbytes, on_host
from paged_optax.backend.text import keystr, parse_bytes
from paged_optax.backend.types import is_committed, is_traced, shape_dtype
from paged_optax.backend.validation import brief, check_arrays
from paged_optax.engine.transfers import to_host
from paged_optax.layerwise.layer_tree import LayerNumbers, LayerTree
from paged_optax.layerwise.parameters import Shaped, offload, place_on_host
from paged_optax.layerwise.slices import write_slice
from paged_optax.splitting.numbered import Names
from paged_optax.state.leaves import is_quantized


@dataclasses.dataclass(frozen=True, eq=False)
class Stacking:
    """Correspondence of a tree of parameters to its stacks."""

    argument: str  # the user's name for the tree
    types: PyTree[jax.ShapeDtypeStruct]  # of the tree
    tree: LayerTree  # the tree mapped to its stacks
    axes: Mapping[int, int]  # the layers' axis of leaves that are stacks, by number

    def stacked(
        self, tree: PyTree, *, on_host: bool | Literal["all"], min_size: int | str
    ) -> dict[str, PyTree]:
        """Stacks the layers' leaves, see `SplitModel.stack`."""
        if on_host not in (False, True, "all"):
            raise ValueError(
                f"on_host={brief(on_host)}: True puts the layers on the host, 'all' the"
                " other parameters too."
            )
        self._check(tree)
        smallest = parse_bytes("min_size", min_size)
        make = functools.partial(_on_host, min_size) if on_host else stack_leaves
        known = Array, np.ndarray, jax.ShapeDtypeStruct

        def single(n: int, x: Shaped) -> Shaped:
            if n in self.axes:
                return make([x], self.axes[n])
            # Objects with `__array__` are read into NumPy arrays.
            x = x if isinstance(x, known) else np.asarray(x)
            return place_on_host(x) if on_host == "all" and nbytes(x) >= smallest else x

        return self.tree.stack(tree, make, single)

    def unstacked(self, stacked: PyTree) -> PyTree:
        """Restores the tree from its stacks."""
        for path, member in jax.tree_util.tree_leaves_with_path(self.tree.members):
            x, (first, *names) = stacked, [key.key for key in path]
            for name in (first, *names):
                if not isinstance(x, Mapping) or name not in x:
                    raise ValueError(
                        f"the parameters have no {'/'.join((first, *names))!r}: pass"
                        " the tree that model.stack returned, or a step."
                    )
                x = x[name]
            if isinstance(member, LayerNumbers) and x.shape[:1] != (len(member),):
                raise ValueError(
                    f"{self.argument}['layers'] has {'/'.join(names)!r} of shape"
                    f" {x.shape}, and the model that split_layers was given has"
                    f" {len(member)} layers: pass the stacks of all of them."
                )
        tree = self.unstacked_state(stacked)
        return self.tree.structure.unflatten(jax.tree.leaves(tree))

    def stacked_state(self, state: PyTree) -> PyTree:
        """Converts a state of the tree to a state of the stacks."""
        first = lambda x, axis: stack_leaves([x], axis)
        return self.tree.stack(state, stack_moments, self._moved(first))

    def unstacked_state(self, state: PyTree) -> PyTree:
        """Converts a state of the stacks to a state of the tree."""
        apart = lambda x: unstack_leaf(x, self.tree.length)
        back = lambda x, axis: unstack_leaf(x, 1, axis)[0]
        return self.tree.unstack(state, apart, self._moved(back))

    def _moved(
        self, move: Callable[[Shaped, int], Shaped]
    ) -> Callable[[int, PyTree], PyTree]:
        """Moves the layers' axis of a stack's moment, given its parameter's number."""
        shapes = list(leaf_shapes(self.types).items())

        def moved(n: int, x: PyTree) -> PyTree:
            axis, (name, sizes) = self.axes.get(n), shapes[n]
            # A masked parameter has no moment.
            if not axis or not jax.tree.leaves(x) or not getattr(x, "ndim", 1):
                return x
            if is_quantized(x) or len(x.shape) != len(sizes):
                raise ValueError(
                    f"the layers of {self.argument}{name} are on axis {axis}, and"
                    " its state has other axes, as encoded and factored moments have:"
                    " keep the state in stacks, or make it by model.init."
                )
            return move(x, axis)

        return moved

    def _check(self, tree: PyTree) -> None:
        check_arrays(self.argument, tree)
        shapes, known = leaf_shapes(tree), leaf_shapes(self.types)
        for name in known | shapes:
            if known.get(name) != shapes.get(name):
                raise ValueError(
                    f"{self.argument}{name} has shape {shapes.get(name)}, and"
                    f" split_layers was given {known.get(name)}. Pass a tree that the"
                    " loss takes, as model.unstack returns it, or split the model"
                    " again."
                )
        if jax.tree.structure(tree) != self.tree.structure:
            raise ValueError(
                f"{self.argument} has other containers than split_layers was given."
                " Pass a tree as model.unstack returns it."
            )


def leaf_shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a tree's leaves, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {keystr(path): tuple(x.shape) for path, x in leaves}


def nested(leaves: Mapping[Names, object]) -> dict[str, PyTree]:
    """Returns nested dicts with one level for each name."""
    tree: dict[str, PyTree] = {}
    for names, x in leaves.items():
        at = tree
        for name in names[:-1]:
            at = at.setdefault(name, {})
        at[names[-1]] = x
    return tree


def _on_host(
    min_size: int | str, leaves: Sequence[PyTree], axis: int | None = None
) -> Shaped:
    """Stacks leaves along a new leading axis, in host memory if they are large."""
    first = leaves[0]
    like = jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype)
    in_jax = any(isinstance(x, Array | jax.ShapeDtypeStruct) for x in leaves)
    if in_jax or axis is not None or not on_host(offload([like], min_size)):
        return offload([stack_leaves(leaves, axis)], min_size)[0]
    # NumPy arrays are copied layer by layer, and the stack is allocated once: not in
    # NumPy, and not on the device either.
    stack = jax.jit(lambda: to_host(lax.empty(like.shape, like.dtype), True))()
    write = jax.jit(write_slice, donate_argnums=0)
    for n, x in enumerate(leaves):
        stack = jax.block_until_ready(write(stack, jnp.asarray(np.asarray(x))[None], n))
    return stack


def stack_moments(leaves: Sequence[Shaped | None]) -> Shaped:
    """Stacks moments along a new leading axis, with zeros for layers without any."""
    first = next(x for x in leaves if x is not None)
    zeros = first
    if is_traced(first):
        zeros = jnp.zeros_like(first)
    elif isinstance(first, Array) and any(x is None for x in leaves):
        zeros = jax.device_put(np.zeros(first.shape, first.dtype), first.sharding)
    return stack_leaves([zeros if x is None else x for x in leaves])


def stack_leaves(leaves: Sequence[PyTree], axis: int | None = None) -> Shaped:
    """Stacks leaves along a leading axis, or moves the layers' `axis` there."""
    first = leaves[0]
    make = lambda *xs: jnp.stack(xs) if axis is None else jnp.moveaxis(xs[0], axis, 0)
    if isinstance(first, jax.ShapeDtypeStruct):
        stack = jax.eval_shape(make, *leaves)
        return stack.update(sharding=_sharding(first, axis))
    if axis == 0 and isinstance(first, Array):
        return first
    in_jax = any(isinstance(x, Array) for x in leaves)
    hosted = in_jax and any(on_host(x) for x in leaves)
    if hosted and is_traced(first):
        return jax.device_put(make(*jax.device_put([*leaves], DEVICE)), HOST)
    if not in_jax or hosted:
        # In NumPy: XLA would compute in host memory, or fail.
        if axis is None:
            stack = np.empty((len(leaves), *first.shape), first.dtype)
            for n, x in enumerate(leaves):
                stack[n] = np.asarray(x)  # one at a time: some are read lazily
        else:
            stack = np.moveaxis(np.asarray(first), axis, 0)
        return jax.device_put(stack, _sharding(first, axis)) if in_jax else stack
    # An uncommitted leaf may be placed on the ambient mesh, as in `jnp.stack`.
    sharding = _sharding(first, axis) if is_committed(first) else None
    return jax.jit(make, out_shardings=sharding)(*leaves)


def _sharding(x: Shaped, axis: int | None) -> jax.sharding.Sharding | None:
    """The sharding of a stack whose layers are sharded like this leaf."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = (*sharding.spec, *[None] * (len(x.shape) - len(sharding.spec)))
    layers = None if axis is None else spec[axis]
    rest = spec if axis is None else (*spec[:axis], *spec[axis + 1 :])
    return sharding.update(spec=PartitionSpec(layers, *rest))


def unstack_leaf(x: Shaped, count: int, axis: int | None = None) -> list[Shaped]:
    """Returns the leaves of a stack."""
    if isinstance(x, jax.ShapeDtypeStruct):
        make = lambda x: x[0] if axis is None else jnp.moveaxis(x, 0, axis)
        return [shape_dtype(jax.eval_shape(make, x))] * count
    if axis is not None:
        return [x if axis == 0 else jnp.moveaxis(x, 0, axis)]
    if not isinstance(x, np.ndarray) and on_host(x) and not is_traced(x):
        # In NumPy, as in `stack_leaves`.
        values, place = np.asarray(x), x.sharding
        if isinstance(place, NamedSharding) and place.num_devices > 1:
            place = place.update(spec=PartitionSpec(*place.spec[1:]))
        else:
            place = HOST
        return [jax.device_put(values[n], place) for n in range(count)]
    return [x[n] for n in range(count)]
