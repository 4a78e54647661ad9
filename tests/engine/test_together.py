"""Like leaves that share pages: the numbers of leaves alone, and what it saves."""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import aot, reference, schedule, step_model
from helpers.programs import BOTH_WAYS, MIB, assert_in_place, bfloat16, square, updating
from helpers.runtime_counts import RuntimeCounts
from paged_optax.backend.platforms import (
    GPU_HAS_STREAMS_BY_DIRECTION,
    GPU_NEEDS_RAW_INDEX,
)
from paged_optax.codecs import arranged, named
from paged_optax.engine import pages as page_types
from paged_optax.engine import stream
from paged_optax.engine.loop import Loop
from paged_optax.engine.paged_array import PagedArray, buffers_of
from paged_optax.engine.pages import MomentFormat
from paged_optax.engine.sharing import cut

_COMPILERS = [pytest.param(aot.h200, marks=BOTH_WAYS, id="h200"), aot.v5e]


@pytest.fixture(params=["in turn", "both ways"])
def together(monkeypatch, request):
    """Lets a CPU's leaves share pages too, as a GPU's do, and a page size for that."""

    def switch():
        as_a_gpu = lambda run, geometry: functools.partial(run, geometry.gpu)
        monkeypatch.setattr(stream, "_by_backend", as_a_gpu)
        if request.param == "both ways":
            monkeypatch.setattr(page_types, "GPU_FETCHES_AHEAD", True)
            monkeypatch.setattr(Loop, "_in_turn", Loop._duplex)
        jax.clear_caches()

    yield switch, {"in turn": "1GiB", "both ways": "8KiB"}[request.param]
    monkeypatch.undo()
    jax.clear_caches()


#: Flat blocks, blocks of a row, blocks along columns; words along rows and columns.
SHAPES = [(48, 256), (16, 512), (256, 16), (512, 24), (4096,), (3, 16, 256), (40, 100)]

#: Pages that end within a word or a block, which no other leaf's may follow.
UNEVEN = [(131, 256), (4300,), (133, 256), (129, 1, 256)]

_CODED = ("dynamic_int8", "dynamic_int4", "float8_e4m3", "bfloat16")
TRANSFORMATIONS = {
    "adamw": functools.partial(po.paged_adamw, 1e-2),
    "lion": functools.partial(po.paged_lion, 1e-2),
    "masters": functools.partial(
        po.paged_adamw, 1e-2, master_dtype="float32", codec="dynamic_int8"
    ),
    **{x: functools.partial(po.paged_adamw, 1e-2, codec=x) for x in _CODED},
    "two codecs": functools.partial(
        po.paged_adamw, 1e-2, codec={"mu": "float8_e4m3", "nu": "dynamic_int8"}
    ),
}


def trained(name, shapes, page_size, active=None, **settings):
    """Two steps, of three leaves of each shape."""
    shapes = {f"{shape} {i}": shape for shape in shapes for i in range(3)}
    dtype = jnp.bfloat16 if name == "masters" else jnp.float32
    params = reference.arrays(dtype, 0, shapes)
    gradients = reference.arrays(dtype, 1, shapes)
    tx = TRANSFORMATIONS[name](page_size=page_size, min_paged_size=0, **settings)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(gradients, state, params, active=active)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_alike(found, wanted):
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        x, y = (np.asarray(x, np.float32) for x in (x, y))
        # XLA:CPU contracts a product and a sum otherwise in another fusion. Where that
        # moves a value from one code to the next, it is one in thousands.
        near = np.isclose(x, y, rtol=3e-6, atol=1e-8)
        assert np.mean(~near) <= 1e-3, "Mismatched elements"


