"""A scheduled program, read from its text: computations, instructions, loops.

XLA marks buffers in host memory by the layout's memory space 5
(`xla::Layout::kHostMemorySpace`).
"""

import dataclasses
import enum
import math
import re
from collections.abc import Sequence

_LINE = re.compile(
    r"\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<types>.*?)"
    r" (?P<operation>[a-z][\w\-]*)\((?P<operands>[^)]*)\)"
)

#: Instructions for which nothing runs on the device.
_NOTHING = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
    + ("after-all", "add-dependency", "opt-barrier")
)
#: What copies a part of an array.
_COPIES = frozenset(("copy", "slice", "dynamic-slice", "dynamic-update-slice"))


class Executor(enum.Enum):
    """What runs an instruction that calls no other computation."""

    NOTHING = "nothing on the device"
    KERNEL = "a kernel, in its turn among the others"
    ENGINE = "a copy engine, between host and device"
    ZERO_COPY = "a kernel that reads or writes pinned memory over the link"
    SLICE = "an asynchronous copy on the device"
    HOST = "a copy within host memory"


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array, as the program's text states it."""

    shape: tuple[int, ...]  # its dimensions
    bytes: int  # its bytes
    on_host: bool  # whether it is in host memory


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str  # its name
    types: str  # the types of its results, with their layouts
    operation: str  # what it does, as `fusion`, `copy-start` or `while`
    operands: tuple[str, ...]  # the names of its operands
    code: str  # the line without metadata, and without what follows these
    line: str  # the whole line

    @property
    def started(self) -> bool:
        """Whether it starts something, for which another instruction waits."""
        return self.operation.endswith("-start")

    @property
    def calls(self) -> str:
        """The computation that a fusion runs, or the empty string."""
        return self.named("calls")

    def named(self, attribute: str) -> str:
        """The computation that an attribute names, or the empty string."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.code)
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class WhileLoop:
    """A loop of a program."""

    body: str  # the computation of a turn
    condition: str  # the computation that decides whether there is another turn
    turns: int  # how many turns are taken
    #: Whether the compiler states them. XLA:GPU then runs the turns without the
    #: condition.
    counted: bool


class Computations:
    """The computations of a scheduled program.

    Attributes:
      instructions: The instructions of each, by its name.
      types: The types of each instruction's results, by its name.
      entry: The name of the computation that a call runs.
    """

    def __init__(self, hlo: str, trips: Sequence[int] = ()) -> None:
        """Takes a program apart.

        Args:
          hlo: The program.
          trips: Turns of the innermost loops that transfer pages and of which the
            compiler states none, in the order of the program: XLA:TPU states none.
            A loop without a stated count takes one turn: it isolates a leaf.
        """
        self.instructions: dict[str, list[Instruction]] = {}
        self.types: dict[str, str] = {}
        self.entry = ""
        self._turns: dict[str, int] = {}
        self._stated = iter(trips)
        # Computations are apart by blank lines.
        for text in hlo.split("\n\n"):
            name = re.match(r"\s*(ENTRY )?%?([\w.\-]+) ", text)
            if name and "{" in text:
                read = [x for line in text.splitlines() if (x := _instruction(line))]
                self.instructions[name[2]] = read
                self.types |= {x.name: x.types for x in read}
                self.entry = name[2] if name[1] else self.entry

    def branches(self, instruction: Instruction) -> list[str]:
        """The computations that a call runs, or of which a conditional runs one."""
        if instruction.operation not in ("call", "conditional"):
            return []
        names = re.findall(r"%?([\w.\-]+)", instruction.code.partition(")")[2])
        return [name for name in names if name in self.instructions]

    def loop(self, instruction: Instruction) -> WhileLoop:
        """The loop that a `while` instruction runs."""
        body, condition = instruction.named("body"), instruction.named("condition")
        if known := re.search(r'known_trip_count[^}]*"n":"?(\d+)', instruction.line):
            return WhileLoop(body, condition, int(known[1]), True)
        # A loop without a stated count takes one turn, to isolate a leaf. If it is an
        # innermost one that moves pages, it is a page loop on XLA:TPU.
        if body not in self._turns:
            inside = self.instructions[body]
            inner = any(x.operation == "while" for x in inside)
            moves = any(x.started and self.on_host(x) for x in inside)
            self._turns[body] = next(self._stated, 1) if moves and not inner else 1
        return WhileLoop(body, condition, self._turns[body], False)

    def buffers(self, instruction: Instruction) -> list[Buffer]:
        """The arrays that an instruction reads and writes."""
        # The start of a transfer states its operands among its results.
        operands = () if instruction.started else instruction.operands
        types = (instruction.types, *(self.types.get(name, "") for name in operands))
        return [buffer for text in types for buffer in buffers(text)]

    def on_host(self, instruction: Instruction) -> bool:
        """Whether an instruction reads or writes host memory."""
        return any(buffer.on_host for buffer in self.buffers(instruction))

    def executor(self, instruction: Instruction) -> Executor:
        """What runs an instruction, as XLA:GPU schedules it."""
        operation = instruction.operation
        if (
            operation in _NOTHING
            or operation.endswith(("-done", "-update"))
            or 'custom_call_target="AllocateBuffer"' in instruction.code
        ):
            return Executor.NOTHING
        called = self.instructions.get(instruction.calls, [])
        # A fusion or an asynchronous call does what the computation it names does.
        what = operation.removesuffix("-start")
        if self.on_host(instruction):
            # Scalars, such as an index, do not say where a copy goes.
            large = [x for x in self.buffers(instruction) if x.shape]
            if what == "copy" and all(x.on_host for x in large):
                return Executor.HOST
            # XLA:GPU states an address that is linear in a counted loop's variable.
            stated = any("dynamic_slice_config" in inner.line for inner in called)
            return Executor.ENGINE if stated or not called else Executor.ZERO_COPY
        copies = not _COPIES.isdisjoint({what, *(inner.operation for inner in called)})
        return Executor.SLICE if instruction.started and copies else Executor.KERNEL

    def moved_by(self, instruction: Instruction) -> int:
        """Bytes of one transfer: of its part on the device."""
        # Scalars among the operands, such as an index, are not what travels.
        sizes = [x.bytes for x in self.buffers(instruction) if not x.on_host]
        return min((size for size in sizes if size > 64), default=0)

    def goes_up(self, instruction: Instruction) -> bool:
        """Whether a transfer goes from host to device, and not back."""
        if called := self.instructions.get(instruction.calls):
            # The last instruction of a computation is its result.
            return not any(x.on_host for x in buffers(called[-1].types))
        if instruction.operation.startswith("dynamic-"):
            return "update" not in instruction.operation
        # The first type of a copy is its destination's.
        return not buffers(instruction.types)[0].on_host


def buffers(types: str) -> list[Buffer]:
    """The arrays in types such as `(f32[8,4]{1,0:S(5)}, s32[])`, in their order."""
    arrays: list[Buffer] = []
    for dtype, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", types):
        # bf16 and f8e4m3fn say their bits; a predicate takes a byte, a token nothing.
        bits = 8 if dtype == "pred" else int((re.findall(r"\d+", dtype) or [0])[0])
        shape = tuple(int(n) for n in dims.split(",") if n)
        size = -(-math.prod(shape) * bits // 8)
        arrays.append(Buffer(shape, size, "S(5)" in layout))
    return arrays


def _instruction(line: str) -> Instruction | None:
    match = _LINE.match(line)
    if match is None:
        return None
    return Instruction(
        match["name"],
        match["types"],
        match["operation"],
        tuple(re.findall(r"%([\w.\-]+)", match["operands"])),
        line.split(", metadata=")[0],
        line,
    )
