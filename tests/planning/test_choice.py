"""Cards by name, a step's seconds, and the way to choose with its code."""

import ast
import dataclasses
import itertools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from paged_optax.cli import main
from paged_optax.planning.cards import CARDS, card_name, find_card
from paged_optax.planning.footprints import training_code
from paged_optax.planning.hugging_face import config_heads

SHAPES = po.model_shapes("1B")
RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"


@pytest.mark.parametrize("name", CARDS)
def test_a_card_by_name(name):
    card = find_card(name)
    assert 8 << 30 < card.memory < 200 << 30
    # Within one memory a copy takes as long in either direction, or in both.
    assert (card.link < card.bidirectional) != card.unified_memory
    assert card.link <= card.bidirectional <= 2 * card.link
    assert 50 < card.teraflops < 1000
    assert find_card(f" {name.upper()} ") == card


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("Tesla T4", "t4"),
        ("NVIDIA T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("NVIDIA GB10", "gb10"),
        ("DGX Spark", "gb10"),
        ("NVIDIA H100 PCIe", None),  # a slower one
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("cpu", None),
    ],
)
def test_a_card_as_jax_reports_it(reported, name):
    assert card_name(reported) == name
    if name:
        assert find_card(reported) == CARDS[name]


def t4(dtype, **arguments):
    shapes = po.model_shapes("1B", dtype)
    return po.what_fits(shapes, batch=1, length=512, **{"card": "t4"} | arguments)


def test_seconds_on_a_t4():
    """Tensor cores of compute capability 7.5 know no bfloat16."""
    bfloat16, float16 = t4("bfloat16")[0].seconds, t4("float16")[0].seconds
    assert bfloat16 == pytest.approx([65 / 8.1 * x for x in float16])
    assert t4("float32")[0].seconds == pytest.approx(bfloat16)
    assert t4("bfloat16").machine.link == 16
    for other in ({"teraflops": 10}, {"card": "l4"}):
        assert t4("bfloat16", **other)[0].seconds == t4("float16", **other)[0].seconds


def test_a_t4_is_told_to_train_in_float16():
    words = 'with master_dtype="float32" and a scaled loss.'
    for dtype, card in (("float16", "t4"), ("float32", "t4"), ("bfloat16", "l4")):
        assert "float16" not in " ".join(t4(dtype, card=card).remarks)
    (told,) = [x for x in t4("bfloat16").remarks if "float16" in x]
    assert "bfloat16 at 8.1 instead of 65 TFLOP/s" in told and told.endswith(words)


def test_a_card_states_what_no_argument_does():
    card = CARDS["l4"]
    found = po.what_fits(SHAPES, card="L4", batch=1, length=512)
    assert found.machine == card
    stated = {"device_memory": "1GiB", "link_gigabytes_per_second": 10.0}
    own = po.what_fits(SHAPES, card="L4", **stated, teraflops=50, batch=1, length=512)
    assert (own.machine.memory, own.machine.link) == (2**30, 10.0)
    # Between 30% and 60% of 121 TFLOP/s, and at 50.
    best, worst = found[0].seconds
    assert worst == pytest.approx(2 * best)
    assert own[0].seconds == pytest.approx((best * 121 * 0.6 / 50,) * 2)


def test_a_tpu_is_taken_whole():
    assert po.what_fits(SHAPES, card="v5e").share == 1


@pytest.mark.parametrize("memory", [None, "7GiB", "20GiB"])
def test_bytes_of_one_memory_add_up(memory):
    """As of two equal machines: what the host holds is the device's too."""
    step = {"batch": 1, "length": 512, "device_memory": memory or CARDS["gb10"].memory}
    apart = po.what_fits(SHAPES, **step, link_gigabytes_per_second=136.5)
    for settings in ({"unified_memory": True}, {"card": "gb10"}):
        ways = po.what_fits(SHAPES, **step, **settings)
        assert "Device and host are one memory here" in " ".join(str(ways).split())
        for way, row in zip(ways, apart, strict=True):
            assert (way.device, way.host) == (row.device, row.host)
            both = row.device + row.host < ways.machine.memory
            assert (way in ways.fitting) == (row in apart.fitting and both)
    assert "one memory" not in str(apart)
    own = po.what_fits(SHAPES, card="gb10", unified_memory=False)
    assert not own.machine.unified_memory


