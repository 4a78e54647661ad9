"""`examples/finetune_hf --devices 8`: the run of one device, divided."""

import csv

import jax
import numpy as np
import pytest

from helpers.hf_command import main, weights_of
from helpers.hf_folders import TEXT

why = 'not installed: pip install ".[hf]", from Python 3.12 on'
pytest.importorskip("eqx_zoo", reason=why)
pytest.importorskip("transformers", reason=why)
load_file = pytest.importorskip("safetensors.numpy", reason=why).load_file

#: The method, where the weights are, and more arguments.
RUNS = {
    "full": ("qwen3", "full", "device"),
    "on the host": ("qwen3", "full", "host"),
    "all on the host": ("gemma3", "full", "all"),
    "lora": ("qwen3", "lora", "host"),
    "qlora": ("llama", "qlora", "device"),
}


def losses(path):
    with (path / "losses.csv").open() as file:
        return [
            [float(x[name] or 0) for name in ("loss", "held out")]
            for x in csv.DictReader(file)
        ]


def test_the_loss_of_divided_rows(example, folders, tmp_path):
    """Eleven rows on eight devices have the mean that they have one by one."""
    text, found = tmp_path / "text.txt", []
    text.write_text(TEXT)
    given = ["--checkpoint", str(folders("qwen3")), "--text", str(text)]
    given += ["--output", str(tmp_path / "out"), "--length", "64", "--batch", "8"]
    given += ["--method", "qlora", "--way", "host", "--min-size", "1KiB"]
    for count in ("1", "8"):
        args = example.command.parse_arguments([*given, "--devices", count])
        run = example.run.Run.of(args)
        params = run.trained(run.method.first(run.folder))
        found.append(run.evaluated(params, run.train[:11]))
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_one_device(example, folders, name, tmp_path):
    """And what comes out is what one device makes, to rounding."""
    family, method, way = RUNS[name]
    folder, text = folders(family), tmp_path / "text.txt"
    text.write_text(TEXT)
    more = "--batch", "8", "--steps", "3", "--method", method, "--way", way
    for count in ("1", "8"):
        main(example, folder, text, tmp_path / count, *more, "--devices", count)
    np.testing.assert_allclose(
        losses(tmp_path / "8"), losses(tmp_path / "1"), rtol=1e-5
    )
    for file in weights_of(tmp_path / "1"):
        one, eight = (load_file(tmp_path / count / file) for count in ("1", "8"))
        assert one.keys() == eight.keys()
        for tensor, x in one.items():
            np.testing.assert_allclose(eight[tensor], x, atol=3e-5, err_msg=tensor)
    names = [sorted(x.name for x in (tmp_path / n).iterdir()) for n in ("1", "8")]
    assert names[0] == names[1]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["device", "host"])
def test_resumed_on_eight_devices(example, folders, way, tmp_path):
    """Bit for bit; each device has its part of the weights and of the moments."""
    folder, text = folders("qwen3", dtype="bfloat16"), tmp_path / "text.txt"
    text.write_text(TEXT)
    more = "--batch", "8", "--devices", "8", "--steps", "4", "--way", way
    main(example, folder, text, tmp_path / "whole", *more)
    with pytest.raises(SystemExit, match="0"):
        main(example, folder, text, tmp_path / "again", *more, "--stop-after", "2")
    main(example, folder, text, tmp_path / "again", *more, "--resume")
    assert weights_of(tmp_path / "again") == weights_of(tmp_path / "whole")
    given = ["--checkpoint", str(folder), "--text", str(text), "--length", "64"]
    given += ["--output", str(tmp_path / "none"), "--min-size", "1KiB", *more]
    run = example.run.Run.of(example.command.parse_arguments(given))
    params, state, _ = run.carry()
    large = [x for x in jax.tree.leaves((params, state)) if x.size > 1 << 12]
    assert large
    for x in large:
        parts = [y.data.size for y in x.addressable_shards]
        assert parts == [x.size // 8] * 8, x.shape


@pytest.mark.parametrize(
    ("family", "more", "says"),
    [
        (
            "qwen3",
            "--devices 8",
            "--devices 8: JAX has 8, and they divide a step's rows",
        ),
        ("qwen3", "--devices 9 --batch 9", "--devices 9: JAX has 8"),
        ("qwen3_moe", "--devices 8 --batch 8", "--devices 1 is needed for experts"),
    ],
)
def test_devices_that_are_refused(
    example, folders, family, more, says, tmp_path, capsys
):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    given = ["--checkpoint", str(folders(family)), "--text", str(text)]
    given += ["--output", str(tmp_path / "out"), *more.split()]
    assert example.command.main(given) == 1
    assert f"error: {says}" in capsys.readouterr().err
