"""A step that a wrapper skips moves no byte, as the compilers have it."""

import dataclasses
import re

import jax
import optax
import pytest

import paged_optax as po
from helpers import aot
from helpers.programs import (
    COMPILERS,
    MIB,
    on_device,
    shardings,
    square,
    state_on,
    transfers,
)
from helpers.wrapped import every_third

LEAF = 4096 * 4096 * 4
SKIPPING = {
    "MultiSteps": lambda of, tx: of.MultiSteps(tx, 4),
    "apply_if_finite": lambda of, tx: of.apply_if_finite(tx, 3),
    "conditionally_transform": lambda of, tx: of.conditionally_transform(
        tx, every_third
    ),
    "conditionally_mask": lambda of, tx: of.conditionally_mask(tx, every_third),
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
    assert report.transfers == 4 * transfers(compile_for)
    for bound in use.bounds:
        assert any("pred[]" in x.shape for x in bound.values())
        assert any(DECIDES[name] in x for x in bound)


@pytest.mark.compiler
@COMPILERS
def test_an_update_that_is_never_skipped_has_no_such_bound(compile_for):
    """The check above can fail: without a wrapper no loop waits for a predicate."""
    tx = po.paged_adamw(1e-3, page_size="8MiB")
    use = HostUse.of(compile_for(stepping(tx, square(2))).hlo)
    # On a GPU there may be calls in the place of such loops.
    assert use.bounds or "call(" in "".join(use.outside)
    assert not any(use.bounds)


@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore:optax.MultiSteps transfers")
def test_optax_multi_steps_copies_the_whole_state():
    """What `po.MultiSteps` is for: Optax's selects between host arrays."""
    tx = optax.MultiSteps(po.paged_adamw(1e-3, page_size="8MiB"), 4)
    report = aot.h200(stepping(tx, square(4)))
    assert report.host_temp >= 2 * LEAF
    with pytest.raises(jax.errors.JaxRuntimeError):
        aot.v5e(stepping(tx, square(4)))
