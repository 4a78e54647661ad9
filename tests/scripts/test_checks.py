"""Checks that come first on a GPU: each check passes here, and each can fail."""

import importlib
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from paged_optax.cli import machine, self_test

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
#: The others compile steps of decoders.
NAMES = ["graphs", "half budget", "large leaves", "activations"]


@pytest.fixture
def program(monkeypatch):
    """The checks; where steps are compared, each process would compile them anew."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    made = {"w": np.ones(3, np.float32)}
    graphs = importlib.import_module("graphs")
    monkeypatch.setattr(graphs, "trained", lambda flag, steps, limit: made)
    return importlib.import_module("checks")


@pytest.mark.parametrize("name", NAMES)
def test_check(name, program):
    assert program.check(name, True)["right"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ends", "O1"])
def test_same_losses(name, program, monkeypatch):
    slices = importlib.import_module("paged_optax.layerwise.slices")
    monkeypatch.setattr(slices, "GPU_FETCHES_AHEAD", slices.GPU_FETCHES_AHEAD)
    try:
        assert program.check(name, True)["right"]
    finally:
        jax.config.update("jax_optimization_level", "UNKNOWN")


def test_other_losses_fail(program):
    assert not program.alike([2.0, 1.0], [2.0, 1.001])["right"]
    assert program.alike([2.0, 1.0], [2.0, 1.0])["right"]


def break_graphs(graphs):
    """With graphs another value."""
    value = lambda flag: 2.0 if flag == graphs.NO_GRAPHS else 1.9
    return lambda flag, steps, limit: {"w": np.full(3, value(flag))}


def break_half_budget(self_test):
    """A tenth too much is learned."""
    return lambda inner, **how: po.paged(optax.adamw(1.1e-3), **how)


def break_large_leaves(po):
    """A moment comes back a row from its place."""
    jit_step = po.jit_step

    def shifted(step, *args, **settings):
        compiled = jit_step(step, *args, **settings)

        def run(*args):
            updates, state = compiled(*args)
            second = np.roll(np.asarray(state["second"]), 1, 0)
            return updates, state | {"second": jnp.asarray(second)}

        return run

    return shifted


def break_activations(graphs):
    """A layer is given another one's input."""
    train = graphs.layerwise
    other = lambda batches, on_host: [jnp.roll(x, on_host, 1) for x in batches]
    return lambda params, batches, tx, activations_on_host: train(
        params, other(batches, activations_on_host), tx
    )


#: The module, what of it breaks, and how.
BREAKING = {
    "graphs": ("graphs", "trained", break_graphs),
    "half budget": (self_test, "paged", break_half_budget),
    "large leaves": (po, "jit_step", break_large_leaves),
    "activations": ("graphs", "layerwise", break_activations),
}


@pytest.mark.parametrize("name", NAMES)
def test_check_can_fail(name, program, monkeypatch):
    module, attribute, broken = BREAKING[name]
    module = importlib.import_module(module) if type(module) is str else module
    monkeypatch.setattr(module, attribute, broken(module))
    assert not program.check(name, True)["right"]


def test_the_link(program, monkeypatch):
    """A CPU has none; and nothing is measured of one that sends nothing."""
    assert all("no link" in row["reason"] for row in program.link(16 << 20, 1))
    monkeypatch.setattr(jax, "default_backend", lambda: "an accelerator")
    monkeypatch.setattr(machine, "whole", lambda sources, targets: targets)
    first, *_ = program.link(16 << 20, 1)
    assert "are not those that were sent" in first["reason"]


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
    with pytest.raises(RuntimeError, match="over 0.01 s"):
        graphs.compare_graphs(1, 0.01)


def test_a_failure_stops_nothing(program, monkeypatch, tmp_path, capsys):
    """The file has all outcomes, and the exit status tells; so where time is short."""
    run = importlib.import_module("run")
    known = {"versions": {"jax": "1.2", "python": "3"}, "host_bytes_available": 0}
    known |= {"backend": "gpu", "device_kind": "A Card", "cpus": 1, "load_average": [0]}

    def run_part(part, *, timeout, env=None, name="", **arguments):
        assert timeout > 0
        if name == "graphs":
            raise run.PartError("killed by signal 11")
        row = {"section": "checks", "name": name, "right": True}
        return {"machine": known, "checks": row}.get(part, [])

    monkeypatch.setattr(run, "run_part", run_part)
    assert run.CHECKS.keys() == program.CHECKS.keys()
    for budget, missing in (("870", ["graphs"]), ("4", [*run.CHECKS])):
        command = ["run.py", "--checks", "--budget", budget, "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", command)
        assert run.main() == 1
        (path,) = tmp_path.iterdir()
        assert path.name == "checks-gpu-a-card-jax1.2.json"
        written = json.loads(path.read_text())
        late = [row["name"] for row in written["not_run"] if "checks" in row["section"]]
        assert late == [f"checks {name}" for name in missing]
        assert len(written["rows"]) == len(run.CHECKS) - len(missing)
    assert "killed by signal 11" in capsys.readouterr().out
