"""Kernels, waits and transfers of one call of a program of XLA:GPU."""

import collections
import dataclasses
import functools
import operator
from collections.abc import Sequence

from helpers.hlo import Computations, Executor, Instruction

_Counts = collections.Counter[str]


@dataclasses.dataclass(frozen=True)
class RuntimeCounts:
    """What XLA:GPU's runtime does in one call of a program.

    Read from the scheduled program, and multiplied by the turns of loops. A loop of
    which the compiler states no count takes one turn here. One that keeps a leaf apart
    does so where something is updated. Which branch a conditional takes is not known:
    each count is the largest of the branches'.
    """

    #: Kernels, calls of libraries, and copies between them, one after the other. They
    #: include those of the conditions that loops evaluate.
    kernels: int = 0
    #: How often the host waits for the device: to learn whether a loop without a stated
    #: count takes another turn, and which branch a conditional takes.
    host_syncs: int = 0
    loop_turns: int = 0  # turns of loops whose count the compiler states
    transfers_up: int = 0  # copies from host to device by the copy engine
    transfers_down: int = 0  # copies from device to host by the copy engine
    #: Of both, those without a start of their own. What comes after one waits until it
    #: ends.
    sync_transfers: int = 0
    #: Kernels that read pinned memory over the link. XLA makes one where the address is
    #: not linear in the variable of a counted loop, or where a slice is not contiguous.
    zero_copy_up: int = 0
    zero_copy_down: int = 0  # kernels that write pinned memory over the link
    transfer_bytes: int = 0  # bytes that the copy engine moves, both ways
    zero_copy_bytes: int = 0  # bytes that kernels move over the link, both ways
    device_slices: int = 0  # asynchronous copies from device to device
    host_copies: int = 0  # copies of whole arrays within host memory
    #: Instructions that XLA added to compute a value once more, to save memory. They
    #: are counted in the program's text, not multiplied by turns.
    rematerialized: int = 0

    @classmethod
    def of(cls, hlo: str, trips: Sequence[int] = ()) -> "RuntimeCounts":
        """Reads a scheduled program of XLA:GPU: others are run in other ways.

        `trips` are the turns of the innermost loops that transfer pages and of which
        the compiler states none, in the order of the program.
        """
        program = Computations(hlo, trips)
        counts = _computation(program, program.entry)
        # XLA says so in such an instruction's name.
        counts["rematerialized"] = sum(
            ".remat" in instruction.name
            and program.executor(instruction) is not Executor.NOTHING
            for instructions in program.instructions.values()
            for instruction in instructions
        )
        return cls(**counts)


def _computation(program: Computations, name: str) -> _Counts:
    each = (_instruction(program, x) for x in program.instructions[name])
    return sum(each, collections.Counter())


def _instruction(program: Computations, instruction: Instruction) -> _Counts:
    if instruction.operation == "while":
        return _loop(program, instruction)
    if instruction.operation in ("call", "conditional"):
        branches = [_computation(program, x) for x in program.branches(instruction)]
        if instruction.operation == "call":
            return sum(branches, collections.Counter())
        # The host waits for the index of the branch, which is not known here.
        largest = functools.reduce(operator.or_, branches, collections.Counter())
        return largest + collections.Counter(host_syncs=1)
    executor = program.executor(instruction)
    if executor in (Executor.ENGINE, Executor.ZERO_COPY):
        return _transfer(program, instruction, executor)
    names = {
        Executor.KERNEL: "kernels",
        Executor.SLICE: "device_slices",
        Executor.HOST: "host_copies",
    }
    return collections.Counter({names[executor]: 1} if executor in names else {})


def _loop(program: Computations, instruction: Instruction) -> _Counts:
    loop = program.loop(instruction)
    total = _times(_computation(program, loop.body), loop.turns)
    if loop.counted:
        return total + collections.Counter(loop_turns=loop.turns)
    # The condition is evaluated, and its answer awaited, before each turn and after.
    asked = _computation(program, loop.condition) + collections.Counter(host_syncs=1)
    return total + _times(asked, loop.turns + 1)


def _times(counts: _Counts, turns: int) -> _Counts:
    return collections.Counter({name: turns * n for name, n in counts.items()})


def _transfer(
    program: Computations, instruction: Instruction, executor: Executor
) -> _Counts:
    way = "up" if program.goes_up(instruction) else "down"
    size = program.moved_by(instruction)
    # What has no start of its own is in its turn among the others.
    if executor is Executor.ENGINE:
        counts = {f"transfers_{way}": 1, "transfer_bytes": size}
        alone = "sync_transfers"
    else:
        counts = {f"zero_copy_{way}": 1, "zero_copy_bytes": size}
        alone = "kernels"
    return collections.Counter(counts | {alone: int(not instruction.started)})
