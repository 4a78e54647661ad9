"""The benchmark runs with no arguments but a folder, and writes what it says."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

RUN = pathlib.Path(__file__).parents[1] / "benchmarks" / "run.py"


def result_of(tmp_path, *arguments):
    """The path and the contents of the file, and the output."""
    done = subprocess.run(
        [sys.executable, str(RUN), "--out", str(tmp_path), *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    return path, json.loads(path.read_text()), done.stdout


@pytest.mark.slow
def test_quick_run(tmp_path):
    path, result, printed = result_of(tmp_path, "--quick")
    assert path.name == f"cpu-cpu-jax{jax.__version__}.json"
    assert {"python", "jax", "jaxlib", "optax"} <= result["versions"].keys()
    assert {"date", "backend", "device_kind", "load_average"} <= result.keys()

    sections = {row["section"] for row in result["rows"]}
    assert sections == {"numbers", "update", "tokens"}
    numbers = [row for row in result["rows"] if row["section"] == "numbers"]
    assert all(row["right"] for row in numbers)
    assert any(row["leaves_with_a_smaller_last_page"] for row in numbers)
    updates = {r["contestant"]: r for r in result["rows"] if r["section"] == "update"}
    assert {"optax.adamw, resident", "whole-tree offload", "paged, default"} < set(
        updates
    )
    for row in updates.values():
        assert row["seconds"] > 0 and row["ratio"] > 0
        assert not row["donated_but_unused"]
    steps = [r for r in result["rows"] if r["section"] == "tokens"]
    # All compute one function, whatever they keep where.
    losses = np.asarray([r["losses"] for r in steps])
    assert len(steps) == 2 and (losses[:, 2] < losses[:, 0]).all()
    np.testing.assert_allclose(losses, losses[:1].repeat(2, 0), rtol=1e-4)
    # A CPU has no link: said so, and no number invented.
    assert {row["section"] for row in result["not_run"]} == {"link"}
    assert all("no link" in row["reason"] for row in result["not_run"])
    assert "Could not run" in printed and "tokens/s" in printed


@pytest.mark.slow
def test_checks(tmp_path):
    """On a CPU of small sizes: all are right, and none is left out."""
    path, result, printed = result_of(tmp_path, "--checks")
    assert path.name.startswith("checks-cpu-cpu-")
    checks = [row for row in result["rows"] if row["section"] == "checks"]
    assert len(checks) == 6 and all(row["right"] for row in checks)
    assert checks[0]["differing"] == 0 and not result["not_run"]
    assert "the same numbers in every way" in printed


@pytest.mark.slow
def test_tokens(tmp_path):
    """On a CPU of a small decoder: gradients of micro-batches add up to the same."""
    path, result, _ = result_of(tmp_path, "--tokens")
    rows = result["rows"]
    assert path.name.startswith("tokens-cpu")
    assert [row["micro_batches"] for row in rows] == [1, 3] * 5
    for row in rows:
        assert row["tokens_per_second"] == row["tokens"] / row["seconds"]
    for count in (1, 3):
        losses = [r["losses"] for r in rows if r["micro_batches"] == count]
        np.testing.assert_allclose(losses, [losses[0]] * 5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.compiler
def test_profile_by_the_model(tmp_path):
    """Of programs for an H200; parts add up to the low end, and a picture is drawn."""
    path, result, printed = result_of(tmp_path, "--profile", "--models", "small")
    assert path.name.startswith("profile-modelled-h200-")
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert "Shares of a step" in printed
    for row in result["rows"]:
        assert sum(row["shares"].values()) == pytest.approx(row["seconds"])
        assert row["shares"]["attention"] > 0 and row["shares"]["optimizer"] > 0
