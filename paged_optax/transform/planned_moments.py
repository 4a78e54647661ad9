"""Moments of all paged transformations inside another, described for `plan`."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jaxtyping import PyTree

from paged_optax.analysis.program import Evaluation, LeafUpdate
from paged_optax.backend import memory, tiling
from paged_optax.backend.memory import layout_bytes
from paged_optax.backend.text import keystr
from paged_optax.backend.types import ArrayOrShape, Transformation, shape_dtype
from paged_optax.engine.paged_array import PagedArray
from paged_optax.engine.pages import MomentFormat, Pages
from paged_optax.engine.shards import Shards
from paged_optax.engine.sharing import sharing, uncut
from paged_optax.transform.codec_rules import coded_moments
from paged_optax.transform.context import Visitor, within
from paged_optax.transform.groups import LeafStreams
from paged_optax.transform.init import NewState
from paged_optax.transform.paged_transformation import PagedTransformation
from paged_optax.transform.trees import (
    StoredOrShape,
    Value,
    arrays_and_rest,
    leaf_paths,
)


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


#: Describes the moments of a paged transformation, given `update`'s extra arguments.
Describe = Callable[[Mapping[str, PyTree]], list[Moment]]


def recorded(
    tx: Transformation, params: optax.Params
) -> list[tuple[PagedTransformation, Describe]]:
    """Returns every paged transformation inside `tx`: chained, masked, injected.

    With each is a function that describes its moments. `tx` is initialised on shapes
    alone. Raises `ValueError` if nothing in it is paged.
    """
    calls: list[tuple[PagedTransformation, Describe]] = []

    def record(state: NewState) -> None:
        shapes = jax.tree.map(shape_dtype, state.params)
        describe = functools.partial(planned_moments, state, shapes)
        calls.append((state.paged, describe))

    # A new function each time: JAX caches traces, context and all, as long as the
    # function lives.
    init = lambda params: tx.init(params)
    visitor = Visitor(init=record)
    with within(visitor=visitor), explicitly_typed(params) as shapes:
        jax.eval_shape(init, shapes)
    if not calls:
        raise ValueError(
            "tx has no paged transformation inside: wrap one with paged(...), or use"
            " an alias such as paged_adamw."
        )
    return calls


@contextlib.contextmanager
def explicitly_typed(params: PyTree) -> Generator[PyTree[jax.ShapeDtypeStruct]]:
    """Yields shapes of parameters on explicit axes, whose types have shardings."""
    leaves, structure = jax.tree.flatten(params)
    divided = [x and x.sharding for x in map(Shards.of_array, leaves)]
    explicit = lambda mesh: AbstractMesh(
        mesh.axis_sizes,
        mesh.axis_names,
        axis_types=(AxisType.Explicit,) * len(mesh.axis_names),
    )
    places = [x and NamedSharding(explicit(x.mesh), x.spec) for x in divided]
    meshes = [explicit(x.mesh) for x in divided if x is not None]
    typed = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        for x, place in zip(leaves, places, strict=True)
    ]
    on_mesh = (
        jax.sharding.use_abstract_mesh(meshes[0])
        if meshes
        else contextlib.nullcontext()
    )
    with on_mesh:
        yield structure.unflatten(typed)


_WHOLE = (
    "its rows are no whole words, and before jax 0.11.2 a GPU takes it whole: install"
    " jax 0.11.2 or newer, or give all moments of the parameter one codec"
)


def planned_moments(
    state: NewState, params: PyTree[jax.ShapeDtypeStruct], extra: Mapping[str, PyTree]
) -> list[Moment]:
    """Describes the placement and the pages of each moment; `extra`: of `update`."""
    paged, layout, stays = state.paged, state.layout, state.stays
    groups, elementwise = _grouped(state, params, extra)
    geometry, index = _geometry(paged, groups, memory.platform())
    moments = []
    state_paths, _ = leaf_paths(layout.shapes)
    small = layout.small(paged.min_paged_size)
    coded = coded_moments(paged.rules, layout.shapes, params, layout.param_indices)
    for i, (path, leaf) in enumerate(zip(state_paths, layout.leaves, strict=True)):
        x, codec, shape = leaf.aval, leaf.codec, leaf.local
        unstreamed = index + i, uncut(x.shape).gpu, False, 3
        number, pages, both, flying = geometry.get(i, unstreamed)
        stored = codec.stored(shape) if codec else jax.ShapeDtypeStruct(shape, x.dtype)
        parts = PagedArray.create(stored, pages, codec, on_host=not stays[i]).parts
        preloaded = [part for part in parts if part.preloaded]
        reason = _WHOLE if parts[0].preloaded else pages.refused
        moments.append(
            Moment(
                path=keystr(path),
                shape=shape,
                dtype=str(x.dtype if codec is None else codec),
                bytes=layout_bytes(stored),
                on_host=not stays[i],
                pages=0 if stays[i] else max(1, pages.count),
                page_bytes=0 if stays[i] else _page_bytes(pages, x),
                leaf=number,
                in_flight=flying if codec is None else 3,
                beside=sum(map(layout_bytes, preloaded)),
                refused=state.refused.get(i, "" if stays[i] else reason),
                bidirectional=both and not stays[i],
                small=leaf.size is not None and small[i],
                elementwise=i in elementwise,
                uncoded=codec is None and (y := coded[i]) is not None and y.small,
            )
        )
    return moments


def _grouped(
    state: NewState, params: PyTree[jax.ShapeDtypeStruct], extra: Mapping[str, PyTree]
) -> tuple[list[list["_StreamedMoments"]], set[int]]:
    """Groups moments as `update` does, and returns the element-wise ones' positions."""
    layout, stays, parameters = state.layout, state.stays, jax.tree.leaves(params)
    first, leaves = len(parameters), layout.leaves
    extras, static = arrays_and_rest({"extra_args": extra})
    analysis, constants = state.paged.analyse(
        params, layout.shapes, layout.param_indices, params, extras, static
    )
    groups: list[list[_StreamedMoments]] = []

    def streamed(leaf: LeafUpdate, shards: Shards | None) -> _StreamedMoments:
        numbers = sorted({i - first for i in (*leaf.inputs, *leaf.outputs)})
        formats = {
            i: MomentFormat(
                leaves[i].aval.dtype.itemsize, leaves[i].codec, not stays[i]
            )
            for i in numbers
            if 0 <= i < len(leaves) and (leaves[i].codec or not stays[i])
        }
        dtype = None if leaf.param_index is None else parameters[leaf.param_index].dtype
        return _StreamedMoments(leaf, formats, shards, dtype)

    def group(stored: list[StoredOrShape], *others: Sequence[Value]) -> None:
        gradients, *remaining = others
        place = lambda x, stays: x if stays else jax.device_put(x, memory.HOST)
        args = [*gradients, *map(place, stored, stays), *itertools.chain(*remaining)]
        counts = {first + i: [args[first + i]] * first for i in layout.counts}
        moves = dict.fromkeys([None, *range(first)], True)
        streams = LeafStreams(analysis, layout, args, counts, [True] * first, moves)
        _, grouped = streams.grouped(Evaluation(analysis, args, constants, counts))
        groups.extend(
            [streamed(analysis.leaf_updates[i], x.shards) for i, x in members.items()]
            for _, members in grouped
        )

    stored = [leaf.stored for leaf in leaves]
    jax.eval_shape(group, stored, parameters, parameters, extras)
    return groups, {i - first for i in analysis.elementwise}


