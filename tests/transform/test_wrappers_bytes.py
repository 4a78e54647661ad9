"""A step that a wrapper skips moves no byte, as the compilers have it."""

import jax
import optax
import pytest

import paged_optax as po
from helpers import aot, programs
from helpers.gates import bound_of, loops_over_host
from helpers.hlo import Computations
from helpers.programs import COMPILERS, shardings, square, state_on, transfers
from helpers.wrapped import every_third

LEAF = 4096 * 4096 * 4
SKIPPING = {
    "MultiSteps": 4,
    "apply_if_finite": 3,
    "conditionally_transform": every_third,
    "conditionally_mask": every_third,
}
#: What the trip count of every page loop follows from.
DECIDES = {"MultiSteps": "mini_step", "apply_if_finite": "notfinite_count"}
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
        args = programs.on_device(mesh, params), state_on(mesh, tx, params)
        args = (*args, args[0])
        jitted = jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=shardings(args))
        return jitted, args

    return build


def used_outside(program):
    """What touches a host array outside every loop."""
    harmless = ("parameter", "tuple", "get-tuple-element", "bitcast", "while")
    return [
        x.line
        for x in program.instructions[program.entry]
        if program.on_host(x) and x.operation not in harmless
    ]


@pytest.mark.quick("-MultiSteps", "conditionally_mask-h200")
@pytest.mark.compiler
@COMPILERS
@pytest.mark.parametrize("name", SKIPPING)
def test_a_skipped_step_moves_no_byte(compile_for, name):
    """In place, and every trip count follows from the wrapper's counter, by a bool."""
    tx = getattr(po, name)(po.paged_adamw(1e-3, page_size="8MiB"), SKIPPING[name])
    report = compile_for(stepping(tx, square(4)))
    assert report.host_temp == 0
    assert report.host_aliased == report.host_outputs == report.host_arguments
    assert report.host_arguments == 2 * 4 * LEAF
    assert 0 <= report.device_outputs - report.device_aliased < 2**16
    beside = BESIDE.get((name, compile_for), 0)
    assert report.device_temp <= 48 * programs.MIB + beside * LEAF
    program = Computations(report.hlo)
    assert used_outside(program) == []
    loops = loops_over_host(program)
    assert len(loops) == 4
    assert report.transfers == 4 * transfers(compile_for)
    for bound in (bound_of(program, loop) for loop in loops):
        assert any("pred[]" in x.types for x in bound.values())
        assert any(DECIDES.get(name, "state_step") in x for x in bound)


@pytest.mark.compiler
@COMPILERS
def test_an_update_that_is_never_skipped_has_no_such_bound(compile_for):
    """The check above can fail: without a wrapper no loop waits for a predicate."""
    tx = po.paged_adamw(1e-3, page_size="8MiB")
    program = Computations(compile_for(stepping(tx, square(2))).hlo)
    loops = loops_over_host(program)
    # On a GPU there may be calls in the place of such loops.
    assert loops or "call(" in "".join(used_outside(program))
    assert not any(bound_of(program, loop) for loop in loops)


@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore:optax.MultiSteps transfers")
def test_optax_multi_steps_copies_the_whole_state():
    """What `po.MultiSteps` is for: Optax's selects between host arrays."""
    tx = optax.MultiSteps(po.paged_adamw(1e-3, page_size="8MiB"), 4)
    report = aot.h200(stepping(tx, square(4)))
    assert report.host_temp >= 2 * LEAF
    with pytest.raises(jax.errors.JaxRuntimeError):
        aot.v5e(stepping(tx, square(4)))
