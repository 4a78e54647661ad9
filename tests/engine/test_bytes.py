"""XLA's own buffer assignment for one H200 and one TPU v5e: the promised savings."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import paged_optax as po
from helpers import aot, programs
from helpers.programs import MIB, leaf_shapes, shardings, square, updating
from paged_optax.backend import memory
from paged_optax.backend.platforms import GPU_NEEDS_RAW_INDEX
from paged_optax.engine.sharing import MomentFormat, cut

pytestmark = pytest.mark.compiler


@programs.COMPILERS
def test_scratch_is_a_few_pages(compile_for):
    """16 leaves of 4096x4096: 2048 MiB of moments, at most 48 MiB of scratch."""
    tx = po.paged_adamw(1e-3, page_size="8MiB")
    report = compile_for(updating(tx, square(16)))
    programs.assert_in_place(report)
    assert report.device_temp <= 48 * MIB
    assert report.host_arguments == 2048 * MIB
    # The instrument tells the difference: the whole tree needs it all.
    whole = updating(programs.whole_tree(optax.adamw(1e-3)), square(16))
    assert compile_for(whole).device_temp > 2e9


def _on_both(name, *rest):
    return {f"{name} {x.__name__}": (x, *rest) for x in (aot.h200, aot.v5e)}


TX, LEAF = po.paged_adamw(1e-3, page_size="8MiB"), 4 * 2048 * 2048
#: By name: a compiler, a transformation, parameters, and the most scratch.
SCRATCH = {
    # 61 GiB of moments.
    "llama h200": (
        aot.h200,
        po.paged_adamw(1e-3, page_size="16MiB"),
        programs.llama(),
        96 * MIB,
    ),
    # Sizes that a v5e holds; XLA:TPU keeps 54 KiB for each of six transfers a leaf.
    "llama v5e": (
        aot.v5e,
        TX,
        programs.llama(hidden=1024, inner=3584, grouped=256),
        4 * 8 * MIB + 291 * 6 * 54 * 2**10,
    ),
    # Leaves that no page count divides: a smaller last page, and no copy.
    **_on_both("odd rows", TX, square(4, (4099, 4096)), 48 * MIB),
    **_on_both("odd", TX, square(4, (4099, 4097)), 48 * MIB),
    **_on_both("stack", TX, square(4, (7, 1000, 4096)), 48 * MIB),
    # XLA:TPU reads and writes no single row of bfloat16, and slices the lanes at whole
    # tiles only: such a leaf goes whole.
    "50258 v5e": (aot.v5e, TX, programs.bfloat16(square(2, (50258, 768))), 48 * MIB),
    "50257 v5e": (
        aot.v5e,
        TX,
        programs.bfloat16(square(2, (50257, 768))),
        8.2 * 50257 * 768,
    ),
    "vector h200": (aot.h200, TX, square(2, (4097 * 4000,)), 48 * MIB),
    "vector v5e": (aot.v5e, TX, square(2, (4097 * 4000,)), 16.4 * 4097 * 4000),
    # Transformations within a leaf: a couple of leaves, whatever their number.
    **_on_both("lamb", po.paged_lamb(1e-3), square(12, (2048, 2048)), 6 * LEAF),
    **_on_both("lars", po.paged_lars(1e-3), square(12, (2048, 2048)), 6 * LEAF),
    **_on_both("muon", po.paged_muon(1e-3), square(12, (2048, 2048)), 6 * LEAF),
    **_on_both(
        "single page", po.paged_adamw(1e-3), square(16, (2048, 2048)), 4.2 * LEAF
    ),
}


@pytest.mark.quick("odd rows", "-odd h200", "50257", "vector", "lamb", "single page")
@pytest.mark.parametrize("name", SCRATCH)
def test_scratch(name):
    """Of leaves one at a time, in place."""
    compile_for, tx, params, most = SCRATCH[name]
    report = compile_for(updating(tx, params))
    programs.assert_in_place(report)
    assert report.device_temp <= most


@pytest.mark.parametrize("many", [48, pytest.param(256, marks=pytest.mark.slow)])
def test_scratch_is_flat_in_leaves_on_h200(many):
    tx = po.paged_adamw(1e-3, page_size="8MiB")
    few, large = (
        aot.h200(updating(tx, square(n, (1024, 4096)))).device_temp for n in (16, many)
    )
    # Beside the pages, what loops count: at most 8 KiB a leaf.
    assert large - few <= (many - 16) * 8 * 2**10


@programs.COMPILERS
@pytest.mark.parametrize(
    "tx",
    [po.paged_adamw(1e-3), po.paged(optax.contrib.schedule_free_adamw(1e-3))],
    ids=["zeros", "copies"],
)
def test_init_allocates_a_page(compile_for, tx):
    """Leaves of different shapes, so that the compiler cannot share their zeros."""
    params = leaf_shapes({f"leaf{i}": (4096, 4096 - 128 * i) for i in range(8)})

    def build(mesh):
        state = programs.state_on(mesh, tx, params)
        return jax.jit(tx.init, out_shardings=shardings(state)), (
            programs.on_device(mesh, params),
        )

    report = compile_for(build)
    assert report.host_temp == 0
    assert report.device_temp <= 18 * MIB


def training_step(tx, params):
    """A step of a 16-layer MLP of 4096x4096 at batch 256, for a compiler."""

    def loss(params, x):
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    step = programs.ordinary_step(loss, tx)

    def build(mesh):
        device, _ = aot.placements(mesh)
        weights, state = (
            programs.on_device(mesh, params),
            programs.state_on(mesh, tx, params),
        )
        x = jax.ShapeDtypeStruct((256, 4096), jnp.float32, sharding=device)
        jitted = jax.jit(
            step,
            donate_argnums=(0, 1),
            out_shardings=(shardings(weights), shardings(state), device),
        )
        return jitted, (weights, state, x)

    return build


def test_training_step():
    """The whole step on an H200: resident Optax without its 2048 MiB of moments."""
    params = square(16)
    resident = aot.h200(training_step(optax.adamw(1e-3), params))
    paged = aot.h200(training_step(po.paged_adamw(1e-3, page_size="8MiB"), params))
    assert paged.host_temp == 0
    assert paged.host_aliased == paged.host_outputs == paged.host_arguments
    needs = lambda report: report.device_arguments + report.device_temp
    # 3224 MiB resident with jax 0.10.2; XLA of 0.12.0.1 schedules the backward pass
    # with more gradients alive, and needs 3520 without us. It keeps one more where
    # updates are loops within a gate, of pages of any size.
    if needs(resident) < 3225 * MIB:
        assert needs(paged) <= 1204 * MIB
    else:
        assert needs(paged) <= needs(resident) - 2048 * MIB + (32 + 64) * MIB


@pytest.mark.parametrize("shape", [(4096, 4096), (4099, 4096), (40, 197, 4096)])
@pytest.mark.parametrize("page_size", ["2MiB", "8MiB"])
def test_addresses(shape, page_size):
    """Every transfer of the compiled H200 program covers exactly its page.

    XLA:GPU attaches to each slice of a host buffer in a loop the byte it starts at
    and the bytes from one trip to the next. jax 0.10.2 derives both from the loop's
    variable alone (openxla/xla#46308).
    """
    leaves = 3
    tx = po.paged_adamw(1e-3, page_size=page_size)
    report = aot.h200(updating(tx, square(leaves, shape)))
    programs.assert_addresses(report, shape, int(page_size[0]) * MIB, leaves)


def test_addresses_of_init():
    """A new moment is written page by page over the whole of its leaf."""
    tx, params = po.paged_adamw(1e-3, page_size="8MiB"), square(2, (4099, 4096))

    def build(mesh):
        state = programs.state_on(mesh, tx, params)
        jitted = jax.jit(tx.init, out_shardings=shardings(state))
        return jitted, (programs.on_device(mesh, params),)

    page_bytes = 4 * cut((4099, 4096), (MomentFormat(4),), 8 * MIB).gpu.entries
    found = aot.descriptors(aot.h200(build).hlo)
    assert {key[0::2] for key in found} == {("write", 0)}
    assert {key[3] for key in found} == {page_bytes}


def test_addresses_of_a_computed_index_are_told_apart():
    """The check above can fail: the form the engine avoids is wrong in jax 0.10.2."""
    host_space, device_space = jax.memory.Space.Host, jax.memory.Space.Device

    def update(gradient, moment):
        def body(i, carry):
            gradient, moment = carry
            page = jax.lax.dynamic_slice_in_dim(moment, i * 512, 512)
            page = jax.device_put(page, device_space) + 1
            page = jax.device_put(page, host_space)
            return gradient, jax.lax.dynamic_update_slice_in_dim(
                moment, page, i * 512, 0
            )

        return jax.lax.fori_loop(0, 8, body, (gradient, moment))

    def build(mesh):
        places, leaf = aot.placements(mesh), square(1)
        args = [programs.placed(leaf, place)["leaf000"] for place in places]
        return jax.jit(update, donate_argnums=(0, 1), out_shardings=places), args

    steps = {step for *_, step in aot.descriptors(aot.h200(build).hlo)}
    right = 4 * 512 * 4096
    assert steps == ({4 * 4096} if GPU_NEEDS_RAW_INDEX else {right})


@programs.COMPILERS
def test_transfers_are_asynchronous(compile_for):
    """Reads and writes of a leaf are each started and finished by name."""
    report = compile_for(updating(po.paged_adamw(1e-3, page_size="8MiB"), square(4)))
    assert report.transfers == 4 * programs.transfers(compile_for)
    assert not re.search(r"S\(5\)\S* copy\(", report.hlo)


def test_one_leaf_costs_one_trace_of_the_loop():
    """Leaves of one shape share one traced and lowered loop."""
    tx = po.paged_adamw(1e-3)
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    jitted, arguments = updating(tx, square(40))(mesh)
    text = jitted.lower(*arguments).as_text()
    assert text.count("func.func private @_stream") == 1


@pytest.mark.quick("paged_lion")
@pytest.mark.parametrize("alias", ["paged_lion", "paged_rmsprop", "paged_sgd"])
def test_scratch_of_one_moment_is_as_planned_on_h200(alias):
    """XLA:GPU may keep a part of the update, where a page is of an odd size."""
    tx = getattr(po, alias)(1e-3, **({"momentum": 0.9} if "sgd" in alias else {}))
    for shape in ((99999989,), (24571, 4096)):
        params = leaf_shapes({"w": shape})
        report = aot.h200(updating(tx, params))
        programs.assert_in_place(report)
        assert report.device_temp <= po.plan(tx, params).scratch_bytes + MIB


@pytest.mark.quick("remainders-(4096, 4096)")
@pytest.mark.parametrize("shape", [(4096, 4096), (2, 128, 2048, 768)], ids=str)
@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"master_remainders": True}, jnp.bfloat16),
        ({"master_dtype": "float32"}, jnp.bfloat16),
        ({"mu_dtype": "bfloat16"}, jnp.float32),
        ({"mu_dtype": "float32"}, jnp.bfloat16),
    ],
    ids=["remainders", "masters", "narrow mu", "wide mu"],
)
def test_scratch_of_moments_of_two_sizes_is_as_planned_on_h200(settings, dtype, shape):
    """XLA:GPU may keep a page of converted moments; the larger has 128 experts."""
    tx, params = po.paged_adamw(1e-3, **settings), square(1, shape)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params)
    report = aot.h200(updating(tx, params))
    assert report.host_temp == 0
    planned = po.plan(tx, params).scratch_bytes
    assert 0.95 * planned <= report.device_temp <= planned + MIB / 4


@pytest.mark.quick("(8192, 33)-None")
@pytest.mark.parametrize("codec", [None, "dynamic_int8"])
@pytest.mark.parametrize(
    "shape", [(8192, 33), (3, 3, 3, 64, 64), (13, 17, 19, 23, 29)], ids=str
)
def test_a_plan_for_a_tpu_counts_tiles(monkeypatch, shape, codec):
    monkeypatch.setattr(memory, "platform", lambda: "tpu")
    tx = po.paged_ademamix(1e-3, codec=codec, min_paged_size=0)
    params = leaf_shapes({"w": shape})
    plan, report = po.plan(tx, params), aot.v5e(updating(tx, params))
    assert report.host_arguments == plan.host_bytes > 0
    assert report.device_temp <= plan.scratch_bytes + 8 * MIB


@pytest.mark.slow
def test_a_codec_of_whole_leaves_compiles_soon_on_v5e():
    """In pieces: at once it took 6 s here, and more than 150 of (6144, 50432)."""
    tx = po.paged_adafactor(1e-3, momentum=0.9, codec={"ema": "dynamic_int8"})
    params = leaf_shapes({"w": (1024, 8192)})
    report = aot.v5e(updating(tx, params))
    programs.assert_in_place(report)
    assert report.device_temp <= 64 * MIB  # it was 137


def test_complex_moments_stay_on_a_tpu(monkeypatch):
    """XLA:TPU takes no layout of them."""
    monkeypatch.setattr(memory, "platform", lambda: "tpu")
    tx = po.paged_adamw(1e-3)
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.complex64)}
    refused = [x.refused for x in po.plan(tx, params).moments]
    assert ["complex" in x for x in refused] == [False, True, True]
    report = aot.v5e(updating(tx, params))
    assert report.device_temp <= 8 * MIB
    assert not report.host_arguments
