"""One contract for wrappers: Optax's own and ours, around paged and unpaged Optax.

`python test_wrappers.py` answers with what each case breaks that it is asked for. The
tests run it in a process where XLA:CPU rounds every formula one way (see `exact`), so
that every number of every step must be Optax's bit for bit.
"""

import dataclasses
import functools
import re
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import aot, apart
from helpers.exact import FLAGS as ONE_ROUNDING
from helpers.programs import COMPILERS, MIB, on_device, shardings, square, state_on
from helpers.reference import arrays, assert_equal, distances, kinds

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


def _itself(value: Any) -> Any:
    return value


def _paged(inner: Any) -> Any:
    return po.paged(inner, **PAGING)


#: How to make each, and how Optax makes it.
TRANSFORMATIONS: dict[str, tuple[Make, Make]] = {
    "adamw": (functools.partial(_adamw, _itself), functools.partial(_adamw, _itself)),
    "paged": (functools.partial(_adamw, _paged), functools.partial(_adamw, _itself)),
    "clip and paged": (
        functools.partial(_clipped, _paged),
        functools.partial(_clipped, _itself),
    ),
}

# -- the wrappers -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """A wrapper and what it promises.

    Attributes:
      wrap: Wraps what a `Make` makes.
      twin: Optax's wrapper of the same semantics; itself where it is Optax's.
      happens: Whether a step, by its number, reaches the wrapped transformation.
      inner: The wrapped transformation's state.
      not_finite: The steps whose gradients are not finite.
      hands_through: Whether a skipped step's updates are its gradients; else zero.
      lookahead: Whether parameters are pairs of fast and slow ones.
    """

    wrap: Callable[[Make], Any]
    twin: Callable[[Make], Any]
    happens: Callable[[int], bool] = lambda number: True
    inner: Callable[[Any], Any] = _itself
    not_finite: tuple[int, ...] = ()
    hands_through: bool = False
    lookahead: bool = False


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def _labels(params: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)


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
_third = lambda number: number % 3 == 2

WRAPPERS: dict[str, Wrapper] = {
    **_by_both(
        "MultiSteps",
        lambda of, make: of.MultiSteps(make(), 3).gradient_transformation(),
        happens=_third,
        inner=_inner_opt_state,
    ),
    **_by_both(
        "MultiSteps of sums by schedule",
        lambda of, make: of.MultiSteps(make(), lambda n: n + 1, use_grad_mean=False),
        happens=lambda number: number in (0, 2, 5, 9),
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
        happens=lambda number: number in (1, 4, 8),
        inner=_inner_opt_state,
        not_finite=NOT_FINITE,
    ),
    **_by_both(
        "apply_if_finite",
        lambda of, make: of.apply_if_finite(make(), 3),
        happens=lambda number: number not in NOT_FINITE or number == 12,
        inner=_inner_state,
        not_finite=NOT_FINITE,
    ),
    **_by_both(
        "conditionally_transform",
        lambda of, make: of.conditionally_transform(make(), _third),
        happens=_third,
        inner=_inner_state,
        hands_through=True,
    ),
    **_by_both(
        "conditionally_mask",
        lambda of, make: of.conditionally_mask(
            make(), lambda number, go: go, forward_extra_args=True
        ),
        happens=_third,
        inner=_inner_state,
    ),
    "optax.inject_hyperparams": _optax(
        lambda make: optax.inject_hyperparams(make)(
            learning_rate=optax.linear_schedule(1e-2, 0.0, STEPS)
        )
    ),
    "optax.masked": _optax(lambda make: optax.masked(make(), _matrices)),
    "optax.partition": _optax(
        lambda make: optax.partition(
            {"matrix": make(), "vector": make(learning_rate=1e-3)}, _labels
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
                optax.chain(optax.clip(0.5), optax.masked(make(), _matrices)), 5
            ),
            2,
        ),
        happens=lambda number: number % 2 == 1 and number != 13,
        inner=lambda state: state.inner_opt_state.inner_state,
        not_finite=(12,),
    ),
    **_by_both(
        "apply_if_finite of MultiSteps of masked",
        lambda of, make: of.apply_if_finite(
            of.MultiSteps(optax.masked(make(), _matrices), 2).gradient_transformation(),
            5,
        ),
        happens=lambda number: number in (1, 3, 7, 10, 12),
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


def _gradients(wrapper: Wrapper, number: int) -> dict[str, jax.Array]:
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


def _step(tx: Any) -> Callable[..., Any]:
    def step(params, state, gradients, go):
        updates, state = tx.update(gradients, state, params, go=go)
        return optax.apply_updates(params, updates), state, updates

    return step


def run(wrapper: Wrapper, tx: Any, *, jitted: bool = True, count: int = STEPS) -> Run:
    """Steps with a wrapped transformation; fails if an array changes its memory.

    Args:
      wrapper: Its wrapper.
      tx: The wrapped transformation.
      jitted: Whether to use `jit_step`, with everything donated; else eager.
      count: How many steps.
    """
    tx = optax.with_extra_args_support(tx)
    params = arrays(shapes=SHAPES)
    if wrapper.lookahead:
        # Not init_synced: a buffer cannot be donated twice.
        params = optax.LookaheadParams(params, arrays(shapes=SHAPES))
    params = jax.device_put(params, jax.devices()[0])
    state = tx.init(params)
    places, inner, results = kinds(state), [_bits(wrapper.inner(state))], []
    step = _step(tx)
    for number in range(count):
        gradients = _gradients(wrapper, number)
        arguments = (params, state, gradients, jnp.asarray(_third(number)))
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
    wrapper, (_, make) = WRAPPERS[name], TRANSFORMATIONS[transformation]
    twin = f"optax.{name[3:]}"
    if wrapper.twin is not wrapper.wrap and twin in WRAPPERS:
        return wanted(twin, transformation)
    return run(wrapper, wrapper.twin(make))


def keep(case: str) -> None:
    """The contract."""
    name, transformation = case.split(" / ")
    wrapper, (make, optax_make) = WRAPPERS[name], TRANSFORMATIONS[transformation]
    theirs = wanted(name, "clip and paged" if "clip" in transformation else "adamw")
    if wrapper.twin is wrapper.wrap and make is optax_make:
        ours = theirs
    else:
        ours = run(wrapper, wrapper.wrap(make))
    is_paged = "paged" in transformation
    moments = [x.ndim > 0 and x.size > 3 for x in jax.tree.leaves(ours.results[0][2])]

    # 1. Moments are where they should be, and nothing else is on the host.
    assert ("pinned_host" in ours.kinds) == is_paged
    assert all(
        moment
        for moment, kind in zip(moments, ours.kinds, strict=True)
        if kind != "device"
    )
    # 2. The state's structure, shapes and dtypes, and every number of every step.
    for number, (found, right) in enumerate(
        zip(ours.results, theirs.results, strict=True)
    ):
        assert _described(found) == _described(right), number
        assert distances(found, right) == {}, number
    # 3. Skipped steps leave the inner state, and give the documented updates.
    for number in range(STEPS):
        before, after = ours.inner[number : number + 2]
        if wrapper.happens(number):
            assert before != after, number
            continue
        assert before == after, number
        updates = ours.results[number][0]
        gradients = _gradients(wrapper, number)
        for update, gradient in zip(
            *map(jax.tree.leaves, (updates, gradients)), strict=True
        ):
            assert np.array_equal(
                update, gradient if wrapper.hands_through else 0 * update
            )
    # 4. The same eager.
    if transformation == "paged" and name.startswith("po."):
        eager = run(wrapper, wrapper.wrap(make), jitted=False, count=3)
        assert eager.kinds == ours.kinds
        for number, found in enumerate(eager.results):
            assert distances(found, ours.results[number]) == {}, number


def _outcome(case: str) -> str:
    try:
        keep(case)
    except Exception:  # one case must not hide the others
        return traceback.format_exc()
    return "kept"


# -- the tests --------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcome():
    with apart.process(__file__, FLAGS) as ask:
        yield ask


@pytest.mark.quick("-po.MultiSteps / clip", "-po.apply_if_finite / clip", "inject")
@pytest.mark.parametrize("case", CASES)
def test_contract(outcome, case):
    """Optax's state and numbers, skips that skip, memory that stays: see `keep`."""
    assert outcome(case) == "kept"


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("of", [optax, po], ids=["optax", "po"])
def test_has_updated_tells_the_micro_steps(of, jit):
    """`has_updated`, `inner_opt` and the object itself are Optax's."""
    inner = po.paged_sgd(1e-2, momentum=0.9, **PAGING)
    tx = of.MultiSteps(inner, 3)
    assert isinstance(tx, optax.MultiSteps)
    assert (tx.inner_opt.init, tx.inner_opt.update) == (inner.init, inner.update)
    transformation = tx.gradient_transformation()
    assert isinstance(transformation, optax.GradientTransformation)
    update = jax.jit(transformation.update) if jit else transformation.update
    params = arrays(shapes={"w": (70, 32)})
    state, seen = tx.init(params), []
    assert kinds(state.acc_grads) == ["device"]
    for _ in range(7):
        updates, state = update(params, state, params)
        seen.append(bool(tx.has_updated(state)))
        assert seen[-1] == bool(jnp.any(updates["w"] != 0))
    assert seen == [False, False, True, False, False, True, False]