def test_where_one_memory_is_full():
    """A way would fit the device, but its moments have no other memory."""
    rooms = {"device_memory": "6GiB", "batch": 1, "length": 512}
    apart = po.what_fits(SHAPES, **rooms)
    assert apart.choice.host
    ways = po.what_fits(SHAPES, **rooms, unified_memory=True)
    assert ways.choice is None
    most = max(ways.left(row) for row in ways)
    assert f"{-most / 2**20:.1f} MiB too much" in " ".join(ways.advice().split())


def test_seconds_of_a_step():
    """Eight operations a parameter and token; what travels is beside them or not."""
    leaf = jax.ShapeDtypeStruct((4, 512, 512), jnp.float32)
    step = {"batch": 1, "length": 1000, "teraflops": 1.0}
    rates = {"device_memory": "1GiB", "link_gigabytes_per_second": 1.0}
    ways = po.what_fits({"layers": {"w": leaf}}, **step, **rates)
    work = 8 * leaf.size * 1000 / 1e12
    resident, _, paged, layerwise, *_ = ways
    assert resident.seconds == pytest.approx((work, work))
    moved = 4 * 4 * leaf.size / 1e9
    assert paged.moved == pytest.approx(moved * 1e9, rel=1e-3)
    for way, least in ((paged, work + moved / 2), (layerwise, max(work, moved / 2))):
        assert way.seconds == pytest.approx((least, work + moved), rel=1e-3)
    assert po.what_fits({"layers": {"w": leaf}}, **rates)[0].seconds is None


def of_memory(ways, size):
    machine = dataclasses.replace(ways.machine, memory=size)
    return dataclasses.replace(ways, machine=machine)


@pytest.fixture(scope="module")
def ways():
    arguments = {"card": "rtx4090", "codec": "dynamic_int8"}
    return po.what_fits(SHAPES, batch=4, length=512, **arguments)


@pytest.mark.parametrize(
    ("memory", "way"),
    [
        (24.0, "resident"),
        (7.0, "layerwise, dynamic_int8"),
        (4.0, "layerwise, dynamic_int8, weights on host"),
        (3.0, "layerwise, dynamic_int8, all on host"),
    ],
)
def test_the_last_lines_are_the_choice_and_its_code(memory, way, ways):
    ways = of_memory(ways, int(memory * 2**30))
    assert ways.choice.way == way
    words, code = re.split(r"\n\n(?=import )", str(ways), maxsplit=1)
    assert f"Choose {way}: the fastest that fits" in words.splitlines()[-2:][0]
    assert "seconds a step." in words
    ast.parse(code)
    assert ("split_layers" in code) == ("layerwise" in way)
    assert ("on_host" in code) == ("on host" in way)
    assert ('codec="dynamic_int8"' in code) == (way != "resident")


def test_nothing_fits(ways):
    ways = of_memory(ways, 2**30)
    assert ways.choice is None
    least = "Nothing fits: layerwise, dynamic_int8, all on host takes the least"
    assert least in ways.advice()
    assert dataclasses.replace(ways, workload=None).advice() == ""


def test_advice_where_the_host_is_small(ways):
    """It names the host, and there is no pool for a way that does not fit."""
    ways = of_memory(ways, 4 * 2**30)
    small = dataclasses.replace(ways, host_memory=2**20)
    said = " ".join(str(small).split())
    assert re.search(r"of the device, and [0-9.]+ GiB too much of the host\.", said)
    assert "Host memory" in str(ways) and "Host memory" not in said


