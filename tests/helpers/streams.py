"""The streams on which XLA:GPU's runtime starts what is asynchronous."""

import re
from collections.abc import Iterator, Sequence

import jax

from helpers.hlo import Computations, Instruction

#: XLA:GPU deals to so many streams in turn: transfers of both directions, and slices on
#: the device. None: each direction has a stream of its own, and slices wait for none.
IN_TURN = 4 if jax.__version_info__ < (0, 12) else None


def dealt(program: Computations, streams: int | None) -> dict[str, int]:
    """The stream of each instruction that starts something, if they are dealt in turn.

    XLA goes through computations breadth first, and through each in post order.
    """
    dealt: dict[str, int] = {}
    names = [program.entry] if streams else []
    for name in names:  # grows
        for instruction in _post_order(program.instructions[name]):
            if instruction.started and streams:
                dealt[instruction.name] = len(dealt) % streams
            called = program.branches(instruction)
            if instruction.operation == "while":
                called = [instruction.named("condition"), instruction.named("body")]
            names += [x for x in called if x not in names]
    return dealt


def _post_order(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """Instructions after their operands, depth first from those that nothing uses."""
    known = {x.name: x for x in instructions}
    needs = {x.name: [n for n in _needs(x) if n in known] for x in instructions}
    used = {name for each in needs.values() for name in each}
    waiting = [x.name for x in reversed(instructions) if x.name not in used]
    opened: set[str] = set()
    ended: set[str] = set()
    while waiting:
        name = waiting[-1]
        if name not in opened:
            opened.add(name)
            waiting += [x for x in reversed(needs[name]) if x not in opened]
            continue
        waiting.pop()
        if name not in ended:
            ended.add(name)
            yield known[name]


def _needs(instruction: Instruction) -> list[str]:
    """Names of what comes before an instruction."""
    found = re.search(r"control-predecessors=\{([^}]*)\}", instruction.line)
    before = re.findall(r"%([\w.\-]+)", found[1]) if found else []
    return [*reversed(before), *instruction.operands]
