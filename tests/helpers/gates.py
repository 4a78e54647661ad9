"""Which loops of a compiled program move host arrays, and what bounds them."""

import re
from collections.abc import Mapping

from helpers.hlo import Computations, Instruction


def loops_over_host(program: Computations) -> list[Instruction]:
    """The entry's loops that are given host arrays."""
    entry = program.instructions[program.entry]
    return [x for x in entry if x.operation == "while" and program.on_host(x)]


def loop_around(program: Computations, name: str) -> Instruction:
    """The entry's instruction within which a computation runs."""
    while True:
        called = re.compile(rf"%{re.escape(name)}(?![\w.\-])")
        name, caller = next(
            (computation, x)
            for computation, inside in program.instructions.items()
            for x in inside
            if called.search(x.code.partition(")")[2])
        )
        if name == program.entry:
            return caller


def bound_of(program: Computations, loop: Instruction) -> dict[str, Instruction]:
    """The entry's instructions that a loop's trip count follows from.

    None if no argument is among them, as of a constant count.
    """
    entry = {x.name: x for x in program.instructions[program.entry]}
    condition = program.instructions[loop.named("condition")]
    if any(x.operation == "constant" for x in condition):
        return {}
    carried = entry[loop.operands[0]].operands
    found: dict[str, Instruction] = {}
    for x in condition:
        if x.operation == "get-tuple-element":
            index = re.search(r"index=(\d+)", x.code)
            assert index is not None
            reached = _slice(entry, carried[int(index[1])])
            # The counter starts at a constant; the other one is the bound.
            if any(y.operation == "parameter" for y in reached.values()):
                found |= reached
    return found


def _slice(entry: Mapping[str, Instruction], name: str) -> dict[str, Instruction]:
    """An instruction and all that it follows from."""
    found, waiting = {}, [name]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = entry[name]
            waiting.extend(entry[name].operands)
    return found