class _StreamedMoments(NamedTuple):
    """A leaf's program, and its streamed moments by their positions in the state."""

    leaf: LeafUpdate
    formats: dict[int, MomentFormat]
    shards: Shards | None
    dtype: np.dtype | None  # of its parameter

    @property
    def converted(self) -> int | None:
        """Position of a moment of which XLA keeps one more page, for conversions.

        It does for remainders, which join the bits of the parameter, and for moments of
        fewer bits than the parameter (H200, jax 0.10.2 and 0.12.0.1; v5e). The page has
        the size of the widest, in which nothing else fits.
        """
        offloaded = {i: x.itemsize for i, x in self.formats.items() if x.on_host}
        coded = any(x.codec for x in self.formats.values())
        if len({*offloaded.values()}) < 2 or self.dtype is None or coded:
            return None
        remainders = any(x.dtype in (jnp.int16, jnp.int8) for x in self.leaf.avals)
        if not remainders and self.dtype.itemsize <= min(offloaded.values()):
            return None
        return max(offloaded, key=lambda i: (offloaded[i], i))


def _geometry(
    paged: PagedTransformation,
    groups: Iterable[Sequence[_StreamedMoments]],
    platform: str,
) -> tuple[dict[int, tuple[int, Pages, bool, int]], int]:
    """Returns the pages of moments, by their positions among the state's leaves.

    Each has the number common to moments that share pages, its pages, whether they
    travel both ways, and the most of them on the device. Last is the count of numbers.
    """
    geometry: dict[int, tuple[int, Pages, bool, int]] = {}
    index = 0
    for group in groups:
        leaf, formats, shards, _ = group[0]
        cut = paged.geometry(leaf, [*formats.values()], shards, len(group))
        pages, offloaded = cut.on(platform), sum(x.on_host for x in formats.values())
        for part in sharing(pages, len(group)):
            both = pages.bidirectional(offloaded * len(group[part]))
            # On a GPU the kernel of a single moment may keep a further page. With
            # several moments XLA:GPU never did (jax 0.10.2).
            single = offloaded == 1 and platform != "tpu"
            flying = (4 if both else 3) if single or not pages.count else 2
            for item in group[part]:
                planned = index, pages, both, flying
                geometry.update(dict.fromkeys(item.formats, planned))
                widest = item.converted
                if pages.leaf_count == 1 < pages.count and widest is not None:
                    geometry[widest] = index, pages, both, flying + 1
            index += 1
    return geometry, index


def _page_bytes(pages: Pages, moment: ArrayOrShape) -> int:
    """Returns the bytes of a full page, as the transformation sees it."""
    if not pages.count:
        return layout_bytes(moment)
    order = tiling.view_layout(pages.leaf, len(pages.view), moment.dtype.itemsize)
    page = jax.ShapeDtypeStruct(pages.page(pages.size), moment.dtype)
    return layout_bytes(page, order)