@pytest.mark.quick("both ways-lion")
@pytest.mark.parametrize(
    ("together", "name"),
    [
        *(("in turn", name) for name in ("lion", "dynamic_int8")),
        *(("both ways", name) for name in TRANSFORMATIONS),
    ],
    indirect=["together"],
)
def test_numbers(name, together):
    """Several leaves' pages, joined, are stored as each leaf's own."""
    switch, page_size = together
    shapes = SHAPES if name in ("dynamic_int8", "dynamic_int4") else SHAPES[::2]
    wanted = trained(name, shapes, page_size)
    switch()
    assert_alike(trained(name, shapes, page_size), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dynamic_int8", "dynamic_int4"])
def test_leaves_that_end_within_a_block(name, together):
    """Each is stored as alone, so that an update of one of them reads it rightly."""
    switch, page_size = together
    wanted = trained(name, UNEVEN, page_size)
    switch()
    assert_alike(trained(name, UNEVEN, page_size), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["dynamic_int8", "dynamic_int4", "float8_e4m3"])
def test_pages_that_share_end_with_words_and_blocks(codec):
    """Of leaves of many sizes; joined pages are stored as their parts are."""
    for rows, columns, like in itertools.product(
        (125, 128, 131, 1027), (100, 256, 4096), (2, 3, 4, 9)
    ):
        shape = rows, columns
        stored = arranged(named(codec, True), shape)
        kept = (
            MomentFormat(4, stored),
            MomentFormat(4, arranged(named(codec, False), shape)),
        )
        found = cut(shape, kept, 2**24, like)
        for pages in (found.gpu, found.tpu):
            sizes = {pages.size, pages.axis_size % pages.size or pages.size}
            for size in sizes if pages.leaf_count > 1 else ():
                assert_stored_alike(stored, pages, size)


def assert_stored_alike(codec, pages, size):
    """What is stored of joined pages is what is stored of each."""
    page = np.random.default_rng(0).normal(size=pages.page(size)).astype(np.float32)
    parts = [page * 10.0**i for i in range(pages.leaf_count)]
    array = PagedArray.create(codec.stored(pages.leaf), pages, codec, on_host=True)
    joined = jnp.concatenate(parts, pages.axis)
    made = array.encode(joined, None, page.shape, pages.leaf_count)
    for found, part in zip(made, parts, strict=True):
        wanted = buffers_of(codec.encode(jnp.asarray(part)))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("on_host", [True, False])
def test_scales_are_stacked_where_they_are_few(on_host):
    """Of moments on the device they may be many, and would be copied."""
    shape, codec = (4096, 14336), named("dynamic_int4", True)
    pages = cut(shape, (MomentFormat(4, codec, on_host),) * 2, 2**24, 7).gpu
    stored = codec.stored(shape if on_host is False else (512, 512))
    if on_host:
        pages = cut((512, 512), (MomentFormat(4, codec),) * 2, 2**18, 7).gpu
    *_, scales = PagedArray.create(
        stored, pages, codec, on_host, pages.leaf_count
    ).parts
    assert pages.leaf_count == 7
    assert scales.stacked_leaves == (7 if on_host else 0)


def test_no_large_leaf_waits_for_another():
    """Of 256 MiB at the most: an update waits for the gradients of all that share."""
    plan = po.plan(po.paged_lion(1e-3), square(2, (131072, 1024)))
    assert len({x.leaf for x in plan.moments if x.on_host}) == 2
    plan = po.plan(po.paged_lion(1e-3), square(2, (65536, 1024)))
    assert len({x.leaf for x in plan.moments if x.on_host}) == 1 + GPU_NEEDS_RAW_INDEX


@pytest.mark.slow
def test_leaves_that_do_not_move(together):
    """Gates part like leaves; those under one gate still share pages."""
    switch, page_size = together
    asked = functools.partial(trained, "lion", [(48, 256), (7, 1024)], page_size)
    gates = [True, True, False, True, jnp.bool(False), jnp.bool(True)]
    names = [f"{shape} {i}" for shape in [(48, 256), (7, 1024)] for i in range(3)]
    active = dict(zip(names, gates, strict=True))
    wanted = asked(active)
    switch()
    assert_alike(asked(active), wanted)


def test_steps_of_their_own(together):
    """A parameter that counts its own steps is updated alone."""
    switch, page_size = together
    asked = functools.partial(
        trained, "adamw", [(48, 256)], page_size, per_parameter_steps=True
    )
    wanted = asked()
    switch()
    assert_alike(asked(), wanted)


@pytest.mark.slow
def test_a_page_of_another_leaf_shows(together, monkeypatch):
    """The comparison above tells leaves that were exchanged."""
    switch, page_size = together
    asked = functools.partial(trained, "dynamic_int8", [(48, 256)], page_size)
    wanted = asked()
    switch()
    right = PagedArray.encode

    def turned(array, *args):
        leaves = array._by_leaf(right(array, *args))  # scales of all may be stacked
        return array._stacked(leaves[::-1])

    monkeypatch.setattr(PagedArray, "encode", turned)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_alike(asked(), wanted)


def compiled(compile_for, tx, params):
    """The report of an update in place, its plan, and its time over the least."""
    report, plan = compile_for(updating(tx, params)), po.plan(tx, params)
    assert_in_place(report)
    # XLA:TPU states no turns. Its loops are those of the pages that leaves share.
    turns = [on_tpu(tx, params)] * len(params) if compile_for is aot.v5e else ()
    return report, plan, step_model.over_floor(report.hlo, plan.host_bytes, turns)


def on_tpu(tx, params):
    """Pages of a leaf on a TPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paged_optax.backend.memory.platform", lambda: "tpu")
        (pages,) = {x.pages for x in po.plan(tx, params).moments if x.on_host}
    return pages


@pytest.mark.compiler
@pytest.mark.quick("h200")
@pytest.mark.parametrize("compile_for", _COMPILERS)
@pytest.mark.parametrize(
    ("build", "like"),
    [
        (lambda: po.paged_lion(1e-3), square),
        (lambda: po.paged_adamw_8bit(1e-3), square),
        (lambda: po.paged_lion_8bit(1e-3), square),
        (
            lambda: po.paged_adamw_8bit(1e-3, master_dtype="float32"),
            lambda leaves: bfloat16(square(leaves)),
        ),
    ],
    ids=["lion", "int8", "lion in int8", "int8 with masters"],
)
def test_they_are_at_the_links_rate(compile_for, build, like):
    """One leaf is read while another is written; 32 MiB of scratch."""
    report, plan, time = compiled(compile_for, build(), like(8))
    assert time <= 1.10
    assert report.device_temp <= 32 * MIB
    assert report.device_temp <= plan.scratch_bytes + MIB or compile_for is aot.v5e


@pytest.mark.compiler
@BOTH_WAYS
def test_an_odd_number_of_arrays_is_at_the_links_rate():
    """Seven moments have no equal halves, so that each goes while another comes."""
    _, _, time = compiled(aot.h200, po.paged_lion_8bit(1e-3), square(7))
    assert time <= 1.10


@pytest.mark.compiler
@pytest.mark.skipif(
    not GPU_HAS_STREAMS_BY_DIRECTION, reason="both directions would meet on a stream"
)
def test_half_of_a_page_travels_at_once():
    """Seven moments go while seven others come, so that a page waits twice."""
    report, _, _ = compiled(aot.h200, po.paged_adamw_8bit(1e-3), square(7))
    (flight,) = schedule.flights(report.hlo)
    assert (flight.up, flight.down) == (7, 7)
    # The updates, and the codes that go with the second half.
    assert flight.kernels >= 7 + 2


@pytest.mark.compiler
@BOTH_WAYS
def test_scales_of_leaves_are_one_slice():
    """They are on the device: no turn of the loop copies those of each leaf."""
    report, _, _ = compiled(aot.h200, po.paged_adamw_8bit(1e-3), square(7))
    assert RuntimeCounts.of(report.hlo).device_slices <= 4 * 2 * 7


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("compile_for", [aot.h200, aot.v5e])
def test_adapters_are_few_programs(compile_for):
    """32 adapters of rank 16: what is computed of their codes is compiled twice."""
    tx = po.paged_adamw_8bit(1e-3, min_paged_size=0)
    one, _, _ = compiled(compile_for, tx, square(1, (4096, 16)))
    many, plan, _ = compiled(compile_for, tx, square(32, (4096, 16)))
    computed = lambda report: report.hlo.count(" divide(")
    assert computed(many) <= (2 if compile_for is aot.h200 else 8) * computed(one)
    assert many.device_temp <= plan.scratch_bytes + MIB
    assert step_model.traffic(many.hlo) == plan.link_bytes


@pytest.mark.compiler
@BOTH_WAYS
def test_rates_that_are_computed_for_each_leaf():
    """A schedule's rate is one value, though Optax computes it for each leaf."""
    schedule = optax.cosine_decay_schedule(1e-3, 100)
    for tx in (
        po.paged_lion(schedule, page_size="16MiB"),
        po.paged(optax.inject_hyperparams(optax.lion)(1e-3), page_size="16MiB"),
        po.paged_adamw_8bit(schedule, page_size="16MiB"),
    ):
        _, plan, time = compiled(aot.h200, tx, square(4, (4096, 1024)))
        assert time <= 1.10
        leaves = collections.Counter(x.leaf for x in plan.moments if x.on_host)
        assert min(leaves.values()) >= 2


@pytest.mark.compiler
@BOTH_WAYS
def test_each_pages_address():
    """Three leaves of 2051 rows: full pages, read ahead, and a smaller last one."""
    params = square(3, (2051, 4096))
    tx = po.paged_lion(1e-3, page_size="16MiB")
    report, plan, _ = compiled(aot.h200, tx, params)
    assert " concatenate(" not in report.hlo  # each leaf is computed by itself
    (page,) = {x.page_bytes for x in plan.moments if x.on_host}
    assert 2051 * 4096 * 4 % page
    places = {place[:1] + place[2:] for place in aot.descriptors(report.hlo)}
    assert places == {("read", page, page), ("write", 0, page)}
    assert step_model.traffic(report.hlo) == plan.link_bytes


def adapters(rank, layers=16):
    """Adapters of two matrices a layer, and the layers' norms."""
    layer = {"a": (2048, rank), "b": (rank, 1024), "norm": (2048,)}
    return {f"{name} {i}": x for i in range(layers) for name, x in layer.items()}


@pytest.mark.parametrize(
    "make",
    [
        po.paged_adamw,
        po.paged_lion,
        pytest.param(po.paged_adamw_8bit, marks=pytest.mark.slow),
    ],
)
def test_adapters_page_by_default(make):
    """Each is small, and together they are not; norms are."""
    tx = make(1e-2)
    params = reference.arrays(jnp.float32, 0, adapters(32))
    state = tx.init(params)
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if x.ndim:
            adapter = "norm" not in jax.tree_util.keystr(path)
            assert (x.sharding.memory_kind == "pinned_host") == adapter, path
    plan = po.plan(tx, params)
    on_host = [x for x in jax.tree.leaves(state) if on_the_host(x)]
    assert plan.host_bytes == sum(x.nbytes for x in on_host)
    gradients = reference.arrays(jnp.float32, 1, adapters(32))
    updates, new = jax.jit(tx.update)(gradients, state, params)
    assert len(on_host) == sum(map(on_the_host, jax.tree.leaves(new)))
    if make is not po.paged_adamw_8bit:
        plain = getattr(optax, make.__name__.removeprefix("paged_"))(1e-2)
        wanted, _ = jax.jit(plain.update)(gradients, plain.init(params), params)
        reference.assert_equal(updates, wanted)


def on_the_host(x):
    """Whether a moment lives in host memory."""
    return x.sharding.memory_kind == "pinned_host"


def test_a_small_moment_alone_stays():
    """One adapter is not worth its transfers, nor are many norms."""
    params = reference.arrays(jnp.float32, 0, adapters(16, layers=1))
    assert po.plan(po.paged_adamw(1e-2), params).host_bytes == 0
    norms = {f"{i}": jnp.ones(4096) for i in range(100)}
    assert po.plan(po.paged_adamw(1e-2), norms).host_bytes == 0
