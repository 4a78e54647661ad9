"""The script that runs Optax's own tests says what it finds."""

import subprocess
import sys
from pathlib import Path

import pytest

import optax_own

SCRIPT = Path(optax_own.__file__)


@pytest.mark.parametrize(
    ("error", "plain", "kind"),
    [
        ("", "", "passed"),
        ("", "fails", "passed"),
        ("fails", "fails", "fails without paging"),
        ("ValueError: so no page can be updated without the others", "", "refused"),
        ("AssertionError: 1 != 2", "", "fails"),
        ("AssertionError: 1 != 2", None, "fails"),
    ],
)
def test_kinds(error, plain, kind):
    assert optax_own.kind_of(error, plain, optax_own.refusals()) == kind


@pytest.mark.slow
@pytest.mark.parametrize("folder", [None, "other"])
def test_script(folder, tmp_path):
    """One paged test of Optax's; one of a checkout, which fails with paging alone."""
    command = [sys.executable, str(SCRIPT), "--settings", "16 B", "--files"]
    command += ["transforms/_masking_test.py", "-k", "test_mask_fn"]
    if folder:
        there = tmp_path / "optax" / "transforms"
        there.mkdir(parents=True)
        (there / "_masking_test.py").write_text(
            "from optax._src import alias\n"
            "import jax.numpy as jnp\n"
            "def test_mask_fn():\n"
            "    state = alias.adam(1.0).init(jnp.ones(8))\n"
            "    assert state[0].mu.sharding.memory_kind == 'device'\n"
        )
        command += ["--optax", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == bool(folder), done.stderr
    row = "| 0 | 0 | 0 | 1 |" if folder else "| 1 | 0 | 0 | 0 |"
    assert f"| 16 B {row}" in done.stdout
