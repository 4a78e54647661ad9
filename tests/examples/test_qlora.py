"""The QLoRA example: what it learns, what it saves, and that it goes on bit for bit."""

import importlib
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import paged_optax as po
from helpers import aot
from helpers.programs import placed, shardings, state_on

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.optimized,  # as what the fixture of the whole file compiles
    # Qwix 0.1.8 reads variables as Flax no longer wants them read.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix.*"),
]

#: As small as adapters can be whose moments are in eight bits: 16 x 256 values.
FLAGS = ("--base-steps=80 --steps=100 --save-every=50 --batch=4 --length=32").split()


def model_size(*sizes):
    return importlib.import_module("finetune_lm").ModelSize(*sizes)


@pytest.fixture(scope="module")
def program():
    """The example, its model cut to one layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        program = importlib.import_module("finetune_qlora")
        patch.setitem(program.SIZES, "mini", model_size(256, 1, 4))
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

    compiled = result.step.compiled
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


def on_h200(program, variant, args):
    """What XLA assigns to a variant's step on an H200."""
    model = nnx.eval_shape(variant.model)
    graphdef, trained, frozen = nnx.split(model, variant.trained, ...)

    def build(mesh):
        device, _ = aot.placements(mesh)
        given = placed(trained, device), state_on(mesh, variant.tx, trained)
        batch = jax.ShapeDtypeStruct((1, args.length + 1), jnp.int32, sharding=device)
        step = jax.jit(
            program.make_step(graphdef, variant.tx),
            donate_argnums=(0, 1),
            out_shardings=(*shardings(given), device),
        )
        return step, (*given, batch, placed(frozen, device))

    return aot.h200(build)


@pytest.mark.compiler
def test_bytes_on_an_accelerator(program, monkeypatch):
    """Two float32 moments leave the device, and nothing of theirs comes to stay."""
    monkeypatch.setitem(program.SIZES, "mini", model_size(1024, 1, 8))
    args = program.parse_arguments(["--length=32"])
    ways = program.variants(args)
    plain, paged = (on_h200(program, ways[name], args) for name in list(ways)[-2:])
    moments = 2 * 4 * args.rank * 16 * 1024  # of four matrices' two adapters
    assert plain.device_arguments - paged.device_arguments == moments
    assert plain.device_total - paged.device_total > 0.8 * moments
    assert paged.host_temp == 0


def test_it_refuses_adapters_too_small_to_page(program, tmp_path):
    with pytest.raises(SystemExit, match="take a larger --rank"):
        program.main(["--rank=8", f"--output-dir={tmp_path}"])


def test_nothing_to_resume(program, tmp_path, capsys):
    with pytest.raises(SystemExit):
        program.main(["--resume", f"--output-dir={tmp_path}"])
    assert "no checkpoint under" in capsys.readouterr().err
