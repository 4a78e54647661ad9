"""Initializes the state of a transformation for stacked parameters."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from paged_optax.analysis.flat import Flat, trace
from paged_optax.analysis.program import Constant
from paged_optax.backend.flax_variables import as_pure
from paged_optax.backend.memory import DEVICE, HOST, memory_kinds, on_host
from paged_optax.backend.types import ArrayOrShape, PyTreeDef, is_traced
from paged_optax.layerwise.layer_tree import (
    LayerNumbers,
    LayerTree,
    Members,
    is_stored,
    stack_of,
    stacked_shape,
    tree_leaves,
    with_stack,
)
from paged_optax.layerwise.same_updates import CrossLayerError, Roles, contents
from paged_optax.layerwise.slices import LayerIndex, read_slice, write_slice
from paged_optax.layerwise.weights import host_like
from paged_optax.state.leaves import is_quantized
from paged_optax.state.restore import abstract_state
from paged_optax.transform.context import within
from paged_optax.transform.trees import leaf_paths


def init_stacked(
    tx: optax.GradientTransformation, tree: LayerTree, params: PyTree
) -> optax.OptState:
    """Initializes the state of `tx` for stacked parameters, layer by layer.

    Raises:
      ValueError: If `params` has no stacks, or if `tx.init` combines layers.
    """
    leaves: list[Array] = tree.stacked_leaves(params)
    layers = _LayerInit(tx, tree, leaves)
    shapes = tree.structure.unflatten(layers.each_leaf(_shape))
    paths, _ = leaf_paths(as_pure(shapes))
    members, _ = tree.stacked
    stacks = [(n, x) for n, x in enumerate(members) if isinstance(x, LayerNumbers)]
    # The moments of a stack are all on the device, or all on the host.
    together = tuple((paths[index], n) for n, x in stacks for index in x)
    with within(stacks=together):
        entries = abstract_state(tx, shapes)
    types = tree.stack(entries, stacked_shape)
    numbers = tree.get_members(
        jax.tree.structure(as_pure(entries), is_leaf=is_quantized)
    )
    layers = layers.with_sizes_if_needed(numbers)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        return types
    return _filled(layers, numbers, types)


def _filled(
    layers: "_LayerInit", numbers: Sequence[Members], types: PyTree
) -> optax.OptState:
    """Computes the leaves outside the layers, then those of each layer."""
    new = layers.state(None, [m for m in numbers if isinstance(m, int)])
    like, structure = jax.tree.flatten(types, is_leaf=is_stored)
    # Alone, a vector that is paged with the layers' vectors would stay on the device.
    state = [
        host_like(new[m], like[n]) if isinstance(m, int) else None
        for n, m in enumerate(numbers)
    ]
    write = jax.jit(write_slice, donate_argnums=0)
    for i in range(layers.tree.length):
        at = {n: m[i] for n, m in enumerate(numbers) if not isinstance(m, int)}
        at = {n: index for n, index in at.items() if index >= 0}
        new = layers.state(i, [*at.values()])
        put = lambda stack, x, i=i: write(stack, jax.device_put(x, DEVICE)[None], i)
        for n, index in at.items():
            if state[n] is None:
                state[n] = jax.tree.map(_zeros, stack_of(like[n]), new[index])
            state[n] = jax.tree.map(put, state[n], new[index])
        jax.block_until_ready(state)
    pairs = zip(like, state, strict=True)
    return structure.unflatten(with_stack(*pair) for pair in pairs)


@dataclasses.dataclass(frozen=True)
class _LayerInit:
    """Initializes the state of one layer, or of the parameters outside the layers.

    Masks and labels read the whole tree. Arrays of size zero stand for the other
    leaves, whose moments then take no memory.

    Attributes:
      sizes: True if the other leaves have their sizes, because the state depends on
        them. XLA removes the moments that are not returned.
    """

    tx: optax.GradientTransformation
    tree: LayerTree
    params: Sequence[Array]
    sizes: bool = False

    def each_leaf(self, item: Callable[[Array, int | None], PyTree]) -> list[PyTree]:
        """The own tree's leaves: `item(x, i)` of layer i of a stack; None: the rest."""
        members, _ = self.tree.stacked
        leaves = [
            item(x, None) if isinstance(m, int) else x
            for m, x in zip(members, self.params, strict=True)
        ]
        return tree_leaves(members, leaves, item)

    def state(self, layer: int | None, numbers: Sequence[int]) -> dict[int, PyTree]:
        """Returns leaves of the own state, by their numbers, for one layer."""
        there = lambda x, i: x if i is None else _read(x, i)
        leaves = self.each_leaf(
            lambda x, i: there(x, i) if i == layer else _shape(x, i)
        )
        arrays = [x for x in leaves if not isinstance(x, jax.ShapeDtypeStruct)]

        def init(arrays: Sequence[Array]) -> dict[int, PyTree]:
            array = iter(arrays)
            zeros = lambda x: jnp.zeros(x.shape if self.sizes else _blank(x), x.dtype)
            full = [
                zeros(x) if isinstance(x, jax.ShapeDtypeStruct) else next(array)
                for x in leaves
            ]
            state = as_pure(self.tx.init(self.tree.structure.unflatten(full)))
            new = jax.tree.leaves(state, is_leaf=is_quantized)
            return {n: new[n] for n in numbers}

        return jax.jit(init)(arrays) if self.sizes else init(arrays)

    def with_sizes_if_needed(self, numbers: Sequence[Members]) -> "_LayerInit":
        """The same with `sizes`, if a layer's state is another one without them.

        Raises:
          ValueError: If `tx.init` combines layers.
        """
        structure, full = self._described(lambda i: True)
        stacks = [m for m in numbers if not isinstance(m, int)]
        # One layer with each set of moments.
        firsts = {tuple(m[i] < 0 for m in stacks): i for i in range(self.tree.length)}
        for layer in (None, *firsts.values()):
            same, one = self._described(lambda i, layer=layer: i == layer)
            if same != structure or one[layer] != full[layer]:
                return dataclasses.replace(self, sizes=True)
        return self

    def _described(
        self, has_size: Callable[[int | None], bool]
    ) -> tuple[PyTreeDef, Mapping[int | None, list[Hashable]]]:
        """A new state's structure; shapes and constants of its leaves, by layer."""
        entry = lambda x, i: (
            x if has_size(i) else jax.ShapeDtypeStruct(_blank(x), x.dtype)
        )
        params = self.tree.structure.unflatten(
            self.each_leaf(lambda x, i: entry(_shape(x, i), i))
        )
        with within(plain=True):
            closed, state = trace(lambda params: self.tx.init(params), params)
        flat, roles = Flat(closed), Roles(self.tree, params, state)
        of_params = roles.of_parameters("parameter")
        read = {n: frozenset([layer]) for n, (_, layer) in enumerate(of_params)}
        for eqn in flat.eqns:
            layers = frozenset().union(*(read.get(x, ()) for x in eqn.numbers))
            read |= dict.fromkeys(eqn.outputs, layers)
        described = defaultdict[int | None, list[Hashable]](list)
        pairs = zip(flat.outputs, closed.out_avals, roles.of_state, strict=True)
        for x, aval, (name, layer) in pairs:
            value: Hashable = x if isinstance(x, Constant) else None
            if not isinstance(x, Constant):
                if read.get(x, frozenset()) - {layer}:
                    raise CrossLayerError(
                        f"`init` computes state{name[1]} from parameters of several"
                        " layers"
                    )
                if x in flat.constants and not is_traced(flat.constants[x]):
                    value = contents(flat.constants[x])
            described[layer].append((name, aval.shape, aval.dtype, value))
        return jax.tree.structure(state), described


