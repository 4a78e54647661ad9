"""What both accelerator compilers make of real models' shapes, leaf by leaf.

`python tests/sweep.py` compiles `init` and `update` of every distinct shape of ten
models, in five formats and with two page sizes, prints a table, and writes JSON. It
runs in processes of its own: a compiler that aborts ends one of them, and is reported.

`--record` keeps the fingerprints of what passed. With `--recorded` what has such a
fingerprint is not compiled again: it is the same program, compiler and plan.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import json
import math
import os
import queue
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from helpers import models, one_leaf
from helpers.one_leaf import COMPILERS, FORMATS, MIB, PAGE_SIZES, PHASES, Case, Outcome


def cases(
    shapes: Sequence[tuple[int, ...]], formats: Sequence[str] = tuple(FORMATS)
) -> Iterator[Case]:
    """All cases of some shapes; those whose programs are equal, once."""
    for shape in shapes:
        for name in formats:
            one_page = 4 * math.prod(shape) <= MIB
            sizes = ["default"] if one_page else PAGE_SIZES
            for compiler, phase in itertools.product(COMPILERS, PHASES):
                for size in sizes:
                    yield Case(shape, name, size, compiler, phase)


def outcomes(
    chosen: Sequence[Case],
    workers: int = 2,
    minutes: float = math.inf,
    seed: int | None = None,
    anew: bool = True,
) -> Iterator[tuple[Case, Outcome]]:
    """Compiles cases in processes of their own, as many as the minutes allow.

    Args:
      chosen: The cases. Those that differ in the size of a page follow each other.
      workers: Processes.
      minutes: After so many no case is begun.
      seed: Shuffles them; None: their own order.
      anew: Whether to compile also what is on record as passed.
    """
    from helpers import apart

    apart_from_size = lambda case: dataclasses.replace(case, page_size="")
    groups = [list(group) for _, group in itertools.groupby(chosen, apart_from_size)]
    if seed is not None:
        random.Random(seed).shuffle(groups)
    waiting = collections.deque(groups)
    end = time.monotonic() + 60 * minutes
    done: queue.SimpleQueue[tuple[Case, Outcome] | None] = queue.SimpleQueue()

    def work() -> None:
        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        try:
            while waiting and time.monotonic() < end:
                ask_for_each()
        except IndexError:
            pass  # another worker took the last cases
        finally:
            done.put(None)

    def ask_for_each() -> None:
        left: list[Case] = []
        try:
            with apart.process(one_leaf.__file__, "--xla_gpu_autotune_level=0") as ask:
                while waiting and time.monotonic() < end:
                    left = waiting.popleft()
                    while left:
                        question = dataclasses.asdict(left[0]) | {"anew": anew}
                        reply = ask(json.dumps(question))
                        done.put((left.pop(0), Outcome(**reply)))
        except RuntimeError as error:
            last = str(error).strip().splitlines()[-1][:200]
            done.put((left.pop(0), Outcome(error=f"the process ended: {last}")))
            if left:
                waiting.appendleft(left)

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(work) for _ in range(workers)]
        left = workers
        while left:
            if (one := done.get()) is None:
                left -= 1
                continue
            case, outcome = one
            if outcome.failure:
                print(*dataclasses.astuple(case), "->", outcome.failure, flush=True)
            yield one
        for each in running:
            each.result()


def table(results: Sequence[tuple[Case, Outcome]]) -> str:
    """A row for each format, compiler and page size: the worst of its cases."""
    titles = (
        "format", "compiler", "pages", "compile", "host scratch", "scratch",
        "of bound", "traffic", "addresses", "seconds", "kept whole",
    )  # fmt: skip
    groups: dict[Any, list[tuple[Case, Outcome]]] = {}
    for case, found in results:
        key = (case.format, case.compiler, case.page_size)
        groups.setdefault(key, []).append((case, found))
    rows = []
    for key, group in sorted(groups.items()):
        good = [x for _, x in group if not x.error and not x.recorded]
        worst = lambda value, good=good: max(map(value, good), default=0)
        shapes = {case.shape for case, found in group if found.refused}
        rows.append(
            (
                *key,
                f"{sum(not x.error for _, x in group)} of {len(group)}",
                f"{worst(lambda x: x.host_scratch) / MIB:.0f} MiB",
                f"{worst(lambda x: x.scratch) / MIB:.1f} MiB",
                f"{worst(lambda x: x.scratch / x.bound):.2f}",
                f"{worst(lambda x: x.traffic):.3f}",
                "wrong" if any(x.addresses for x in good) else "exact",
                f"{worst(lambda x: x.seconds):.1f}",
                f"{len(shapes)} shapes" if shapes else "-",
            )
        )
    from paged_optax.backend.text import table

    return table(titles, rows)


def main() -> None:
    """Compiles all cases, or those of one compiler; prints and writes what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--odd", action="store_true", help="also shapes once refused")
    parser.add_argument("--compiler", choices=COMPILERS, help="one compiler alone")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="stop then; cases are taken in an order that --seed shuffles",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write cases as they come")
    parser.add_argument("--recorded", action="store_true", help="compile what is new")
    parser.add_argument("--record", action="store_true", help="keep what passed")
    options = parser.parse_args()
    shapes = [*models.distinct(4096), *(models.ODD if options.odd else ())]
    chosen = [
        case
        for case in cases(list(dict.fromkeys(shapes)))
        if options.compiler in (None, case.compiler)
    ]
    results: list[tuple[Case, Outcome]] = []

    def write() -> None:
        if options.json:
            rows = [dataclasses.asdict(c) | dataclasses.asdict(x) for c, x in results]
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
        if options.record:
            passed = {x.fingerprint for _, x in results if not x.failure}
            if options.recorded or len(results) < len(chosen):
                passed |= one_leaf.recorded()
            one_leaf.record().parent.mkdir(exist_ok=True)
            one_leaf.record().write_text("\n".join(sorted(passed)) + "\n")

    seed = options.seed if options.minutes < math.inf else None
    for each in outcomes(
        chosen, options.workers, options.minutes, seed, not options.recorded
    ):
        results.append(each)
        if len(results) % 100 == 0:
            write()
    write()
    print(table(results))
    bad = [(case, found) for case, found in results if found.failure]
    left = len(chosen) - len(results)
    kept = sum(x.recorded for _, x in results)
    if options.recorded:
        print(f"{kept} of {len(results)} are the programs that passed when recorded")
    print(f"{left} of {len(chosen)} cases were not reached" if left else "all cases")
    print(f"{len(results) - len(bad)} passed, {len(bad)} failed")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
