"""Recipes of random transformations, as many as you like, and what each comes to."""

import json
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st

from helpers import apart, fuzz


def _steps(names, *, max_size=10):
    ago = st.integers(0, 4)
    step = st.tuples(st.sampled_from([*names]), ago, ago)
    return st.lists(step, min_size=1, max_size=max_size)


#: One step that looks at the rest of the leaf hides what others do to its pages.
_FEW_WITHIN = st.tuples(
    _steps(fuzz.ELEMENTWISE),
    _steps(fuzz.WITHIN, max_size=1),
    _steps(fuzz.ELEMENTWISE),
).map(lambda parts: sum(parts, []))

_BLOCKS = st.sampled_from([*fuzz.BLOCKS])
_PLAIN = {
    "before": st.lists(_BLOCKS, max_size=2),
    "steps": _steps(fuzz.ELEMENTWISE) | _FEW_WITHIN | _steps(fuzz.STEPS),
    "after": st.lists(_BLOCKS, max_size=1),
    "shapes": st.lists(st.sampled_from(fuzz.SHAPES), min_size=1, max_size=3),
    "dtype": st.sampled_from(fuzz.DTYPES),
    "page_size": st.sampled_from([64, 256, 512, 1024, 4096]),
    "codec": st.none(),
    "mesh": st.none(),
    "active": st.lists(
        st.none() | st.lists(st.booleans(), min_size=3, max_size=3),
        min_size=2,
        max_size=2,
    ),
    "traced": st.booleans(),
    "eager": st.booleans(),
}
_CODED = _PLAIN | {
    "shapes": st.lists(st.sampled_from(fuzz.CODED_SHAPES), min_size=1, max_size=2),
    "dtype": st.just("float32"),
    "page_size": st.sampled_from([2048, 4096, 16384]),
    "codec": st.sampled_from(fuzz.CODECS),
}
#: A sum over shards is rounded otherwise than one over the whole.
_SHARDED = {
    "before": st.just([]),
    "steps": _steps(fuzz.ELEMENTWISE),
    "after": st.just([]),
    "mesh": st.sampled_from(["Auto", "Explicit"]),
}
#: Of other shapes a device's part is stored in other blocks than the whole.
_EVEN = {"shapes": st.lists(st.sampled_from(fuzz.EVEN_SHAPES), min_size=1, max_size=2)}
RECIPES = st.one_of(
    st.fixed_dictionaries(_PLAIN),
    st.fixed_dictionaries(_CODED),
    st.fixed_dictionaries(_PLAIN | _SHARDED),
    st.fixed_dictionaries(_CODED | _SHARDED | _EVEN),
)


def drawn(cases: int, seed: int) -> list[str]:
    """So many recipes, as JSON; equal ones are drawn once."""
    found: dict[str, None] = {}

    @hypothesis.settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=[*hypothesis.HealthCheck],
    )
    @hypothesis.seed(seed)
    @hypothesis.given(RECIPES)
    def draw(recipe: dict[str, Any]) -> None:
        found[json.dumps(recipe)] = None

    draw()
    return [*found]


def outcomes(
    chosen: list[str], workers: int, minutes: float
) -> Iterator[tuple[str, Any]]:
    """What each recipe comes to, in processes of their own, as the minutes allow."""
    end = time.monotonic() + 60 * minutes
    waiting, done = queue.SimpleQueue[str](), queue.SimpleQueue[Any]()
    for recipe in chosen:
        waiting.put(recipe)

    def work() -> None:
        while time.monotonic() < end and not waiting.empty():
            recipe = ""
            try:
                with apart.process(fuzz.__file__, fuzz.FLAGS) as ask:
                    # What is compiled stays in memory: a process is for some cases.
                    for _ in range(100):
                        if time.monotonic() > end:
                            break
                        recipe = waiting.get_nowait()
                        done.put((recipe, ask(recipe)))
            except queue.Empty:
                break
            except RuntimeError as error:
                done.put((recipe, f"the process ended: {error}"))
        done.put(None)

    for _ in range(workers):
        threading.Thread(target=work, daemon=True).start()
    for _ in range(workers):
        while (one := done.get()) is not None:
            yield one