def _shape(x: ArrayOrShape, layer: int | None) -> jax.ShapeDtypeStruct:
    """The shape of one layer of a stack, or of another leaf if `layer` is None."""
    sharding, first = getattr(x, "sharding", None), 0 if layer is None else 1
    if first and isinstance(sharding, NamedSharding):
        sharding = sharding.update(spec=PartitionSpec(*sharding.spec[1:]))
    return jax.ShapeDtypeStruct(x.shape[first:], x.dtype, sharding=sharding)


def _blank(x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return (0, *x.shape[1:]) if x.shape else ()


def _read(x: Array, layer: int) -> Array:
    """Reads one layer of a stack to the device."""
    sharding = x.sharding
    if not is_traced(x) and isinstance(sharding, NamedSharding):
        sharding = sharding.update(spec=PartitionSpec(*sharding.spec[1:]))
        sharding = sharding.with_memory_kind(memory_kinds()[0])
    else:
        sharding = None
    # JAX compiles one function once for all layers.
    return jax.jit(_layer_of, out_shardings=sharding)(x, layer)


def _layer_of(x: Array, i: LayerIndex) -> Array:
    return read_slice(x, i)[0]


def _zeros(like: jax.ShapeDtypeStruct, layer: Array) -> Array:
    """A stack of zeros with the placement of `like`."""
    if is_traced(layer):
        zeros = jnp.zeros(like.shape, like.dtype)
        return jax.device_put(zeros, HOST) if on_host(like) else zeros
    if on_host(like):
        # NumPy's zeros take no memory before they are read.
        return jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)
    if isinstance(layer.sharding, NamedSharding):
        return jnp.zeros(like.shape, like.dtype, device=like.sharding)
    return jnp.zeros(like.shape, like.dtype)
