"""`python -m paged_optax`: what it prints."""

import contextlib
import dataclasses
import math
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
from paged_optax.backend import text
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
        ("--score-blocks 8", "A head by linear_cross_entropy takes"),
        ("--score-blocks 8 --fused-head", ""),
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


def test_plan_of_a_checkpoint(tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"w": np.ones((512, 1024), np.float32)}, path)
    assert main(["plan", "--checkpoint", str(path), "--device-memory", "1GiB"]) == 0
    assert "in float32, 2.0 MiB" in capsys.readouterr().out


def test_what_there_is(capsys):
    """Without a command it says which there are; their examples run as they stand."""
    assert main([]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert max(map(len, captured.out.splitlines())) <= 80
    for command in (plan, doctor):
        assert (command.__doc__ or "").splitlines()[0].split(",")[0] in captured.out
        assert f"python -m paged_optax {command.EXAMPLE}\n" in captured.out
    assert main(plan.EXAMPLE.split()) == 0


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


class Tesla:
    """What JAX reports of a T4."""

    device_kind = "Tesla T4"
    compute_capability = "7.5"

    memory_stats = staticmethod(lambda: {})

    class client:  # noqa: N801
        platform_version = "CUDA"


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_the_link_is_measured_as_jit_step_compiles(level, monkeypatch):
    """Also under a level whose pipeliner loses addresses of host memory."""
    given = {}
    monkeypatch.setattr(jax, "local_devices", lambda: [Tesla])
    monkeypatch.setattr(machine.jax, "jit", lambda function, **x: given.update(x))
    before = jax.config.jax_optimization_level
    jax.config.update("jax_optimization_level", level)
    try:
        machine._jit(machine.whole, "h", "d", {"h": None, "d": None})
        wanted = {**overlap_options(Tesla), **addressing_options(Tesla)}
    finally:
        jax.config.update("jax_optimization_level", before)
    assert given["compiler_options"] == wanted
    assert "collective-pipeliner-forward" in wanted["xla_disable_hlo_passes"]


def on_a_t4(monkeypatch):
    """This machine, as if it had one; what is slow is left out."""
    rates = [
        machine.Rate("host to device, in pages", (6.1,)),
        machine.Rate("both at once, in pages", (9.9,), 2),
    ]
    monkeypatch.setattr(jax, "devices", lambda: [Tesla])
    monkeypatch.setattr(jax, "local_devices", lambda: [Tesla])
    monkeypatch.setattr(machine, "measure", lambda size, repeats: iter(rates))
    monkeypatch.setattr(doctor, "memory_kinds", lambda: ("device", "pinned_host"))
    monkeypatch.setattr(machine, "host_available", lambda: int(11.6 * 2**30))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(doctor, "_products", lambda dtype: f"{len(dtype)}.0")
    monkeypatch.setattr(doctor, "_self_test", lambda: (True, [("all", "", "passed")]))


def test_doctor_on_a_t4(monkeypatch, capsys):
    """What is stated of it stands beside what was measured; and how to train."""
    on_a_t4(monkeypatch)
    assert main(["doctor"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        " x Tesla T4, known as t4 driver ",
        "export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=10 ",
        "link GB/s stated ",
        "host to device, in pages 6.1 16 ",
        "both at once, in pages 9.9 32 ",
        "products TFLOP/s stated ",
        " float16 7.0 65 bfloat16 8.0 8.1 ",
        "know float16 alone: train in float16, clip in float32 (Optax's norm of",
        "xla_gpu_enable_command_buffer",
        "xla_disable_hlo_passes",
    ):
        assert words in printed
    assert "export XLA_FLAGS" not in printed


@pytest.mark.parametrize(("limit", "told"), [("64", True), ("10", False)])
def test_doctor_keeps_the_pool_within_the_machine(limit, told, monkeypatch):
    """As on a Colab machine; what is advised is not told again."""
    monkeypatch.setattr(machine, "host_available", lambda: int(11.6 * 2**30))
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", limit)
    note = doctor._pool_advice()
    line = "export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=10"
    assert note.splitlines()[-1:] == [line] * told
    assert ("11.6 GiB are free" in " ".join(note.split())) is told


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
    assert [rate.name for rate in rates] == list(machine.programs())
    for rate in rates:
        assert not rate.reason
        assert len(rate.gigabytes_per_second) == 2 and rate.median > 0
        assert rate.directions == 1 + rate.name.startswith("both")
        assert ("pages" in rate.name) == (rate.page_bytes == 16 << 20)


def test_plan_takes_this_machine_as_a_card(monkeypatch, capsys):
    """The CPU's own rates, which say nothing: plan has them as those of a card."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(machine, "SIZE", 16 << 20)
    monkeypatch.setattr(machine, "device_memory", lambda: (18 << 30, 0))
    monkeypatch.setattr(machine.teraflops, "__defaults__", (64, 1))
    card = machine.measured_card()
    assert (card.memory, card.gpu) == (24 << 30, True)
    assert 0 < card.link < math.inf
    assert 0 < card.both_ways < math.inf
    assert 0 < card.teraflops < math.inf
    assert card.bfloat16 is None
    monkeypatch.setattr(machine, "knows_bfloat16", lambda: False)
    assert 0 < machine.measured_card().bfloat16 < math.inf
    monkeypatch.setattr(plan, "measured_card", lambda: card)
    step = "--batch 1 --length 512".split()
    assert main(["plan", "--params", "1B", "--card", "measured", *step]) == 0
    shown = capsys.readouterr().out
    assert "18.0 GiB, which JAX takes of a GPU of 24.0 GiB" in shown
    assert "seconds" in shown
    assert "This machine has" in shown


def test_a_link_that_loses_values_is_reported(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "an accelerator")
    monkeypatch.setattr(machine, "whole", lambda to, *arrays: arrays[len(to) :])
    first = next(machine.measure(16 << 20, 1))
    assert "are not those that were sent" in first.reason


TERMINAL = """
from paged_optax.backend.text import print_table, track

print_table(("name", "bytes"), [("[w]", "3 GiB")])
print(list(track(range(3), "counting", 3)))
"""


def shown_by(terminal):
    """All that a terminal shows, which gives it in parts, and fails at its end."""
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 1 << 16):
            yield part


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_on_a_terminal(rich):
    """Tables, and a bar for a loop."""
    pty = pytest.importorskip("pty")
    hide = "" if rich else "import sys; sys.modules['rich'] = None\n"
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", hide + TERMINAL],
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
    )
    os.close(theirs)
    text = b"".join(shown_by(ours)).decode()
    os.close(ours)
    assert child.wait() == 0, text
    assert "[w]" in text and "3 GiB" in text and "[0, 1, 2]" in text
    assert ("counting" in text and "100%" in text) == rich


def test_a_table_wider_than_the_terminal_is_plain(monkeypatch, capsys):
    """Rich would break its words; so would it in a pipe."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for width, lines in ((10, 3), (40, 5)):
        monkeypatch.setenv("COLUMNS", str(width))
        text.print_table(("name", "bytes"), [("parameters", "3 GiB")])
        assert len(capsys.readouterr().out.splitlines()) == lines


def test_without_rich_tables_are_plain(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.box", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    text.print_table(("name", "bytes"), [("w", "3 GiB")])
    assert capsys.readouterr().out == "name  bytes\n----  -----\nw     3 GiB\n"
