"""The update of a paged transformation: its state streams past the gradients."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import optax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.gpu import warn_without_overlap
from paged_optax.backend.memory import (
    PINNED_HOST,
    donate_within_memory,
    is_mistyped,
    on_host,
    resolve_host_memory_kind,
)
from paged_optax.backend.meshes import in_shard_map, shape_dtype, with_automatic_axes
from paged_optax.backend.processes import compare, spans_processes
from paged_optax.backend.text import keystr, readable_bytes
from paged_optax.backend.types import is_traced
from paged_optax.backend.variables import as_pure, unflatten_like
from paged_optax.engine.backend_check import check_backend
from paged_optax.engine.shards import Shards
from paged_optax.transform.agreement import Said, said_of
from paged_optax.transform.checks import (
    refuse_different,
    refuse_host,
    refuse_inside_paged,
    refuse_own_steps,
    refuse_state,
)
from paged_optax.transform.context import current
from paged_optax.transform.gates import any_gate, gates_of
from paged_optax.transform.manual import as_results, with_rows, without_rows
from paged_optax.transform.paged_transformation import Pager
from paged_optax.transform.state_layout import Layout, OtherLayoutError
from paged_optax.transform.streaming import Streaming
from paged_optax.transform.trees import (
    Gates,
    Static,
    Stored,
    Traceable,
    Traced,
    arrays_and_rest,
    as_arrays,
    paths_of,
)


class Update:
    """The `update` of one paged transformation.

    Args:
      pager: The transformation, and how it is paged.
    """

    def __init__(self, pager: Pager):
        self.pager = pager
        self._eager = jax.jit(self._stream, static_argnames=("traced", "shards"))

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        active: PyTree = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Streams the state past the gradients.

        Args:
          updates: The gradients.
          state: The state.
          params: The parameters, or None.
          active: Whether to update each parameter: see `paged`.
          **extra_args: Extra arguments of `inner`.

        Returns:
          The updates, divided over a mesh as the parameters are, or without parameters
          as the gradients are; and the new state.
        """
        refuse_inside_paged()
        gradients, held, params = as_pure(updates), as_pure(state), as_pure(params)
        active, extra_args = as_pure(active), as_pure(extra_args)
        pager = self.pager
        if current().seen_through:
            shards = pager.shards(gradients, held, params)
            layout = pager.layout(_like_init(gradients, params), held, shards)
            plain = layout.blank(layout.take_apart(held)[0])
            made = pager.inner.update(gradients, plain, params, **extra_args)
            return unflatten_like(updates, made[0]), made[1]
        if (asked := current().asked) is not None:
            shards = pager.shards(gradients, held, params)
            layout = pager.layout(_like_init(gradients, params), held, shards)
            moved = _moved(pager, layout, layout.take_apart(held)[0])
            asked(pager, moved, lambda: self._said(gradients, held, params, extra_args))
            return updates, state
        made = donate_within_memory(
            self._update(gradients, held, params, active, extra_args)
        )
        return unflatten_like(updates, made[0]), unflatten_like(
            state, with_rows(made[1], held)
        )

    def _update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        active: PyTree,
        extra_args: dict[str, PyTree],
    ) -> tuple[optax.Updates, optax.OptState]:
        refuse_host("gradient", updates)
        refuse_host("parameter", params)
        self._tell_of_mistyped(state)
        if params is not None:
            refuse_different(updates, params)
        gates = gates_of(active, updates)
        restart = current().restart
        given = {"gates": gates and Gates.of(gates), "restart": restart}
        open_gates, gating = arrays_and_rest(given)
        extras, static = arrays_and_rest({"restart": restart, "extra_args": extra_args})
        trees = (as_arrays(updates), state, as_arrays(params))
        shards = self.pager.shards(*trees)
        if self.pager.rules and in_shard_map():
            alone = without_rows(self.pager.layout(updates, state, shards), state)
            trees = (trees[0], alone, trees[2])
        # Traced anew at each call, for `inner` may read more than its arguments.
        trace = lambda updates, state, params: self._trace(
            updates, state, params, extras, static, gating, shards
        )
        traced, constants, layout = trace(*trees)
        overwritten = functools.partial(as_results, gates=gates or (), restart=restart)
        while new := overwritten(traced.analysis, layout, *trees[:2]):
            trees = (*new, trees[2])
            traced, constants, layout = trace(*trees)
        if spans_processes(trees):
            made_for = _like_init(updates, params)
            said = said_of(self.pager, made_for, state, shards, traced.analysis)
            compare("update of a paged transformation", said)
        arguments = (*trees, extras, open_gates, constants)
        if is_traced(arguments):
            warn_without_overlap(state)
            return self._stream(*arguments, traced=traced, shards=shards)
        return self._eager(*arguments, traced=traced, shards=shards)

    def _said(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        extra_args: dict[str, PyTree],
    ) -> Said:
        """What all processes must have built alike."""
        given = {"restart": False, "extra_args": extra_args}
        extras, static = arrays_and_rest(given)
        shards = self.pager.shards(updates, state, params)
        made = self._trace(updates, state, params, extras, static, static, shards)
        made_for = _like_init(updates, params)
        return said_of(self.pager, made_for, state, shards, made[0].analysis)

    def _tell_of_mistyped(self, state: optax.OptState) -> None:
        for path, x in zip(*paths_of(state), strict=True):
            if is_mistyped(x):
                self.pager.tell(
                    f"state{keystr(path)} is in host memory, and has the type of"
                    " device memory, where it is about to go: a restore made it with"
                    " a SingleDeviceSharding. Put"
                )
                break

    def _trace(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        extras: Sequence[Traceable],
        static: Static,
        gating: Static,
        shards: tuple[Shards | None, ...],
    ) -> tuple[Traced, dict[int, ArrayLike], Layout]:
        """Traces what an update computes, and finds the arrays that it closes over."""
        made_for = _like_init(updates, params)
        layout = self.pager.layout(made_for, state, shards)
        try:
            leaves, own = layout.take_apart(state)
        except OtherLayoutError:
            raise
        except ValueError as error:
            refuse_state(self.pager.inner, made_for, state, error)
            raise
        seen = jax.tree.map(
            lambda x, held: x if x is held else shape_dtype(x, held),
            layout.seen(leaves),
            layout.structure.unflatten(leaves),
        )
        analysis, structure = self.pager.analyse(
            updates, seen, layout.owners, params, extras, static
        )
        first = len(jax.tree.leaves(updates))
        refuse_own_steps(analysis, {first + p: x for p, x in own.items()}, seen, first)
        constants = dict(analysis.constants)
        analysis = dataclasses.replace(analysis, constants={})
        return Traced(analysis, structure, gating), constants, layout

    def _stream(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        *others: PyTree[ArrayLike],
        traced: Traced,
        shards: tuple[Shards | None, ...],
    ) -> tuple[optax.Updates, optax.OptState]:
        run = functools.partial(_streamed, self.pager, traced=traced, shards=shards)
        results = (updates if params is None else params, state)
        return with_automatic_axes(run, (updates, state, params, *others), results)


