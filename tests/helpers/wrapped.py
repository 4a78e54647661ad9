"""One contract for wrappers: Optax's own and ours, around paged and unpaged Optax.

`python tests/helpers/wrapped.py` answers with what each case breaks that it is asked
for, see `apart`. It runs where XLA:CPU rounds every formula one way (see `exact`), so
that every number of every step must be Optax's bit for bit.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import paged_optax as po
from helpers import apart
from helpers.exact import FLAGS as ONE_ROUNDING
from helpers.exact import labels, matrices
from helpers.reference import arrays, distances, kinds

STEPS = 14
#: Three pages, the last smaller; a single page; and one that stays on the device.
SHAPES = {"w": (70, 32), "v": (40,), "t": (3,)}
PAGING = {"page_size": "4KiB", "min_paged_size": "64B"}
#: Three in a row are rejected, and the fourth is let through.
NOT_FINITE = (2, 5, 6, 9, 10, 11, 12)

#: Fast to compile, and one way to round.
FLAGS = (
    f"{ONE_ROUNDING} --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true"
)

# -- the transformations ------------------------------------------------------------

Make = Callable[..., Any]


def _adamw(page: Callable[[Any], Any], learning_rate: Any = 1e-2) -> Any:
    return page(optax.adamw(learning_rate, weight_decay=0.1))


def _clipped(page: Callable[[Any], Any], learning_rate: Any = 1e-2) -> Any:
    clip = optax.clip_by_global_norm(1.0)
    return optax.chain(clip, _adamw(page, learning_rate))


def itself(value: Any) -> Any:
    return value


def as_paged(inner: Any) -> Any:
    return po.paged(inner, **PAGING)


#: How to make each, and what pages it; by Optax nothing does.
TRANSFORMATIONS: dict[str, tuple[Make, Callable[[Any], Any]]] = {
    "adamw": (_adamw, itself),
    "paged": (_adamw, as_paged),
    "clip and paged": (_clipped, as_paged),
}

# -- the wrappers -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """A wrapper and what it promises."""

    wrap: Callable[[Make], Any]  # wraps what a `Make` makes
    #: Optax's wrapper of the same semantics; itself where it is Optax's.
    twin: Callable[[Make], Any]
    #: Whether a step, by its number, reaches the wrapped transformation.
    enabled: Callable[[int], bool] = lambda number: True
    inner: Callable[[Any], Any] = itself  # the wrapped transformation's state
    not_finite: tuple[int, ...] = ()  # the steps whose gradients are not finite
    #: Whether a skipped step's updates are its gradients; else zero.
    hands_through: bool = False
    lookahead: bool = False  # whether parameters are pairs of fast and slow ones


def _optax(wrap: Callable[[Make], Any], **promises: Any) -> Wrapper:
    return Wrapper(wrap, wrap, **promises)


def _by_both(
    name: str, build: Callable[[Any, Make], Any], **promises: Any
) -> dict[str, Wrapper]:
    """Optax's wrapper, and ours, which must be its twin."""
    theirs, ours = functools.partial(build, optax), functools.partial(build, po)
    return {
        f"optax.{name}": Wrapper(theirs, theirs, **promises),
        f"po.{name}": Wrapper(ours, theirs, **promises),
    }


_inner_state = lambda state: state.inner_state
_inner_opt_state = lambda state: state.inner_opt_state
every_third = lambda number: number % 3 == 2

