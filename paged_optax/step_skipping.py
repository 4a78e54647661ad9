"""Optax's wrappers that skip steps, for moments in host memory.

Optax selects between the old state and the new with `jnp.where` or `lax.cond`. With
states in host memory XLA copies both whole (`MultiSteps` on GPUs; `lax.cond` on GPUs,
jax 0.10.2) or fails to compile (`MultiSteps` on TPUs), and every micro-step transfers
the whole state. Here the wrapper closes the gate of the updates inside
(`transform.context`), the trip count of the loop around each leaf, so that a skipped
step runs its page loops zero times. Optax's own wrapper decides: it runs around a
transformation whose state is a single bool, which is True afterwards if the wrapper
would have updated.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Bool, PyTree

from paged_optax.backend.flax_variables import as_pure
from paged_optax.backend.memory import on_host
from paged_optax.backend.validation import check_transformation
from paged_optax.transform.checks import check_arguments, check_on_device
from paged_optax.transform.context import only_if, restart_if
from paged_optax.transform.init import tied

#: The identity, whose state is True after an update.
_PROBE = optax.GradientTransformationExtraArgs(
    lambda params: jnp.asarray(False),
    lambda updates, state, params=None, **extra_args: (updates, jnp.asarray(True)),
)


class _Wrapped(NamedTuple):
    """An Optax wrapper around a transformation."""

    init: Callable[[optax.Params], PyTree]  # of the wrapper around `_PROBE`
    update: Callable[..., tuple[optax.Updates, PyTree]]
    inner: optax.GradientTransformationExtraArgs
    field: str  # of the wrapper's state, with the state of `inner`
    zero: bool  # the updates of a skipped step are zero; False: its gradients
    accumulates: bool = False  # `inner` gets other gradients than the wrapper

    def init_around(self, params: optax.Params) -> PyTree:
        if self.accumulates:  # arrays like the parameters, on the device
            check_on_device("parameter", as_pure(params))
        state = self.init(params)._replace(**{self.field: self.inner.init(params)})
        return tied(state, jax.tree.leaves(params))

    def update_around(
        self,
        updates: optax.Updates,
        state: PyTree,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, PyTree]:
        old = self.inside(state)
        check_arguments(*map(as_pure, (updates, state, params)))
        enabled, grads, outer = self._probe(updates, state, params, **extra_args)
        if not self.accumulates:
            # Optax's conditional returns the same gradients, but copies them.
            grads = updates
        with only_if(enabled):
            updates, new = self.inner.update(grads, old, params, **extra_args)
        # The page loops have selected already.
        select = lambda new, old: new if on_host(new) else jnp.where(enabled, new, old)
        new = jax.tree.map(select, new, old)
        skipped = lambda x, grad: jnp.zeros_like(x) if self.zero else grad
        keep = lambda x, grad: jnp.where(enabled, x, skipped(x, grad).astype(x.dtype))
        return jax.tree.map(keep, updates, grads), outer._replace(**{self.field: new})

    def _probe(
        self, updates: PyTree, state: PyTree, *args: PyTree, **extra_args: object
    ) -> tuple[Bool[Array, ""], PyTree, PyTree]:
        """Returns whether the wrapper updates, and what it returns around `_PROBE`."""
        probing = state._replace(**{self.field: jnp.asarray(False)})
        updates, outer = self.update(updates, probing, *args, **extra_args)
        return getattr(outer, self.field), updates, outer

    def inside(self, state: PyTree) -> PyTree:
        """Returns the wrapped transformation's part of a state."""
        return getattr(state, self.field)


class IfFinite(_Wrapped):
    """`apply_if_finite`, for callers that test the gradients themselves."""

    def decided(
        self, finite: Bool[Array, ""], state: PyTree
    ) -> tuple[Bool[Array, ""], PyTree]:
        """Returns whether an update happens, and the wrapper's next state."""
        enabled, _, outer = self._probe(jnp.where(finite, 0.0, jnp.nan), state)
        return enabled, outer


def wrapper_of(tx: optax.GradientTransformation) -> IfFinite | None:
    """The transformation as an `apply_if_finite`, or None."""
    wrapper = getattr(tx.update, "__self__", None)
    return wrapper if isinstance(wrapper, IfFinite) else None


