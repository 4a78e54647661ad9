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

from paged_optax.analysis.program import Analysis
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
    note_elsewhere,
    warn_of_multi_steps,
)
from paged_optax.transform.context import Gate, all_gates, current, without
from paged_optax.transform.groups import LeafStreams
from paged_optax.transform.paged_transformation import (
    PagedTransformation,
    TracedUpdate,
    tell,
)
from paged_optax.transform.state_layout import StateLayout, reshaped_like
from paged_optax.transform.trees import (
    StoredOrShape,
    Traceable,
    as_arrays,
    leaf_paths,
)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced update, compared by value."""

    analysis: Analysis
    layout: StateLayout
    # Of each gradient's gate, and of the restart, the position among False, True and
    # the traced gates.
    gates: tuple[int, ...]


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
    bare, paged = paged, paged.in_variables_of(updates)
    if paged is bare:
        extra_args = as_pure(extra_args)
    gradients, moments, params = map(as_pure, (updates, state, params))
    visit = context.visitor and context.visitor.update
    check_arguments(gradients, moments, params, visited=visit is not None)
    if visit is None:
        paged.warn_of_mistyped(moments)
        if params is not None:
            check_equal_values(gradients, params)
    gradients, params = as_arrays(gradients), as_arrays(params)
    layout, leaves = paged.take_apart(gradients, moments, params)

    def trace() -> TracedUpdate:
        # Traced at each call, for `inner` may read more than its arguments.
        seen, restart = layout.seen(leaves), context.restart
        return paged.trace(layout, gradients, seen, params, extra_args, restart)

    def agreement(analysis: Analysis) -> Values:
        like = gradients if params is None else params
        return paged.agreement(like, moments, layout, analysis)

    if visit is not None:
        visit(paged, paged.moved(layout, leaves), lambda: agreement(trace().analysis))
        return updates, state
    gates, restart = all_gates(as_pure(active), gradients), context.restart
    # One tracer may be the gate of all gradients. If it were passed once for each,
    # `jax.jit` would make distinct tracers of it.
    arrays = {id(x): x for x in (*gates, restart) if isinstance(x, Array)}
    numbers = dict(zip(arrays, range(2, 2 + len(arrays)), strict=True))
    numbers |= {id(False): 0, id(True): 1}
    analysis, constants, extras = trace()
    count = layout.parameters.num_leaves  # of gradients
    buffers = [*jax.tree.leaves(gradients), *leaves]
    # Values that vary in a moment's place may make others vary: repeat.
    while in_shard_map() and (new := _as_results(analysis, buffers, gates, restart)):
        buffers, leaves = new, new[count:]
        gradients = unflatten_like(gradients, new[:count])
        analysis, constants, extras = trace()
    if spans_processes((gradients, moments, params)):
        # A program that one process alone has would block the devices of all.
        compare("update of a paged transformation", agreement(analysis))
    args = buffers, params, extras, [*arrays.values()], constants
    traced = Traced(analysis, layout, tuple(numbers[id(x)] for x in (*gates, restart)))
    # Outside a `jax.jit` the update is a program of its own, compiled once for all
    # equal `Traced`.
    run = jitted
    if is_traced(args):
        warn_of_options(leaves)
        warn_of_multi_steps(leaves)
        run = functools.partial(stream_update, bare)
    try:
        new = run(*args, traced=traced)
    except ValueError as error:
        note_elsewhere(error)
        raise
    # A `jax.jit` pairs donated buffers by shape alone, across memories too.
    new = donate_within_memory(new)
    moments = map(reshaped_like, jax.tree.leaves(new[count:]), jax.tree.leaves(moments))
    return unflatten_like(updates, new[:count]), unflatten_like(state, [*moments])


def stream_update(
    paged: PagedTransformation,
    buffers: list[StoredOrShape],
    params: optax.Params | None,
    extras: Sequence[Traceable],
    gates: Sequence[Array],
    constants: Mapping[int, ArrayLike],
    *,
    traced: Traced,
) -> list[Array]:
    """Computes the updates and the new state's arrays.

    `buffers` has the gradients, and the state's leaves as they are stored. If they are
    donated, the results overwrite them, in their order. `constants` are arrays that the
    programs close over, and `gates` the traced ones.
    """
    layout = traced.layout
    count = layout.parameters.num_leaves  # of gradients
    trees = buffers, params, extras, gates, constants
    if explicit_mesh(trees) is not None:
        # The programs were traced without axes: on explicit axes their equations would
        # return other types than their neighbours expect.
        updates = buffers[:count] if params is None else params
        like = jax.tree.leaves((updates, buffers[count:]))
        run = functools.partial(stream_update, paged, traced=traced)
        return with_automatic_axes(run, trees, like)
    if not current().layerwise and (moved := paged.moved(layout, buffers[count:])):
        tell(moved, paged.on_moved)
    args = [*buffers, *jax.tree.leaves((params, extras))]
    if any(map(on_host, args)):
        # Some versions of XLA:GPU read wrong pages without an error.
        check_backend()
    *leaf_gates, restart = [(False, True, *gates)[i] for i in traced.gates]
    traced_args = traced.analysis, layout, args, constants
    streams = LeafStreams.create(*traced_args, leaf_gates, restart)
    results, groups = streams.grouped()
    for leaf, members in groups:
        one, *_ = members.values()
        gate = streams.moves[leaf.param_index]
        hosted = any(x.on_host for x in one.moments)
        leaves = [
            check_not_differentiated(x.arrays) if hosted else tuple(x.arrays)
            for x in members.values()
        ]
        random_bits = streams.random_bits(leaf)
        geometry = paged.geometry(leaf, one.moments, one.shards, len(members))
        unknown = one.shards is None and one.program.program.elementwise
        if unknown and leaf.param_index is not None and hosted:
            paths, _ = leaf_paths(jax.tree.unflatten(layout.parameters, range(count)))
            paged.known.warn_of_unknown(paths[leaf.param_index], args[leaf.param_index])
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
        results.update(zip(members, new, strict=True))
    return streams.results(results)


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
    axes = dict[int, frozenset[str]]()
    for leaf in analysis.leaf_updates:
        index = leaf.param_index
        owned = gates if index is None else gates[index : index + 1]
        for p, aval in zip(leaf.outputs, leaf.avals, strict=False):
            axes[p] = varying_axes(aval, owned, reset)
    arrays = lambda p: jax.tree.leaves(buffers[p])
    if not any(axes[p] - varying_axes(x) for p in axes for x in arrays(p)):
        return None
    return [varying(x, axes.get(p, frozenset())) for p, x in enumerate(buffers)]
