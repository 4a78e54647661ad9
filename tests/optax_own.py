"""Optax's own tests, with paged transformations in place of its own.

`python tests/optax_own.py` runs the test files that the installed release of Optax
ships, or those of a checkout given by `--optax`, once as they are and once in each of
three settings of page and minimum size. It prints a table, and each failure that is
neither there without paging nor refused by a message that the reference explains; if
there is one it exits with 1.

What Optax makes is paged as it is made: its aliases, contributions and
transformations. Wrappers of transformations are left as they are, but those that
`paged_optax` has are its own.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

FILES = (
    "_src/alias_test.py",
    "contrib/_common_test.py",
    "transforms/_accumulation_test.py",
    "transforms/_conditionality_test.py",
    "transforms/_masking_test.py",
    "transforms/_freezing_test.py",
    "transforms/_combining_test.py",
    "schedules/_inject_test.py",
    "tree_utils/_state_utils_test.py",
    "_src/sharding_test.py",
)
#: Pages of four values of everything, one page of everything, and the defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "16 B": {"page_size": 16, "min_paged_size": 0},
    "4 KiB": {"page_size": 4096, "min_paged_size": 0},
    "default": {},
}
PLAIN = "not paged"

#: Modules whose functions make transformations.
MAKERS = ("optax._src.alias", "optax._src.transform", "optax.contrib", "optax")
#: Where Optax keeps the wrappers that `paged_optax` has too.
WRAPPERS = {
    "MultiSteps": "optax.transforms._accumulation",
    "apply_if_finite": "optax.transforms._conditionality",
    "conditionally_mask": "optax.transforms._conditionality",
    "conditionally_transform": "optax.transforms._conditionality",
    "lookahead": "optax._src.lookahead",
}


def patch(settings: dict[str, Any]) -> None:
    """Puts paged transformations in place of Optax's own."""
    import importlib

    import optax

    import paged_optax

    commit_arrays()
    making = contextvars.ContextVar("making", default=False)

    @functools.cache
    def replaced(function: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            inside = making.get()
            token = making.set(True)
            try:
                made = function(*args, **kwargs)
            finally:
                making.reset(token)
            given = (*args, *kwargs.values())
            wraps = any(isinstance(x, optax.GradientTransformation) for x in given)
            if inside or wraps or not isinstance(made, optax.GradientTransformation):
                return made
            return paged_optax.paged(made, **settings)

        if isinstance(function, functools.partial):
            make.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
            return make
        return functools.wraps(function)(make)

    originals = {name: getattr(optax, name) for name in WRAPPERS}
    own = types.SimpleNamespace(**vars(optax))
    for name, module in list(sys.modules.items()):
        if name.startswith("paged_optax") and getattr(module, "optax", None) is optax:
            module.optax = own  # type: ignore[attr-defined]
    for module in map(importlib.import_module, MAKERS):
        for name, function in list(vars(module).items()):
            is_maker = isinstance(function, (types.FunctionType, functools.partial))
            if is_maker and not name.startswith("_") and name not in WRAPPERS:
                setattr(module, name, replaced(function))
    for name, where in WRAPPERS.items():
        for module in (optax, importlib.import_module(where)):
            if getattr(module, name, None) is originals[name]:
                setattr(module, name, getattr(paged_optax, name))


def commit_arrays() -> None:
    """Makes `jnp.array` commit, as the reference has it done to parameters.

    A paged step returns committed arrays, and `jax.jit` would compile the next again.
    """
    import jax
    import jax.numpy as jnp

    array = jnp.array

    @functools.wraps(array)
    def committed(*args: Any, **kwargs: Any) -> Any:
        made = array(*args, **kwargs)
        if isinstance(made, jax.core.Tracer) or len(made.sharding.device_set) > 1:
            return made
        return jax.device_put(made, made.sharding)

    jnp.array = committed


class Report:
    """What pytest says of each test."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keeps the error of a test that failed; empty for one that passed."""
        if report.skipped:
            return
        name = report.nodeid.split("::", 1)[-1]
        crash = getattr(getattr(report, "longrepr", None), "reprcrash", None)
        error = crash.message if crash else str(report.longrepr)
        self.found[name] = self.found.get(name) or (error if report.failed else "")

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be read is one failure."""
        if report.failed:
            self.found["collection"] = str(report.longrepr)


@contextlib.contextmanager
def without_missing_modules() -> Iterator[None]:
    """Lets a file be read whose rarer tests need what is not installed.

    Those tests fail with and without paging.
    """
    for name in ("sklearn", "sklearn.datasets", "sklearn.linear_model"):
        try:
            __import__(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, sys.modules[name])
    yield


def run_here(path: Path, setting: str, chosen: str, found: Path) -> None:
    """Runs one file in this process, and writes what came of it."""
    import pytest

    if setting != PLAIN:
        patch(SETTINGS[setting])
    report = Report()
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--tb=short"]
    options += ["--import-mode=importlib", "-W", "ignore"]
    with without_missing_modules():
        pytest.main(
            [*options, *(["-k", chosen] if chosen else []), str(path)], [report]
        )
    found.write_text(json.dumps(report.found))


def run_apart(path: Path, setting: str, chosen: str, optax_at: Path) -> dict[str, str]:
    """Runs one file in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        paths = [str(optax_at), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        }
        command = [sys.executable, __file__, "--here", str(path), setting, str(found)]
        if chosen:
            command += ["-k", chosen]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if not found.exists():
            return {"process": f"ended with {done.returncode}: {done.stderr[-500:]}"}
        return json.loads(found.read_text())


def refusals() -> list[str]:
    """Patterns of the messages that the reference explains."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)`", text, re.M)
    return [re.escape(x).replace("…", ".*") for x in messages]


def main() -> int:
    """Runs every file in every setting; whether something failed that may not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optax", type=Path, help="a checkout of Optax")
    parser.add_argument("--files", nargs="*", default=FILES)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS))
    parser.add_argument("-k", default="", help="pytest's choice of tests")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--here", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        path, setting, found = asked.here
        run_here(Path(path), setting, asked.k, Path(found))
        return 0
    if asked.optax is None:
        import optax

        asked.optax = Path(optax.__file__).parents[1]
    where = asked.optax.resolve()
    missing = [x for x in asked.files if not (where / "optax" / x).exists()]
    if missing:
        parser.error(f"{where} has no optax/{missing[0]}: pass --optax a checkout")
    patterns, unexplained, refused = refusals(), [], collections.Counter()
    print(f"| file | setting | {' | '.join(KINDS)} |\n| --- | --- |" + " --- |" * 4)
    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
        run = lambda path, setting: run_apart(
            where / "optax" / path, setting, asked.k, where
        )
        started = {
            path: {x: pool.submit(run, path, x) for x in (PLAIN, *asked.settings)}
            for path in asked.files
        }
        for path, runs in started.items():
            plain = runs.pop(PLAIN).result()
            for setting, each in runs.items():
                counts = collections.Counter()
                for name, error in each.result().items():
                    kind = kind_of(error, plain.get(name), patterns)
                    counts[kind] += 1
                    if kind == KINDS[1]:
                        refused[listed(error, patterns)] += 1
                    if kind == KINDS[3]:
                        unexplained.append(f"{path} [{setting}] {name}\n    {error}")
                shown = " | ".join(str(counts[kind]) for kind in KINDS)
                print(f"| {path} | {setting} | {shown} |", flush=True)
    print("\n| refused by | tests |\n| --- | --- |")
    for pattern, count in refused.most_common():
        print(f"| {pattern} | {count} |")
    print("\n" + "\n".join(unexplained))
    return bool(unexplained)


KINDS = ("passed", "refused", "fails without paging", "fails")


def kind_of(error: str, plain: str | None, patterns: list[str]) -> str:
    """What a test's error means, given that of the same test without paging."""
    if not error:
        return KINDS[0]
    if plain:
        return KINDS[2]
    return KINDS[1] if listed(error, patterns) else KINDS[3]


def listed(error: str, patterns: list[str]) -> str:
    """The pattern that an error matches, or nothing."""
    return next((x for x in patterns if re.search(x, error, re.S)), "")


if __name__ == "__main__":
    sys.exit(main())