WRAPPERS: dict[str, Wrapper] = {
    **_by_both(
        "MultiSteps",
        lambda of, make: of.MultiSteps(make(), 3).gradient_transformation(),
        enabled=every_third,
        inner=_inner_opt_state,
    ),
    **_by_both(
        "MultiSteps of sums by schedule",
        lambda of, make: of.MultiSteps(make(), lambda n: n + 1, use_grad_mean=False),
        enabled=lambda number: number in (0, 2, 5, 9),
        inner=_inner_opt_state,
    ),
    **_by_both(
        "MultiSteps of bfloat16 that skips",
        lambda of, make: of.MultiSteps(
            make(),
            2,
            should_skip_update_fn=optax.skip_not_finite,
            accumulator_dtype=jnp.bfloat16,
        ),
        enabled=lambda number: number in (1, 4, 8),
        inner=_inner_opt_state,
        not_finite=NOT_FINITE,
    ),
    **_by_both(
        "apply_if_finite",
        lambda of, make: of.apply_if_finite(make(), 3),
        enabled=lambda number: number not in NOT_FINITE or number == 12,
        inner=_inner_state,
        not_finite=NOT_FINITE,
    ),
    **_by_both(
        "conditionally_transform",
        lambda of, make: of.conditionally_transform(make(), every_third),
        enabled=every_third,
        inner=_inner_state,
        hands_through=True,
    ),
    **_by_both(
        "conditionally_mask",
        lambda of, make: of.conditionally_mask(
            make(), lambda number, go: go, forward_extra_args=True
        ),
        enabled=every_third,
        inner=_inner_state,
    ),
    "optax.inject_hyperparams": _optax(
        lambda make: optax.inject_hyperparams(make)(
            learning_rate=optax.linear_schedule(1e-2, 0.0, STEPS)
        )
    ),
    "optax.masked": _optax(lambda make: optax.masked(make(), matrices)),
    "optax.partition": _optax(
        lambda make: optax.partition(
            {"matrix": make(), "vector": make(learning_rate=1e-3)}, labels
        )
    ),
    "optax.chain": _optax(
        lambda make: optax.chain(optax.clip(0.5), make(), optax.scale(0.5))
    ),
    "optax.named_chain": _optax(
        lambda make: optax.named_chain(("clip", optax.clip(0.5)), ("adamw", make()))
    ),
    "optax.lookahead": _optax(
        lambda make: optax.lookahead(make(), sync_period=3, slow_step_size=0.5),
        lookahead=True,
    ),
    "optax.lookahead that resets": _optax(
        lambda make: optax.lookahead(
            make(), sync_period=3, slow_step_size=0.5, reset_state=True
        ),
        lookahead=True,
    ),
    # Gradients that are not finite stay in the accumulators of Optax's MultiSteps for
    # good (0 * nan), so the last pair has them.
    **_by_both(
        "MultiSteps of apply_if_finite of chain and masked",
        lambda of, make: of.MultiSteps(
            of.apply_if_finite(
                optax.chain(optax.clip(0.5), optax.masked(make(), matrices)), 5
            ),
            2,
        ),
        enabled=lambda number: number % 2 == 1 and number != 13,
        inner=lambda state: state.inner_opt_state.inner_state,
        not_finite=(12,),
    ),
    **_by_both(
        "apply_if_finite of MultiSteps of masked",
        lambda of, make: of.apply_if_finite(
            of.MultiSteps(optax.masked(make(), matrices), 2).gradient_transformation(),
            5,
        ),
        enabled=lambda number: number in (1, 3, 7, 10, 12),
        inner=lambda state: state.inner_state.inner_opt_state,
        not_finite=(4, 5, 9),
    ),
}
CASES = [
    f"{name} / {inner}"
    for name in WRAPPERS
    for inner in TRANSFORMATIONS
    # Around pages, one chain tells of Optax's own; around Optax it is its own twin.
    if inner == "clip and paged" or name.startswith("po.")
]

# -- a run ----------------------------------------------------------------------------


def gradients_of(wrapper: Wrapper, number: int) -> dict[str, jax.Array]:
    made = arrays(shapes=SHAPES, seed=100 + number)
    if number in wrapper.not_finite:
        made["w"] = made["w"].at[50, 3].set(jnp.nan if number % 2 else jnp.inf)
    return made


def _bits(tree: Any) -> list[bytes]:
    return [np.array(x).tobytes() for x in jax.tree.leaves(tree)]


def _described(tree: Any) -> list[Any]:
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run gave: the state it began with, and copies of each step's results."""

    kinds: list[str]
    inner: list[list[bytes]]
    results: list[Any]


