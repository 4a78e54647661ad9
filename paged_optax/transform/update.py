"""The update of a paged transformation: traced, streamed, put together again.

`Update` checks its arguments, traces the transformation and takes it apart into one
program a leaf. `paged_optax.transform.leaf_groups` runs these. What comes out takes the
places of the gradients and of the state's arrays.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.program import Analysis
from paged_optax.backend.compiler_options import warn_of_options
from paged_optax.backend.flax_variables import as_pure, unflatten_like
from paged_optax.backend.memory import donate_within_memory, is_mistyped
from paged_optax.backend.processes import compare, spans_processes
from paged_optax.backend.text import keystr
from paged_optax.backend.types import (
    in_shard_map,
    is_traced,
)
from paged_optax.transform.checks import (
    check_arguments,
    note_elsewhere,
    refuse_different,
    refuse_exchanged,
    refuse_inside_paged,
    refuse_shared_counts,
)
from paged_optax.transform.context import current
from paged_optax.transform.gates import Gates, gates_of
from paged_optax.transform.leaf_groups import Traced, stream_update
from paged_optax.transform.moment_parts import as_results, with_rows
from paged_optax.transform.paged_transformation import PagedTransformation
from paged_optax.transform.process_agreement import Said, said_of
from paged_optax.transform.state_layout import StateLayout
from paged_optax.transform.trees import (
    Static,
    StoredOrShape,
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
        self._streamed = functools.partial(stream_update, paged)
        self._jitted = jax.jit(self._streamed, static_argnames="traced")

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
        if current().plain:
            return self.paged.inner.update(updates, state, params, **extra_args)
        # `nnx.Optimizer` makes the state in variables, and calls with bare arrays.
        paged = self.paged.in_variables_of(updates)
        if paged is self.paged:
            extra_args = as_pure(extra_args)
        gradients, moments, params = as_pure(updates), as_pure(state), as_pure(params)
        refuse_exchanged(gradients, moments, params)
        check_arguments(gradients, moments, params)
        context = current()
        if context.seen_through:
            # A trace that only looks at what is computed must meet no page loop.
            layout, leaves = paged.take_apart(gradients, moments, params)
            zeros = lambda x: jnp.zeros(x.shape, x.dtype)
            plain = jax.tree.map(
                lambda x: zeros(x) if isinstance(x, jax.ShapeDtypeStruct) else x,
                layout.seen(leaves),
            )
            new = paged.inner.update(gradients, plain, params, **extra_args)
            return unflatten_like(updates, new[0]), new[1]
        if context.on_update is not None:
            layout, leaves = paged.take_apart(gradients, moments, params)
            others = gradients, leaves, moments, params, extra_args
            said = functools.partial(self._said, paged, layout, *others)
            context.on_update(paged, paged.moved(layout, leaves), said)
            return updates, state
        self._check(gradients, moments, params)
        gates, restart = gates_of(as_pure(active), gradients), context.restart
        # Which gates are known is part of the program; the others are its arguments.
        gating = {"gates": gates and Gates.of(gates), "restart": restart}
        traced_gates, gating = arrays_and_rest(gating)
        # A restart decides which moments move, and is traced too: it is among both.
        extras, static = arrays_and_rest({"restart": restart, "extra_args": extra_args})
        gradients, params = as_arrays(gradients), as_arrays(params)
        layout, leaves = paged.take_apart(gradients, moments, params)
        # Traced anew at each call, for `inner` may read more than its arguments.
        others = params, extras, static
        analysis, constants = self._trace(paged, layout, gradients, leaves, *others)
        # What varies in a moment's place may make others vary: again, until all do.
        while in_shard_map() and (
            new := as_results(analysis, gradients, leaves, gates or (), restart)
        ):
            gradients, leaves = new
            analysis, constants = self._trace(paged, layout, gradients, leaves, *others)
        if spans_processes((gradients, moments, params)):
            # A program that one process alone has would block the devices of all.
            like = gradients if params is None else params
            said = said_of(paged, like, moments, layout, analysis)
            compare("update of a paged transformation", said)
        buffers = [*jax.tree.leaves(gradients), *leaves]
        arguments = buffers, params, extras, traced_gates, constants
        # Outside a `jax.jit` the update is a program of its own, compiled once for all
        # equal `Traced`.
        run = self._jitted
        if is_traced(arguments):
            warn_of_options(leaves)
            run = self._streamed
        try:
            new = run(*arguments, traced=Traced(analysis, gating, layout))
        except ValueError as error:
            note_elsewhere(error)
            raise
        # A `jax.jit` pairs what is donated by shape alone, across memories too.
        new = donate_within_memory(new)
        first = layout.parameters.num_leaves
        new_state = with_rows(new[first:], moments) if in_shard_map() else new[first:]
        return unflatten_like(updates, new[:first]), unflatten_like(state, new_state)

    def _check(self, updates: PyTree, state: PyTree, params: PyTree | None) -> None:
        for path, x in zip(*paths_of(state), strict=True):
            if is_mistyped(x):
                self.paged.tell(
                    f"state{keystr(path)} is in host memory, and has the type of"
                    " device memory, where it is about to go: a restore made it with"
                    " a SingleDeviceSharding. Put"
                )
                break
        if params is not None:
            refuse_different(updates, params)

    def _trace(
        self,
        paged: PagedTransformation,
        layout: StateLayout,
        updates: PyTree,
        leaves: Sequence[StoredOrShape],
        params: PyTree | None,
        extras: Sequence[Traceable],
        static: Static,
    ) -> tuple[Analysis, dict[int, ArrayLike]]:
        """Traces what an update computes, and the arrays that it closes over."""
        seen = layout.seen(leaves)
        analysis, constants = paged.analyse(
            updates, seen, layout.owners, params, extras, static
        )
        if layout.counts:
            first = layout.parameters.num_leaves
            counts = {first + position for position in layout.counts}
            refuse_shared_counts(analysis, counts, seen, first)
        return analysis, constants

    def _said(
        self,
        paged: PagedTransformation,
        layout: StateLayout,
        updates: PyTree,
        leaves: Sequence[StoredOrShape],
        state: PyTree,
        params: PyTree | None,
        extra_args: dict[str, PyTree],
    ) -> Said:
        """What all processes must have built alike."""
        extras, static = arrays_and_rest({"restart": False, "extra_args": extra_args})
        others = params, extras, static
        analysis, _ = self._trace(paged, layout, updates, leaves, *others)
        like = updates if params is None else params
        return said_of(paged, like, state, layout, analysis)
