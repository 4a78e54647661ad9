"""The benchmark runs with no arguments but a folder, and writes what it says."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

RUN = pathlib.Path(__file__).parents[1] / "benchmarks" / "run.py"


@pytest.mark.slow
def test_quick_run(tmp_path):
    done = subprocess.run(
        [sys.executable, str(RUN), "--quick", "--out", str(tmp_path)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    assert path.name == f"cpu-cpu-jax{jax.__version__}.json"
    result = json.loads(path.read_text())
    assert {"python", "jax", "jaxlib", "optax"} <= result["versions"].keys()
    assert {"date", "backend", "device_kind", "load_average"} <= result.keys()

    sections = {row["section"] for row in result["rows"]}
    assert sections == {"numbers", "update", "layerwise", "tracing", "decoder"}
    numbers = [row for row in result["rows"] if row["section"] == "numbers"]
    assert all(row["right"] for row in numbers)
    assert any(row["leaves_with_a_smaller_last_page"] for row in numbers)
    updates = {r["contestant"]: r for r in result["rows"] if r["section"] == "update"}
    assert {"optax.adamw, resident", "whole-tree offload", "paged, default"} < set(
        updates
    )
    for row in updates.values():
        assert row["seconds"] > 0 and row["ratio"] > 0
        assert row["peak_device_bytes"] > 0 and row["peak_source"]
        assert not row["donated_but_unused"]
    decoders = [r for r in result["rows"] if r["section"] == "decoder"]
    # All compute one function, whatever they keep where.
    (losses,) = {tuple(r["losses"][:2]) for r in decoders}
    assert len(decoders) == 4 and losses[1] < losses[0]
    # A CPU has no link: said so, and no number invented.
    assert {row["section"] for row in result["not_run"]} == {"link"}
    assert all("no link" in row["reason"] for row in result["not_run"])
    assert "Could not run" in done.stdout and "Tracing" in done.stdout
