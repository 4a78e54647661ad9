"""What a compiled step costs on a machine of stated rates, by its schedule.

A scheduled program is run through in its order. Each direction of the link between host
and device is one engine: a transfer begins when it is issued and its engine is free,
and what waits for it goes on when it ends. Products of matrices and other kernels run
one after the other. So what is computed between the start of a transfer and its end
hides it.

A kernel takes twice its results' bytes at the memory's rate, or, where it changes a
part of an array in place, twice that part's; one with products takes their time, as
does cuDNN's attention.

`cost` gives the time of an ideal runtime, which adds nothing to that. `between` gives a
range for XLA:GPU's: it adds stated overheads, low and high, and runs transfers on the
streams of the jax at hand. The overheads are assumptions. Four steps that were measured
on an H200 took 6 to 13% less than the low end
(`tests/benchmarks/results/gpu-nvidia-h200-jax0.11.2.json`).
"""

import collections
import dataclasses
import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence

import jax

from helpers import aot
from helpers.hlo import Computations, Executor, Instruction, buffers
from paged_optax.planning.cards import CARDS

#: XLA:GPU deals to so many streams in turn: transfers of both directions, and slices on
#: the device. None: each direction has a stream of its own, and slices wait for none.
IN_TURN = 4 if jax.__version_info__ < (0, 12) else None


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rates."""

    link: float  # bytes a second between host and device, each way
    flops: float = math.inf  # operations of products a second
    memory: float = math.inf  # bytes a second of device memory


#: Round figures of data sheets, for comparing schedules: PCIe 5 x16, dense bfloat16.
H200 = Machine(link=55e9, flops=600e12, memory=3.5e12)


def machine_of(card: str) -> Machine:
    """A card's rates: as much of its data sheet's as `H200` has of an H200's.

    86% of the link, 61% of the products in bfloat16, 73% of the memory's rate.
    """
    rates = dataclasses.astuple(H200), _stated("h200"), _stated(card)
    return Machine(*(x / whole * y for x, whole, y in zip(*rates, strict=True)))


def _stated(card: str) -> tuple[float, float, float]:
    """The rates of a card's data sheet, in the order of `Machine`."""
    found = re.search(r"memory_bandwidth: (\d+)", aot.target(card))
    assert found is not None
    known = CARDS[card]
    return 1e9 * known.link, 1e12 * known.products("bfloat16"), float(found[1])


@dataclasses.dataclass(frozen=True)
class Overheads:
    """What a runtime adds. Without arguments: nothing."""

    kernel: float = 0.0  # the least seconds that a kernel takes
    gap: float = 0.0  # seconds between two kernels
    copy: float = 0.0  # seconds that a transfer or a slice takes beyond its bytes' time
    #: Seconds of one wait of the host, which finds the device idle after it.
    sync: float = 0.0
    #: Seconds that a turn of a counted loop takes, to update its graph.
    graph: float = 0.0
    one_way: float = 1.0  # the part of the link's rate that a copy engine reaches
    bidirectional: float = 1.0  # the part left for each direction while both are busy
    zero_copy: float = 1.0  # the part of the link's rate that a kernel reaches over it
    slices: float = 0.0  # how often a slice copied on the device crosses its memory


#: Assumptions, from what such machines are known for, in the order of the fields.
LOW = Overheads(2e-6, 1e-6, 4e-6, 20e-6, 15e-6, 0.95, 0.95, 0.8, 2.0)
HIGH = Overheads(3e-6, 2e-6, 12e-6, 50e-6, 60e-6, 0.85, 0.7, 0.5, 2.0)


