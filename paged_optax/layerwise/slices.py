"""Reads and writes slices of stacked layers, and loops over layers."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int

from paged_optax.backend.memory import on_host
from paged_optax.backend.platforms import (
    GPU_FETCHES_AHEAD,
    GPU_NEEDS_RAW_INDEX,
    on_platforms,
)
from paged_optax.backend.types import is_traced
from paged_optax.codecs import Quantized
from paged_optax.engine.paged_array import Stored
from paged_optax.engine.shards import Shards
from paged_optax.engine.transfers import StackPage
from paged_optax.transform.codec_rules import SMALLEST_CODED

#: A layer's number, static or traced.
LayerIndex = Int[Array, ""] | np.int32 | int

Carry = TypeVar("Carry")

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
    page = StackPage(i, x.scales.shape[0] // parts, at_once=True)
    scales = page.read(x.scales)
    return Quantized(read_slice(x.codes, i, parts, shards), scales)


def write_moment(
    x: Stored, new: Stored, i: LayerIndex, parts: int, shards: Shards | None
) -> Stored:
    """Replaces part i of a moment, see `write_slice`."""
    if not isinstance(x, Quantized) or not isinstance(new, Quantized):
        return jax.tree.map(lambda x, y: write_slice(x, y, i, parts, shards), x, new)
    page = StackPage(i, new.scales.shape[0], at_once=True)
    scales = page.write(x.scales, new.scales)
    return Quantized(write_slice(x.codes, new.codes, i, parts, shards), scales)


def _page(
    i: LayerIndex, size: int, parts: int | None, shards: Shards | None
) -> StackPage:
    # Weights are prefetched. In a loop XLA may fetch them long before, during an
    # embedding: 0.9 GiB more for Llama-3-8B on an L4 (jax 0.12.0.1). Shards are small.
    prefetched = parts is None and shards is None
    at_once = prefetched or is_traced(i) or not GPU_FETCHES_AHEAD
    return StackPage(i, size, at_once, shards)


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

    If `prefetches`, `body` fetches from `next_item` into the carry, which is None if
    there is no next layer or the loop cannot prefetch it. An iteration then runs two
    layers, because the current slice is still used, or one if `body` `makes_room`: it
    frees the buffers that it fetches into.
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
