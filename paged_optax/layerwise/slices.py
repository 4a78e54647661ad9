"""Slices of stacked layers, transfers of parameters, and loops over layers.

The prologue, the epilogue, the prologue's gradients and the update each fetch the
parameters outside the layers and free them. Their gradients stay on the host during the
backward pass. Nothing writes frozen parameters: loops close over their stacks.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Int, PyTree

from paged_optax.backend.memory import nbytes, on_host
from paged_optax.backend.platforms import (
    GPU_FETCHES_AHEAD,
    GPU_NEEDS_RAW_INDEX,
    on_platforms,
)
from paged_optax.backend.types import PyTreeDef, is_traced, on_one_device
from paged_optax.codecs import Quantized
from paged_optax.engine.paged_array import Stored
from paged_optax.engine.shards import Shards
from paged_optax.engine.transfers import StackPage, to_device, to_host
from paged_optax.transform.codec_rules import SMALLEST_CODED

#: A layer's number, static or traced.
LayerIndex = Int[Array, ""] | np.int32 | int

Carry = TypeVar("Carry")
Tree = TypeVar("Tree", bound=PyTree)
Dependency = TypeVar("Dependency", bound=PyTree)

#: Stacks, and one layer's slices of them.
Pair = tuple[list[Array], list[Array]]


def is_sliced(x: Array | np.ndarray | jax.ShapeDtypeStruct) -> bool:
    """True if a stack of layers is sliced layer by layer.

    Stacks of vectors (norms, biases) are small, and on a TPU a row is no whole tile.
    """
    return len(x.shape) >= 3 and x.size // max(1, x.shape[0]) >= SMALLEST_CODED


def read_slice(
    x: Array | np.ndarray,
    i: LayerIndex,
    parts: int | None = None,
    shards: Shards | None = None,
) -> Array:
    """Reads part i of the leading axis to the device.

    `parts` is the number of parts. None is the length of the axis, for weights, which
    travel during products.
    """
    size = 1 if parts is None else x.shape[0] // parts
    return _page(i, size, parts, shards).read(x)


def write_slice(
    x: Array,
    new: Array,
    i: LayerIndex,
    parts: int | None = None,
    shards: Shards | None = None,
) -> Array:
    """Replaces part i of the leading axis, see `read_slice`."""
    return _page(i, new.shape[0], parts, shards).write(x, new)


def read_moment(x: Stored, i: LayerIndex, parts: int, shards: Shards | None) -> Stored:
    """Reads part i of a moment, see `read_slice`."""
    if not isinstance(x, Quantized):
        return read_slice(x, i, parts, shards)
    # Scales are on the device while layers are updated; see `LayeredState`.
    page = StackPage(i, x.scales.shape[0] // parts, in_one_transfer=True)
    scales = page.read(x.scales)
    return Quantized(read_slice(x.codes, i, parts, shards), scales)


def write_moment(
    x: Stored, new: Stored, i: LayerIndex, parts: int, shards: Shards | None
) -> Stored:
    """Replaces part i of a moment, see `write_slice`."""
    if not isinstance(x, Quantized) or not isinstance(new, Quantized):
        return jax.tree.map(lambda x, y: write_slice(x, y, i, parts, shards), x, new)
    page = StackPage(i, new.scales.shape[0], in_one_transfer=True)
    scales = page.write(x.scales, new.scales)
    return Quantized(write_slice(x.codes, new.codes, i, parts, shards), scales)


def _page(
    i: LayerIndex, size: int, parts: int | None, shards: Shards | None
) -> StackPage:
    # Weights are prefetched. In a loop XLA may fetch them long before, during an
    # embedding: 0.9 GiB more for Llama-3-8B on an L4 (jax 0.12.0.1). Shards are small.
    prefetched = parts is None and shards is None
    in_one_transfer = prefetched or is_traced(i) or not GPU_FETCHES_AHEAD
    return StackPage(i, size, in_one_transfer, shards)


def over_layers(
    length: int,
    body: Callable[[LayerIndex, LayerIndex | None, Carry], Carry],
    carry: Carry,
    *,
    backward: bool = False,
    prefetches: bool = False,
    makes_room: bool = False,
) -> Carry:
    """Runs `body(i, next_item, carry)` for each layer, and returns the last carry.

    If `prefetches`, `body` fetches layer `next_item` into the carry; it is None if
    there is no next layer, or if the loop cannot prefetch it. An iteration then runs
    two layers, because the current slice is still used, or one if `body` `makes_room`:
    it frees the buffers that it fetches into.
    """
    # An older XLA:GPU follows only the loop's own variable, so that the loop counts
    # down. A newer one follows `length - 1 - k`, but finds no transfer in such a loop.
    if backward and GPU_NEEDS_RAW_INDEX:
        return lax.while_loop(
            lambda c: c[0] >= 0,
            lambda c: (c[0] - 1, body(c[0], None, c[1])),
            (jnp.int32(length - 1), carry),
        )[1]
    layer = (lambda k: length - 1 - k) if backward else (lambda k: k)
    run = lambda k, c: body(layer(k), layer(k + 1), c)
    if not prefetches:
        trips, trip, left = length, lambda k, c: body(layer(k), None, c), range(0)
    elif makes_room:
        trips, trip, left = length - 1, run, range(length - 1, length)
    else:
        # A loop's carry has one buffer. With one layer an iteration, the next layer
        # could be fetched only after this layer is used. The last layers follow the
        # loop: XLA:GPU follows linear indices, and no clamped ones.
        trips = (length - 1) // 2
        trip = lambda k, c: run(2 * k + 1, run(2 * k, c))
        left = range(2 * trips, length)
    carry = lax.while_loop(
        lambda c: c[0] < trips, lambda c: (c[0] + 1, trip(*c)), (jnp.int32(0), carry)
    )[1]
    for k in left:
        after = layer(k + 1) if k + 1 < length else None
        carry = body(np.int32(layer(k)), after, carry)
    return carry


def written_back(stacks: list[Array], slices: list[Array], i: LayerIndex) -> Pair:
    """Writes slices back over themselves, so that XLA:TPU casts one slice at a time.

    TPU matrix units read bfloat16. XLA copies float32 stacks that a loop only reads to
    bfloat16 before the loop, for all layers (libtpu 0.0.52: half the bytes of the
    weights).
    """

    def write(pair: Pair) -> Pair:
        stacks, slices = pair
        # One barrier for each slice: a fetch need not wait for the others.
        slices = [
            new if on_host(x) else lax.optimization_barrier(new)
            for x, new in zip(stacks, slices, strict=True)
        ]
        return [
            x if on_host(x) else write_slice(x, new, i)
            for x, new in zip(stacks, slices, strict=True)
        ], slices

    return on_platforms("tpu", write, (stacks, slices))


#: Prefetched slices of the next layer, by the positions of their stacks.
Prefetched = dict[int, Array]

#: The vectors of all layers, by their stacks' positions: an array of several stacks,
#: [layers, stacks, width], and the stack's number in it.
Vectors = Mapping[int, tuple[Array, int]]


# The largest array of several stacks, in bytes; its stacks are held twice. Two norms of
# 80 layers with 8192 values have 2.5 MiB.
_LARGEST_VECTORS = 4 * 2**20

# Parts of a parameter that is updated in place.
_PARTS_IN_PLACE = 16


def on_device(x: Array) -> Array:
    """Fetches an array that is on the host."""
    return to_device(x, on_host(x))


def fetch_after(tree: Tree, dependency: Dependency) -> tuple[Tree, Dependency]:
    """Fetches the leaves on the host after `dependency` is computed."""
    leaves, structure = jax.tree.flatten(tree)
    offloaded = [x for x in leaves if on_host(x)]
    if not offloaded:
        return tree, dependency
    # Without the barrier XLA merges all fetches of one array, and keeps the result.
    offloaded, dependency = lax.optimization_barrier((offloaded, dependency))
    loaded = iter([on_device(x) for x in offloaded])
    leaves = [next(loaded) if on_host(x) else x for x in leaves]
    return structure.unflatten(leaves), dependency


def host_like(tree: Tree, like: PyTree) -> Tree:
    """Moves to the host the leaves that are on the host in `like`."""
    return jax.tree.map(
        lambda x, old: to_host(x, on_host(old) and not on_host(x)), tree, like
    )


def bind_prefetched(
    gradients: Tree, cts: Dependency, prefetched: Prefetched
) -> tuple[Tree, Dependency, Prefetched]:
    """Binds each prefetched matrix to the same matrix's gradient of this layer.

    The transfer then overlaps the computation of the gradients. Frozen matrices are
    bound to the gradients by the layer's input.
    """
    flat, structure = jax.tree.flatten(gradients)
    frozen = {n: x for n, x in prefetched.items() if n >= len(flat)}
    trained = {n: x for n, x in prefetched.items() if n < len(flat)}
    for n, x in trained.items():
        # The next layer's matrix is read from the stack before this layer's is written
        # there. Otherwise XLA would copy the stack.
        flat[n], trained[n] = lax.optimization_barrier((flat[n], x))
    if frozen:
        cts, frozen = lax.optimization_barrier((cts, frozen))
    return structure.unflatten(flat), cts, trained | frozen


def add_in_place(x: Array, update: Array) -> Array:
    """Adds in the update's buffer. XLA:GPU would allocate a third one for the sum."""
    rows = x.shape[0] if x.ndim else 1
    parts = max(n for n in range(1, _PARTS_IN_PLACE + 1) if rows % n == 0)
    if parts == 1 or update.dtype != x.dtype:
        return (x + update).astype(x.dtype)
    size = rows // parts

    def body(i: Int[Array, ""], update: Array) -> Array:
        part = lambda x: lax.dynamic_slice_in_dim(x, i * size, size)
        new = part(x) + part(update)
        return lax.dynamic_update_slice_in_dim(update, new, i * size, 0)

    return lax.fori_loop(0, parts, body, update)


