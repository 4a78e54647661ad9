"""What a compiled step costs on a machine of stated rates, by its schedule.

A scheduled program is run through in its order. Each direction of the link between host
and device is one engine: a transfer begins when it is issued and its engine is free,
and what waits for it goes on when it ends. Products of matrices and other kernels run
one after the other. So what is computed between the start of a transfer and its end
hides it.

A kernel takes twice its results' bytes at the memory's rate, or, where it changes a
part of an array in place, twice that part's; one with products takes their time.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

from helpers import aot


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rates.

    Attributes:
      link: Bytes a second between host and device, each way.
      flops: Operations of products a second.
      memory: Bytes a second of device memory.
    """

    link: float
    flops: float = math.inf
    memory: float = math.inf


#: Round figures of data sheets, for comparing schedules: PCIe 5 x16, dense bfloat16.
H200 = Machine(link=55e9, flops=600e12, memory=3.5e12)
V5E = Machine(link=16e9, flops=150e12, memory=0.8e12)


@dataclasses.dataclass
class Cost:
    """What a program moves and computes, and how long it takes.

    Attributes:
      up: Bytes from host to device.
      down: Bytes from device to host.
      compute: Seconds of all that is no transfer.
      seconds: Seconds of the whole.
    """

    up: float = 0.0
    down: float = 0.0
    compute: float = 0.0
    seconds: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed: transfers that nothing hides."""
        return self.seconds - self.compute


def cost(
    hlo: str, machine: Machine, layers: int = 1, trips: Sequence[int] = ()
) -> Cost:
    """Runs through a scheduled program.

    Args:
      hlo: The program.
      machine: Its machine.
      layers: Turns of the loops over layers where the compiler states none: XLA:TPU
        states none, and the last layer or the first may have a turn of its own.
      trips: Turns of the innermost loops of which it states none, in their order.
    """
    run = _Run(machine, layers, aot.Computations(hlo, trips), hlo)
    run.cost.seconds = run.computation(run.program.entry, 0.0)
    return run.cost


def over_floor(hlo: str, least: int, trips: Sequence[int] = ()) -> float:
    """The time of a program's transfers over the least that they can take.

    All that is no transfer takes no time.

    Args:
      hlo: The program.
      least: Bytes that have to go in each direction.
      trips: See `cost`.
    """
    return cost(hlo, Machine(link=1.0), trips=trips).seconds / least


class _Run:
    """One pass over a program, at a time that goes on."""

    def __init__(
        self, machine: Machine, layers: int, program: aot.Computations, hlo: str
    ) -> None:
        self.machine, self.layers, self.cost = machine, layers, Cost()
        self.program = program
        self.free = {"up": 0.0, "down": 0.0}
        self.kernels: dict[str, float] = {}
        self.types = dict(re.findall(r"^\s*(?:ROOT )?%([\w.\-]+) = (\S+)", hlo, re.M))

    def computation(self, name: str, now: float, last: bool = False) -> float:
        """The time at which a computation that begins now has ended."""
        flying: dict[str, float] = {}
        for line in self.program.lines[name]:
            found = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", line)
            code = line.split(", metadata=")[0]
            if found is None:
                continue
            if " while(" in code:
                now = self.loop(line, now)
            elif called := self.program.called(code, last):
                for branch in called:
                    now = self.computation(branch, now)
            elif "-start(" in code and "S(5)" in code:
                way = _direction(code)
                flying[found[1]] = self.transfer(way, aot.moved_by(code), now)
            elif started := re.search(r"-done\([^%]*%?([\w.\-]+)\)", code):
                now = max(now, flying.pop(started[1], now))
            else:
                seconds = self.kernel(found[1], code)
                self.cost.compute += seconds
                now += seconds
        return max([now, *flying.values()])

    def loop(self, line: str, now: float) -> float:
        """As `computation`; the third turn of a loop stands for all that follow."""
        body, turns = self.program.loop(line)
        if "known_trip_count" not in line and self.of_layers(body):
            turns = self.layers
        for turn in range(1, turns + 1):
            before, began = dataclasses.replace(self.cost), now
            now = self.computation(body, now, 1 < turn == turns)
            left = turns - 1 - turn
            if turn == 3 and left > 0:
                longer = left * (now - began)
                for field in ("up", "down", "compute"):
                    each = getattr(self.cost, field) - getattr(before, field)
                    setattr(self.cost, field, getattr(self.cost, field) + left * each)
                self.free = {way: free + longer for way, free in self.free.items()}
                return self.computation(body, now + longer, True)
        return now

    def of_layers(self, body: str) -> bool:
        """Whether products are computed in a loop's body."""
        return any(
            self.products(line)
            for caller in self.program.lines[body]
            for line in (caller, *self.program.lines.get(_called(caller), []))
        )

    def transfer(self, way: str, size: int, now: float) -> float:
        """The time at which a transfer that is issued now has ended."""
        self.free[way] = max(now, self.free[way]) + size / self.machine.link
        setattr(self.cost, way, getattr(self.cost, way) + size)
        return self.free[way]

    def kernel(self, name: str, code: str) -> float:
        """Seconds of one instruction."""
        if name not in self.kernels:
            self.kernels[name] = self._kernel(code)
        return self.kernels[name]

    def _kernel(self, code: str) -> float:
        operation = re.search(
            r" (fusion|copy|reduce|custom-call|dot|convolution)\(", code
        )
        if operation is None or "S(5)" in code:
            return 0.0
        lines = self.program.lines.get(_called(code), [])
        if products := sum(map(self.products, [code, *lines])):
            return products / self.machine.flops
        types = code[: operation.start()].partition(" = ")[2]
        size = sum(_sizes(types))
        for line in lines:
            changed = re.search(
                r" = (\S+) dynamic-update-slice\(%?[\w.\-]+, %?([\w.\-]+)", line
            )
            if changed:  # in place
                part = _sizes(self.types.get(changed[2], ""))
                size += sum(part) - sum(_sizes(changed[1]))
        return 2 * max(size, 0) / self.machine.memory

    def products(self, code: str) -> int:
        """Operations of the products in one line."""
        operation = re.search(r" (dot|convolution|custom-call)\(%?([\w.\-]+)", code)
        if operation is None:
            return 0
        left = _dimensions(self.types.get(operation[2], ""))
        result = _dimensions(code.partition(" = ")[2])
        if operation[1] == "convolution":
            return 2 * math.prod(result) * self._summed(code, result)
        axes = re.search(r'lhs_contracting_dim\w*"?[=:]\s*[\[{]([\d", ]+)', code)
        if axes is None or not left:
            return 0
        summed = [left[int(i)] for i in re.findall(r"\d+", axes[1])]
        return 2 * math.prod(result) * math.prod(summed)

    def _summed(self, code: str, result: Sequence[int]) -> int:
        """Entries that a TPU's product sums: its axes are those of a convolution."""
        labels = re.search(r"dim_labels=\w+_(\w+)->(\w+)", code)
        right = re.search(r" convolution\(%?[\w.\-]+, %?([\w.\-]+)", code)
        assert labels is not None
        assert right is not None
        axes = dict(zip(labels[1], _dimensions(self.types[right[1]]), strict=True))
        made = dict(zip(labels[2], result, strict=True))
        return math.prod(
            n for axis, n in axes.items() if axis != "o" and made.get(axis, 1) == 1
        )


def _called(code: str) -> str:
    found = re.search(r"calls=%?([\w.\-]+)", code)
    return found[1] if found else ""


def _direction(code: str) -> str:
    operation = re.search(r"([\w\-]+)-start\(", code)
    assert operation is not None
    what = (operation[1] + _called(code)).replace("_", "-")
    if "update-slice" in what:
        return "down"
    if "dynamic-slice" in what:
        return "up"
    # copy-start: (destination, source, ...)
    first = re.search(r"\w+\[[\d,]*\](\{[^}]*\})?", code.partition(" = ")[2])
    return "down" if first and "S(5)" in first[0] else "up"


_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "s16": 2}
_BYTES |= {"u8": 1, "s8": 1, "pred": 1}


def _sizes(types: str) -> list[int]:
    return [
        _BYTES.get(dtype, 4) * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", types)
    ]


def _dimensions(types: str) -> list[int]:
    found = re.search(r"\w+\[([\d,]*)\]", types)
    return [int(n) for n in found[1].split(",") if n] if found else []
