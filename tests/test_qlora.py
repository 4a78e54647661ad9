"""The QLoRA example: what it learns, what it saves, and that it goes on bit for bit."""

import importlib
import pathlib
import shutil

import jax
import numpy as np
import pytest

import paged_optax as po

ROOT = pathlib.Path(__file__).parents[1]

pytestmark = [
    pytest.mark.slow,
    # Qwix 0.1.8 reads variables as Flax no longer wants them read.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix.*"),
]

#: As small as adapters can be whose moments are in eight bits: 16 x 256 values.
FLAGS = ("--base-steps=80 --steps=100 --save-every=50 --batch=4 --length=32").split()


@pytest.fixture(scope="module")
def program():
    """The example, its model cut to one layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        program = importlib.import_module("finetune_qlora")
        small = importlib.import_module("finetune_lm").ModelSize(256, 1, 4)
        patch.setitem(program.SIZES, "mini", small)
        yield program


@pytest.fixture(scope="module")
def straight(program, tmp_path_factory):
    """One run from beginning to end, and its folder."""
    folder = tmp_path_factory.mktemp("qlora")
    return program.main([*FLAGS, f"--output-dir={folder}"]), folder


def kinds(state):
    return [x.sharding.memory_kind for x in jax.tree.leaves(state) if x.ndim]


def test_it_learns(straight):
    """NF4 costs little, and the adapters earn it back on text they did not see."""
    result, folder = straight
    base, quantised, adapted = result.losses.values()
    assert base < np.log(256) and abs(quantised - base) < 0.05 * base
    assert adapted < 0.98 * quantised
    assert (folder / "qlora_memory.png").read_bytes()[:4] == b"\x89PNG"


def test_where_the_bytes_go(program, straight):
    """Each way takes less of the device than the one before; XLA counts as we do."""
    result, _ = straight
    full, lora, qlora, paged = result.memory.values()
    assert full.device > 2 * lora.device > 3 * qlora.device
    assert qlora.device > paged.device
    assert full.host == lora.host == qlora.host == 0
    # Four bits a weight and a float32 scale for 64 of them; embeddings as they were.
    matrices = 12 * 256**2
    assert lora.frozen - qlora.frozen == matrices * 4 - (matrices // 2 + matrices // 16)
    # Two moments in eight bits and a float32 scale for 256 values, none of them left.
    assert paged.host == 2 * (paged.trained // 4 + paged.trained // 256)
    assert set(kinds(result.state)) == {"pinned_host"}
    stored = sum(x.nbytes for x in jax.tree.leaves(result.state) if x.ndim)
    assert stored == paged.host

    args = program.parse_arguments(FLAGS)
    *_, variant = program.variants(args).values()
    compiled = program.compile_step(variant, args).compiled
    counted = [program.argument_bytes(compiled, k) for k in ("device", "pinned_host")]
    assert sum(map(sum, counted)) == po.memory_report(compiled).device_arguments


def test_it_resumes_bit_for_bit(program, straight, tmp_path):
    """Half the way, a new process's worth of forgetting, and the other half."""
    result, folder = straight
    shutil.copytree(folder / "qlora", tmp_path / "qlora")
    shutil.rmtree(tmp_path / "qlora" / "adapters" / "100")
    flags = [*FLAGS, "--resume", "--no-compare", f"--output-dir={tmp_path}"]
    resumed = program.main(flags)
    assert resumed.losses == result.losses
    for field in ("adapters", "state"):
        ours, wanted = getattr(resumed, field), getattr(result, field)
        assert jax.tree.structure(ours) == jax.tree.structure(wanted)
        jax.tree.map(np.testing.assert_array_equal, ours, wanted)
        assert kinds(ours) == kinds(wanted)


def test_it_refuses_adapters_too_small_to_page(program, tmp_path):
    with pytest.raises(SystemExit, match="take a larger --rank"):
        program.main(["--rank=8", f"--output-dir={tmp_path}"])


def test_nothing_to_resume(program, tmp_path, capsys):
    with pytest.raises(SystemExit):
        program.main(["--resume", f"--output-dir={tmp_path}"])
    assert "no checkpoint under" in capsys.readouterr().err
