"""Slabs of stacked layers: fetched, and put back."""

from collections.abc import Callable
from typing import TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int

from paged_optax.backend.memory import on_host
from paged_optax.backend.platforms import GPU_FETCHES_AHEAD, GPU_NEEDS_RAW_INDEX, on_tpu
from paged_optax.backend.types import is_traced
from paged_optax.codecs import Quantized
from paged_optax.engine.paged_array import Stored
from paged_optax.engine.transfers import StackPage
from paged_optax.transform.codec_rules import SMALLEST_CODED

#: A layer's number: known when traced, or on the device.
LayerIndex = Int[Array, ""] | np.int32 | int

Carry = TypeVar("Carry")

#: One layer's turn: `body(i, following, carry)` returns the next carry.
Turn = Callable[[LayerIndex, LayerIndex | None, Carry], Carry]


def goes_in_slabs(x: Array | np.ndarray | jax.ShapeDtypeStruct) -> bool:
    """Whether a stack of layers is handled layer by layer.

    Vectors (norms, biases) are few, and on a TPU a row of a matrix is no whole tile.
    """
    return len(x.shape) >= 3 and x.size // max(1, x.shape[0]) >= SMALLEST_CODED


@overload
def slab(x: Array | np.ndarray, i: LayerIndex, parts: int | None = None) -> Array: ...
@overload
def slab(x: Stored, i: LayerIndex, parts: int | None = None) -> Stored: ...
def slab(x: Stored | np.ndarray, i: LayerIndex, parts: int | None = None) -> Stored:
    """Part i of a leading axis, on the device.

    Args:
      x: The array. A stack of layers has one part a layer.
      i: The part's number.
      parts: How many there are; None: as many as the axis has entries.
    """
    if isinstance(x, Quantized):
        parts = x.codes.shape[0] if parts is None else parts
        scales = _scales(i, x.scales.shape[0] // parts).read(x.scales)
        return Quantized(slab(x.codes, i, parts), scales)
    size = 1 if parts is None else x.shape[0] // parts
    return _page(x, i, size, parts).read(x)


@overload
def put(x: Array, new: Array, i: LayerIndex, parts: int | None = None) -> Array: ...
@overload
def put(x: Stored, new: Stored, i: LayerIndex, parts: int | None = None) -> Stored: ...
def put(x: Stored, new: Stored, i: LayerIndex, parts: int | None = None) -> Stored:
    """An array with part i of its leading axis replaced, as `slab` gives it.

    Args:
      x: The array.
      new: The part.
      i: Its number.
      parts: As for `slab`; None: of weights, which travel beside products.
    """
    if isinstance(x, Quantized):
        assert isinstance(new, Quantized)
        scales = _scales(i, new.scales.shape[0]).write(x.scales, new.scales)
        return Quantized(put(x.codes, new.codes, i, parts), scales)
    assert not isinstance(new, Quantized)
    return _page(x, i, new.shape[0], parts).write(x, new)


def _page(
    x: Array | np.ndarray, i: LayerIndex, size: int, parts: int | None
) -> StackPage:
    # Weights are fetched ahead of their layer. In a loop XLA may do it long before,
    # beside an embedding: 0.9 GiB more for Llama-3-8B on an L4 (jax 0.12.0.1).
    at_once = parts is None or is_traced(i) or not GPU_FETCHES_AHEAD
    return StackPage.of(x, i, size, at_once)


def _scales(i: LayerIndex, size: int) -> StackPage:
    # They are on the device while layers are updated, see `LayeredState`.
    return StackPage(i, size, on_host=False, pieces=1)


def upwards(
    length: int,
    body: Turn[Carry],
    carry: Carry,
    *,
    prefetches: bool = False,
    makes_room: bool = False,
) -> Carry:
    """Runs `body(i, following, carry)` for the layers from the first to the last.

    Args:
      length: How many layers.
      body: Returns the next carry. `following` is the layer whose turn is next, or None
        where no turn is known to come.
      carry: The first carry.
      prefetches: Whether `body` fetches from the following layer, and puts that in the
        carry. A trip then has two turns, for the current layer is still used.
      makes_room: Whether `body` makes room for what it fetches. A trip then has one
        turn.

    Returns:
      The last carry.
    """
    return _visited(length, lambda k: k, body, carry, prefetches, makes_room)


def downwards(
    length: int,
    body: Turn[Carry],
    carry: Carry,
    *,
    prefetches: bool = False,
    makes_room: bool = False,
) -> Carry:
    """Runs `body(i, following, carry)` for the layers from the last to the first.

    Args:
      length: As for `upwards`.
      body: As for `upwards`.
      carry: As for `upwards`.
      prefetches: As for `upwards`.
      makes_room: As for `upwards`.
    """
    # An older XLA:GPU follows only the loop's own variable, so that the loop counts
    # down. A newer one follows `length - 1 - k`, but finds no transfer in such a loop.
    if GPU_NEEDS_RAW_INDEX:
        return lax.while_loop(
            lambda c: c[0] >= 0,
            lambda c: (c[0] - 1, body(c[0], None, c[1])),
            (jnp.int32(length - 1), carry),
        )[1]
    layer = lambda k: length - 1 - k
    return _visited(length, layer, body, carry, prefetches, makes_room)


def _visited(
    length: int,
    layer: Callable[[LayerIndex], LayerIndex],
    body: Turn[Carry],
    carry: Carry,
    prefetches: bool,
    makes_room: bool,
) -> Carry:
    """Runs the k-th turn for `layer(k)`."""
    turn = lambda k, c: body(layer(k), layer(k + 1), c)
    if not prefetches:
        trips, trip, left = length, lambda k, c: body(layer(k), None, c), range(0)
    elif makes_room:
        trips, trip, left = length - 1, turn, range(length - 1, length)
    else:
        # A trip has two turns. A loop's carry has one buffer: with one turn a trip, the
        # next layer could be fetched only after this layer is used. The last layers
        # come after the loop: XLA:GPU follows linear indices, but no clamped ones.
        trips = (length - 1) // 2
        trip = lambda k, c: turn(2 * k + 1, turn(2 * k, c))
        left = range(2 * trips, length)
    carry = lax.while_loop(
        lambda c: c[0] < trips, lambda c: (c[0] + 1, trip(*c)), (jnp.int32(0), carry)
    )[1]
    for k in left:
        after = layer(k + 1) if k + 1 < length else None
        carry = body(np.int32(layer(k)), after, carry)
    return carry


def written_back(
    stacks: list[Array], slabs: list[Array], i: LayerIndex
) -> tuple[list[Array], list[Array]]:
    """Stacks on the device and their slabs, so that XLA:TPU casts a slab at a time.

    Its matrix units take bfloat16. Of float32 stacks that a loop only reads it would
    make a copy in bfloat16, all layers at once, before the loop (libtpu 0.0.52: half
    the bytes of the weights again). A slab written back over itself prevents that.
    """

    def write(
        pair: tuple[list[Array], list[Array]],
    ) -> tuple[list[Array], list[Array]]:
        stacks, slabs = pair
        # Each by itself: what is fetched from the host may come when it is needed.
        slabs = [
            new if on_host(x) else lax.optimization_barrier(new)
            for x, new in zip(stacks, slabs, strict=True)
        ]
        return [
            x if on_host(x) else put(x, new, i)
            for x, new in zip(stacks, slabs, strict=True)
        ], slabs

    return on_tpu(write, (stacks, slabs))
