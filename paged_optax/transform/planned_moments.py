"""Moments of all paged transformations inside another, described for `plan`."""

import contextlib
import dataclasses
import itertools
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jaxtyping import PyTree

from paged_optax.analysis.program import LeafUpdate
from paged_optax.backend import memory, tiling
from paged_optax.backend.memory import layout_bytes
from paged_optax.backend.text import keystr
from paged_optax.backend.types import ArrayOrShape, Transformation, shape_dtype
from paged_optax.engine.paged_array import PagedArray
from paged_optax.engine.pages import MomentFormat, Pages
from paged_optax.engine.shards import Shards
from paged_optax.engine.sharing import sharing, uncut
from paged_optax.transform.context import Visitor, within
from paged_optax.transform.groups import LeafStreams, StreamedLeaf
from paged_optax.transform.init import NewState
from paged_optax.transform.paged_transformation import TracedUpdate
from paged_optax.transform.trees import StoredOrShape, Value, leaf_paths


@dataclasses.dataclass(frozen=True)
class Moment:
    """One leaf of a paged state, as planned."""

    path: str  # in the state
    shape: tuple[int, ...]  # on a mesh, of one device's shard
    dtype: str
    bytes: int  # on a mesh, of one device's shard
    on_host: bool
    pages: int  # 1 if it travels whole; 0 on the device
    page_bytes: int  # bytes of one page
    leaf: int  # a number common to moments that share pages
    # Most of its pages on the device. Two are read and written; a third is computed if
    # the moment is coded, or if the page is a whole leaf. On a GPU the only moment of a
    # parameter has three, or four if it travels both ways. The widest moment has one
    # more if narrower ones are converted to its dtype.
    in_flight: int = 2
    beside: int = 0  # bytes of its scales or codes, if they travel whole
    # Reason why a moment larger than a page cannot be paged on this backend, and the
    # way out; empty if it can.
    refused: str = ""
    bidirectional: bool = False  # one page of it is read while another is written
    small: bool = False  # it stays on the device because it is under `min_paged_size`
    elementwise: bool = True  # its update is element-wise
    uncoded: bool = False  # it is too small for the codec of its rule

    @property
    def stays(self) -> str:
        """Reason why it stays on the device, in a word; `"-"` if there is none."""
        return "cannot be paged" if self.refused else "small" if self.small else "-"


def recorded(tx: Transformation, params: optax.Params) -> list[NewState]:
    """Returns the new states of all paged transformations inside `tx`, on shapes.

    They may be chained, masked or injected. Raises `ValueError` if there is none.
    """
    states: list[NewState] = []

    def record(state: NewState) -> None:
        shapes = jax.tree.map(shape_dtype, state.params)
        states.append(dataclasses.replace(state, params=shapes))

    # A new function each time: JAX caches traces, context and all, as long as the
    # function lives.
    init = lambda params: tx.init(params)
    visitor = Visitor(init=record)
    with within(visitor=visitor), explicitly_typed(params) as shapes:
        jax.eval_shape(init, shapes)
    if not states:
        raise ValueError(
            "tx has no paged transformation inside: wrap one with paged(...), or use"
            " an alias such as paged_adamw."
        )
    return states


@contextlib.contextmanager
def explicitly_typed(params: PyTree) -> Generator[PyTree[jax.ShapeDtypeStruct]]:
    """Yields shapes of parameters on explicit axes, whose types have shardings."""
    leaves, structure = jax.tree.flatten(params)
    types = lambda mesh: (AxisType.Explicit,) * len(mesh.axis_names)
    explicit = lambda mesh: AbstractMesh(
        mesh.axis_sizes, mesh.axis_names, axis_types=types(mesh)
    )
    shards = map(Shards.of_array, leaves)
    divided = [x and NamedSharding(explicit(x.mesh), x.spec) for x in shards]
    typed = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for x, sharding in zip(leaves, divided, strict=True)
    ]
    mesh = next((x.mesh for x in divided if x is not None), None)
    with contextlib.ExitStack() as stack:
        if isinstance(mesh, AbstractMesh):
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield structure.unflatten(typed)


_WHOLE = (
    "its rows are no whole words, and before jax 0.11.2 a GPU takes it whole: install"
    " jax 0.11.2 or newer, or give all moments of the parameter one codec"
)


def planned_moments(state: NewState, extra: Mapping[str, PyTree]) -> list[Moment]:
    """Describes the placement and the pages of each moment; `extra`: of `update`."""
    paged, layout, on_device = state.paged, state.layout, state.on_device
    traced = paged.trace(layout, state.params, layout.shapes, state.params, extra)
    first = layout.parameters.num_leaves
    elementwise = {i - first for i in traced.analysis.elementwise}
    geometry = _geometry(state, traced)
    moments = []
    state_paths, _ = leaf_paths(layout.shapes)
    small = layout.small(paged.min_paged_size)
    for i, (path, leaf) in enumerate(zip(state_paths, layout.leaves, strict=True)):
        x, codec, shape = leaf.aval, leaf.codec, leaf.local
        full = _PlannedPages(i, uncut(x.shape).gpu, False, 3)
        number, pages, both, flying = geometry.get(i, full)
        stored = codec.stored(shape) if codec else jax.ShapeDtypeStruct(shape, x.dtype)
        parts = PagedArray.create(stored, pages, codec, on_host=not on_device[i]).parts
        preloaded = [part for part in parts if part.preloaded]
        reason = _WHOLE if parts[0].preloaded else pages.refused
        moments.append(
            Moment(
                path=keystr(path),
                shape=shape,
                dtype=str(x.dtype if codec is None else codec),
                bytes=layout_bytes(stored),
                on_host=not on_device[i],
                pages=0 if on_device[i] else max(1, pages.count),
                page_bytes=0 if on_device[i] else _page_bytes(pages, x),
                leaf=number,
                in_flight=flying if codec is None else 3,
                beside=sum(map(layout_bytes, preloaded)),
                refused=state.refused.get(i, "" if on_device[i] else reason),
                bidirectional=both and not on_device[i],
                small=leaf.size is not None and small[i],
                elementwise=i in elementwise,
                uncoded=i in layout.uncoded,
            )
        )
    return moments