@pytest.mark.parametrize("finite", [True, False])
def test_micro_steps_are_zero_whatever_the_gradients(finite):
    """Zero as Optax documents, where its `0 * nan` hands a NaN to the parameters."""
    params = arrays(shapes={"w": (70, 32)})
    gradients = params if finite else jax.tree.map(lambda x: x * jnp.nan, params)
    for of in (po,) if not finite else (po, optax):
        tx = of.MultiSteps(po.paged_adamw(1e-2, **PAGING), 2)
        updates, _ = tx.update(gradients, tx.init(params), params)
        assert_equal(updates, jax.tree.map(jnp.zeros_like, params))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_jitted_inner_update_is_skipped_too(jit):
    """JAX's cache of traces must not hand out one that was made for another step."""
    inner = po.paged_sgd(1e-2, momentum=0.9, **PAGING)
    jitted = optax.GradientTransformationExtraArgs(inner.init, jax.jit(inner.update))
    params, results = arrays(shapes={"w": (70, 32)}), []
    for tx in (po.MultiSteps(inner, 2), po.MultiSteps(jitted, 2)):
        state, update = tx.init(params), jax.jit(tx.update) if jit else tx.update
        for _ in range(4):
            _, state = update(params, state, params)
        results.append(state)
    assert_equal(*results)


