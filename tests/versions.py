"""Other versions of what this package needs, installed and tested in about a minute.

`python tests/versions.py oldest` takes each lower bound of `pyproject.toml`, `newest`
what pip finds, and `pre` pre-releases too. Packages may be given other versions, as in
`oldest jax==0.11.2 jaxlib==0.11.2`. JAX's pre-releases are on an index of its own,
for `PIP_EXTRA_INDEX_URL`, see https://docs.jax.dev/en/latest/installation.html.

It prints what was installed, then the tests that failed. The exit code is pip's where
the versions cannot be installed together, else pytest's.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
#: Subjects that call another library, and those that depend on how JAX places arrays.
OF_OTHERS = (
    *("libraries/flax", "libraries/nnx", "state/checkpoints"),
    *("transform/numbers", "transform/wrappers"),
)
OF_JAX = (
    *("compiling/step", "engine/shapes", "engine/sharding"),
    *("state/place", "state/state", "transform/partial"),
)
#: Of the extra `test`, what the tests of these import.
TOOLS = ("chex", "equinox", "hypothesis", "pytest", "pytest-xdist", "safetensors")


def lower_bounds() -> dict[str, str]:
    """The least version that `pyproject.toml` allows of each package, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["examples"]]
    needed += [x for x in extras["test"] if re.match(r"[\w-]+", x)[0] in TOOLS]
    return dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", x).groups() for x in needed)


def requirements(which: str, others: list[str]) -> dict[str, str]:
    """What pip is asked for, by the package's name."""
    relation = "==" if which == "oldest" else ">="
    asked = {name: name + relation + least for name, least in lower_bounds().items()}
    return asked | {re.match(r"[\w-]+", x)[0]: x for x in others}


def installed(python: pathlib.Path) -> dict[str, str]:
    """The version of each package of an environment, by name."""
    command = [python, "-m", "pip", "list", "--format=json"]
    environment = {k: v for k, v in os.environ.items() if k != "PIP_QUIET"}
    listed = subprocess.run(command, env=environment, check=True, capture_output=True)
    return {x["name"].lower(): x["version"] for x in json.loads(listed.stdout)}


def main() -> None:
    """Makes an environment, says what is in it, and tests there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("which", choices=("oldest", "newest", "pre"))
    parser.add_argument("others", nargs="*", metavar="package==version")
    parser.add_argument("--python", default=sys.executable, help="the interpreter")
    options = parser.parse_args()
    asked = requirements(options.which, options.others)
    with tempfile.TemporaryDirectory(prefix="paged_optax_versions_") as folder:
        subprocess.run([options.python, "-m", "venv", folder], check=True)
        python = pathlib.Path(folder, "bin", "python")
        pre = ["--pre"] if options.which == "pre" else []
        made = subprocess.run([python, "-m", "pip", "install", *pre, *asked.values()])
        if made.returncode:
            sys.exit(made.returncode)
        found = installed(python)
        for name in sorted(found):
            print(f"{name:24}{found[name]:16}{asked.get(name, '')}")
        command = [python, "-m", "pytest", "-n", "2", "-m", "not slow and not compiler"]
        # Python 3.11 has the oldest JAX in any case.
        anew = options.which != "oldest" or options.others
        subjects = OF_OTHERS + OF_JAX if anew else OF_OTHERS
        names = (subject.split("/") for subject in subjects)
        files = [f"tests/{room}/test_{subject}.py" for room, subject in names]
        tested = subprocess.run(
            [*command, "-rfE", "--tb=short", "-p", "no:cacheprovider", *files],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    sys.exit(tested.returncode)


if __name__ == "__main__":
    main()
