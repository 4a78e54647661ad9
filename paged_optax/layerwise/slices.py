"""Slabs of stacked layers: fetched, and put back."""

from collections.abc import Callable
from typing import TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int

from paged_optax.backend.memory import DEVICE, HOST, on_host
from paged_optax.backend.tiling import minor_to_major
from paged_optax.backend.types import is_traced
from paged_optax.backend.xla import GPU_NEEDS_RAW_INDEX
from paged_optax.codecs import Quantized
from paged_optax.engine.page_io import (
    in_layout,
    pieces_of,
    read_in_pieces,
    write_in_pieces,
)
from paged_optax.engine.pages import Index
from paged_optax.engine.stored_array import Stored
from paged_optax.transform.codec_rules import SMALLEST_CODED

# To fetch ahead, the next layer's index is computed. Older XLA:GPU cannot follow that.
FETCHES_AHEAD = not GPU_NEEDS_RAW_INDEX

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
        blocks = x.scales.shape[0] // parts
        scales = lax.dynamic_slice_in_dim(x.scales, _first(i, blocks), blocks)
        return Quantized(slab(x.codes, i, parts), scales)
    size = 1 if parts is None else x.shape[0] // parts
    if not on_host(x):
        return lax.dynamic_slice_in_dim(x, _first(i, size), size)
    assert isinstance(x, Array)

    def fetched(x: Array) -> Array:
        part = lax.dynamic_slice_in_dim(x, _first(i, size), size)
        return jax.device_put(_in_stacks_layout(part), DEVICE)

    def in_pieces(x: Array) -> Array:
        rows = _by_rows(x)
        address, length = _address(x, i, size)
        piece = lambda turn: jax.device_put(
            lax.dynamic_slice_in_dim(
                rows, address(turn), length, allow_negative_indices=False
            ),
            DEVICE,
        )
        part = read_in_pieces(_pieces(x, size), piece)
        return part.reshape(size, *x.shape[1:])

    # Weights are fetched ahead of their layer. In a loop XLA may do it long before,
    # beside an embedding: 0.9 GiB more for Llama-3-8B on an L4 (jax 0.12.0.1).
    if parts is None or _in_loop(i) or _pieces(x, size) == 1:
        return fetched(x)
    return lax.platform_dependent(x, cpu=fetched, tpu=fetched, default=in_pieces)


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
        first = _first(i, new.scales.shape[0])
        scales = lax.dynamic_update_slice_in_dim(x.scales, new.scales, first, 0)
        return Quantized(put(x.codes, new.codes, i, parts), scales)
    assert not isinstance(new, Quantized)
    size = new.shape[0]
    if not on_host(x):
        return lax.dynamic_update_slice_in_dim(x, new, _first(i, size), 0)

    def written(x: Array, new: Array) -> Array:
        placed = _in_stacks_layout(jax.device_put(new, HOST))
        return lax.dynamic_update_slice_in_dim(x, placed, _first(i, size), 0)

    def in_pieces(x: Array, new: Array) -> Array:
        address, _ = _address(x, i, size)

        def write(turn: Index, rows: Array, piece: Array) -> Array:
            placed = jax.device_put(piece, HOST)
            return lax.dynamic_update_slice_in_dim(
                rows, placed, address(turn), 0, allow_negative_indices=False
            )

        rows = write_in_pieces(_pieces(x, size), write, _by_rows(x), _by_rows(new))
        return rows.reshape(x.shape)

    if parts is None or _in_loop(i) or _pieces(x, size) == 1:
        return written(x, new)
    return lax.platform_dependent(x, new, cpu=written, tpu=written, default=in_pieces)


def _in_loop(i: LayerIndex) -> bool:
    """Whether a transfer of part i is in a loop, as far as a GPU need know."""
    return is_traced(i) or not FETCHES_AHEAD


def _by_rows(x: Array) -> Array:
    """A stack whose parts are cut along its first axis: XLA:GPU follows no other."""
    return x.reshape(-1, *x.shape[2:])


def _pieces(x: Array | np.ndarray, size: int) -> int:
    """In how many pieces a part of a stack is moved; 1: as it is."""
    numbered = x.ndim > 1 and x.shape[0] * x.shape[1] < 2**31
    return pieces_of(size * x.shape[1]) if numbered else 1


def _address(
    x: Array | np.ndarray, i: LayerIndex, size: int
) -> tuple[Callable[[Index], Index], int]:
    """Where each piece of part i begins, in rows, and how many rows it has."""
    rows = size * x.shape[1]
    length = rows // _pieces(x, size)
    return lambda turn: np.int32(i * rows) + turn * np.int32(length), length


