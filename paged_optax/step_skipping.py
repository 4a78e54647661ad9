"""Optax's wrappers that skip steps, for moments in host memory.

Optax selects between the old state and the new with `jnp.where` or `lax.cond`. XLA
copies host arrays whole for this (`MultiSteps` on GPUs; `lax.cond` on GPUs, jax 0.10.2)
or fails to compile (`MultiSteps` on TPUs), and every micro-step transfers every byte.
Here a skipped step runs its page loops zero times:

- The wrapper closes the gate of the wrapped updates (`paged_optax.transform.gates`).
  In a layerwise step `layerwise.layer_optimizer` closes it (`layerwise.clipping`).
- The gate is the trip count of the loop around each leaf
  (`paged_optax.engine.exchange`). Arrays without a loop keep their old value
  (`paged_optax.transform.groups`).

The semantics are Optax's by construction: Optax's own wrapper runs around a
transformation whose state is a single bool, which is True after an update.
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
from paged_optax.backend.validation import (
    check_count,
    check_function,
    check_transformation,
)
from paged_optax.transform.checks import check_arguments, refuse_host
from paged_optax.transform.gates import only_if, restart_if
from paged_optax.transform.init import tied

#: Returns updates unchanged. Its state is True after the wrapper applied an update.
_PROBE = optax.GradientTransformationExtraArgs(
    lambda params: jnp.asarray(False),
    lambda updates, state, params=None, **extra_args: (updates, jnp.asarray(True)),
)


class _Wrapped(NamedTuple):
    """An Optax wrapper around `_PROBE`, and the transformation that it wraps."""

    init: Callable[[optax.Params], PyTree]
    update: Callable[..., tuple[optax.Updates, PyTree]]
    inner: optax.GradientTransformationExtraArgs
    field: str  # of the wrapper's state, with the state of `inner`
    zero: bool  # a skipped step returns zero updates; if False, its gradients
    accumulates: bool = False  # the wrapper accumulates the gradients of `inner`

    def init_around(self, params: optax.Params) -> PyTree:
        if self.accumulates:  # arrays like the parameters, on the device
            refuse_host("parameter", as_pure(params))
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
        # Optax's own wrapper runs around a bool, and selects between no host arrays.
        blank = state._replace(**{self.field: jnp.asarray(False)})
        gradients, outer = self.update(updates, blank, params, **extra_args)
        happens = getattr(outer, self.field)
        if not self.accumulates:
            # Optax's conditional returns the same gradients, but copies them.
            gradients = updates
        # A skipped step runs the page loops zero times, and transfers no byte.
        with only_if(happens):
            updates, new = self.inner.update(gradients, old, params, **extra_args)
        # The page loops have selected already.
        new = jax.tree.map(
            lambda new, old: new if on_host(new) else jnp.where(happens, new, old),
            new,
            old,
        )
        skipped = lambda x, gradient: (
            jnp.zeros_like(x) if self.zero else gradient.astype(x.dtype)
        )
        updates = jax.tree.map(
            lambda x, gradient: jnp.where(happens, x, skipped(x, gradient)),
            updates,
            gradients,
        )
        return updates, outer._replace(**{self.field: new})

    def inside(self, state: PyTree) -> PyTree:
        """The wrapped transformation's part of a state."""
        if not hasattr(state, self.field):
            raise ValueError(
                f"state, of type {type(state).__name__}, has no {self.field}: pass the"
                " state of this wrapper's init, not of the wrapped transformation."
            )
        return getattr(state, self.field)


