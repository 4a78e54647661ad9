"""Progress of what takes long, on a terminal where rich is installed."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Yields the items, and shows how far it is; nothing where nobody looks.

    Args:
      items: What is worked on.
      what: What is done, in a few words.
      total: How many there are.

    Example:
      >>> list(track("abc", "spelling", 3))
      ['a', 'b', 'c']
    """
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import track as bar
        except ImportError:
            pass
        else:
            console = Console(stderr=True)
            yield from bar(items, what, total, console=console, transient=True)
            return
    yield from items
