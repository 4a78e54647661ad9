"""What is run first on a GPU: each check passes here, and each can fail."""

import importlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from paged_optax.cli import machine, self_test

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
NAMES = ["graphs", "half budget", "large leaves", "activations", "link"]
#: What measures, and fails where it breaks, or where numbers differ.
MEASURED = ["tokens", "tokens, resident", "profile", "pages", "ends"]
MEASURED += ["remainders", "O1"]
ALL = ["numbers", *NAMES, *MEASURED]


@pytest.fixture
def program(monkeypatch):
    """The command's module; its parts, which are modules too, are imported as it is."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # Where steps are compared, each process would compile them once more.
    made = {"w": np.ones(3, np.float32)}
    graphs = importlib.import_module("graphs")
    monkeypatch.setattr(graphs, "trained", lambda flag, steps, limit: made)
    return importlib.import_module("first_minutes")


@pytest.mark.parametrize("name", NAMES)
def test_check(name, program):
    found = program.CHECKS[name](True)
    wanted = {"link": program.NOT_RUN}  # a CPU has none
    assert found["outcome"] == wanted.get(name, program.PASSED)


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_what_is_measured(name, program, monkeypatch):
    """All train a small decoder to the same; what is not built says so."""
    slices = importlib.import_module("paged_optax.layerwise.slices")
    monkeypatch.setattr(slices, "GPU_FETCHES_AHEAD", slices.GPU_FETCHES_AHEAD)
    try:
        found = program.CHECKS[name](True)
    finally:
        jax.config.update("jax_optimization_level", "UNKNOWN")
    if name == "remainders" and found["outcome"] == program.NOT_RUN:
        assert "not built" in found["reason"]
        return
    assert found["outcome"] == program.PASSED
    assert all(row["seconds"] > 0 for row in found["rows"])
    if name == "profile":
        for row in found["rows"]:
            assert row["shares"]["products"] > 0 and row["shares"]["head and loss"] > 0


def test_other_losses_fail(program):
    rows = [{"losses": [2.0, 1.0]}, {"losses": [2.0, 1.001]}]
    assert program._alike(rows)["outcome"] == program.FAILED
    assert program._alike(rows[:1] * 2)["outcome"] == program.PASSED


def break_graphs(monkeypatch):
    graphs = importlib.import_module("graphs")
    trained = lambda flag, steps, limit: {
        "w": np.full(3, 2.0 if flag == graphs.NO_GRAPHS else 1.9)
    }
    monkeypatch.setattr(graphs, "trained", trained)


def break_half_budget(monkeypatch):
    """A tenth too much is learned."""
    monkeypatch.setattr(
        self_test, "paged", lambda inner, **how: po.paged(optax.adamw(1.1e-3), **how)
    )


def break_link(monkeypatch):
    """Nothing is sent."""
    monkeypatch.setattr(jax, "default_backend", lambda: "an accelerator")
    monkeypatch.setattr(machine, "whole", lambda sources, targets: targets)


def break_large_leaves(monkeypatch):
    """A moment comes back a row from its place."""
    module = importlib.import_module("large_leaves")
    jit_step = module.po.jit_step

    def shifted(step, *args, **settings):
        compiled = jit_step(step, *args, **settings)

        def run(*args):
            updates, state = compiled(*args)
            second = np.roll(np.asarray(state["second"]), 1, 0)
            return updates, state | {"second": jnp.asarray(second)}

        return run

    monkeypatch.setattr(module.po, "jit_step", shifted)


def break_activations(monkeypatch):
    """A layer is given another one's input."""
    module = importlib.import_module("activations")
    train = module._train
    other = lambda *args: train(*args[:2], args[2] + args[3], args[3])
    monkeypatch.setattr(module, "_train", other)


BREAKING = {
    "graphs": break_graphs,
    "half budget": break_half_budget,
    "link": break_link,
    "large leaves": break_large_leaves,
    "activations": break_activations,
}


@pytest.mark.parametrize("name", NAMES)
def test_check_can_fail(name, program, monkeypatch):
    BREAKING[name](monkeypatch)
    found = program.CHECKS[name](True)
    assert found["outcome"] == program.FAILED, found


@pytest.fixture
def graphs(monkeypatch):
    """The module that compares steps in two processes."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("graphs")


def test_graphs_that_compute_nan(graphs, monkeypatch):
    """Equal values prove nothing if they are not finite."""
    gone = {"w": np.full(3, np.nan, np.float32)}
    monkeypatch.setattr(graphs, "trained", lambda *run: gone)
    with pytest.raises(ArithmeticError, match="values are not finite"):
        graphs.compare_graphs()


def test_graphs_where_a_process_crashes(graphs, monkeypatch):
    monkeypatch.setattr(graphs, "NO_GRAPHS", "--xla_gpu_no_such_flag=")
    with pytest.raises(RuntimeError, match="no_such_flag"):
        graphs.compare_graphs()


def test_graphs_take_too_long(graphs):
    with pytest.raises(RuntimeError, match="over 0.01 s"):
        graphs.compare_graphs(1, 0.01)


@pytest.fixture
def without_work(program, monkeypatch):
    """Parts that do nothing; the graphs crash."""
    described = {"backend": "gpu", "device_kind": "A Card", "versions": {"jax": "1.2"}}
    asked = []

    def run_part(part, timeout, name="", small=False, env=None):
        asked.append((part, name, small))
        assert timeout > 0
        if name == "graphs":
            raise program.PartError("killed by signal 11")
        return described if part == "machine" else {"outcome": program.PASSED}

    monkeypatch.setattr(program, "run_part", run_part)
    return asked


def test_a_failure_stops_nothing(program, without_work, monkeypatch, tmp_path, capsys):
    """The file has all outcomes, and the exit status tells."""
    monkeypatch.setattr(sys, "argv", ["first_minutes.py", "--out", str(tmp_path)])
    assert program.main() == 1
    (path,) = tmp_path.iterdir()
    assert path.name == "first-minutes-gpu-a-card-jax1.2.json"
    written = json.loads(path.read_text())
    assert written["sizes"] == "full"
    outcomes = {name: found["outcome"] for name, found in written["checks"].items()}
    assert outcomes == {name: "passed" for name in ALL} | {"graphs": "FAILED"}
    assert "graphs: FAILED: killed by signal 11" in capsys.readouterr().out
    machine, *parts = without_work
    assert machine == ("machine", "", False)
    assert parts == [("first minutes", name, False) for name in ALL]


def test_no_time_is_left(program, without_work, monkeypatch, tmp_path):
    """What comes too late is not run, and has not failed."""
    monkeypatch.setattr(program, "BUDGET", 4)
    found = program.run(False, tmp_path)["checks"]
    assert {x["outcome"] for x in found.values()} == {program.NOT_RUN}


@pytest.mark.slow
def test_as_a_command(tmp_path):
    """On a CPU, with small sizes, which the file says."""
    program = str(BENCHMARKS / "first_minutes.py")
    done = subprocess.run(
        [sys.executable, program, "--out", str(tmp_path)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    assert path.name == f"first-minutes-cpu-cpu-jax{jax.__version__}.json"
    result = json.loads(path.read_text())
    assert result["sizes"] == "small: there is no GPU"
    outcomes = {name: found["outcome"] for name, found in result["checks"].items()}
    late = {"link": "not run", "remainders": outcomes["remainders"]}
    assert outcomes == dict.fromkeys(ALL, "passed") | late
    assert "Shares of a step" in done.stdout
    assert result["checks"]["graphs"]["differing"] == 0