def _streamed(
    pager: Pager,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    extras: Sequence[Traceable],
    open_gates: Sequence[Traceable],
    constants: Mapping[int, ArrayLike],
    *,
    traced: Traced,
    shards: tuple[Shards | None, ...],
) -> tuple[optax.Updates, optax.OptState]:
    """Computes the updates and the new state on a mesh of automatic axes."""
    gradients = jax.tree.leaves(updates)
    layout = pager.layout(_like_init(updates, params), state, shards)
    leaves, own = layout.take_apart(state)
    if not current().fetched and (moved := _moved(pager, layout, leaves)):
        pager.tell(moved)
    first = len(gradients)
    arguments = [*gradients, *leaves, *jax.tree.leaves((params, extras))]
    if any(map(on_host, arguments)):
        check_backend()
    given = traced.gating.merge(open_gates)
    gates = given["gates"].each() if given["gates"] else [True] * first
    # On a restart a moment starts again even if its parameter's update is skipped.
    moves = [any_gate([gate, given["restart"]]) for gate in gates]
    streaming = Streaming(
        pager=pager,
        layout=layout,
        shards=shards,
        analysis=dataclasses.replace(traced.analysis, constants=constants),
        arguments=arguments,
        own={first + position: each for position, each in own.items()},
        gates=gates,
        moves=moves,
        any_moves=any_gate(moves) if moves else True,
    )
    made, new = jax.tree.unflatten(traced.structure, streaming.results())
    return made, unflatten_like(state, new)  # in containers that name the codecs


def _like_init(updates: PyTree, params: PyTree | None) -> PyTree:
    """What the state was made for; gradients may have other dtypes."""
    return updates if params is None else params


def _moved(pager: Pager, layout: Layout, leaves: Sequence[Stored]) -> str:
    """What to tell of moments on the device for which the budget has no room."""
    budget = pager.configuration.device_budget
    if not isinstance(budget, int):
        return ""
    if resolve_host_memory_kind(pager.configuration.host_memory_kind) != PINNED_HOST:
        return ""
    paths, _ = paths_of(jax.tree.unflatten(layout.structure, range(len(leaves))))
    small = layout.small(pager.configuration.min_paged_size)
    every = zip(paths, leaves, layout.sizes(), small, strict=True)
    moved = [
        (path, size)
        for position, (path, x, size, stays) in enumerate(every)
        if size is not None
        and not stays
        and not on_host(x)
        and not pager.refused(layout, position)
    ]
    total = sum(size for _, size in moved)
    if total <= budget:
        return ""
    return (
        f"{len(moved)} moments of {readable_bytes(total)} are in device memory,"
        f" state{keystr(moved[0][0])} first, and device_budget="
        f"{readable_bytes(budget)} leaves them no room: a jax.device_put, a"
        " restore or out_shardings without a memory kind moved them; or they were"
        " small, and now count as large together with others of their shape. If"
        " they are to stay, pass device_budget=None; if not, put"
    )