@dataclasses.dataclass(frozen=True)
class Weights:
    """The layers' parameters, stacked. The trained ones precede the frozen ones.

    Attributes:
      stacks: The trained stacks. Loops carry and write them.
      frozen: The frozen stacks. Loops close over them.
      structure: The structure of both trees.
      shards: The division of each stack over a mesh, or None.
    """

    stacks: list[Array]
    frozen: list[Array]
    structure: PyTreeDef
    length: int
    shards: Sequence[Shards | None]

    @property
    def prefetches(self) -> bool:
        """True if weights are prefetched while the previous layer is computed."""
        offloaded = any(map(on_host, [*self.stacks, *self.frozen]))
        return GPU_FETCHES_AHEAD and self.length > 1 and offloaded

    def prefetch(self, stacks: Sequence[Array], i: LayerIndex | None) -> Prefetched:
        """Prefetches layer i; nothing for None."""
        if i is None or not self.prefetches:
            return {}
        every = enumerate([*stacks, *self.frozen])
        return {n: self.read(n, x, i) for n, x in every if on_host(x)}

    def read(self, n: int, stack: Array, i: LayerIndex) -> Array:
        """Reads layer i of the stack in position n."""
        return read_slice(stack, i, shards=self.shards[n])

    def write(
        self,
        stacks: Sequence[Array],
        slices: Sequence[Array],
        new: Sequence[Array],
        i: LayerIndex,
    ) -> list[Array]:
        """Writes the trained slices of layer i that changed."""
        return [
            x if update is old else write_slice(x, update, i, shards=self.shards[n])
            for n, (x, old, update) in enumerate(zip(stacks, slices, new, strict=True))
        ]

    @staticmethod
    def vectors(stacks: Sequence[Array]) -> Vectors:
        """Joins trained vectors (norms, biases) of one shape in one array.

        A loop then reads one small slice for each layer and shape. The loop may write
        the stacks, because each layer is read before it is written.
        """
        if any(map(on_host, stacks)):
            return {}  # XLA:GPU packs buffers less well: 32 MiB more on an L4
        by_kind = defaultdict[tuple[tuple[int, ...], DTypeLike], list[int]](list)
        for n, x in enumerate(stacks):
            if x.ndim == 2:
                by_kind[x.shape, x.dtype].append(n)
        merged_rows = {}
        for indices in by_kind.values():
            group = [stacks[n] for n in indices]
            small = sum(map(nbytes, group)) <= _LARGEST_VECTORS
            if len(group) > 1 and small and on_one_device(group):
                merged = jnp.stack(group, axis=1)
                merged_rows |= {n: (merged, k) for k, n in enumerate(indices)}
        return merged_rows

    def slices(
        self,
        stacks: Sequence[Array],
        i: LayerIndex,
        prefetched: Prefetched | None = None,
        vectors: Vectors | None = None,
    ) -> list[Array]:
        """Reads layer i of these trained stacks, and of the frozen ones."""
        prefetched, vectors = prefetched or {}, vectors or {}

        def item(n: int, x: Array) -> Array:
            if n in vectors:
                merged, k = vectors[n]
                return read_slice(merged, i)[:, k]
            return prefetched[n] if n in prefetched else self.read(n, x, i)

        return [item(n, x) for n, x in enumerate([*stacks, *self.frozen])]

    def of(self, slices: Sequence[Array]) -> tuple[PyTree[Array], PyTree[Array]]:
        """The model's arguments: one layer's trained and frozen parameters."""
        return jax.tree.unflatten(self.structure, [x[0] for x in slices])