def _flagged(inner):
    """A transformation whose state holds a Python scalar beside another's."""
    return optax.GradientTransformation(
        lambda params: {"flag": False, "inner": inner.init(params)},
        lambda updates, state, params=None: (
            (made := inner.update(updates, state["inner"], params))[0],
            {"flag": True, "inner": made[1]},
        ),
    )


RESTARTING = {
    "MultiSteps": lambda of, tx: of.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda of, tx: of.apply_if_finite(tx, 9),
    "Python scalar": lambda of, tx: tx,
}


@pytest.mark.quick("-MultiSteps")
@pytest.mark.parametrize("name", RESTARTING)
def test_a_synchronisation_restarts_what_a_step_skips(name):
    """All of the state, although the wrapper in between skips the step."""
    shapes = {"w": (64, 128), "v": (300,)}
    params = optax.LookaheadParams.init_synced(arrays(shapes=shapes))

    def states(of, page):
        flag = _flagged if name == "Python scalar" else lambda inner: inner
        fast = RESTARTING[name](of, page(flag(optax.adam(1e-2))))
        tx = of.lookahead(fast, 3, 0.5, reset_state=True)
        state, update = tx.init(params), jax.jit(tx.update)
        for number in range(5):
            gradients = arrays(shapes=shapes, seed=number)
            if number == 2 and name == "apply_if_finite":
                gradients["v"] = gradients["v"].at[7].set(jnp.nan)
            updates, state = update(gradients, state, params)
            yield jax.tree.map(np.asarray, (updates, state))

    ours = states(po, _paged)
    for wanted in states(optax, _itself):
        found = next(ours)
        same = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
        jax.tree.map(same, found, wanted)