class _PlannedPages(NamedTuple):
    leaf: int  # the position of the first moment that shares the pages
    pages: Pages
    bidirectional: bool
    in_flight: int  # most of them on the device


def _geometry(state: NewState, traced: TracedUpdate) -> dict[int, _PlannedPages]:
    """Returns the pages of moments, by their positions among the state's leaves.

    Leaves are grouped as `update` groups them, in a trace of their types.
    """
    on_device, leaves, analysis = state.on_device, state.layout.leaves, traced.analysis
    parameters = jax.tree.leaves(state.params)
    first, platform = len(parameters), memory.platform()
    formats = {
        i: MomentFormat(x.aval.dtype.itemsize, x.codec, not stays)
        for i, (x, stays) in enumerate(zip(leaves, on_device, strict=True))
        if x.codec or not stays
    }
    # The mesh may be fictitious: leaves on the device are not constrained to it.
    full = tuple(dataclasses.replace(x, shards=None) for x in leaves)
    layout = dataclasses.replace(state.layout, leaves=full)
    geometry: dict[int, _PlannedPages] = {}

    def moments_of(leaf: LeafUpdate) -> dict[int, MomentFormat]:
        numbers = {i - first for i in (*leaf.inputs, *leaf.outputs)}
        return {i: formats[i] for i in sorted(numbers & formats.keys())}

    def plan(leaf: LeafUpdate, members: Mapping[int, StreamedLeaf]) -> None:
        one, *_ = members.values()
        updates = [analysis.leaf_updates[i] for i in members]
        cut = state.paged.geometry(leaf, one.moments, one.shards, len(members))
        pages, offloaded = cut.on(platform), sum(x.on_host for x in one.moments)
        for part in sharing(pages, len(members)):
            both = pages.bidirectional(offloaded * len(updates[part]))
            # On a GPU the kernel of a single moment may keep a further page. With
            # several moments XLA:GPU never did (jax 0.10.2).
            single = offloaded == 1 and platform != "tpu"
            flying = (4 if both else 3) if single or not pages.count else 2
            number = min(moments_of(updates[part][0]))
            planned = _PlannedPages(number, pages, both, flying)
            for x in updates[part]:
                moments, owner = moments_of(x), x.param_index
                geometry.update(dict.fromkeys(moments, planned))
                dtype = None if owner is None else parameters[owner].dtype
                widest = _converted(x, moments, dtype)
                if pages.leaf_count == 1 < pages.count and widest is not None:
                    geometry[widest] = planned._replace(in_flight=flying + 1)

    def trace(stored: list[StoredOrShape], *extra: Sequence[Value]) -> None:
        gradients, *remaining = extra
        place = lambda x, stays: x if stays else jax.device_put(x, memory.HOST)
        placed = map(place, stored, on_device)
        args = [*gradients, *placed, *itertools.chain(*remaining)]
        for i in layout.counts:
            args[first + i] = [args[first + i]] * first
        moving = traced.constants, [True] * first
        _, groups = LeafStreams.create(analysis, layout, args, *moving).grouped()
        for group in groups:
            plan(*group)

    stored = [leaf.stored for leaf in leaves]
    jax.eval_shape(trace, stored, parameters, parameters, traced.extras)
    return geometry


def _converted(
    leaf: LeafUpdate, formats: Mapping[int, MomentFormat], dtype: np.dtype | None
) -> int | None:
    """Returns the moment of which XLA keeps one more page, for conversions, or None.

    It does for remainders, which join the bits of the parameter, and for moments of
    fewer bits than the parameter (H200, jax 0.10.2 and 0.12.0.1; v5e). The page has the
    size of the widest, in which nothing else fits. `dtype` is the parameter's.
    """
    offloaded = {i: x.itemsize for i, x in formats.items() if x.on_host}
    coded = any(x.codec for x in formats.values())
    if len({*offloaded.values()}) < 2 or dtype is None or coded:
        return None
    remainders = any(x.dtype in (jnp.int16, jnp.int8) for x in leaf.avals)
    if not remainders and dtype.itemsize <= min(offloaded.values()):
        return None
    return max(offloaded, key=lambda i: (offloaded[i], i))


def _page_bytes(pages: Pages, moment: ArrayOrShape) -> int:
    """Returns the bytes of a full page, as the transformation sees it."""
    if not pages.count:
        return layout_bytes(moment)
    order = tiling.view_layout(pages.leaf, len(pages.view), moment.dtype.itemsize)
    page = jax.ShapeDtypeStruct(pages.page(pages.size), moment.dtype)
    return layout_bytes(page, order)
