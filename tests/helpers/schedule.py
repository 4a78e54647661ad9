"""What runs while transfers from and to the host are open, in a scheduled HLO."""

import dataclasses
import re
from collections.abc import Callable, Iterator

from helpers.hlo import Computations, Executor, Instruction


@dataclasses.dataclass
class Overlap:
    """Transfers between host and device in one loop's body."""

    products: int = 0  # matrix products in the body
    covered: int = 0  # those during which a transfer is open
    bytes: int = 0  # bytes transferred, both ways
    hidden: int = 0  # bytes of the transfers that are open during a matrix product


def overlaps(hlo: str) -> list[Overlap]:
    """One entry for each loop body that has matrix products and transfers."""
    found = []
    program = Computations(hlo)
    for body in _bodies(program):
        result = Overlap()
        for size, count in _beside(program, body, _is_product):
            if size is None:
                result.products += 1
                result.covered += bool(count)
            else:
                result.bytes += size
                result.hidden += size if count else 0
        if result.products and result.bytes:
            found.append(result)
    return found


def reductions(hlo: str) -> list[int]:
    """For each reduction in a loop: how many transfers are open when it starts."""
    program = Computations(hlo)
    return [
        count
        for body in _bodies(program)
        for size, count in _beside(program, body, _is_reduction)
        if size is None
    ]


@dataclasses.dataclass
class Flight:
    """What is under way at once in one loop's body."""

    up: int = 0  # the most transfers to the device that are open at once
    down: int = 0  # the most transfers to the host
    kernels: int = 0  # kernels that start while a transfer is open


def flights(hlo: str) -> list[Flight]:
    """One entry for each loop body that has transfers both ways."""
    found = []
    program = Computations(hlo)
    for body in _bodies(program):
        result, flying = Flight(), {True: set[str](), False: set[str]()}
        for instruction in program.instructions[body]:
            if instruction.started and program.on_host(instruction):
                flying[program.goes_up(instruction)].add(instruction.name)
                result.up = max(result.up, len(flying[True]))
                result.down = max(result.down, len(flying[False]))
            elif instruction.operation.endswith("-done"):
                for each in flying.values():
                    each.discard(instruction.operands[0])
            elif program.executor(instruction) is Executor.KERNEL:
                result.kernels += any(flying.values())
        if result.up and result.down:
            found.append(result)
    return found


def _bodies(program: Computations) -> list[str]:
    every = [x for inside in program.instructions.values() for x in inside]
    names = (x.named("body") for x in every if x.operation == "while")
    return [name for name in dict.fromkeys(names) if name in program.instructions]


def _beside(
    program: Computations,
    body: str,
    wanted: Callable[[Computations, Instruction], bool],
) -> Iterator[tuple[int | None, int]]:
    """None for what is wanted, with how many transfers are open; and a transfer's
    bytes, with how much of that it was open for."""
    flying: dict[str, tuple[int, int]] = {}
    for instruction in program.instructions[body]:
        done = instruction.operation.endswith("-done")
        if instruction.started and program.on_host(instruction):
            flying[instruction.name] = program.moved_by(instruction), 0
        elif done and instruction.operands[0] in flying:
            yield flying.pop(instruction.operands[0])
        elif wanted(program, instruction):
            yield None, len(flying)
            flying = {name: (size, n + 1) for name, (size, n) in flying.items()}


def _is_reduction(program: Computations, instruction: Instruction) -> bool:
    return instruction.operation.removesuffix("-start") == "reduce-scatter"


def _is_product(program: Computations, instruction: Instruction) -> bool:
    lines = [instruction, *program.instructions.get(instruction.calls, [])]
    return any(
        x.operation in ("dot", "convolution") or re.search("cublas|gemm", x.code)
        for x in lines
    )
