"""`python -m paged_optax`: what it prints."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy

import paged_optax as po
from paged_optax.backend.compiler_options import addressing_options, overlap_options
from paged_optax.cli import doctor, machine, main, plan, self_test
from paged_optax.engine import backend_check

ROOT = pathlib.Path(po.__file__).parents[1]
MODELS = "import jax\ndef make():\n    return {'w': jax.numpy.ones((512, 512))}\n"


@pytest.fixture
def printed(capsys):
    """The output of a command; the device has 24 GiB unless it says."""

    def run(command):
        if command.startswith("plan") and "--device-memory" not in command:
            command += " --device-memory 24GiB"
        assert main(command.split()) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


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
    assert (done.returncode, done.stderr) == (0, "")
    assert "paged, bfloat16" in done.stdout
    assert "18.0 GiB, which JAX takes of a GPU of 24.0 GiB" in done.stdout


def test_plan_prints_what_what_fits_says(printed):
    text = printed("plan --params 1B --device-memory 8GiB --optimizer lion --link 50")
    how = {"device_memory": "8GiB", "link_gigabytes_per_second": 50.0, "rank": 16}
    ways = po.what_fits(po.model_shapes("1B"), optax.lion(1e-3), **how)
    assert text.endswith(f"{ways}\n")
    assert "998,823,936 parameters in bfloat16, 1.9 GiB; lion" in text


def test_plan_of_an_alias(printed):
    """Its name says how moments are stored."""
    alias = printed("plan --params 1B --optimizer paged_adamw_8bit")
    assert alias == printed("plan --params 1B --optimizer adamw --codec dynamic_int8")
    assert "8 bits" not in printed("plan --params 1B --optimizer paged_adamw_32bit")


@pytest.mark.parametrize(
    "name", ["lars", *(x for x in po.__all__ if x.startswith("paged_"))]
)
def test_plan_takes_every_alias(name, printed):
    known = name.removeprefix("paged_").partition("_")[0]
    assert f"MiB; {known}" in printed(f"plan --params 100M --optimizer {name}")


ADVICE = "Scores in blocks and a head by linear_cross_entropy take"


@pytest.mark.parametrize(
    ("flags", "advised"), [("", ADVICE), ("--fused-head", "Scores in blocks take")]
)
@pytest.mark.parametrize("memory", ["24GiB", "1GiB"])
def test_plan_advises_nothing_that_is_done(flags, advised, memory, printed):
    how = f"--device-memory {memory} --batch 4 --length 4096 {flags}"
    text = " ".join(printed(f"plan --params 1B {how}").split())
    told = 2 if memory == "1GiB" else 1
    assert text.count(f"{advised} less.") == told
    assert text.lower().count("scores in blocks") == told
    assert text.lower().count("a head by") == ("head" in advised) * told


def test_output_that_nobody_reads_on():
    """As of `plan ... | head`: it ends, and without a word."""
    command = [sys.executable, "-m", "paged_optax", "plan", "--params", "1B"]
    command += ["--device-memory", "24GiB"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        child.stdout.close()
        assert (child.stderr.read(), child.wait()) == (b"", 0)


def test_plan_of_several_devices(printed):
    """Host and device are counted; the printed code is what runs on them."""
    how = "--device-memory 16GiB --devices 8 --host-memory 12GiB --batch 8 --length 512"
    text = printed(f"plan --params google/gemma-3-4b-it {how} --codec dynamic_int8")
    assert "Fits counts the 12.0 GiB of the host too." in text
    rows = [x for x in text.splitlines() if x.startswith("layerwise")]
    answers = {x[:40].strip(): x.split()[-2] for x in rows[:7]}
    assert answers["layerwise QLoRA, weights on host"] == "yes"
    assert answers["layerwise, dynamic_int8, all on host"] == "no"
    assert "mesh = jax.make_mesh((8,)" in text
    assert "gemma-3-4b-it: weights that see pictures are left out" in text


def test_plan_of_a_checkpoint(tmp_path, printed):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"w": np.ones((512, 1024), np.float32)}, path)
    assert "in float32, 2.0 MiB" in printed(f"plan --checkpoint {path}")


def test_what_there_is(printed):
    """Without a command it says which there are."""
    text = printed("")
    assert max(map(len, text.splitlines())) <= 80
    for command in (plan, doctor):
        assert (command.__doc__ or "").splitlines()[0].split(",")[0] in text


@pytest.mark.parametrize("flags", ["", "--codec dynamic_int8", "--optimizer muon"])
@pytest.mark.parametrize("size", ["60M", "8B"])
def test_plan_fits_a_terminal(size, flags, printed):
    text = printed(f"plan --params {size} {flags}")
    assert max(map(len, text.splitlines())) <= 80


DOCTOR = (
    "No accelerator|one: the bytes of both add up|pinned_host|not measured: no link"
)
DOCTOR += f"|bit for bit|is right|jax {jax.__version__}"


def test_doctor(printed):
    text = " ".join(printed("doctor").split())
    assert [words for words in DOCTOR.split("|") if words not in text] == []
    assert "FAILED" not in text


@pytest.mark.parametrize("before", [True, False])
def test_doctor_on_a_gpu(before, monkeypatch):
    """It says which versions of XLA read and write pages in turn."""
    monkeypatch.setattr(doctor, "GPU_NEEDS_RAW_INDEX", before)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    rows = dict(doctor._machine())
    assert ("jax 0.11.2" in rows["reads and writes"]) is before
    assert "device and host memory" not in rows


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_the_link_is_measured_as_jit_step_compiles(level, monkeypatch):
    """Also under a level whose pipeliner loses addresses of host memory."""
    tesla = types.SimpleNamespace(platform="gpu", compute_capability="7.5")
    tesla.memory_stats = dict
    monkeypatch.setattr(jax, "local_devices", lambda: [tesla])
    before = jax.config.jax_optimization_level
    jax.config.update("jax_optimization_level", level)
    try:
        wanted = {**overlap_options(tesla), **addressing_options(tesla)}
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
