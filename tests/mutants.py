"""Small changes to the code, of which tests should notice each.

Which tests run a line, and how long they take, is asked of them first:

    python -m pytest -n 2 -m "not slow" --cov=paged_optax --cov-branch \
      --cov-context=test --junitxml=out/tests.xml

Then `python tests/mutants.py --mutants 200 --seed 1` draws places of the code, where
Cosmic Ray changes an operator, a comparison, a number, a condition, a loop or a
decorator. Of the tests that run the line, those that run little else come first, in a
copy of the tree, until one fails; what survives `--seconds` of them gets four times as
many more. Those that failed are run without a change at the end, and count only if they
pass. `--record` adds the run to `tests/data/mutants.json`. There somebody writes why
each change survived, and `by`, the test that notices it, if there is one since, or if
it was left out for its time; `--again` tries those changes by those tests.

Left out are annotations and `strict=True`, which only asserts what holds.
"""

import argparse
import ast
import dataclasses
import importlib.metadata
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from xml.etree import ElementTree

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from coverage import CoverageData

from helpers.records import record

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "data" / "mutants.json"
ROOMS = ("analysis", "codecs", "engine", "layerwise", "transform")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A change of one place.

    Attributes:
      file: Of the place, from the root of the checkout.
      line: Of the place.
      operator: What Cosmic Ray calls the change.
      occurrence: Which of the places in the file that the operator can change.
    """

    file: str
    line: int
    operator: str
    occurrence: int

    def code(self) -> str:
        """The file with the change."""
        source = (ROOT / self.file).read_text()
        return mutate_code(source, get_operator(self.operator)(), self.occurrence)

    def change(self) -> str:
        """The line before and after."""
        before = (ROOT / self.file).read_text().splitlines()
        after = self.code().splitlines()
        changed = [(a, b) for a, b in zip(before, after, strict=False) if a != b]
        a, b = changed[0] if changed else (before[self.line - 1], "")
        return f"{a.strip()} -> {b.strip()}"


def spots(node: ast.expr) -> set[tuple[int, int]]:
    """Line and column of all of an expression."""
    return {
        (line, column)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for column in range(
            node.col_offset if line == node.lineno else 0,
            (node.end_col_offset or 0) if line == node.end_lineno else 200,
        )
    }


def unseen(source: str) -> set[tuple[int, int]]:
    """Where a change changes nothing: annotations, and zips of what is equally long."""
    found: set[tuple[int, int]] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.returns:
            found |= spots(node.returns)
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            found |= spots(node.annotation)
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            found |= spots(node.value)
    return found


def places(file: str) -> Iterator[list[Mutant]]:
    """The places of a file, each with the changes that can be made there."""
    source = (ROOT / file).read_text()
    left_out, tree, found = unseen(source), get_ast(source), {}
    nodes = list(ast_nodes(tree))
    for name in operator_names():
        if get_operator(name).arguments():
            continue  # needs names of variables
        operator = get_operator(name)()
        ranges = (spot for x in nodes for spot in operator.mutation_positions(x))
        for occurrence, (start, end) in enumerate(ranges):
            if start not in left_out:
                mutant = Mutant(file, start[0], name, occurrence)
                found.setdefault((start, end), []).append(mutant)
    yield from found.values()


def drawn(count: int, seed: int, rooms: tuple[str, ...]) -> list[Mutant]:
    """As many places of the rooms as asked for, and one change of each."""
    files = sorted(
        str(file.relative_to(ROOT))
        for room in rooms
        for file in (ROOT / "paged_optax" / room).rglob("*.py")
    )
    every = [place for file in files for place in places(file)]
    chance = random.Random(seed)
    print(f"{len(every)} places in {len(files)} files", flush=True)
    return [chance.choice(x) for x in chance.sample(every, min(count, len(every)))]


def statement(mutant: Mutant) -> set[int]:
    """The lines of the smallest statement around a place, without its body."""
    best: set[int] = set()
    for node in ast.walk(ast.parse((ROOT / mutant.file).read_text())):
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            body = getattr(node, "body", None)
            first = min(x.lineno for x in getattr(node, "decorator_list", []) or [node])
            end = body[0].lineno - 1 if body else node.end_lineno or first
            lines = set(range(first, max(end, node.lineno) + 1))
            if mutant.line in lines and (not best or len(lines) < len(best)):
                best = lines
    return best


class Tests:
    """Which tests run what.

    Args:
      coverage: Of the tests, by test.
      report: Of the tests, in JUnit's format.
    """

    def __init__(self, coverage: Path, report: Path) -> None:
        self._data = CoverageData(basename=str(coverage))
        self._data.read()
        self._seconds = {
            (x.get("classname"), x.get("name")): float(x.get("time") or 0)
            for x in ElementTree.parse(report).iter("testcase")
        }
        self._lines: Counter[str] = Counter()
        for file in self._data.measured_files():
            for names in self._data.contexts_by_lineno(file).values():
                self._lines.update({name.split("|")[0] for name in names})

    def seconds(self, test: str) -> float:
        """How long a test took."""
        path, _, name = test.partition("::")
        of = path.removesuffix(".py").replace("/", ".")
        of, name = (".".join([of, *name.split("::")[:-1]]), name.split("::")[-1])
        return self._seconds.get((of, name), 1.0)

    def of(self, mutant: Mutant, seconds: float) -> list[str]:
        """Those that run a line: the most special first, of so many seconds in all."""
        files = [x for x in self._data.measured_files() if x.endswith(mutant.file)]
        names = self._data.contexts_by_lineno(files[0]) if files else {}
        lines = statement(mutant) & names.keys()
        found = {x.split("|")[0] for line in lines for x in names[line]} - {""}
        if not found and any("" in names[line] for line in lines):  # runs at import
            found = {x.split("|")[0] for each in names.values() for x in each} - {""}
        chosen, spent = [], 0.0
        for test in sorted(found, key=lambda x: (self._lines[x], x)):
            if not chosen or spent + self.seconds(test) <= seconds:
                chosen.append(test)
                spent += self.seconds(test)
        return sorted(chosen, key=self.seconds)


def pytest(tree: Path, options: list[str], minutes: float) -> tuple[int, list[str]]:
    """Runs pytest in a tree. What it exits with, and the tests that failed."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60 * minutes,
    )
    words = (line.partition(" - ")[0].split(" ", 1) for line in run.stdout.splitlines())
    return run.returncode, [x[1] for x in words if x[0] in ("FAILED", "ERROR")]