@dataclasses.dataclass
class Cost:
    """What a program moves and computes, and how long it takes."""

    up: float = 0.0  # bytes from host to device
    down: float = 0.0  # bytes from device to host
    compute: float = 0.0  # seconds of all that is no transfer
    seconds: float = 0.0  # seconds of the whole

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed: transfers that nothing hides."""
        return self.seconds - self.compute


def cost(
    hlo: str,
    machine: Machine,
    layers: int = 1,
    trips: Sequence[int] = (),
    overheads: Overheads = Overheads(),  # noqa: B008
    in_turn: int | None = None,
) -> Cost:
    """Runs through a scheduled program.

    Args:
      hlo: The program.
      machine: Its machine.
      layers: Turns of the loops over layers where the compiler states none: XLA:TPU
        states none, and the last layer or the first may have a turn of its own.
      trips: Turns of the innermost loops of which it states none, in their order.
      overheads: What the runtime adds.
      in_turn: Streams to which transfers and slices are dealt, see `IN_TURN`.
    """
    program = Computations(hlo, trips)
    run = _Run(machine, layers, program, overheads, dealt(program, in_turn))
    run.cost.seconds = run.computation(program.entry, 0.0)
    return run.cost


def kernels(hlo: str, machine: Machine) -> Iterator[tuple[Instruction, float, int]]:
    """Each kernel of a program of XLA:GPU, its seconds without overheads, its runs."""
    program = Computations(hlo)
    run = _Run(machine, 1, program, Overheads(), {})

    def inside(name: str, times: int) -> Iterator[tuple[Instruction, float, int]]:
        for instruction in program.instructions[name]:
            if instruction.operation == "while":
                loop = program.loop(instruction)
                yield from inside(loop.body, times * loop.turns)
            elif called := program.branches(instruction):
                for branch in called:
                    yield from inside(branch, times)
            elif program.executor(instruction) is Executor.KERNEL:
                yield instruction, run.roofline(instruction), times

    return inside(program.entry, 1)


def between(hlo: str, machine: Machine, layers: int = 1) -> tuple[float, float]:
    """The least and the most seconds of a program of XLA:GPU, see `LOW` and `HIGH`."""
    low, high = (
        cost(hlo, machine, layers, overheads=overheads, in_turn=IN_TURN).seconds
        for overheads in (LOW, HIGH)
    )
    return low, high


def over_floor(hlo: str, least: int, trips: Sequence[int] = ()) -> float:
    """The time of a program's transfers over the least, if `least` bytes go each way.

    All that is no transfer takes no time.
    """
    return cost(hlo, Machine(link=1.0), trips=trips).seconds / least


def traffic(hlo: str, trips: Sequence[int] = ()) -> int:
    """Bytes that a program moves between host and device, both ways; see `cost`."""
    moved = cost(hlo, Machine(link=1.0), trips=trips)
    return int(moved.up + moved.down)


class _Run:
    """One pass over a program, at a time that goes on."""

    def __init__(
        self,
        machine: Machine,
        layers: int,
        program: Computations,
        overheads: Overheads,
        streams: Mapping[str, int],
    ) -> None:
        self.machine, self.layers, self.cost = machine, layers, Cost()
        self.program, self.overheads, self.streams = program, overheads, streams
        self.free: dict[Hashable, float] = collections.defaultdict(float)
        self.kernels: dict[str, float] = {}

    def computation(self, name: str, now: float, last: bool = False) -> float:
        """The time at which a computation that begins now has ended."""
        flying: dict[str, float] = {}
        for instruction in self.program.instructions[name]:
            kind = self.program.executor(instruction)
            if instruction.operation == "while":
                now = self.loop(instruction, now)
            elif called := self.program.branches(instruction):
                now = self.called(instruction, called, now, last)
            elif instruction.operation.endswith("-done"):
                now = max(now, flying.pop(instruction.operands[0], now))
            elif kind is Executor.KERNEL:
                now = self.kernel(instruction, now)
            elif kind in (Executor.ENGINE, Executor.ZERO_COPY, Executor.SLICE):
                ended = self.transfer(instruction, kind, now)
                if instruction.started:
                    flying[instruction.name] = ended
                else:
                    now = ended
        return max([now, *flying.values()])

    def called(
        self, instruction: Instruction, called: Sequence[str], now: float, last: bool
    ) -> float:
        """The time at which a call has ended, or a conditional of which all may run.

        In a loop's last turn nothing is left to do under a condition.
        """
        if instruction.operation == "conditional":
            now += self.overheads.sync
            called = () if last else called
        for branch in called:
            now = self.computation(branch, now)
        return now

    def loop(self, instruction: Instruction, now: float) -> float:
        """As `computation`; the third turn of a loop stands for all that follow."""
        loop = self.program.loop(instruction)
        turns = loop.turns
        if not loop.counted:
            if self.of_layers(loop.body):
                turns = self.layers
            now = self.asked(loop.condition, now)

        def turn_from(now: float, last: bool) -> float:
            now = self.computation(loop.body, now, last)
            if loop.counted:
                return now + self.overheads.graph
            return self.asked(loop.condition, now)

        for turn in range(1, turns + 1):
            before, began = dataclasses.replace(self.cost), now
            now = turn_from(now, 1 < turn == turns)
            left = turns - 1 - turn
            if turn == 3 and left > 0:
                longer = left * (now - began)
                for field, x in dataclasses.asdict(self.cost).items():
                    setattr(self.cost, field, x + left * (x - getattr(before, field)))
                return turn_from(now + longer, True)
        return now

    def asked(self, condition: str, now: float) -> float:
        """The time at which the host knows whether a loop takes another turn."""
        return self.computation(condition, now) + self.overheads.sync

    def of_layers(self, body: str) -> bool:
        """Whether products are computed in a loop's body."""
        return any(
            self.products(inner)
            for caller in self.program.instructions[body]
            for inner in (caller, *self.inside(caller))
        )

    def inside(self, instruction: Instruction) -> list[Instruction]:
        """The instructions of a fusion."""
        return self.program.instructions.get(instruction.calls, [])

    def transfer(self, instruction: Instruction, kind: Executor, now: float) -> float:
        """The time at which a transfer or a slice that is issued now has ended."""
        stream = self.streams.get(instruction.name)
        if stream is not None:
            now = max(now, self.free[stream])
        size = self.program.moved_by(instruction)
        if kind is Executor.SLICE:
            seconds = self.overheads.slices * size / self.machine.memory
            ended = now + self.overheads.copy + seconds
        else:
            up = self.program.goes_up(instruction)
            ended = self.over_link("up" if up else "down", kind, size, now)
        if stream is not None:
            self.free[stream] = ended
        return ended

    def over_link(self, way: str, kind: Executor, size: int, now: float) -> float:
        """The time at which a transfer has ended that begins now, or when it can.

        While the other way is busy, both have `bidirectional` of twice one way's
        rate. What was issued first keeps its own rate, and this transfer has the rest.
        """
        setattr(self.cost, way, getattr(self.cost, way) + size)
        over = self.overheads
        part = over.one_way if kind is Executor.ENGINE else over.zero_copy
        seconds = size / (part * self.machine.link)
        begun = max(now, self.free[way]) + over.copy
        rest = 2 * over.bidirectional - 1
        busy = max(0.0, self.free["down" if way == "up" else "up"] - begun)
        beside = min(busy, seconds / rest if rest else math.inf)
        self.free[way] = begun + seconds + (1 - rest) * beside
        return self.free[way]

    def kernel(self, instruction: Instruction, now: float) -> float:
        """The time at which a kernel that begins now has ended."""
        if instruction.name not in self.kernels:
            least = max(self.roofline(instruction), self.overheads.kernel)
            self.kernels[instruction.name] = least + self.overheads.gap
        seconds = self.kernels[instruction.name]
        self.cost.compute += seconds
        return now + seconds

    def roofline(self, instruction: Instruction) -> float:
        """Seconds that the machine's rates allow for."""
        timed = ("fusion", "copy", "reduce", "custom-call", "dot", "convolution")
        if instruction.operation not in timed:
            return 0.0
        lines = self.inside(instruction)
        if products := sum(map(self.products, [instruction, *lines])):
            return products / self.machine.flops
        size = sum(x.bytes for x in buffers(instruction.types))
        for line in lines:
            if line.operation == "dynamic-update-slice":  # in place
                part = buffers(self.program.types.get(line.operands[1], ""))
                size += sum(x.bytes for x in part)
                size -= sum(x.bytes for x in buffers(line.types))
        return 2 * max(size, 0) / self.machine.memory

    def products(self, instruction: Instruction) -> int:
        """Operations of the products in one line."""
        operations = ("dot", "convolution", "custom-call")
        if instruction.operation not in operations or not instruction.operands:
            return 0
        result = _shape(instruction.types)
        if "__cudnn$fmha" in instruction.line:
            return _flash(instruction, self.program.types)
        if instruction.operation == "convolution":
            return 2 * math.prod(result) * self._summed(instruction, result)
        left = _shape(self.program.types.get(instruction.operands[0], ""))
        # A call of cuBLAS has them behind its metadata.
        axes = re.search(
            r'lhs_contracting_dim\w*"?[=:]\s*[\[{]([\d", ]+)', instruction.line
        )
        if axes is None or not left:
            return 0
        summed = [left[int(i)] for i in re.findall(r"\d+", axes[1])]
        return 2 * math.prod(result) * math.prod(summed)

    def _summed(self, instruction: Instruction, result: Sequence[int]) -> int:
        """Entries that a TPU's product sums: its axes are those of a convolution."""
        labels = re.search(r"dim_labels=\w+_(\w+)->(\w+)", instruction.code)
        assert labels is not None
        right = _shape(self.program.types[instruction.operands[1]])
        axes = dict(zip(labels[1], right, strict=True))
        made = dict(zip(labels[2], result, strict=True))
        return math.prod(
            n for axis, n in axes.items() if axis != "o" and made.get(axis, 1) == 1
        )


