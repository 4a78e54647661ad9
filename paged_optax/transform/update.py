"""The update of a paged transformation: what it computes, as a value.

`Update` checks its arguments, traces the transformation, and takes it apart into one
program a leaf. `paged_optax.transform.streaming` then runs these.
"""

import functools
from collections.abc import Sequence

import jax
import optax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.memory import donate_within_memory, is_mistyped
from paged_optax.backend.processes import compare, spans_processes
from paged_optax.backend.text import keystr
from paged_optax.backend.types import (
    in_shard_map,
    is_traced,
    shape_dtype,
    with_automatic_axes,
)
from paged_optax.backend.variables import as_pure, unflatten_like
from paged_optax.backend.xla import warn_without_overlap
from paged_optax.engine.shards import Shards
from paged_optax.transform.active_parameters import Gates, gates_of
from paged_optax.transform.agreement import Said, said_of
from paged_optax.transform.checks import (
    refuse_different,
    refuse_host,
    refuse_inside_paged,
    refuse_shared_counts,
    refuse_state,
)
from paged_optax.transform.context import current
from paged_optax.transform.manual import as_results, with_rows, without_rows
from paged_optax.transform.paged_transformation import PagedTransformation
from paged_optax.transform.state_layout import OtherLayoutError
from paged_optax.transform.streaming import Traced, stream_update
from paged_optax.transform.trees import (
    Static,
    Traceable,
    arrays_and_rest,
    as_arrays,
    paths_of,
)


class Update:
    """The `update` of one paged transformation.

    Args:
      paged: The transformation, and how it is paged.
    """

    def __init__(self, paged: PagedTransformation):
        self.paged = paged
        self._eager = jax.jit(self._stream, static_argnames="traced")

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        active: PyTree = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Streams moments through the device.

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
        gradients, moments, params = as_pure(updates), as_pure(state), as_pure(params)
        active, extra_args = as_pure(active), as_pure(extra_args)
        paged, asked = self.paged, current().asked
        if current().seen_through or asked is not None:
            shards = paged.shards(gradients, moments, params)
            layout = paged.layout(_state_like(gradients, params), moments, shards)
            leaves, _ = layout.take_apart(moments)
            if asked is not None and not current().seen_through:
                said = lambda: self._said(gradients, moments, params, extra_args)
                asked(paged, paged.moved(layout, leaves), said)
                return updates, state
            plain = layout.blank(leaves)
            new = paged.inner.update(gradients, plain, params, **extra_args)
            return unflatten_like(updates, new[0]), new[1]
        new_updates, new_state = donate_within_memory(
            self._update(gradients, moments, params, active, extra_args)
        )
        new_state = unflatten_like(state, with_rows(new_state, moments))
        return unflatten_like(updates, new_updates), new_state

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
        gates, restart = gates_of(active, updates), current().restart
        gating = {"gates": gates and Gates.of(gates), "restart": restart}
        open_gates, gating = arrays_and_rest(gating)
        extras, static = arrays_and_rest({"restart": restart, "extra_args": extra_args})
        trees = (as_arrays(updates), state, as_arrays(params))
        shards = self.paged.shards(*trees)
        if self.paged.rules and in_shard_map():
            layout = self.paged.layout(updates, state, shards)
            trees = (trees[0], without_rows(layout, state), trees[2])
        # Traced anew at each call, for `inner` may read more than its arguments.
        trace = functools.partial(
            self._trace, extras=extras, static=static, gating=gating, shards=shards
        )
        traced, constants = trace(*trees)
        overwritten = functools.partial(as_results, gates=gates or (), restart=restart)
        while new := overwritten(traced.analysis, traced.layout, *trees[:2]):
            trees = (*new, trees[2])
            traced, constants = trace(*trees)
        if spans_processes(trees):
            like = _state_like(updates, params)
            said = said_of(self.paged, like, state, shards, traced.analysis)
            compare("update of a paged transformation", said)
        arguments = (*trees, extras, open_gates, constants)
        if is_traced(arguments):
            warn_without_overlap(state)
            return self._stream(*arguments, traced=traced)
        return self._eager(*arguments, traced=traced)

    def _stream(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        *others: PyTree[ArrayLike],
        traced: Traced,
    ) -> tuple[optax.Updates, optax.OptState]:
        run = functools.partial(stream_update, self.paged, traced)
        like = (_state_like(updates, params), state)
        return with_automatic_axes(run, (updates, state, params, *others), like)

    def _said(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        extra_args: dict[str, PyTree],
    ) -> Said:
        """What all processes must have built alike."""
        extras, static = arrays_and_rest({"restart": False, "extra_args": extra_args})
        shards = self.paged.shards(updates, state, params)
        traced, _ = self._trace(updates, state, params, extras, static, static, shards)
        like = _state_like(updates, params)
        return said_of(self.paged, like, state, shards, traced.analysis)

    def _tell_of_mistyped(self, state: optax.OptState) -> None:
        for path, x in zip(*paths_of(state), strict=True):
            if is_mistyped(x):
                self.paged.tell(
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
    ) -> tuple[Traced, dict[int, ArrayLike]]:
        """Traces what an update computes, and the arrays that it closes over."""
        like = _state_like(updates, params)
        layout = self.paged.layout(like, state, shards)
        try:
            leaves, counts = layout.take_apart(state)
        except OtherLayoutError:
            raise
        except ValueError as error:
            refuse_state(self.paged.inner, like, state, error)
            raise
        seen = jax.tree.map(
            lambda x, stored: x if x is stored else shape_dtype(x, stored),
            layout.seen(leaves),
            layout.structure.unflatten(leaves),
        )
        analysis, constants, structure = self.paged.analyse(
            updates, seen, layout.owners, params, extras, static
        )
        first = len(jax.tree.leaves(updates))
        numbers = {first + position for position in counts}
        refuse_shared_counts(analysis, numbers, seen, first)
        return Traced(analysis, structure, gating, layout, shards), constants


def _state_like(updates: PyTree, params: PyTree | None) -> PyTree:
    """What the state belongs to; gradients may have other dtypes than parameters."""
    return updates if params is None else params