def outcome(mutant: Mutant, tree: Path, tests: list[str], minutes: float) -> str:
    """The test that fails in a tree with the change, or why there is none."""
    if not tests:
        return "no test runs it"
    file = tree / mutant.file
    before = file.read_text()
    file.write_text(mutant.code())
    try:
        status, by = pytest(tree, ["-x", *tests], minutes)
    except subprocess.TimeoutExpired:
        return "killed: no end"
    finally:
        file.write_text(before)
    if status == 0:
        return "survived"
    return f"killed: {by[0] if by else f'exit {status}'}"


def failing_anyway(tree: Path, outcomes: list[str]) -> set[str]:
    """Of the outcomes, those by a test that fails without a change too."""
    by = {x.removeprefix("killed: ") for x in outcomes if x.startswith("killed: ")}
    tests = sorted(x for x in by if x.startswith("tests/") and ".py" in x)
    return {f"killed: {x}" for x in pytest(tree, tests, 60)[1]} if tests else set()


def tried(
    mutants: list[Mutant], tests: Tests, workers: int, seconds: float
) -> list[tuple[Mutant, str]]:
    """Each change and what came of it, which it prints."""
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for worker in range(workers):
            trees.put(copied(Path(folder, str(worker))))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(folder, "compiled"))

        def one(mutant: Mutant) -> tuple[Mutant, str]:
            tree = trees.get()
            try:
                chosen = tests.of(mutant, seconds)
                came = outcome(mutant, tree, chosen, 1 + seconds / 6)
                more = [x for x in tests.of(mutant, 5 * seconds) if x not in chosen]
                if came == "survived" and more:
                    came = outcome(mutant, tree, more, 1 + 5 * seconds / 6)
                return mutant, came
            finally:
                trees.put(tree)

        found = []
        with ThreadPoolExecutor(workers) as pool:
            for mutant, came in pool.map(one, mutants):
                print(
                    f"{mutant.file}:{mutant.line}: {mutant.change()}: {came}",
                    flush=True,
                )
                found.append((mutant, came))
        anyway = failing_anyway(trees.get(), [came for _, came in found])
        return [(x, f"not {y}" if y in anyway else y) for x, y in found]


def copied(folder: Path) -> Path:
    """A copy of the tree, with what stands beside it."""
    tree = folder / "checkout"
    left_out = shutil.ignore_patterns(".git", ".venv*", "out", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=left_out)
    tree.with_name("shared").symlink_to(ROOT.with_name("shared"))
    return tree


def again() -> int:
    """Tries what is on record as noticed since. How many still survive."""
    entries = [x for run in json.loads(RECORD.read_text()) for x in run["survivors"]]
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        for entry in entries:
            if "by" not in entry:
                continue
            every = (x for place in places(entry["file"]) for x in place)
            found = [x for x in every if x.change() == entry["change"]]
            came = [outcome(x, tree, [entry["by"]], 10) for x in found[:1]]
            print(f"{entry['file']}: {entry['change']}: {came}", flush=True)
            survived += came == ["survived"]
    return survived


def main() -> None:
    """Draws, tries, and says how many were noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60, help="of tests, a mutant")
    parser.add_argument("--rooms", nargs="+", default=ROOMS)
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage")
    parser.add_argument("--report", type=Path, default=ROOT / "out" / "tests.xml")
    parser.add_argument("--record", action="store_true", help=f"in {RECORD.name}")
    parser.add_argument("--again", action="store_true", help="what is noticed since")
    options = parser.parse_args()
    if options.again:
        sys.exit(again())
    mutants = drawn(options.mutants, options.seed, tuple(options.rooms))
    tests = Tests(options.coverage, options.report)
    killed, survivors = 0, []
    for mutant, came in tried(mutants, tests, options.workers, options.seconds):
        if came.startswith("killed"):
            killed += 1
        else:
            entry = {"file": mutant.file, "change": mutant.change(), "why": ""}
            survivors.append(entry)
    print(f"{killed} of {len(mutants)} noticed, {killed / len(mutants):.1%}")
    if options.record:
        run = {"jax": importlib.metadata.version("jax"), "seed": options.seed}
        run |= {"mutants": len(mutants), "killed": killed, "survivors": survivors}
        record(RECORD, run)


if __name__ == "__main__":
    main()