def _in_stacks_layout(part: Array) -> Array:
    """A part of a stack on the host, in the stack's own layout on a TPU."""
    if part.ndim < 2:
        return part
    order = minor_to_major(part.shape, part.dtype.itemsize)
    return lax.platform_dependent(
        part, tpu=lambda part: in_layout(part, order), default=lambda part: part
    )


def _first(i: LayerIndex, size: int) -> LayerIndex:
    return i if size == 1 else i * size


def upwards(
    length: int,
    body: Turn[Carry],
    carry: Carry,
    *,
    ahead: bool = False,
    following: bool = False,
) -> Carry:
    """Runs `body(i, following, carry)` for the layers from the first to the last.

    Args:
      length: How many layers.
      body: Returns the next carry. `following` is the layer whose turn is next, or None
        where no turn is known to come.
      carry: The first carry.
      ahead: Whether `body` fetches from the following layer, and puts that in the carry
        while the current layer is still used. A trip then has two turns.
      following: Whether `body` fetches from the following layer, and makes room for it
        itself. A trip then has one turn.

    Returns:
      The last carry.
    """
    return _visited(length, lambda k: k, body, carry, ahead, following)


def downwards(
    length: int,
    body: Turn[Carry],
    carry: Carry,
    *,
    ahead: bool = False,
    following: bool = False,
) -> Carry:
    """Runs `body(i, following, carry)` for the layers from the last to the first.

    Args:
      length: As for `upwards`.
      body: As for `upwards`.
      carry: As for `upwards`.
      ahead: As for `upwards`.
      following: As for `upwards`.
    """
    # An older XLA:GPU follows only the loop's own variable, so that the loop counts
    # down. A newer one follows `length - 1 - k`, but finds no transfer in such a loop.
    if GPU_NEEDS_RAW_INDEX:
        return lax.while_loop(
            lambda c: c[0] >= 0,
            lambda c: (c[0] - 1, body(c[0], None, c[1])),
            (jnp.int32(length - 1), carry),
        )[1]
    return _visited(length, lambda k: length - 1 - k, body, carry, ahead, following)


def _visited(
    length: int,
    layer: Callable[[LayerIndex], LayerIndex],
    body: Turn[Carry],
    carry: Carry,
    ahead: bool,
    following: bool = False,
) -> Carry:
    """Runs the k-th turn for `layer(k)`."""
    turn = lambda k, c: body(layer(k), layer(k + 1), c)
    if ahead:
        # A trip has two turns. A loop's carry has one buffer: with one turn a trip, the
        # next layer could be fetched only after this layer is used. The last layers
        # come after the loop: XLA:GPU follows linear indices, but no clamped ones.
        trips = (length - 1) // 2
        trip = lambda k, c: turn(2 * k + 1, turn(2 * k, c))
        left = range(2 * trips, length)
    elif following:
        trips, trip, left = length - 1, turn, range(length - 1, length)
    else:
        trips, trip, left = length, lambda k, c: body(layer(k), None, c), range(0)
    carry = lax.while_loop(
        lambda c: c[0] < trips, lambda c: (c[0] + 1, trip(*c)), (jnp.int32(0), carry)
    )[1]
    for k in left:
        after = layer(k + 1) if k + 1 < length else None
        carry = body(np.int32(layer(k)), after, carry)
    return carry


def kept(
    stacks: list[Array], slabs: list[Array], i: LayerIndex
) -> tuple[list[Array], list[Array]]:
    """Stacks on the device and their slabs, so that XLA:TPU casts a slab at a time.

    Its matrix units take bfloat16. Of float32 stacks that a loop only reads it would
    make a copy in bfloat16, all layers at once, before the loop (libtpu 0.0.52: half
    the bytes of the weights again). A slab written back over itself prevents that.
    """

    def write(
        stacks: list[Array], slabs: list[Array]
    ) -> tuple[list[Array], list[Array]]:
        # Each by itself: what is fetched from the host may come when it is needed.
        slabs = [
            new if on_host(x) else lax.optimization_barrier(new)
            for x, new in zip(stacks, slabs, strict=True)
        ]
        return [
            x if on_host(x) else put(x, new, i)
            for x, new in zip(stacks, slabs, strict=True)
        ], slabs

    return lax.platform_dependent(
        stacks, slabs, tpu=write, default=lambda stacks, slabs: (stacks, slabs)
    )