def test_code_has_what_paging_takes():
    inner, params = optax.lion(1e-3), {"layers": {"w": jnp.ones((2, 512, 512))}}
    how = {"device_memory": "1MiB", "page_size": "8MiB", "codec": {"*": "bfloat16"}}
    how |= {"master_dtype": jnp.float32, "batch": 1, "length": 8}
    ways = po.what_fits(params, inner, **how)
    arguments = 'page_size="8MiB", master_dtype="float32", codec=codec'
    assert ways.arguments == arguments
    found = dataclasses.replace(of_memory(ways, 2**30), rows=ways.rows[2:3])
    assert f"tx = po.paged(inner, {arguments})" in found.advice()
    assert "Its seconds need" in found.advice()
    assert "seconds a step" not in str(found)[: str(found).index("Fits counts")]


def loss(params, batch):
    x = params["embed"][batch]
    for layer in params["layers"]:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    logits = x[:-1] @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1:]).mean()


@pytest.mark.quick("resident")
@pytest.mark.parametrize(
    "way",
    ["resident", "paged", "layerwise"]
    + [f"layerwise, dynamic_int8, {x} on host" for x in ("weights", "all")],
)
@pytest.mark.parametrize("devices", [1, 8])
def test_the_code_runs(way, devices):
    """As pasted behind a loss over a list, its parameters and a batch."""
    layer = {"up": jnp.ones((64, 128)) / 128, "down": jnp.ones((128, 64)) / 64}
    layers = [jax.tree.map(jnp.copy, layer) for _ in range(3)]
    params = {"embed": jnp.eye(256, 64), "layers": layers}

    # The code imports what it needs.
    scope = {"loss": loss, "params": params, "batch": jnp.arange(32)}
    before = float(loss(params, scope["batch"]))
    inner, arguments = "optax.adamw(1e-2)", 'min_paged_size="1KiB"'
    exec(training_code(way, inner, arguments, devices=devices), scope)
    matrix = jax.tree.leaves(scope["params"])[0]
    assert len(matrix.sharding.device_set) == devices
    for _ in range(2):
        names = ("params", "state", "workspace")[: 3 if "model" in scope else 2]
        *new, output = scope["step"](*map(scope.get, names), scope["batch"])
        scope |= dict(zip(names, new, strict=True))
    assert float(getattr(output, "loss", output)) < before


@pytest.mark.parametrize("rank", [None, 16])
def test_devices_divide(rank):
    """The host's bytes are those of all; a device's are its part, and a layer."""
    how = {"codec": "dynamic_int8", "length": 512, "rank": rank}
    shapes = po.model_shapes("llama3-8b")
    one, eight = (
        po.what_fits(shapes, card="h200", batch=n, devices=n, **how) for n in (1, 8)
    )
    layers = jax.tree.leaves(shapes["layers"])
    layer = sum(2 * x.size for x in layers) // 32
    for alone, row in zip(one, eight, strict=True):
        assert alone.way == row.way
        assert abs(row.host - alone.host) <= 0.03 * alone.host  # small ones stay
        assert abs(8 * row.moved - alone.moved) <= 0.03 * alone.moved
        gathered = 4 * layer + shapes["embed"].size * 2
        parts = alone.parameters + alone.gradients + alone.moments
        held = row.parameters + row.gradients + row.moments
        assert parts / 8 <= held <= parts / 8 + gathered
    if rank is not None:
        return
    enough = max(row.host for row in eight)
    for host, fits in ((enough, len(eight)), (enough - 1, len(eight) - 1), (0, 1)):
        more = {"batch": 8, "devices": 8, "host_memory": host}
        found = po.what_fits(shapes, card="h200", **more, **how)
        assert len(found.fitting) >= fits if host == 0 else len(found.fitting) == fits
    text = " ".join(str(found).split())
    assert "Device and link are those of each of 8 devices" in text
    assert "Fits counts the 0 B of the host too" in text


