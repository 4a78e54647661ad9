"""What both accelerator compilers make of real models' shapes, leaf by leaf.

`python tests/sweep.py` compiles `init` and `update` of every distinct shape of ten
models, in five formats and with two page sizes, and prints what is not as planned. It
runs in processes of its own: a compiler that aborts ends one of them, and is reported.

`--record` keeps the fingerprints of what passed. With `--recorded` what has such a
fingerprint is not compiled again: it is the same program, compiler and plan.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence

from helpers import apart, models, one_leaf
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
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    apart_from_size = lambda case: dataclasses.replace(case, page_size="")
    groups = [list(group) for _, group in itertools.groupby(chosen, apart_from_size)]
    if seed is not None:
        random.Random(seed).shuffle(groups)
    cases = {json.dumps(dataclasses.asdict(x) | {"anew": anew}): x for x in chosen}
    questions = {case: question for question, case in cases.items()}
    asked = [[questions[case] for case in group] for group in groups]
    script, flags = one_leaf.__file__, "--xla_gpu_autotune_level=0"
    for question, reply in apart.outcomes(asked, workers, minutes, script, flags):
        if isinstance(reply, str):
            last = reply.strip().splitlines()[-1][:200]
            outcome = Outcome(error=f"the process ended: {last}")
        else:
            outcome = Outcome(**reply)
        if outcome.failure:
            print(
                *dataclasses.astuple(cases[question]), "->", outcome.failure, flush=True
            )
        yield cases[question], outcome


def main() -> None:
    """Compiles all cases, or those of one compiler; says how many passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiler", choices=COMPILERS, help="one compiler alone")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="stop then; cases are taken in an order that --seed shuffles",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recorded", action="store_true", help="compile what is new")
    parser.add_argument("--record", action="store_true", help="keep what passed")
    options = parser.parse_args()
    chosen = [
        case
        for case in cases(list(models.distinct(4096)))
        if options.compiler in (None, case.compiler)
    ]
    seed = options.seed if options.minutes < math.inf else None
    anew = not options.recorded
    results = [*outcomes(chosen, options.workers, options.minutes, seed, anew)]
    if options.record:
        passed = {x.fingerprint for _, x in results if not x.failure}
        if options.recorded or len(results) < len(chosen):
            passed |= one_leaf.recorded()
        one_leaf.record().parent.mkdir(exist_ok=True)
        one_leaf.record().write_text("\n".join(sorted(passed)) + "\n")
    bad = sum(bool(found.failure) for _, found in results)
    left = len(chosen) - len(results)
    kept = sum(x.recorded for _, x in results)
    if options.recorded:
        print(f"{kept} of {len(results)} are the programs that passed when recorded")
    print(f"{left} of {len(chosen)} cases were not reached" if left else "all cases")
    print(f"{len(results) - bad} passed, {bad} failed")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
