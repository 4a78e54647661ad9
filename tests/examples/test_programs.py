"""What a stranger runs first: the examples, the README's code."""

import importlib
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import rich

import paged_optax as po

ROOT = pathlib.Path(__file__).parents[2]
# The programs run as a user runs them: one device, this checkout importable.
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
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
    assert done.stdout.splitlines()[-1].startswith("Next: --optimizer paged_adamw_8bit")
    for name in ("loss.png", "memory.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"


def test_progress_of_the_example(monkeypatch, capsys):
    """From the first moment on a terminal; nothing but the summary in a file."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    program = importlib.import_module("finetune_lm")
    step = lambda params, state, batch: (params, state, 2.0)
    summary = "adamw: loss 2.000 -> 2.000 "
    for terminal in ("1", "0"):
        monkeypatch.setenv("TTY_COMPATIBLE", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "80")
        rich.reconfigure()  # or the console of an earlier test stays
        program.run("adamw", step, None, None, [np.zeros((2, 9))] * 3)
        shown = capsys.readouterr().out
        assert "nan" not in shown and " 0 tokens/s" not in shown
        for words in ("the first step", "loss 2.000, ", "0:00:00 left"):
            assert (words in shown) == (terminal == "1")
        assert summary in shown.splitlines()[-1]
    assert shown.startswith(summary)


@pytest.mark.slow
def test_example_on_several_devices(tmp_path):
    """FSDP by one flag: each device pages its own part of the moments."""
    flags = ("--devices", "4", "--size", "mini", "--steps", "3")
    done = example(*flags, "--output-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "within the tolerance" in done.stdout
    assert "each of 4 devices" in done.stdout
    assert re.search(r"256x256 +float32 +host +1 x 256.0 KiB", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--page-size", "16Mb", "page_size='16Mb'"),
        ("--codec", "int7", "codec 'int7'"),
        ("--devices", "3", "does not divide"),
    ],
)
def test_example_refuses_a_bad_flag(flag, value, words):
    done = example(flag, value)
    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.slow
def test_eight_bits_train_as_well(monkeypatch):
    """The final loss is within 1% of that of 32 bits, whatever the seed."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    program = importlib.import_module("finetune_lm")
    # As small as moments can be that are in eight bits and in several pages.
    small = program.ModelSize(width=256, layers=1, heads=4)
    monkeypatch.setitem(program.SIZES, "tiny", small)
    corpus = program.read_corpus()
    for seed in range(3):
        args = program.parse_arguments(
            f"--optimizer paged_adamw_8bit --page-size 256KiB --steps 40 --seed {seed}"
            " --learning-rate 3e-3".split()
        )
        paged, plain = program.make_optimizers(args)
        shapes = program.nnx.state(program.new_model(args))
        assert any(
            m.pages > 1 and "Int8" in m.dtype for m in po.plan(paged, shapes).moments
        )
        eight, _ = program.train("8 bits", args, paged, corpus)
        exact, _ = program.train("32 bits", args, plain, corpus)
        difference, _ = program.compare(eight, exact, coded=True)
        assert difference < 0.01, seed
        assert eight != exact
        assert program.final_loss(exact) < 0.6 * exact[0]  # it did learn


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [[], ["--weights-on-host", "--micro-batches=2"]], ids=["device", "host"]
)
def test_layerwise_example(flags, tmp_path, monkeypatch, capsys):
    """A short run: losses agree, and the gradients' memory is saved."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    train_layerwise = importlib.import_module("train_layerwise")
    sizes = ["--layers=6", "--hidden=128", "--batch=2", "--length=32", "--steps=3"]
    losses, memory = train_layerwise.main([*sizes, *flags, f"--output-dir={tmp_path}"])
    usual, ours = losses.values()
    np.testing.assert_allclose(ours, usual, rtol=0, atol=1e-4)
    assert usual[-1] < usual[0]
    ordinary, layerwise, offloaded = memory.values()
    assert layerwise.scratch < 0.7 * ordinary.scratch
    assert layerwise.moments < 0.1 * ordinary.moments
    assert offloaded.parameters < 0.5 * layerwise.parameters
    assert offloaded.host > layerwise.host > ordinary.host == 0
    assert "within the tolerance" in capsys.readouterr().out
    picture = tmp_path / "layerwise_memory.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = {
    path: re.findall(r"```python\n(.*?)```", path.read_text(), re.S) for path in PAGES
}


@pytest.mark.quick("README")
@pytest.mark.parametrize(
    "path", [path for path in BLOCKS if BLOCKS[path]], ids=lambda path: path.stem
)
def test_python_blocks(path):
    """Every block of a page runs, in order, in one session, and prints something."""
    end = "<end of a block>"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"print({end!r})\n".join(BLOCKS[path])],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(f"{end}\n")
    assert len(printed) == len(BLOCKS[path])
    assert all(printed), done.stdout