def test_a_bad_condition_is_refused_as_by_optax():
    """The condition is asked by Optax's own code, and so are its errors."""
    params = arrays(shapes={"w": (70, 32)})
    skip = lambda *_: (jnp.zeros(2, bool), ())
    for of in (optax, po):
        tx = of.MultiSteps(optax.sgd(1e-2), 2, should_skip_update_fn=skip)
        with pytest.raises(ValueError, match="should return a boolean scalar"):
            tx.update(params, tx.init(params), params)


@pytest.mark.quick("po.conditionally_transform")
@pytest.mark.parametrize("name", [x for x in WRAPPERS if x.startswith("po.")][::2])
def test_plain_jit_settles_after_its_first_step(name):
    """One program, and one for what `init` leaves uncommitted; none later.

    Donated buffers are paired by order: parameters first, as the step returns them.
    """
    wrapper = WRAPPERS[name]
    make = lambda **kwargs: po.paged(optax.sgd(1e-2, momentum=0.9), **PAGING)
    tx = optax.with_extra_args_support(wrapper.wrap(make))
    params = arrays(shapes=SHAPES)
    state = tx.init(params)
    places = kinds(state)
    step, programs = jax.jit(_step(tx), donate_argnums=(0, 1)), []
    for number in range(4):
        go = jnp.asarray(_third(number))
        params, state, _ = step(params, state, _gradients(wrapper, number), go)
        assert kinds(state) == places
        programs.append(step._cache_size())
    assert programs[1] == programs[-1] <= 2


# -- what the compilers make of it -----------------------------------------------

LEAF = 4096 * 4096 * 4
SKIPPING = {
    "MultiSteps": lambda of, tx: of.MultiSteps(tx, 4),
    "apply_if_finite": lambda of, tx: of.apply_if_finite(tx, 3),
    "conditionally_transform": lambda of, tx: of.conditionally_transform(tx, _third),
    "conditionally_mask": lambda of, tx: of.conditionally_mask(tx, _third),
}
#: What the trip count of every page loop follows from.
DECIDES = {
    "MultiSteps": "mini_step",
    "apply_if_finite": "notfinite_count",
    "conditionally_transform": "state_step",
    "conditionally_mask": "state_step",
}
#: Leaves of scratch besides the pages. A gradient that is handed through must outlive
#: the update that may replace it; XLA:TPU keeps two accumulators beside theirs.
BESIDE = {
    ("conditionally_transform", aot.h200): 1,
    ("conditionally_transform", aot.v5e): 1,
    ("MultiSteps", aot.v5e): 2,
}