def _flash(instruction: Instruction, types: Mapping[str, str]) -> int:
    """Operations of cuDNN's attention: two products forward, five backward."""
    scores = re.search(r'"dimensions": ?\[([^]]*)\]', instruction.line)
    assert scores is not None
    size = math.prod(int(n) for n in re.findall(r"\d+", scores[1]))
    products = 5 if "Backward" in instruction.line else 2
    head = _shape(types[instruction.operands[0]])[-1]
    return 2 * products * size * head // (2 if "CAUSAL" in instruction.line else 1)


def _shape(types: str) -> tuple[int, ...]:
    """The first array's dimensions."""
    return next((buffer.shape for buffer in buffers(types)), ())


# -- the streams on which the runtime starts what is asynchronous --------------------


def dealt(program: Computations, streams: int | None) -> dict[str, int]:
    """The stream of each instruction that starts something, if they are dealt in turn.

    XLA goes through computations breadth first, and through each in post order.
    """
    found: dict[str, int] = {}
    names = [program.entry] if streams else []
    for name in names:  # grows
        for instruction in _post_order(program.instructions[name]):
            if instruction.started and streams:
                found[instruction.name] = len(found) % streams
            called = program.branches(instruction)
            if instruction.operation == "while":
                called = [instruction.named("condition"), instruction.named("body")]
            names += [x for x in called if x not in names]
    return found


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
