"""The update of a paged transformation.

`update` checks its arguments, traces the transformation as one program a leaf, and
streams groups of leaves (`paged_optax.transform.groups`). The results replace the
gradients and the arrays of the state.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.program import Analysis, Evaluation
from paged_optax.backend.compiler_options import warn_of_options
from paged_optax.backend.flax_variables import as_pure, unflatten_like
from paged_optax.backend.memory import donate_within_memory, on_host
from paged_optax.backend.processes import Values, compare, spans_processes
from paged_optax.backend.types import (
    explicit_mesh,
    in_shard_map,
    is_traced,
    varying,
    varying_axes,
    with_automatic_axes,
)
from paged_optax.engine.backend_check import check_backend
from paged_optax.engine.shards import UNSHARDED
from paged_optax.engine.stream import stream
from paged_optax.transform.checks import (
    check_arguments,
    check_equal_values,
    check_not_differentiated,
    check_not_nested,
    check_own_counts,
    note_elsewhere,
    warn_of_multi_steps,
)
from paged_optax.transform.context import Gate, all_gates, any_gate, current, without
from paged_optax.transform.groups import LeafStreams
from paged_optax.transform.paged_transformation import PagedTransformation
from paged_optax.transform.state_layout import StateLayout, reshaped_like
from paged_optax.transform.trees import (
    Static,
    StoredOrShape,
    Traceable,
    arrays_and_rest,
    as_arrays,
)


@dataclasses.dataclass(frozen=True, eq=False)
class PendingUpdate:
    """Arguments of an update, without Flax's variables, and its state's layout."""

    paged: PagedTransformation
    gradients: PyTree
    state: PyTree
    params: PyTree | None
    extra_args: Mapping[str, PyTree]
    layout: StateLayout
    leaves: list[StoredOrShape]  # the state's, as they are stored

    def moved(self) -> str:
        """Returns the warning text for moments that left the host, or ""."""
        return self.paged.moved(self.layout, self.leaves)

    def agreement(self, analysis: Analysis | None = None) -> Values:
        """Returns the facts on which all processes must agree."""
        if analysis is None:
            extra = {"restart": False, "extra_args": self.extra_args}
            analysis, _ = self.trace(*arrays_and_rest(extra))
        like = self.gradients if self.params is None else self.params
        return self.paged.agreement(like, self.state, self.layout, analysis)

    def trace(
        self, extras: Sequence[Traceable], static: Static
    ) -> tuple[Analysis, dict[int, ArrayLike]]:
        """Traces the update; returns its programs, and the arrays they close over."""
        layout, seen = self.layout, self.layout.seen(self.leaves)
        analysis, constants = self.paged.analyse(
            self.gradients, seen, layout.param_indices, self.params, extras, static
        )
        if layout.counts:
            first = layout.parameters.num_leaves
            counts = {first + index for index in layout.counts}
            check_own_counts(analysis, counts, seen, first)
        return analysis, constants

    @property
    def buffers(self) -> list[StoredOrShape]:
        """The gradients, and the state's leaves: the results overwrite them."""
        return [*jax.tree.leaves(self.gradients), *self.leaves]


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced update, compared by value."""

    analysis: Analysis
    layout: StateLayout
    gating: Static  # distinct gates, without traced values
    gate_numbers: tuple[int, ...]  # of each gradient's gate, and of the restart


def update(
    paged: PagedTransformation,
    jitted: Callable[..., list[Array]],
    /,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    *,
    active: PyTree = None,
    **extra_args: object,
) -> tuple[optax.Updates, optax.OptState]:
    """Streams moments through the device; `active`: see `paged`.

    `jitted` is `stream_update` as a program of its own, for concrete arrays. Updates
    are divided over a mesh as the parameters are, or without parameters as the
    gradients are.
    """
    check_not_nested()
    context = current()
    if context.plain:
        return paged.inner.update(updates, state, params, **extra_args)
    # `nnx.Optimizer` makes the state in variables, and calls with bare arrays.
    bare = paged
    paged = bare.in_variables_of(updates)
    if paged is bare:
        extra_args = as_pure(extra_args)
    gradients, moments, params = as_pure(updates), as_pure(state), as_pure(params)
    check_arguments(gradients, moments, params)
    visit = context.visitor and context.visitor.update
    if visit is None:
        paged.warn_of_mistyped(moments)
        if params is not None:
            check_equal_values(gradients, params)
    args = as_arrays(gradients), moments, as_arrays(params)
    layout, leaves = paged.take_apart(*args)
    pending = PendingUpdate(paged, *args, extra_args, layout, leaves)
    if visit is not None:
        new = visit(pending)
        return unflatten_like(updates, new[0]), new[1]
    gates, restart = all_gates(as_pure(active), gradients), context.restart
    # One tracer may be the gate of all gradients. If it were passed once for each,
    # `jax.jit` would make distinct tracers of it.
    distinct = {id(gate): gate for gate in (*gates, restart)}
    numbers = dict(zip(distinct, range(len(distinct)), strict=True))
    gate_numbers = tuple(numbers[id(gate)] for gate in (*gates, restart))
    # Known gates are part of the program; the others are its arguments.
    traced_gates, gating = arrays_and_rest([*distinct.values()])
    # A restart decides which moments move, and is traced too: it is among both.
    extra = {"restart": restart, "extra_args": extra_args}
    extras, static = arrays_and_rest(extra)
    # Traced at each call, for `inner` may read more than its arguments.
    analysis, constants = pending.trace(extras, static)
    first = layout.parameters.num_leaves
    # Values that vary in a moment's place may make others vary: repeat.
    while in_shard_map() and (
        new := _as_results(analysis, pending.buffers, gates, restart)
    ):
        varied = unflatten_like(pending.gradients, new[:first])
        pending = dataclasses.replace(pending, gradients=varied, leaves=new[first:])
        analysis, constants = pending.trace(extras, static)
    if spans_processes((gradients, moments, params)):
        # A program that one process alone has would block the devices of all.
        compare("update of a paged transformation", pending.agreement(analysis))
    args = pending.buffers, pending.params, extras, traced_gates, constants
    traced = Traced(analysis, layout, gating, gate_numbers)
    # Outside a `jax.jit` the update is a program of its own, compiled once for all
    # equal `Traced`.
    run = jitted
    if is_traced(args):
        warn_of_options(pending.leaves)
        warn_of_multi_steps(pending.leaves)
        run = functools.partial(stream_update, bare)
    try:
        new = run(*args, traced=traced)
    except ValueError as error:
        note_elsewhere(error)
        raise
    # A `jax.jit` pairs donated buffers by shape alone, across memories too.
    new = donate_within_memory(new)
    arrays = map(reshaped_like, jax.tree.leaves(new[first:]), jax.tree.leaves(moments))
    return unflatten_like(updates, new[:first]), unflatten_like(state, [*arrays])


def stream_update(
    paged: PagedTransformation,
    buffers: list[StoredOrShape],
    params: optax.Params | None,
    extras: Sequence[Traceable],
    traced_gates: Sequence[Traceable],
    constants: Mapping[int, ArrayLike],
    *,
    traced: Traced,
) -> list[Array]:
    """Computes the updates and the new state's arrays.

    `buffers` has the gradients, and the state's leaves as they are stored: the results
    overwrite them, in their order. `constants` are arrays that the programs close over.
    """
    layout, first = traced.layout, traced.layout.parameters.num_leaves
    trees = buffers, params, extras, traced_gates, constants
    if explicit_mesh(trees) is not None:
        # The programs were traced without axes: on explicit axes their equations would
        # return other types than their neighbours expect.
        updates = buffers[:first] if params is None else params
        like = jax.tree.leaves((updates, buffers[first:]))
        run = functools.partial(stream_update, paged, traced=traced)
        return with_automatic_axes(run, trees, like)
    if not current().layerwise and (moved := paged.moved(layout, buffers[first:])):
        paged.tell(moved)
    args = [*buffers, *jax.tree.leaves((params, extras))]
    # A count of each parameter is traced as one; see `Evaluation`.
    counts = {first + index: buffers[first + index] for index in layout.counts}
    args = [counts[i][0] if i in counts else x for i, x in enumerate(args)]
    if any(map(on_host, args)):
        # Some versions of XLA:GPU read wrong pages without an error.
        check_backend()
    distinct = traced.gating.merge(traced_gates)
    *gates, restart = [distinct[i] for i in traced.gate_numbers]
    # On a restart a moment starts again even if its parameter's update is skipped.
    moves = [any_gate([gate, restart]) for gate in gates]
    moves_of = {None: any_gate(moves) if moves else True, **dict(enumerate(moves))}
    streams = LeafStreams(traced.analysis, layout, args, counts, gates, moves_of)
    evaluation = Evaluation(traced.analysis, args, constants, counts)
    of_leaves, groups = streams.grouped(evaluation)
    for leaf, members in groups:
        one, *_ = members.values()
        gate = moves_of[leaf.param_index]
        leaves = [
            check_not_differentiated(x.arrays) if one.on_host else tuple(x.arrays)
            for x in members.values()
        ]
        random_bits = streams.random_bits(leaf)
        geometry = paged.geometry(leaf, one.moments, one.shards, len(members))
        unknown = one.shards is None and one.program.program.elementwise
        if unknown and leaf.param_index is not None and one.on_host:
            path, x = layout.parameter_paths[leaf.param_index], args[leaf.param_index]
            paged.known.warn_of_unknown(path, x)
        scope = jax.named_scope(UNSHARDED) if unknown else contextlib.nullcontext()
        # The loops are independent of the context, so that leaves of equal programs are
        # traced once.
        with scope, without():
            new = stream(
                tuple(leaves),
                # A gate is the trip count of the loop around the pages.
                gate.astype(jnp.int32) if isinstance(gate, Array) else None,
                random_bits,
                leaf=one.program,
                geometry=geometry,
                shards=one.shards,
            )
        of_leaves.update(zip(members, new, strict=True))
    results = evaluation.results([of_leaves[i] for i in range(len(of_leaves))])
    return jax.tree.leaves(list(map(streams.result, range(len(results)), results)))


def _as_results(
    analysis: Analysis,
    buffers: Sequence[StoredOrShape],
    gates: Sequence[Gate],
    reset: Gate,
) -> list[StoredOrShape] | None:
    """Casts gradients and moments to vary along the axes of their results.

    A replicated moment may be updated with a gradient that varies. Its buffer is
    overwritten page by page, and has one type from the first page to the last. None:
    they vary already.
    """
    new = list(buffers)
    for leaf in analysis.leaf_updates:
        index = leaf.param_index
        owned = gates if index is None else gates[index : index + 1]
        for p, aval in zip(leaf.outputs, leaf.avals, strict=False):
            axes = varying_axes(aval, owned, reset)
            if any(axes - varying_axes(x) for x in jax.tree.leaves(buffers[p])):
                new[p] = varying(buffers[p], axes)
    changed = any(x is not y for x, y in zip(new, buffers, strict=True))
    return new if changed else None
