"""What a stranger runs first: the example, the notebook, the README's code."""

import os
import pathlib
import re
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[1]
# The programs run as a user runs them: one device, this checkout importable.
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS",)},
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
}


def example(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "finetune_lm.py"), *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_example(tmp_path):
    """A short run: losses agree, both pictures and both tables come out."""
    done = example("--steps", "6", "--output-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "within the tolerance" in done.stdout
    assert "moments on the host" in done.stdout
    for name in ("loss.png", "memory.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"


def test_example_refuses_a_bad_flag():
    done = example("--page-size", "16Mb")
    assert done.returncode != 0
    assert "page_size='16Mb'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=str)
def test_notebook(path, monkeypatch):
    """Every cell runs."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()


def test_readme_python():
    """Every Python block of the README runs, in order, in one session."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