def _around(
    wrapper: optax.GradientTransformation,
    inner: optax.GradientTransformation,
    *,
    zero: bool,
    kind: type[_Wrapped] = _Wrapped,
) -> optax.GradientTransformationExtraArgs:
    check_transformation("inner", inner)
    inner = optax.with_extra_args_support(inner)
    wrapped = kind(wrapper.init, wrapper.update, inner, "inner_state", zero)
    return optax.GradientTransformationExtraArgs(
        wrapped.init_around, wrapped.update_around
    )


class MultiSteps(optax.MultiSteps):
    """`optax.MultiSteps` whose micro-steps transfer nothing of a paged state.

    Gradients accumulate over `every_k_schedule` calls of `update`. The last call
    updates with the wrapped transformation; the others run its page loops zero times,
    and their updates are zero.

    Args:
      opt: The wrapped transformation, with or without `paged(...)` inside.
      every_k_schedule: Micro-steps a step: an int, or a function of the step count.
      use_grad_mean: If True, gradients are averaged, otherwise summed.
      should_skip_update_fn: Decides whether a micro-step is skipped. Use
        `optax.skip_not_finite` against NaN, which Optax's accumulators would keep.
      accumulator_dtype: The dtype of the accumulators.

    Returns:
      An object with `init`, `update`, `has_updated` and `gradient_transformation`,
      whose state is an `optax.MultiStepsState`.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> tx = po.MultiSteps(po.paged_adamw(1e-3), every_k_schedule=2)
      >>> params = {"w": jnp.ones((512, 512))}
      >>> state = tx.init(params)
      >>> updates, state = tx.update(params, state, params)
      >>> float(jnp.abs(updates["w"]).max()), bool(tx.has_updated(state))
      (0.0, False)
      >>> updates, state = tx.update(params, state, params)
      >>> bool(jnp.abs(updates["w"]).max() > 0), bool(tx.has_updated(state))
      (True, True)
    """

    def __init__(
        self,
        opt: optax.GradientTransformation,
        every_k_schedule: int | Callable[[ArrayLike], ArrayLike],
        use_grad_mean: bool = True,
        should_skip_update_fn: (Callable[..., tuple[ArrayLike, PyTree]] | None) = None,
        accumulator_dtype: DTypeLike = jnp.float32,
    ):
        check_transformation("opt", opt)
        super().__init__(
            _PROBE,
            every_k_schedule,
            use_grad_mean,
            should_skip_update_fn,
            accumulator_dtype,
        )
        inner, field = optax.with_extra_args_support(opt), "inner_opt_state"
        self._wrapped = _Wrapped(
            super().init, super().update, inner, field, zero=True, accumulates=True
        )

    @property
    def inner_opt(self) -> optax.GradientTransformationExtraArgs:
        """The wrapped transformation."""
        return self._wrapped.inner

    def init(self, params: optax.Params) -> optax.MultiStepsState:
        """Returns zero accumulators and counts around the wrapped state."""
        return self._wrapped.init_around(params)

    def update(
        self,
        updates: optax.Updates,
        state: optax.MultiStepsState,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, optax.MultiStepsState]:
        """Accumulates gradients, and updates with them on the last micro-step."""
        return self._wrapped.update_around(updates, state, params, **extra_args)


def apply_if_finite(
    inner: optax.GradientTransformation, max_consecutive_errors: int
) -> optax.GradientTransformationExtraArgs:
    """`optax.apply_if_finite` whose rejected steps transfer nothing of a paged state.

    A step with NaN or infinite gradients keeps the state and returns zero updates. In
    `layerwise_step` this may wrap the whole transformation, if all gradients are
    computed before the update.

    Args:
      inner: The wrapped transformation, with or without `paged(...)` inside.
      max_consecutive_errors: Consecutive rejections after which an update is applied.

    Returns:
      A transformation whose state is an `optax.ApplyIfFiniteState`.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> tx = po.apply_if_finite(po.paged_adamw(1e-3), max_consecutive_errors=3)
      >>> params = {"w": jnp.ones((512, 512))}
      >>> state = tx.init(params)
      >>> updates, state = tx.update({"w": params["w"] * jnp.nan}, state, params)
      >>> float(jnp.abs(updates["w"]).max()), int(state.notfinite_count)
      (0.0, 1)
    """
    wrapper = optax.apply_if_finite(_PROBE, max_consecutive_errors)
    return _around(wrapper, inner, zero=True, kind=IfFinite)


