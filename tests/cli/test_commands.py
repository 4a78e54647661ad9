"""`python -m paged_optax`: what it prints."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy

import paged_optax as po
from paged_optax.backend.compiler_options import addressing_options, overlap_options
from paged_optax.cli import (
    doctor,
    machine,
    main,
    plan,
    self_test,
)
from paged_optax.engine import backend_check

ROOT = pathlib.Path(po.__file__).parents[1]
MODELS = "import jax\ndef make():\n    return {'w': jax.numpy.ones((512, 512))}\n"


def test_as_a_program(tmp_path):
    """As a user calls it, from a folder with a model; warnings are errors."""
    (tmp_path / "mymodels.py").write_text(MODELS)
    command = "plan --module mymodels:make --device-memory 24GiB --codec bfloat16"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "paged_optax", *command.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "paged, bfloat16" in done.stdout
    assert "18.0 GiB, which JAX takes of a GPU of 24.0 GiB" in done.stdout


def test_plan_prints_what_what_fits_says(capsys):
    command = "plan --params 1B --device-memory 8GiB --optimizer lion --link 50"
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    ways = po.what_fits(
        po.model_shapes("1B"),
        optax.lion(1e-3),
        device_memory="8GiB",
        link_gigabytes_per_second=50.0,
        rank=16,
    )
    assert printed.endswith(f"{ways}\n")
    assert "998,823,936 parameters in bfloat16, 1.9 GiB; lion" in printed


def test_plan_of_an_alias(capsys):
    """Its name says how moments are stored."""
    command = ["plan", "--params", "1B", "--device-memory", "24GiB", "--optimizer"]
    assert main([*command, "paged_adamw_8bit"]) == 0
    alias = capsys.readouterr().out
    assert main([*command, "adamw", "--codec", "dynamic_int8"]) == 0
    assert alias == capsys.readouterr().out
    assert main([*command, "paged_adamw_32bit"]) == 0
    assert "8 bits" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["lars", *(x for x in po.__all__ if x.startswith("paged_"))]
)
def test_plan_takes_every_alias(name, capsys):
    command = f"plan --params 100M --device-memory 24GiB --optimizer {name}"
    assert main(command.split()) == 0
    known = name.removeprefix("paged_").partition("_")[0]
    assert f"MiB; {known}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "advised"),
    [
        (
            "",
            "Scores in blocks and a head by linear_cross_entropy take",
        ),
        ("--fused-head", "Scores in blocks take"),
    ],
)
@pytest.mark.parametrize("memory", ["24GiB", "1GiB"])
def test_plan_advises_nothing_that_is_done(flags, advised, memory, capsys):
    batch = f"--device-memory {memory} --batch 4 --length 4096 {flags}"
    assert main(["plan", "--params", "1B", *batch.split()]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    told = 2 if memory == "1GiB" else 1
    assert printed.count(f"{advised} less.") == (told if advised else 0)
    assert printed.lower().count("scores in blocks") == advised.count("Scores") * told
    assert printed.lower().count("a head by") == advised.lower().count("a head") * told


def test_output_that_nobody_reads_on():
    """As of `plan ... | head`: it ends, and without a word."""
    command = [sys.executable, "-m", "paged_optax", "plan", "--params", "1B"]
    command += ["--device-memory", "24GiB"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        child.stdout.close()
        assert (child.stderr.read(), child.wait()) == (b"", 0)


def test_plan_of_several_devices(capsys):
    """Host and device are counted; the printed code is what runs on them."""
    command = "plan --params google/gemma-3-4b-it --device-memory 16GiB --devices 8"
    command += " --host-memory 12GiB --batch 8 --length 512 --codec dynamic_int8"
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    assert "Fits counts the 12.0 GiB of the host too." in printed
    rows = [x for x in printed.splitlines() if x.startswith("layerwise")]
    answers = {x[:40].strip(): x.split()[-2] for x in rows[:7]}
    assert answers["layerwise QLoRA, weights on host"] == "yes"
    assert answers["layerwise, dynamic_int8, all on host"] == "no"
    assert "mesh = jax.make_mesh((8,)" in printed
    assert "gemma-3-4b-it: weights that see pictures are left out" in printed


def test_plan_of_a_checkpoint(tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"w": np.ones((512, 1024), np.float32)}, path)
    assert main(["plan", "--checkpoint", str(path), "--device-memory", "1GiB"]) == 0
    assert "in float32, 2.0 MiB" in capsys.readouterr().out


def test_what_there_is(capsys):
    """Without a command it says which there are."""
    assert main([]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert max(map(len, captured.out.splitlines())) <= 80
    for command in (plan, doctor):
        assert (command.__doc__ or "").splitlines()[0].split(",")[0] in captured.out


@pytest.mark.parametrize("flags", ["", "--codec dynamic_int8", "--optimizer muon"])
@pytest.mark.parametrize("size", ["60M", "8B"])
def test_plan_fits_a_terminal(size, flags, capsys):
    command = f"plan --params {size} --device-memory 24GiB {flags}"
    assert main(command.split()) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_doctor(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert f"jax {jax.__version__}" in " ".join(printed.split())
    for words in (
        "No accelerator",
        "one: the bytes of both add up",
        "pinned_host",
        "not measured: no link",
        "bit for bit",
        "is right",
    ):
        assert words in printed
    assert "FAILED" not in printed


@pytest.mark.parametrize("before", [True, False])
def test_doctor_on_a_gpu(before, monkeypatch):
    """It says which versions of XLA read and write pages in turn."""
    monkeypatch.setattr(doctor, "GPU_NEEDS_RAW_INDEX", before)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    rows = dict(doctor._machine())
    assert ("jax 0.11.2" in rows["reads and writes"]) is before
    assert "device and host memory" not in rows


class Tesla:
    """What JAX reports of a T4."""

    platform, compute_capability = "gpu", "7.5"
    memory_stats = staticmethod(lambda: {})


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_the_link_is_measured_as_jit_step_compiles(level, monkeypatch):
    """Also under a level whose pipeliner loses addresses of host memory."""
    monkeypatch.setattr(jax, "local_devices", lambda: [Tesla])
    before = jax.config.jax_optimization_level
    jax.config.update("jax_optimization_level", level)
    try:
        wanted = {**overlap_options(Tesla), **addressing_options(Tesla)}
        assert machine.compiler_options() == wanted
    finally:
        jax.config.update("jax_optimization_level", before)
    assert "collective-pipeliner-forward" in wanted["xla_disable_hlo_passes"]


@pytest.mark.parametrize("what", ["numbers", "pages", "crash", "no host memory"])
def test_doctor_of_a_sick_backend(what, monkeypatch, capsys):
    if what == "numbers":
        compare = self_test.compare_with_optax

        def wrong(inner, steps):
            found = compare(inner, steps)
            state = dataclasses.replace(found.state, differing=1, ulps=99, error=0.5)
            return dataclasses.replace(found, state=state)

        monkeypatch.setattr(self_test, "compare_with_optax", wrong)
    elif what == "no host memory":
        monkeypatch.setattr(doctor, "memory_kinds", lambda: ("device",))
    else:
        error = backend_check.BackendError if what == "pages" else MemoryError

        def broken(backend):
            raise error("rows 16 are wrong")

        monkeypatch.setattr(backend_check, "run_check", broken)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed and "Do not train" in printed


def test_rates_of_a_link_that_is_there(monkeypatch):
    """The loops run on the CPU too, whose rates say nothing and are not shown."""
    monkeypatch.setattr(jax, "default_backend", lambda: "an accelerator")
    rates = list(machine.measure(32 << 20, 2))
    assert len({rate.name for rate in rates}) == len(rates) == 6
    for rate in rates:
        assert not rate.reason
        assert len(rate.gigabytes_per_second) == 2 and rate.median > 0
        assert rate.directions == 1 + rate.name.startswith("both")
        assert ("pages" in rate.name) == (rate.page_bytes == 16 << 20)


def test_a_link_that_loses_values_is_reported(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "an accelerator")
    monkeypatch.setattr(machine, "whole", lambda sources, targets: targets)
    first = next(machine.measure(16 << 20, 1))
    assert "are not those that were sent" in first.reason
