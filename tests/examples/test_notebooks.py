"""The notebooks: what they install, and that they run."""

import importlib.metadata
import importlib.util
import pathlib
import shutil
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[2]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_cells(path):
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def test_notebooks_are_stored_as_they_ran():
    """In one go, without an error, in few bytes; the first cell is the same in all."""
    assert len(PATHS) == 7
    for path in PATHS:
        cells = code_cells(path)
        assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
        assert all(
            out.output_type != "error" and out.get("name") != "stderr"
            for cell in cells
            for out in cell.outputs
        )
        assert path.stat().st_size < 150_000
        assert cells[0].source == code_cells(PATHS[0])[0].source


EVERYTHING = "paged_optax", "flax", "jaxtyping", "matplotlib", "optax", "orbax", "qwix"
NEW = {"jax": "0.12.0.1"}
OURS = "paged_optax[examples]"


OLD = {"jax": "0.7.2", "jax-cuda12-plugin": "0.7.2"}
FOR_GPUS = NEW | {"jax-cuda13-plugin": "0.12.0.1"}
#: The versions that are there, the modules, what else is, and what is installed.
MACHINES = {
    "nothing is missing": (NEW, EVERYTHING, "", []),
    "Colab": (OLD, EVERYTHING[1:-1], "nvidia-smi", ["jax[cuda12]>=0.10.2", OURS]),
    "JAX for CPUs": (NEW, EVERYTHING, "nvidia-smi", ["jax[cuda13]>=0.10.2"]),
    "JAX for GPUs": (FOR_GPUS, EVERYTHING, "nvidia-smi", []),
    "a bare TPU": ({}, (), "/dev/accel0", ["jax[tpu]>=0.10.2", OURS]),
    "on the CPU": (NEW, EVERYTHING, "nvidia-smi, JAX_PLATFORMS", []),
    "a clone": ({"jax": "0.10.2"}, ("flax",), "clone", [f"{ROOT}[examples]"]),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_what_the_first_cell_installs(machine, monkeypatch, tmp_path, capsys):
    versions, modules, there, installed = MACHINES[machine]
    calls = run_first_cell(dict(versions), modules, there, monkeypatch, tmp_path)
    assert calls == ([["-m", "pip", "install", "-q", *installed]] if installed else [])
    shown = capsys.readouterr().out
    assert ("JAX 0.7.2 is older than 0.10.2" in shown) == (machine == "Colab")
    assert f"installed just now: {', '.join(installed) or 'nothing'}\n" in shown
    assert ("this checkout" in shown) == (there == "clone")


def run_first_cell(versions, modules, there, monkeypatch, folder, returncode=0):
    """Runs it on a machine that has these packages; what it would have run itself."""
    calls = []

    def version(package):
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    def run(command, **_):
        assert command[0] == sys.executable
        calls.append(list(command[1:]))
        versions.setdefault("jax", "0.12.0.1")
        return subprocess.CompletedProcess(command, returncode, "", "no such package")

    with monkeypatch.context() as patch:
        patch.chdir(ROOT / "notebooks" if there == "clone" else folder)
        patch.setattr(sys, "path", [*sys.path])
        patch.delenv("JAX_PLATFORMS", raising=False)
        if "JAX_PLATFORMS" in there:
            patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setattr(importlib.metadata, "version", version)
        patch.setattr(importlib.util, "find_spec", lambda x: x in modules or None)
        patch.setattr(shutil, "which", lambda name: name if name in there else None)
        patch.setattr(pathlib.Path, "exists", lambda path: str(path) in there)
        patch.setattr(subprocess, "run", run)
        exec(code_cells(PATHS[0])[0].source, {})
    return calls


def test_the_first_cell_says_what_pip_said(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match="in a clone(.|\n)*no such package"):
        run_first_cell(dict(NEW), (), "", monkeypatch, tmp_path, returncode=1)


WITHOUT_HF = 'not installed: pip install ".[hf]", from Python 3.12 on'


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook(path, monkeypatch):
    """Every cell runs, with this checkout and nothing installed."""
    if path.stem == "finetune_hf":
        for module in ("eqx_zoo", "transformers"):
            pytest.importorskip(module, reason=WITHOUT_HF, exc_type=ImportError)
    for name in ("PYTHONPATH", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebook = nbformat.read(path, as_version=4)
    source = "import paged_optax\nprint(paged_optax.__file__)"
    notebook.cells.append(nbformat.v4.new_code_cell(source))
    folder = {"metadata": {"path": str(path.parent)}}
    how = {"timeout": 300, "kernel_name": "python3", "resources": folder}
    NotebookClient(notebook, **how).execute()
    first, second, *_, last = (x for x in notebook.cells if x.cell_type == "code")
    installing = [first, second] if path.stem == "finetune_hf" else [first]
    for cell in installing:  # without torch, transformers says so first
        said = "".join(out.get("text", "") for out in cell.outputs)
        assert "installed just now: nothing" in said
    assert last.outputs[0].text == f"{ROOT / 'paged_optax' / '__init__.py'}\n"