class IfFinite(_Wrapped):
    """`apply_if_finite` for gradients that are tested already."""

    def decided(
        self, finite: Bool[Array, ""], state: PyTree
    ) -> tuple[Bool[Array, ""], PyTree]:
        """Returns True if an update happens, and the wrapper's own next state."""
        blank = state._replace(**{self.field: jnp.asarray(False)})
        _, outer = self.update(jnp.where(finite, 0.0, jnp.nan), blank)
        return getattr(outer, self.field), outer


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
    """`optax.MultiSteps` whose micro-steps transfer no byte of a paged state.

    Gradients accumulate over `every_k_schedule` calls of `update`. The last call runs
    the wrapped transformation. In the other calls its page loops run zero times, and
    updates are zero. The state is an `optax.MultiStepsState` of the wrapped state.

    Args:
      opt: The wrapped transformation, with or without `paged(...)` inside.
      every_k_schedule: Micro-steps a step: an int, or a function of the step count.
      use_grad_mean: If True, average the gradients; if False, sum them.
      should_skip_update_fn: Selects micro-steps to skip. Without
        `optax.skip_not_finite` an accumulated NaN persists: Optax resets the
        accumulators by multiplying them by zero.
      accumulator_dtype: The dtype of the accumulators.

    Returns:
      An object with `init`, `update`, `has_updated` and `gradient_transformation`.

    Raises:
      ValueError: If `opt` is no transformation, if a step has no micro-steps, or for
        `optax.MultiSteps`' own reasons.
      TypeError: If `every_k_schedule` is neither an int nor a function.

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

    References:
      `optax.MultiSteps`, whose code computes the accumulators and the counts.
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
        if not callable(every_k_schedule):
            check_count("every_k_schedule", every_k_schedule, 1)
        super().__init__(
            _PROBE,
            every_k_schedule,
            use_grad_mean,
            should_skip_update_fn,
            accumulator_dtype,
        )
        self._wrapped = _Wrapped(
            super().init,
            super().update,
            optax.with_extra_args_support(opt),
            "inner_opt_state",
            zero=True,
            accumulates=True,
        )

    @property
    def inner_opt(self) -> optax.GradientTransformationExtraArgs:
        """The wrapped transformation."""
        return self._wrapped.inner

    def init(self, params: optax.Params) -> optax.MultiStepsState:
        """Initializes accumulators and counts of zero around the wrapped state."""
        return self._wrapped.init_around(params)

    def update(
        self,
        updates: optax.Updates,
        state: optax.MultiStepsState,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, optax.MultiStepsState]:
        """Accumulates gradients, and applies them on the last micro-step."""
        return self._wrapped.update_around(updates, state, params, **extra_args)


def apply_if_finite(
    inner: optax.GradientTransformation, max_consecutive_errors: int
) -> optax.GradientTransformationExtraArgs:
    """`optax.apply_if_finite` whose rejected steps transfer no byte of a paged state.

    A step with an infinite or NaN gradient keeps the state and returns zero updates, up
    to `max_consecutive_errors` consecutive times. `layerwise_step` accepts it around
    the whole transformation, if all gradients are computed before the update.

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

    References:
      `optax.apply_if_finite`, whose code counts the errors.
    """
    check_count("max_consecutive_errors", max_consecutive_errors, 0)
    wrapper = optax.apply_if_finite(_PROBE, max_consecutive_errors)
    return _around(wrapper, inner, zero=True, kind=IfFinite)


def conditionally_transform(
    inner: optax.GradientTransformation,
    should_transform_fn: Callable[..., ArrayLike],
    forward_extra_args: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`optax.conditionally_transform` whose skipped steps transfer no byte.

    If the condition is False, updates are returned unchanged and the state is kept.

    Args:
      inner: The wrapped transformation, with or without `paged(...)` inside.
      should_transform_fn: The condition, a function of the count of calls.
      forward_extra_args: Passes `update`'s extra arguments to the condition too.

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

    References:
      `optax.conditionally_transform`, whose code evaluates the condition.
    """
    check_function("should_transform_fn", should_transform_fn)
    wrapper = optax.conditionally_transform(
        _PROBE, should_transform_fn, forward_extra_args
    )
    return _around(wrapper, inner, zero=False)


def conditionally_mask(
    inner: optax.GradientTransformation,
    should_transform_fn: Callable[..., ArrayLike],
    forward_extra_args: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`optax.conditionally_mask` whose skipped steps transfer no byte.

    If the condition is False, updates are zero and the state is kept.

    Args:
      inner: The wrapped transformation, with or without `paged(...)` inside.
      should_transform_fn: The condition, a function of the count of calls.
      forward_extra_args: Passes `update`'s extra arguments to the condition too.

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

    References:
      `optax.conditionally_mask`, whose code evaluates the condition.
    """
    check_function("should_transform_fn", should_transform_fn)
    wrapper = optax.conditionally_mask(_PROBE, should_transform_fn, forward_extra_args)
    return _around(wrapper, inner, zero=True)


def lookahead(
    fast_optimizer: optax.GradientTransformation,
    sync_period: int,
    slow_step_size: float,
    reset_state: bool = False,
) -> optax.GradientTransformation:
    """`optax.lookahead` that can reset a paged state.

    With `reset_state=False`, `optax.lookahead` itself can wrap `paged(...)`. With
    `reset_state=True` it multiplies host arrays. Here each page is reinitialized as it
    streams through the device.

    Args:
      fast_optimizer: The wrapped transformation, with `paged(...)` inside.
      sync_period: Steps between synchronisations.
      slow_step_size: The step size of the slow parameters.
      reset_state: Resets the wrapped state at each synchronisation.

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
      `optax.lookahead`; Zhang et al., `Lookahead Optimizer: k steps forward, 1 step
      back <https://arxiv.org/abs/1907.08610>`_, 2019.
    """
    check_transformation("fast_optimizer", fast_optimizer)
    check_count("sync_period", sync_period, 1)
    wrapper = optax.lookahead(fast_optimizer, sync_period, slow_step_size)

    def update(
        updates: optax.Updates, state: PyTree, params: PyTree = None
    ) -> tuple[optax.Updates, PyTree]:
        if not (hasattr(params, "fast") and hasattr(params, "slow")):
            raise ValueError(
                f"params is of type {type(params).__name__}: pass the"
                " optax.LookaheadParams that init was given."
            )
        check_arguments(*map(as_pure, (updates, state, params)))
        if not reset_state:
            return wrapper.update(updates, state, params)
        syncs = state.steps_since_sync == sync_period - 1
        # Optax would multiply host arrays. Each page is reinitialized as it streams.
        with restart_if(syncs):
            updates, state = wrapper.update(updates, state, params)
        fast = jax.tree.map(
            lambda new, first: new if on_host(new) else jnp.where(syncs, first, new),
            state.fast_state,
            fast_optimizer.init(params.fast),
        )
        return updates, state._replace(fast_state=fast)

    return optax.GradientTransformation(
        lambda params: tied(wrapper.init(params), jax.tree.leaves(params)), update
    )
