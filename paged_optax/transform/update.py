"""The update of a paged transformation: its state streams past the gradients."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.core import Tracer

from paged_optax.backend.donation import paired
from paged_optax.backend.explicit_axes import automatically
from paged_optax.backend.key_paths import keystr
from paged_optax.backend.memory import (
    PINNED_HOST,
    mistyped,
    on_host,
    resolve_host_memory_kind,
)
from paged_optax.backend.sizes import readable_bytes
from paged_optax.backend.variables import bare, like
from paged_optax.engine.guard import check_backend
from paged_optax.engine.shards import Shards
from paged_optax.transform.active import either, gates_of
from paged_optax.transform.checks import (
    refuse_different,
    refuse_host,
    refuse_own_steps,
    refuse_state,
)
from paged_optax.transform.context import current
from paged_optax.transform.pager import Pager
from paged_optax.transform.stored_state import Layout, OtherLayoutError
from paged_optax.transform.streaming import Streaming
from paged_optax.transform.trees import (
    Gates,
    Static,
    Traced,
    arrays_of,
    paths_of,
    split,
)


class Update:
    """`update` of one paged transformation.

    Args:
      pager: The transformation.
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
        active: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Streams the state past the gradients; returns updates and the new state.

        Updates are divided as parameters are, or as gradients without them.
        """
        gradients, held, params = bare(updates), bare(state), bare(params)
        active, extra_args = bare(active), bare(extra_args)
        pager = self.pager
        if current().seen_through:
            shards = pager.shards(gradients, held, params)
            layout = pager.layout(gradients, held, shards)
            plain = layout.blank(layout.take_apart(held)[0])
            return pager.inner.update(gradients, plain, params, **extra_args)
        made = paired(self._update(gradients, held, params, active, extra_args))
        return like(updates, made[0]), like(state, made[1])

    def _update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        active: Any,
        extra_args: dict[str, Any],
    ) -> tuple[optax.Updates, optax.OptState]:
        refuse_host("gradient", updates)
        refuse_host("parameter", params)
        self._tell_of_mistyped(state)
        if params is not None:
            refuse_different(updates, params)
        gates = gates_of(active, updates)
        restart = current().restart
        gates = gates and Gates.of(gates)
        open_gates, gating = split({"gates": gates, "restart": restart})
        extras, static = split({"restart": restart, "extra_args": extra_args})
        trees = (arrays_of(updates), state, arrays_of(params))
        shards = self.pager.shards(*trees)
        # Anew at each call: `inner` may read more than its arguments. What is compiled
        # serves all that compute the same.
        traced, constants = self._trace(*trees, extras, static, gating, shards)
        arguments = (*trees, extras, open_gates, constants)
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments)):
            return self._stream(*arguments, traced=traced, shards=shards)
        return self._eager(*arguments, traced=traced, shards=shards)

    def _tell_of_mistyped(self, state: optax.OptState) -> None:
        for path, x in zip(*paths_of(state), strict=True):
            if mistyped(x):
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
        extras: list[Any],
        static: Static,
        gating: Static,
        shards: tuple[Shards | None, ...],
    ) -> tuple[Traced, dict[int, Any]]:
        """What an update computes, and the arrays that it closes over."""
        layout = self.pager.layout(updates, state, shards)
        try:
            leaves, own = layout.take_apart(state)
        except OtherLayoutError:
            raise
        except ValueError as error:
            refuse_state(self.pager.inner, updates, state, error)
            raise
        seen = layout.seen(leaves)
        analysis, structure = self.pager.analyse(updates, seen, params, extras, static)
        first = len(jax.tree.leaves(updates))
        refuse_own_steps(analysis, {first + p: x for p, x in own.items()}, seen, first)
        constants = dict(analysis.constants)
        analysis = dataclasses.replace(analysis, constants={})
        return Traced(analysis, structure, gating), constants

    def _stream(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        *others: Any,
        traced: "Traced",
        shards: tuple[Shards | None, ...],
    ) -> tuple[optax.Updates, optax.OptState]:
        run = functools.partial(_streamed, self.pager, traced=traced, shards=shards)
        results = (updates if params is None else params, state)
        return automatically(run, (updates, state, params, *others), results)


def _streamed(
    pager: Pager,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    extras: list[Any],
    open_gates: list[Any],
    constants: dict[int, Any],
    *,
    traced: Traced,
    shards: tuple[Shards | None, ...],
) -> tuple[optax.Updates, optax.OptState]:
    """Updates, and the new state, on a mesh of automatic axes."""
    gradients = jax.tree.leaves(updates)
    layout = pager.layout(updates, state, shards)
    leaves, own = layout.take_apart(state)
    _tell_of_moved(pager, layout, leaves)
    first = len(gradients)
    arguments = [*gradients, *leaves, *jax.tree.leaves((params, extras))]
    if any(map(on_host, arguments)):
        check_backend()
    given = traced.gating.merge(open_gates)
    gates = given["gates"].each() if given["gates"] else [True] * first
    streaming = Streaming(
        pager=pager,
        layout=layout,
        shards=shards,
        analysis=dataclasses.replace(traced.analysis, constants=constants),
        arguments=arguments,
        gradients=gradients,
        leaves=leaves,
        own={first + position: each for position, each in own.items()},
        gates=gates,
        # A moment starts again where its parameter's update is skipped, too.
        moves=[either([gate, given["restart"]]) for gate in gates],
    )
    return jax.tree.unflatten(traced.structure, streaming.results())


def _tell_of_moved(pager: Pager, layout: Layout, leaves: Sequence[Any]) -> None:
    """Reports moments on the device that the budget has no room for."""
    budget = pager.configuration.device_budget
    if not isinstance(budget, int) or current().fetched:
        return
    if resolve_host_memory_kind(pager.configuration.host_memory_kind) != PINNED_HOST:
        return
    paths, _ = paths_of(jax.tree.unflatten(layout.structure, range(len(leaves))))
    moved = [
        (path, size)
        for path, x, size in zip(paths, leaves, layout.sizes(), strict=True)
        if size is not None
        and size >= pager.configuration.min_paged_size
        and not on_host(x)
    ]
    total = sum(size for _, size in moved)
    if total > budget:
        pager.tell(
            f"{len(moved)} moments of {readable_bytes(total)} are in device memory,"
            f" state{keystr(moved[0][0])} first, and device_budget="
            f"{readable_bytes(budget)} leaves them no room: a jax.device_put, a"
            " restore or out_shardings without a memory kind moved them. If"
            " they are to stay, pass device_budget=None; if not, put"
        )
