"""Progress of what takes long, on a terminal where rich is installed."""

import contextlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

#: Fewer bytes than these move too fast for a progress bar.
LARGE = 1 << 30


@contextlib.contextmanager
def progress(
    what: str, total: int, shown: bool = True
) -> Generator[Callable[[], None]]:
    """Shows how far a loop is, on a terminal alone.

    Args:
      what: What is done, in a few words.
      total: How many times it is done.
      shown: Whether it takes long enough to be shown.

    Yields:
      What to call after each time.
    """
    if shown and sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            pass
        else:
            with Progress(console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task(what, total=total)
                yield lambda: bar.advance(task)
            return
    yield lambda: None


def track(items: Iterable[T], what: str, total: int, shown: bool = True) -> Iterator[T]:
    """Yields the items, and shows how far it is, as `progress` does.

    Example:
      >>> list(track("abc", "spelling", 3))
      ['a', 'b', 'c']
    """
    with progress(what, total, shown) as advance:
        for item in items:
            yield item
            advance()
