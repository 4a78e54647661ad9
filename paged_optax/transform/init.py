"""The state that a paged transformation makes."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from paged_optax.analysis.flat import refuse_effects, trace
from paged_optax.analysis.program import Analysis, LeafUpdate
from paged_optax.analysis.split import analyse
from paged_optax.backend import memory
from paged_optax.backend.memory import (
    PINNED_HOST,
    donate_within_memory,
    nbytes,
    resolve_host_memory_kind,
)
from paged_optax.backend.meshes import (
    shape_dtype,
    varying_axes,
    with_automatic_axes,
    without_explicit_axes,
)
from paged_optax.backend.processes import compare, spans_processes
from paged_optax.backend.text import LARGE_BYTES, keystr, readable_bytes, track
from paged_optax.backend.types import KeyPath, is_traced
from paged_optax.backend.variables import (
    as_pure,
    fixed_variables,
    optimizer_shardings,
    parameter_shardings,
    unflatten_like,
)
from paged_optax.engine.backend_check import check_backend
from paged_optax.engine.pages import Storage
from paged_optax.engine.shards import Shards, constrained
from paged_optax.engine.stream import fill
from paged_optax.transform.agreement import said_of
from paged_optax.transform.checks import (
    refuse_devices,
    refuse_dtype,
    refuse_inside_paged,
)
from paged_optax.transform.context import current, within
from paged_optax.transform.paged_transformation import Pager
from paged_optax.transform.placing import place, tied
from paged_optax.transform.planned_moments import planned_moments
from paged_optax.transform.state_layout import Layout, resident
from paged_optax.transform.trees import Parameter, Stored, Value, as_arrays, paths_of


def init(pager: Pager, params: optax.Params) -> optax.OptState:
    """Makes the state of `inner`, its larger arrays in host memory."""
    refuse_inside_paged()
    record = current().record
    # JAX's caches keep what is traced for each context: who records is no part of it.
    with contextlib.nullcontext() if record is None else within(record=None):
        asked, own = optimizer_shardings(params), parameter_shardings(params)
        pairs = zip(jax.tree.leaves(params), own, strict=True)
        given = {id(x): sharding for x, sharding in pairs if sharding is not None}
        with within(given={**current().given, **given}):
            made = donate_within_memory(_made(pager, as_pure(params), asked, record))
    structure = jax.tree.structure(as_pure(params))
    if structure == jax.tree.structure(params):
        return made
    own = jax.eval_shape(pager.inner.init, params)
    leaves = [
        unflatten_like(params, x) if jax.tree.structure(x) == structure else x
        for x in jax.tree.structure(as_pure(own)).flatten_up_to(made)
    ]
    return fixed_variables(jax.tree.unflatten(jax.tree.structure(own), leaves))


def _made(
    pager: Pager,
    params: optax.Params,
    asked: Sequence[NamedSharding | None],
    record: Callable[..., None] | None,
) -> optax.OptState:
    params = as_arrays(params)
    paths, leaves = paths_of(params)
    for path, leaf in zip(paths, leaves, strict=True):
        refuse_dtype(path, leaf)
    told = pager.known.told_by(paths, leaves, asked)
    said = pager.known.said_by(paths, leaves, told)
    making = _Making.of(pager, params, told)
    making.tell_of_factors()
    if record is not None:
        abstract_params = jax.tree.map(shape_dtype, params)
        record(
            pager.configuration,
            lambda extra: planned_moments(
                pager,
                abstract_params,
                making.shapes,
                making.stays,
                making.refused,
                making.shards,
                extra,
            ),
        )
    else:
        pager.known.remember(paths, leaves, told)
    if not is_traced(leaves):
        if spans_processes(leaves):
            # Before JAX itself waits for the others, where scalars are placed.
            given = params, making.shapes, making.shards, making.analysis
            alike = said_of(pager, *given)
            compare("init of a paged transformation", alike, once=False)
        with without_explicit_axes():
            made = tied(making.leaves(leaves), leaves)
        pager.known.learn(said)
        return making.layout.build(made)
    if record is None:
        pager.known.learn(said)
    beside = making.beside(leaves)
    types = [
        making.layout.types(i, None if owner is None else beside[owner])
        for i, owner in enumerate(making.owners)
    ]
    return making.layout.build(with_automatic_axes(making.leaves, (leaves,), types))


@dataclasses.dataclass(frozen=True, eq=False)
class _Making:
    """A new state: its leaves, the programs that make them, and where they go.

    Attributes:
      pager: The paged transformation.
      shapes: The shapes and dtypes of the state of `inner`.
      layout: How the state is stored.
      shards: For each parameter how its moments are divided, or None.
      told: For each parameter how Flax says so of them, or None.
      stays: For each leaf whether it is on the device.
      refused: For each leaf that stays because it cannot be sliced in host memory the
        reason, by its position.
      analysis: The programs that make the leaves.
    """

    pager: Pager
    shapes: PyTree[jax.ShapeDtypeStruct]
    layout: Layout
    shards: tuple[Shards | None, ...]
    told: tuple[NamedSharding | None, ...]
    stays: list[bool]
    refused: Mapping[int, str]
    analysis: Analysis

    @classmethod
    def of(
        cls,
        pager: Pager,
        params: optax.Params,
        told: tuple[NamedSharding | None, ...],
    ) -> "_Making":
        """Traces `inner.init`, and decides what stays on the device."""
        paths, leaves = paths_of(params)
        shards = tuple(
            Shards.of(sharding, x.shape) or own
            for sharding, x, own in zip(
                told, leaves, pager.known.find(paths, leaves), strict=True
            )
        )
        closed, shapes = trace(pager.inner.init, params)
        refuse_effects(closed)
        state_paths, avals = paths_of(shapes)
        layout = pager.layout(params, shapes, shards)
        configuration = pager.configuration
        budget = configuration.budget(parameters=nbytes(leaves))
        stays = resident(
            layout.sizes(),
            layout.owners,
            budget,
            layout.small(configuration.min_paged_size),
        )
        refused: dict[int, str] = {}
        if not all(stays):
            kind = resolve_host_memory_kind(configuration.host_memory_kind)
            if kind == PINNED_HOST:
                check_backend()
                refuse_devices(state_paths, stays, layout.shards)
                refused = {
                    i: reason
                    for i, stay in enumerate(stays)
                    if not stay and (reason := pager.refused(layout, i))
                }
                _tell_of_refused(state_paths, refused)
                stays = [stay or i in refused for i, stay in enumerate(stays)]
            else:
                stays = [True] * len(stays)
        analysis = analyse(closed, [None] * len(leaves), [None] * len(avals), str)
        return cls(pager, shapes, layout, shards, told, stays, refused, analysis)

    @property
    def owners(self) -> Sequence[int | None]:
        """For each leaf the parameter that it belongs to, or None."""
        return self.layout.owners

    @functools.cached_property
    def mesh(self) -> Mesh | AbstractMesh | None:
        """The mesh that parameters are divided over; None if none is."""
        return next((shards.mesh for shards in self.shards if shards), None)

    def beside(self, parameters: Sequence[Parameter]) -> Sequence[Parameter]:
        """The parameters, or types divided as their moments are, if that is told."""
        return [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=told) if told else x
            for x, told in zip(parameters, self.told, strict=True)
        ]

    def tell_of_factors(self) -> None:
        """Warns of what has other axes than those that Flax says how to divide."""
        paths, avals = paths_of(self.shapes)
        for path, x, owner in zip(paths, avals, self.owners, strict=True):
            told = None if owner is None else self.told[owner]
            if told is None or x.size < 2 or len(x.shape) >= len(told.spec):
                continue
            if not current().types_only:
                warnings.warn(
                    f"state{keystr(path)} of shape {x.shape} has other axes than its"
                    f" parameter, whose optimizer_sharding divides by {told.spec}: it"
                    " is on all devices, whole.",
                    stacklevel=3,
                )
            return

    def leaves(self, parameters: Sequence[Parameter]) -> list[Stored]:
        """Makes the state's leaves, as they are stored, each in its memory."""
        sizes = zip(self.layout.sizes(), self.stays, strict=True)
        moving = sum(size or 0 for size, stay in sizes if not stay)
        traced = is_traced(parameters)
        shown = moving >= LARGE_BYTES and not traced

        def run(
            leaves: Sequence[tuple[LeafUpdate, list[Value]]],
        ) -> Iterator[list[Value]]:
            for leaf, inputs in track(leaves, "moments", len(leaves), shown):
                made = self._leaf(leaf, inputs)
                yield jax.block_until_ready(made) if shown else made

        try:
            values = self.analysis.evaluate(parameters, run)
            beside = self.beside(parameters)
            return [
                self._placed(position, value, beside)
                for position, value in enumerate(values)
            ]
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error):  # JAX has no type of its own for it.
                error.add_note(
                    f"The moments take {readable_bytes(moving)} of host memory in all;"
                    " plan(tx, params) lists them. codec= stores them in fewer bytes."
                )
            raise

    def _leaf(self, leaf: LeafUpdate, inputs: list[Value]) -> list[Value]:
        """Runs the program of one leaf: page by page if it moves, or is coded."""
        (position,) = leaf.outputs
        codec, divided = self.layout.codecs[position], self.layout.shards[position]
        stays, dtype = self.stays[position], self.layout.avals[position].dtype
        if stays and codec is None and divided is None:
            return leaf.program(inputs)
        if current().types_only:
            stored = self.layout.stored(position)
            made = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stored)
            return [made if stays else jax.device_put(made, memory.HOST)]
        owner = self.owners[position]
        if owner is not None and self.told[owner] and not is_traced(inputs):
            divide = lambda x: jax.device_put(x, self.told[owner])
            inputs = [divide(x) if x.shape == leaf.shape else x for x in inputs]
        storage = [Storage(dtype.itemsize, codec, not stays)]
        made = fill(
            tuple(inputs),
            jnp.zeros(2, jnp.uint32) if codec and codec.draws else None,
            program=leaf.program,
            geometry=self.pager.geometry(leaf, storage, divided),
            dtype=dtype,
            codec=codec,
            host=not stays,
            shards=divided,
            axes=varying_axes(leaf.avals),
        )
        return [made]

    def _placed(
        self, position: int, value: Value, parameters: Sequence[Parameter]
    ) -> Stored:
        """Puts a leaf beside its parameter, in its own memory."""
        layout, owner = self.layout, self.owners[position]
        if layout.codecs[position] is None:
            value = jnp.asarray(value, layout.avals[position].dtype)
            if is_traced(value) and not memory.on_host(value):
                value = constrained(value, layout.shards[position])
        return place(
            value,
            not self.stays[position],
            None if owner is None else parameters[owner],
            None if layout.shards[position] else self.mesh,
        )


def _tell_of_refused(paths: Sequence[KeyPath], refused: Mapping[int, str]) -> None:
    """Warns of moments that stay on the device; `plan` says so itself."""
    if not refused or current().types_only:
        return
    first, reason = next(iter(refused.items()))
    others = f" and {len(refused) - 1} other moments" if len(refused) > 1 else ""
    warnings.warn(
        f"state{keystr(paths[first])}{others} cannot be paged, and are in device"
        f" memory: {reason}.",
        stacklevel=3,
    )
