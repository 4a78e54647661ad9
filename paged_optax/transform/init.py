"""The init of a paged transformation."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.flat import refuse_effects, trace
from paged_optax.analysis.per_leaf import analyse
from paged_optax.analysis.program import Analysis, Evaluation, LeafUpdate
from paged_optax.backend.flax_variables import (
    as_pure,
    fixed_variables,
    optimizer_shardings,
    parameter_shardings,
    unflatten_like,
)
from paged_optax.backend.memory import (
    DEVICE,
    HOST,
    PINNED_HOST,
    donate_within_memory,
    memory_kinds,
    nbytes,
    on_host,
    replicated_sharding,
    resolve_host_memory_kind,
)
from paged_optax.backend.processes import compare, spans_processes
from paged_optax.backend.text import LARGE_BYTES, keystr, readable_bytes, track
from paged_optax.backend.types import (
    KeyPath,
    is_committed,
    is_traced,
    typed_automatic,
    varying_axes,
    with_automatic_axes,
    without_explicit_axes,
)
from paged_optax.backend.user_warnings import warn_user
from paged_optax.backend.validation import check_arrays
from paged_optax.engine.backend_check import check_backend
from paged_optax.engine.pages import MomentFormat
from paged_optax.engine.shards import Shards, constrained
from paged_optax.engine.stream import fill
from paged_optax.transform.checks import (
    refuse_devices,
    refuse_dtype,
    refuse_inside_paged,
)
from paged_optax.transform.context import current, within
from paged_optax.transform.paged_transformation import PagedTransformation
from paged_optax.transform.process_agreement import said_of
from paged_optax.transform.state_layout import StateLayout, resident
from paged_optax.transform.trees import (
    Parameter,
    StoredOrShape,
    Value,
    as_arrays,
    paths_of,
)


def init(paged: PagedTransformation, params: optax.Params) -> optax.OptState:
    """Makes the state of `inner`, its larger arrays in host memory."""
    refuse_inside_paged()
    if current().plain:
        return paged.inner.init(params)
    metadata = optimizer_shardings(params)
    pairs = zip(jax.tree.leaves(params), parameter_shardings(params), strict=True)
    shardings = {id(x): sharding for x, sharding in pairs if sharding is not None}
    visitor = current().visitor
    # JAX's caches keep traces for each context, and must not depend on who receives
    # the new state.
    quiet = visitor and dataclasses.replace(visitor, init=None)
    with within(shardings={**current().shardings, **shardings}, visitor=quiet):
        bare = paged.in_variables_of(params), as_pure(params)
        visit = visitor and visitor.init
        state = donate_within_memory(_new_state(*bare, metadata, visit))
    structure = jax.tree.structure(as_pure(params))
    if structure == jax.tree.structure(params):
        return state
    variables = jax.eval_shape(paged.inner.init, params)
    leaves = [
        unflatten_like(params, x) if jax.tree.structure(x) == structure else x
        for x in jax.tree.structure(as_pure(variables)).flatten_up_to(state)
    ]
    return fixed_variables(jax.tree.unflatten(jax.tree.structure(variables), leaves))


def _new_state(
    paged: PagedTransformation,
    params: optax.Params,
    metadata: Sequence[NamedSharding | None],
    visit: Callable[["NewState"], None] | None,
) -> optax.OptState:
    check_arrays("params", params, numbers=True)
    params = as_arrays(params)
    paths, leaves = paths_of(params)
    for path, leaf in zip(paths, leaves, strict=True):
        refuse_dtype(path, leaf)
    moments_of = paged.known.of_metadata(paths, leaves, metadata)
    seen = paged.known.of_arrays(paths, leaves, moments_of)
    # Over automatic axes the types of a traced step's arrays have no sharding: `update`
    # needs the ones that `init` sees.
    state = NewState.of(paged, params, moments_of)
    state.warn_of_factors()
    if visit is not None:
        visit(state)
    if not is_traced(leaves):
        if spans_processes(leaves):
            # Before JAX itself waits for the others, where scalars are placed.
            built = said_of(
                paged, params, state.layout.shapes, state.layout, state.analysis
            )
            compare("init of a paged transformation", built, once=False)
        with without_explicit_axes():
            new = tied(state.leaves(leaves), leaves)
        paged.known.remember(paths, leaves, moments_of, seen)
        return state.layout.build(new)
    if visit is None:
        paged.known.remember(paths, leaves, moments_of, seen)
    parameters = state.divided_parameters(leaves)
    types = [
        state.layout.types(i, None if owner is None else parameters[owner])
        for i, owner in enumerate(state.layout.owners)
    ]
    return state.layout.build(with_automatic_axes(state.leaves, (leaves,), types))


@dataclasses.dataclass(frozen=True, eq=False)
class NewState:
    """A new state: its leaves, their programs, and their placement.

    Attributes:
      paged: The paged transformation.
      params: The parameters.
      layout: The state's layout.
      moments_of: For each parameter the sharding of its moments by Flax's metadata, or
        None.
      stays: For each leaf whether it is on the device.
      refused: For each leaf that cannot be sliced in host memory the reason, by its
        position.
      analysis: The programs of the leaves.
      constants: Arrays that they close over, by number.
    """

    paged: PagedTransformation
    params: optax.Params
    layout: StateLayout
    moments_of: tuple[NamedSharding | None, ...]
    stays: list[bool]
    refused: Mapping[int, str]
    analysis: Analysis
    constants: Mapping[int, ArrayLike]

    @classmethod
    def of(
        cls,
        paged: PagedTransformation,
        params: optax.Params,
        moments_of: tuple[NamedSharding | None, ...],
    ) -> "NewState":
        """Traces `inner.init`, and chooses the leaves that stay on the device."""
        paths, leaves = paths_of(params)
        shards = [
            Shards.of(sharding, x.shape) or known
            for sharding, x, known in zip(
                moments_of, leaves, map(paged.known.find, paths, leaves), strict=True
            )
        ]
        closed, shapes = trace(paged.inner.init, params)
        refuse_effects(closed)
        state_paths, avals = paths_of(shapes)
        layout = paged.layout(params, shapes, shards)
        configuration = paged.configuration
        budget = configuration.budget(parameters=nbytes(leaves))
        stack_of = dict(current().stacks)
        # Moments of a parameter stay or go as one, and so do moments of a stack.
        owner_of = lambda n: (
            ("stack", stack_of[paths[n]]) if paths[n] in stack_of else n
        )
        owners = [None if n is None else owner_of(n) for n in layout.owners]
        small = layout.small(configuration.min_paged_size)
        stays = resident(layout.sizes, owners, budget, small)
        refused: dict[int, str] = {}
        if not all(stays):
            kind = resolve_host_memory_kind(configuration.host_memory_kind)
            if kind == PINNED_HOST:
                check_backend()
                refuse_devices(state_paths, stays, layout.shards)
                refused = {
                    i: reason
                    for i, stay in enumerate(stays)
                    if not stay and (reason := paged.refused(layout, i))
                }
                _warn_of_refused(state_paths, refused)
                stays = [stay or i in refused for i, stay in enumerate(stays)]
            else:
                stays = [True] * len(stays)
        unowned = [None] * len(leaves), [None] * len(avals)
        analysis, constants = analyse(closed, *unowned, str)
        return cls(
            paged, params, layout, moments_of, stays, refused, analysis, constants
        )

    @functools.cached_property
    def mesh(self) -> Mesh | AbstractMesh | None:
        """The mesh of the first divided parameter, or None."""
        return next((x.mesh for x in self.layout.parameter_shards if x), None)

    def divided_parameters(
        self, parameters: Sequence[Parameter]
    ) -> Sequence[Parameter]:
        """Returns parameters, or types with the sharding of their moments."""
        return [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) if place else x
            for x, place in zip(parameters, self.moments_of, strict=True)
        ]

    def warn_of_factors(self) -> None:
        """Warns of moments with other axes than their parameter's metadata."""
        paths, avals = paths_of(self.layout.shapes)
        for path, x, owner in zip(paths, avals, self.layout.owners, strict=True):
            place = None if owner is None else self.moments_of[owner]
            if place is None or x.size < 2 or len(x.shape) >= len(place.spec):
                continue
            if current().visitor is None:
                warn_user(
                    f"state{keystr(path)} of shape {x.shape} has other axes than its"
                    f" parameter, whose optimizer_sharding divides by {place.spec}: it"
                    " is on all devices, whole."
                )
            return

    def leaves(self, parameters: Sequence[Parameter]) -> list[StoredOrShape]:
        """Computes the state's leaves, as they are stored, each in its memory."""
        sizes = zip(self.layout.sizes, self.stays, strict=True)
        moving = sum(size or 0 for size, stay in sizes if not stay)
        traced = is_traced(parameters)
        shown = moving >= LARGE_BYTES and not traced
        evaluation = Evaluation(self.analysis, parameters, self.constants)
        try:
            of_leaves = []
            leaves = self.analysis.leaf_updates
            for leaf in track(leaves, "moments", len(leaves), shown):
                new = self._leaf(leaf, evaluation.inputs(leaf))
                of_leaves.append(jax.block_until_ready(new) if shown else new)
            divided = self.divided_parameters(parameters)
            return [
                self._placed(position, value, divided)
                for position, value in enumerate(evaluation.results(of_leaves))
            ]
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error):  # JAX has no type of its own for it.
                error.add_note(
                    f"The moments take {readable_bytes(moving)} of host memory in all;"
                    " plan(tx, params) lists them. codec= stores them in fewer bytes."
                )
            raise

    def _leaf(self, leaf: LeafUpdate, inputs: list[Value]) -> list[Value]:
        """Runs the program of one leaf, page by page if it is on the host or coded."""
        (position,) = leaf.outputs
        codec, divided = self.layout.codecs[position], self.layout.shards[position]
        stays, dtype = self.stays[position], self.layout.avals[position].dtype
        if stays and codec is None and divided is None:
            return leaf.program(inputs)
        if current().visitor is not None:
            # Pages take long to trace, and only types matter.
            stored = self.layout.stored(position)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stored)
            return [zeros if stays else jax.device_put(zeros, HOST)]
        # Page by page: 8 bytes a parameter must never exist on the device, not even for
        # a moment.
        owner = self.layout.owners[position]
        place = None if owner is None else self.moments_of[owner]
        if place is not None and not is_traced(inputs):
            divide = lambda x: jax.device_put(x, place)
            inputs = [divide(x) if x.shape == leaf.shape else x for x in inputs]
        if divided is None and not is_traced(inputs):
            # Pages are written into a buffer whose type names no mesh.
            inputs = [typed_automatic(x) for x in inputs]
        formats = [MomentFormat(dtype.itemsize, codec, not stays)]
        new = fill(
            tuple(inputs),
            jnp.zeros(2, jnp.uint32) if codec and codec.draws else None,
            program=leaf.program,
            geometry=self.paged.geometry(leaf, formats, divided),
            dtype=dtype,
            codec=codec,
            host=not stays,
            shards=divided,
            axes=varying_axes(leaf.avals),
        )
        return [new]

    def _placed(
        self, position: int, value: Value, parameters: Sequence[Parameter]
    ) -> StoredOrShape:
        """Places a leaf as its parameter, in its own memory.

        Leaves of no parameter are replicated over the parameters' mesh.
        """
        layout, owner = self.layout, self.layout.owners[position]
        shards, host = layout.shards[position], not self.stays[position]
        like = None if owner is None else parameters[owner]
        known = is_committed(like) or isinstance(like, jax.ShapeDtypeStruct)
        if layout.codecs[position] is None:
            value = jnp.asarray(value, layout.avals[position].dtype)
            if is_traced(value) and not on_host(value):
                # XLA would replicate what it can compute anywhere, such as zeros.
                value = constrained(value, shards)

        def placed(x: Array) -> Array:
            sharding = None
            if is_traced((x, like)):
                pass  # its type has its placement
            elif known and like is not None and like.shape == x.shape:
                sharding = like.sharding
            elif shards is None and isinstance(self.mesh, Mesh):
                sharding = NamedSharding(self.mesh, PartitionSpec())
            elif is_committed(like) and len(like.sharding.device_set) == 1:
                # Coded moments have other shapes.
                sharding = replicated_sharding([like])
            if sharding is not None:
                # A parameter may be on the host, as an offloaded layer is.
                if host or (like is not None and on_host(like)):
                    kind = PINNED_HOST if host else memory_kinds()[0]
                    sharding = sharding.with_memory_kind(kind)
                return jax.device_put(x, sharding)
            # The default device, and the memory alone.
            if on_host(x) != host:
                return jax.device_put(x, HOST if host else DEVICE)
            return x

        return jax.tree.map(placed, value)


def _warn_of_refused(paths: Sequence[KeyPath], refused: Mapping[int, str]) -> None:
    """Warns of moments that stay on the device; `plan` lists them itself."""
    if not refused or current().visitor is not None:
        return
    first, reason = next(iter(refused.items()))
    others = f" and {len(refused) - 1} other moments" if len(refused) > 1 else ""
    warn_user(
        f"state{keystr(paths[first])}{others} cannot be paged, and are in device"
        f" memory: {reason}."
    )


def tied(state: PyTree, parameters: Sequence[object]) -> PyTree:
    """Commits a new state to the devices of its host arrays, and of its parameters.

    A program that uses host arrays, or committed ones, returns committed arrays. If a
    step count was not committed before, `jax.jit` would compile the next step again. A
    traced state, as of parameters that a `jax.jit` closes over, is committed when its
    program runs.
    """
    leaves = jax.tree.leaves(state)
    if is_traced((leaves, parameters)):
        return state
    tying = [*filter(is_committed, parameters), *filter(on_host, leaves)]
    place = replicated_sharding(tying)
    if place is None or any(x.sharding.device_set != place.device_set for x in tying):
        return state
    tie = lambda x: x if is_committed(x) else jax.device_put(x, place)
    return jax.tree.map(tie, state)