def run(wrapper: Wrapper, tx: Any, *, jitted: bool = True, count: int = STEPS) -> Run:
    """Steps with a wrapped transformation; fails if an array changes its memory.

    If jitted by `jit_step`, with everything donated; else eager.
    """
    tx = optax.with_extra_args_support(tx)
    params = arrays(shapes=SHAPES)
    if wrapper.lookahead:
        # Not init_synced: a buffer cannot be donated twice.
        params = optax.LookaheadParams(params, arrays(shapes=SHAPES))
    params = jax.device_put(params, jax.devices()[0])
    state = tx.init(params)
    places, inner, results = kinds(state), [_bits(wrapper.inner(state))], []

    def step(params, state, gradients, go):
        updates, state = tx.update(gradients, state, params, go=go)
        return optax.apply_updates(params, updates), state, updates

    for number in range(count):
        gradients = gradients_of(wrapper, number)
        arguments = (params, state, gradients, jnp.asarray(every_third(number)))
        if number == 0 and jitted:
            step = po.jit_step(step, *arguments, donate_argnums=(0, 1, 2))
        params, new, updates = step(*arguments)
        if jitted:
            moments = [x for x in jax.tree.leaves(state) if x.ndim == 2]
            assert all(x.is_deleted() for x in moments), "not donated"
        state = new
        assert kinds(state) == places, number
        assert set(kinds((updates, params))) == {"device"}, number
        inner.append(_bits(wrapper.inner(state)))
        results.append(jax.tree.map(np.array, (updates, params, state)))
    return Run(places, inner, results)


@functools.cache
def wanted(name: str, transformation: str) -> Run:
    """The run of Optax's wrapper around unpaged Optax."""
    wrapper, (make, _) = WRAPPERS[name], TRANSFORMATIONS[transformation]
    twin = f"optax.{name[3:]}"
    if wrapper.twin is not wrapper.wrap and twin in WRAPPERS:
        return wanted(twin, transformation)
    return run(wrapper, wrapper.twin(functools.partial(make, itself)))


def keep(case: str) -> None:
    """The contract."""
    name, transformation = case.split(" / ")
    wrapper, (make, page) = WRAPPERS[name], TRANSFORMATIONS[transformation]
    make = functools.partial(make, page)
    theirs = wanted(name, "clip and paged" if "clip" in transformation else "adamw")
    if wrapper.twin is wrapper.wrap and page is itself:
        ours = theirs
    else:
        ours = run(wrapper, wrapper.wrap(make))
    is_paged = "paged" in transformation
    moments = [x.ndim > 0 and x.size > 3 for x in jax.tree.leaves(ours.results[0][2])]

    # 1. Moments are where they should be, and nothing else is on the host.
    assert ("pinned_host" in ours.kinds) == is_paged
    on_host = [kind != "device" for kind in ours.kinds]
    assert all(x <= moment for x, moment in zip(on_host, moments, strict=True))
    # 2. The state's structure, shapes and dtypes, and every number of every step.
    for number, found in enumerate(ours.results):
        right = theirs.results[number]
        assert _described(found) == _described(right), number
        assert distances(found, right) == {}, number
    # 3. Skipped steps leave the inner state, and give the documented updates.
    for number in range(STEPS):
        before, after = ours.inner[number : number + 2]
        if wrapper.enabled(number):
            assert before != after, number
            continue
        assert before == after, number
        updates = ours.results[number][0]
        gradients = gradients_of(wrapper, number)
        zeros = jax.tree.map(np.zeros_like, updates)
        right = gradients if wrapper.hands_through else zeros
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, updates, right)))
    # 4. The same eager.
    if transformation == "paged" and name.startswith("po."):
        eager = run(wrapper, wrapper.wrap(make), jitted=False, count=3)
        assert eager.kinds == ours.kinds
        for number, found in enumerate(eager.results):
            assert distances(found, ours.results[number]) == {}, number


if __name__ == "__main__":
    apart.answer(lambda case: keep(case) or "kept")
