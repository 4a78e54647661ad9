"""How long a program's transfers take, on a link that works both ways at once."""

import re
from collections.abc import Sequence

from helpers import aot


def over_floor(hlo: str, least: int, trips: Sequence[int] = ()) -> float:
    """The time of a scheduled program's transfers over the least that they can take.

    Transfers begin in the program's order: each when it is issued, and when its
    direction of the link is free. What waits for one goes on when it ends. All that is
    no transfer takes no time.

    Args:
      hlo: The program.
      least: Bytes that have to go in each direction.
      trips: Turns of the innermost loops of which the compiler states none, in the
        order of the program: XLA:TPU states none.
    """
    link = _Link(hlo, trips)
    return link.run(link.program.entry, 0.0) / least


class _Link:
    """A link that moves one byte in a unit of time, each way."""

    def __init__(self, hlo: str, trips: Sequence[int]) -> None:
        self.program = aot.Computations(hlo, trips)
        self.free = {"up": 0.0, "down": 0.0}

    def run(self, computation: str, now: float, last: bool = False) -> float:
        """The time at which a computation that begins now has ended."""
        flying: dict[str, float] = {}
        for line in self.program.lines[computation]:
            code = line.split(", metadata=")[0]
            name = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", line)
            if " while(" in code:
                body, turns = self.program.loop(line)
                for turn in range(1, turns + 1):
                    now = self.run(body, now, 1 < turn == turns)
            elif called := self.program.called(code, last):
                for branch in called:
                    now = self.run(branch, now)
            elif name and "-start(" in code and "S(5)" in code:
                way = "down" if "update-slice" in name[1] else "up"
                flying[name[1]] = self.transfer(way, aot.moved_by(code), now)
            elif started := re.search(r"-done\(%?([\w.\-]+)", code):
                now = max(now, flying.pop(started[1], now))
        return max([now, *flying.values()])

    def transfer(self, way: str, size: int, now: float) -> float:
        """The time at which a transfer that is issued now has ended."""
        self.free[way] = max(now, self.free[way]) + size
        return self.free[way]
