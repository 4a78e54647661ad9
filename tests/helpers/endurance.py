"""Long training: what it does to memory, to programs and to numbers."""

import concurrent.futures
import ctypes
import gc
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import paged_optax as po
from helpers.reference import distances

#: Three experts, of which some are active, and a bias that always is.
SHAPES = {"a": (64, 64), "b": (64, 128), "c": (64, 64), "bias": (70,)}
EXPERTS = ("a", "b", "c")
PAGES = {"page_size": "8KiB", "min_paged_size": "1KiB", "per_parameter_steps": True}
#: Room for the larger expert's moments in eight bits, or for the two others'.
BUDGET = "17KiB"
REBALANCED_EVERY = 50
LEARNING_RATE = 1e-3

State = tuple[Any, Any]
Step = Callable[..., State]


def resident() -> int:
    """Bytes of this process in memory, without what is only not yet given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def drawn(seed: int) -> dict[str, jax.Array]:
    random = np.random.default_rng(seed)
    return {
        k: jnp.asarray(random.normal(size=s), jnp.float32) for k, s in SHAPES.items()
    }


def active_in(number: int) -> dict[str, jax.Array]:
    """One expert rests in most steps, another one after each fifty."""
    phase = number // REBALANCED_EVERY
    gates = {name: (phase + i) % 3 > 0 for i, name in enumerate(EXPERTS)}
    gates["b"] |= number % 7 == 0
    return {name: jnp.asarray(gates.get(name, True)) for name in SHAPES}


class Training(NamedTuple):
    """A way to train the experts."""

    init: Callable[[Any], Any]  # makes the state of parameters
    #: Takes gradients, state, parameters and what is active.
    update: Callable[..., tuple[Any, Any]]
    #: What happens to a state before a step, by its number.
    rebalance: Callable[[Any, int], Any] = lambda state, number: state


def eight_bits(budget: str | None, **paging: Any) -> Training:
    """Eight-bit AdamW; within a budget the most recent experts' moments stay there."""
    tx = po.paged_adamw_8bit(LEARNING_RATE, device_budget=budget, **(PAGES | paging))

    def rebalance(state: Any, number: int) -> Any:
        if budget is None or number % REBALANCED_EVERY:
            return state
        return po.rebalance(tx, state, [EXPERTS[number // REBALANCED_EVERY % 3]])

    def update(gradients: Any, state: Any, params: Any, active: Any) -> Any:
        return tx.update(gradients, state, params, active=active)

    return Training(tx.init, update, rebalance)


class Outcome(NamedTuple):
    """What became of a run."""

    params: Any  # the parameters
    state: Any  # the state
    programs: int  # how often the step was traced
    early: int  # bytes of the process after the first steps
    late: int  # bytes of the process in the end

    @property
    def growth(self) -> float:
        return self.late / self.early - 1


def compiled(training: Training) -> tuple[Step, list[None]]:
    """A jitted step of a noisy quadratic, and a list as long as its traces are many."""
    target, traces = drawn(9), []

    def step(params: Any, state: Any, key: Any, active: Any) -> Any:
        traces.append(None)
        keys = dict(zip(SHAPES, jax.random.split(key, len(SHAPES)), strict=True))
        apart = jax.tree.map(jnp.subtract, params, target)
        gradients = {
            k: x + 0.1 * jax.random.normal(keys[k], x.shape) for k, x in apart.items()
        }
        updates, state = training.update(gradients, state, params, active)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1)), traces


def run(
    training: Training,
    steps: int,
    early: int = 1000,
    seed: int = 0,
    step: tuple[Step, list[None]] | None = None,
) -> Outcome:
    """Trains; `early` steps come before the first look at memory."""
    jitted, traces = step or compiled(training)
    params = drawn(seed)
    state = training.init(params)
    first = 0
    for number in range(steps):
        state = training.rebalance(state, number)
        key = jax.random.key(number)
        params, state = jitted(params, state, key, active_in(number))
        if number == early - 1:
            first = resident()
    return Outcome(params, state, len(traces), first, resident())


# -- optimizers made and dropped ----------------------------------------------------


def dropped(make: Callable[[], Any], count: int, early: int) -> tuple[int, int]:
    """Bytes of the process after some optimizers were made and dropped, and all."""
    params, first = {"w": jnp.ones((64, 64))}, 0
    for number in range(count):
        tx = make()
        step = jax.jit(tx.update)
        jax.block_until_ready(step(params, tx.init(params), params))
        if number == early - 1:
            del tx, step
            first = resident()
    tx = step = None
    return first, resident()


MADE: dict[str, Callable[[], Any]] = {
    "optax.adamw": lambda: optax.adamw(LEARNING_RATE),
    "paged_adamw_8bit": lambda: po.paged_adamw_8bit(
        LEARNING_RATE, page_size="4KiB", min_paged_size="1KiB"
    ),
}


# -- threads --------------------------------------------------------------------------


def in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    """What each thread came to, all started at once; an error is raised here."""
    gate = threading.Barrier(count)

    def one(number: int) -> Any:
        gate.wait()
        return work(number)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def threads_that_differ(count: int, steps: int) -> list[int]:
    """Threads that do not end in the bits of the same training alone.

    Half of them make an optimizer of their own, and trace and compile it while others
    do; the rest share one, and its compiled step. Each rebalances its own state.
    """
    shared = eight_bits(BUDGET)
    step = compiled(shared)

    def work(number: int) -> Any:
        if number % 2:
            ended = run(eight_bits(BUDGET), steps, seed=number)
        else:
            ended = run(shared, steps, seed=number, step=step)
        return ended.params, ended.state

    found = in_threads(work, count)
    alone = (run(shared, steps, seed=i, step=step) for i in range(count))
    return [
        number
        for number, (ours, wanted) in enumerate(zip(found, alone, strict=True))
        if distances(ours, (wanted.params, wanted.state))
    ]