def conditionally_transform(
    inner: optax.GradientTransformation,
    should_transform_fn: Callable[..., ArrayLike],
    forward_extra_args: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`optax.conditionally_transform` that transfers nothing if the condition is false.

    It then returns the gradients, and the state as it was.

    Args:
      inner: The wrapped transformation, with or without `paged(...)` inside.
      should_transform_fn: The condition, a function of the count of calls.
      forward_extra_args: If True, the condition gets `update`'s extra arguments too.

    Returns:
      A transformation whose state is an `optax.ConditionallyTransformState`.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> odd = lambda step: step % 2 == 1
      >>> tx = po.conditionally_transform(po.paged_adam(1e-3), odd)
      >>> params = {"w": jnp.ones((512, 512))}
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> float(updates["w"][0, 0])
      1.0
    """
    wrapper = optax.conditionally_transform(
        _PROBE, should_transform_fn, forward_extra_args
    )
    return _around(wrapper, inner, zero=False)


def conditionally_mask(
    inner: optax.GradientTransformation,
    should_transform_fn: Callable[..., ArrayLike],
    forward_extra_args: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`optax.conditionally_mask` that transfers nothing if the condition is false.

    It then returns zero updates, and the state as it was.

    Args:
      inner: The wrapped transformation, with or without `paged(...)` inside.
      should_transform_fn: The condition, a function of the count of calls.
      forward_extra_args: If True, the condition gets `update`'s extra arguments too.

    Returns:
      A transformation whose state is an `optax.ConditionallyMaskState`.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> odd = lambda step: step % 2 == 1
      >>> tx = po.conditionally_mask(po.paged_adam(1e-3), odd)
      >>> params = {"w": jnp.ones((512, 512))}
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> float(updates["w"][0, 0])
      0.0
    """
    wrapper = optax.conditionally_mask(_PROBE, should_transform_fn, forward_extra_args)
    return _around(wrapper, inner, zero=True)


def lookahead(
    fast_optimizer: optax.GradientTransformation,
    sync_period: int,
    slow_step_size: float,
    reset_state: bool = False,
) -> optax.GradientTransformation:
    """`optax.lookahead` that can reset a paged state.

    With `reset_state=True` Optax's own multiplies host arrays by zero; here each page
    is initialized again as it passes through the device.

    Args:
      fast_optimizer: The wrapped transformation, with `paged(...)` anywhere inside.
      sync_period: Steps between synchronizations.
      slow_step_size: The step size of the slow parameters.
      reset_state: If True, a synchronization resets the wrapped state.

    Returns:
      A transformation of `optax.LookaheadParams`; its state is an
      `optax.LookaheadState`.

    Example:
      >>> import jax.numpy as jnp, optax, paged_optax as po
      >>> tx = po.lookahead(po.paged_adamw(1e-3), 2, 0.5, reset_state=True)
      >>> params = optax.LookaheadParams.init_synced({"w": jnp.ones((512, 512))})
      >>> state = tx.init(params)
      >>> for _ in range(2):
      ...     updates, state = tx.update(params.fast, state, params)
      >>> int(po.get_step(state, "w")), float(po.page_in(state, "w")["mu"].max())
      (0, 0.0)

    References:
      Zhang et al., `Lookahead Optimizer: k steps forward, 1 step back
      <https://arxiv.org/abs/1907.08610>`_, 2019.
    """
    check_transformation("fast_optimizer", fast_optimizer)
    wrapper = optax.lookahead(fast_optimizer, sync_period, slow_step_size)

    def update(
        updates: optax.Updates, state: PyTree, params: PyTree = None
    ) -> tuple[optax.Updates, PyTree]:
        check_arguments(*map(as_pure, (updates, state, params)))
        if not reset_state:
            return wrapper.update(updates, state, params)
        syncs = state.steps_since_sync == sync_period - 1
        with restart_if(syncs):
            updates, state = wrapper.update(updates, state, params)
        first = fast_optimizer.init(params.fast)
        select = lambda new, first: (
            new if on_host(new) else jnp.where(syncs, first, new)
        )
        fast = jax.tree.map(select, state.fast_state, first)
        return updates, state._replace(fast_state=fast)

    return optax.GradientTransformation(
        lambda params: tied(wrapper.init(params), jax.tree.leaves(params)), update
    )