def stepping(tx, params):
    """A whole step, all donated: parameters, state, gradients and updates in place."""

    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, updates

    def build(mesh):
        args = on_device(mesh, params), state_on(mesh, tx, params)
        args = (*args, args[0])
        jitted = jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=shardings(args))
        return jitted, args

    return build


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of an entry computation."""

    shape: str
    opcode: str
    operands: tuple[str, ...]
    line: str


def instructions(computation: str) -> dict[str, Instruction]:
    found = {}
    for line in computation.splitlines()[1:]:
        name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        operation = re.search(r"(?:^| )([a-z][\w\-]*)\(", rest)
        if operation:
            operands = rest[operation.end() :].split("), ")[0]
            found[name.lstrip("%")] = Instruction(
                rest[: operation.start()],
                operation[1],
                tuple(re.findall(r"%([\w.\-]+)", operands)),
                line,
            )
    return found


@dataclasses.dataclass(frozen=True)
class HostUse:
    """How a compiled program reaches host memory.

    Attributes:
      outside: Instructions that touch a host buffer outside every loop.
      bounds: For each outermost loop over host buffers, what its trip count is computed
        from in the entry computation; empty where it follows from no argument.
    """

    outside: list[str]
    bounds: list[dict[str, Instruction]]

    @classmethod
    def of(cls, hlo: str) -> "HostUse":
        computations = {}
        for text in re.split(r"\n\}\n", hlo):
            header = re.search(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", text, re.MULTILINE)
            if header:
                body = text[header.start() :]
                computations["ENTRY" if header[1] else header[2]] = instructions(body)
        entry = computations["ENTRY"]
        harmless = ("parameter", "tuple", "get-tuple-element", "bitcast", "while")
        outside, bounds = [], []
        for instruction in entry.values():
            shapes = [entry[x].shape for x in instruction.operands]
            if not any("S(5)" in shape for shape in (instruction.shape, *shapes)):
                continue
            if instruction.opcode not in harmless:
                outside.append(instruction.line)
            if instruction.opcode != "while":
                continue
            (carried,) = instruction.operands
            condition = computations[
                re.search(r"condition=%?([\w.\-]+)", instruction.line)[1]
            ]
            compared = {
                int(re.search(r"index=(\d+)", x.line)[1])
                for x in condition.values()
                if x.opcode == "get-tuple-element"
            }
            reached = [_slice(entry, entry[carried].operands[i]) for i in compared]
            # The counter starts at a constant; the other one is the bound, unless the
            # condition compares with a constant of its own.
            bound: dict[str, Instruction] = {}
            for x in reached:
                if any(y.opcode == "parameter" for y in x.values()):
                    bound |= x
            fixed = any(x.opcode == "constant" for x in condition.values())
            bounds.append({} if fixed else bound)
        return cls(outside, bounds)


def _slice(entry: dict[str, Instruction], name: str) -> dict[str, Instruction]:
    """An instruction and all that it follows from."""
    found, waiting = {}, [name]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = entry[name]
            waiting.extend(entry[name].operands)
    return found


@pytest.mark.quick("-MultiSteps", "conditionally_mask-h200")
@pytest.mark.compiler
@COMPILERS
@pytest.mark.parametrize("name", SKIPPING)
def test_a_skipped_step_moves_no_byte(compile_for, name):
    """Everything in place, and a predicate is the trip count of all that is moved.

    Host memory is touched inside loops alone, whose trip count is a converted bool that
    follows from the wrapper's own counter: 0 on a step that is skipped.
    """
    tx = SKIPPING[name](po, po.paged_adamw(1e-3, page_size="8MiB"))
    report = compile_for(stepping(tx, square(4)))
    assert report.host_temp == 0
    assert report.host_aliased == report.host_outputs == report.host_arguments
    assert report.host_arguments == 2 * 4 * LEAF
    assert 0 <= report.device_outputs - report.device_aliased < 2**16
    beside = BESIDE.get((name, compile_for), 0)
    assert report.device_temp <= 48 * MIB + beside * LEAF
    use = HostUse.of(report.hlo)
    assert use.outside == []
    assert len(use.bounds) == 4
    assert report.transfers == 4 * 4
    for bound in use.bounds:
        assert any("pred[]" in x.shape for x in bound.values())
        assert any(DECIDES[name] in x for x in bound)


@pytest.mark.compiler
@COMPILERS
def test_an_update_that_is_never_skipped_has_no_such_bound(compile_for):
    """The check above can fail: without a wrapper no loop waits for a predicate."""
    tx = po.paged_adamw(1e-3, page_size="8MiB")
    use = HostUse.of(compile_for(stepping(tx, square(2))).hlo)
    assert use.bounds == [{}, {}]


@pytest.mark.compiler
def test_optax_multi_steps_copies_the_whole_state():
    """What `po.MultiSteps` is for: Optax's selects between host arrays."""
    tx = optax.MultiSteps(po.paged_adamw(1e-3, page_size="8MiB"), 4)
    report = aot.h200(stepping(tx, square(4)))
    assert report.host_temp >= 2 * 4 * LEAF
    with pytest.raises(jax.errors.JaxRuntimeError):
        aot.v5e(stepping(tx, square(4)))


if __name__ == "__main__":
    apart.answer(_outcome)