def test_adapters_are_never_chosen():
    """They have rows, which fit where nothing else does."""
    how = {"batch": 1, "length": 512, "codec": "dynamic_int8", "rank": 16}
    memory = {"device_memory": "24GiB", "host_memory": "14GiB"}
    found = po.what_fits(po.model_shapes("8B"), **memory, **how)
    fitting = [row.way for row in found.fitting]
    assert fitting and all("LoRA" in way for way in fitting)
    assert found.choice is None
    assert f"Adapters do: {fitting[0]}; " in " ".join(found.advice().split())
    rows = itertools.product(("LoRA", "QLoRA"), ("", ", weights on host"))
    names = [row.way for row in found if "LoRA" in row.way]
    assert names == [f"layerwise {method}{where}" for method, where in rows]


def test_heads_of_a_checkpoint(tmp_path):
    """Those that its config.json states, also beside weights."""
    assert config_heads(tmp_path) is None
    (tmp_path / "config.json").write_text('{"num_attention_heads": 24}')
    for name in ("", "config.json", "model.safetensors"):
        assert config_heads(tmp_path / name) == 24
    (tmp_path / "config.json").write_text("{}")
    assert config_heads(tmp_path) is None
    (tmp_path / "config.json").write_text('{"num_attention_heads": "24"}')
    with pytest.raises(ValueError, match="field 'num_attention_heads' is '24'"):
        config_heads(tmp_path)


def test_the_command_has_the_same_arguments(capsys):
    """Heads are those of the model's name, and the code has the optimizer."""
    step = "--batch 4 --length 512 --fused-head"
    device = "--card t4 --device-memory 6GiB"
    command = f"plan --params llama3.2-1b {device} {step} --optimizer lion"
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "4 x 512 tokens" in printed
    assert "tx = po.paged(optax.lion(3e-4))\n" in printed
    assert "# The loss ends with po.linear_cross_entropy" in printed
    assert "are assumed" not in printed
    assert main("plan --params 1B --card t5".split()) == 1
    assert "card='t5' is none of t4" in capsys.readouterr().err


#: Steps that an H200 ran, by the ways that `what_fits` has of them.
MEASURED = {
    "layerwise, 8 bits": ("dynamic_int8", "layerwise, dynamic_int8"),
    "layerwise, bfloat16 moments": (None, "layerwise"),
    "jax.grad, 8 bits, paged": ("dynamic_int8", "paged, dynamic_int8"),
}


@pytest.mark.parametrize("name", MEASURED)
def test_what_an_h200_took(name):
    """Seconds lie in the range, and bytes on the device are those at the peak."""
    codec, way = MEASURED[name]
    rows = json.loads((RESULTS / "gpu-nvidia-h200-jax0.11.2.json").read_text())["rows"]
    (row,) = (x for x in rows if x["name"] == f"Llama 3 8B: {name}")
    workload = {"batch": 8, "length": row["tokens"] // 8}
    shapes = po.model_shapes("llama3-8b")
    found = po.what_fits(shapes, codec=codec, card="h200", **workload)
    (planned,) = (x for x in found if x.way == way)
    least, most = planned.seconds
    assert least < row["seconds"] < most
    assert planned.device == pytest.approx(row["peak_device_bytes"], rel=0.03)
    assert planned.host == pytest.approx(row["xla_host_bytes"], rel=0.01)


def test_numbers_of_numpy():
    """None overflows in its own dtype."""
    given = {"batch": np.int8(100), "length": np.int16(512), "heads": np.int8(64)}
    given |= {"link_gigabytes_per_second": np.float16(25), "teraflops": np.int8(100)}
    plain = {name: value.item() for name, value in given.items()}
    given |= {"device_memory": np.int64(1 << 34), "page_size": np.int32(1 << 20)}
    plain |= {"device_memory": 1 << 34, "page_size": 1 << 20}
    assert str(po.what_fits(SHAPES, **given)) == str(po.what_fits(SHAPES, **plain))
    with pytest.raises(ValueError, match="page_size is more than 2.63"):
        po.what_fits(SHAPES, device_memory="1GiB", page_size=10**400)
