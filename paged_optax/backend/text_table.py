"""Tables: the one way reports look."""

import sys
from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned columns under a ruled heading; the last column is right-aligned.

    Example:
      >>> print(table(("space", "bytes"), [("device", "32.0 MiB")]))
      space      bytes
      ------  --------
      device  32.0 MiB
    """
    cells = [tuple(map(str, titles)), *(tuple(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    line = lambda row: "  ".join(
        [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        + [row[-1].rjust(widths[-1])]
    )
    return "\n".join(
        [line(cells[0]), "  ".join("-" * width for width in widths)]
        + [line(row) for row in cells[1:]]
    )


def show(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table: by rich on a terminal that it fits, where rich is installed.

    As plain text elsewhere.

    Example:
      >>> show(("space", "bytes"), [("device", "32.0 MiB")])
      space      bytes
      ------  --------
      device  32.0 MiB
    """
    rows = list(rows)
    text = table(titles, rows)
    if sys.stdout.isatty():
        try:
            from rich.box import SIMPLE_HEAD
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            console = Console(markup=False)
            made = Table(box=SIMPLE_HEAD)
            for i, title in enumerate(titles):
                last = i == len(titles) - 1
                made.add_column(title, justify="right" if last else "left")
            for row in rows:
                made.add_row(*row)
            # A measurement is never wider than the console that takes it.
            if Console(width=1000).measure(made).maximum <= console.width:
                console.print(made)
                return
    print(text)
