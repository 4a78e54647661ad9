"""However a leaf is cut, its numbers are those of a single page."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import reference
from helpers.programs import square
from paged_optax.backend import tiling
from paged_optax.codecs import Arranged, arranged, axis_of_blocks, named, unarranged
from paged_optax.engine import buffers, loop, stream
from paged_optax.engine.paged_array import PagedArray
from paged_optax.engine.sharing import MomentFormat, cut

# All of them: `in_one_page` keeps for one test what another compiled.
pytestmark = pytest.mark.optimized

CODECS = ["dynamic_int8", "dynamic_int4", "float8_e4m3"]
SHAPES = [
    (256, 1003),  # blocks along columns
    (512, 129),
    (257, 768),  # rows that are no whole words
    (130, 512),
    (64, 12, 64),  # an attention kernel
    (12, 64, 256),
    (3, 3, 64, 96),
    (2, 24, 40, 8),
    (3, 40, 50),  # fewer rows than are whole blocks
    (1, 260, 1),
    (7, 1001),
    (70001,),
    (1001, 7),  # pairs of four bits
]


@pytest.fixture
def on_tiles(monkeypatch):
    """Takes a TPU's pages on the CPU, which lays its arrays out otherwise."""
    run = lambda run, geometry: functools.partial(run, geometry.tpu)
    monkeypatch.setattr(stream, "_by_backend", run)
    of = _without_layouts(PagedArray.create)
    monkeypatch.setattr(PagedArray, "create", of)
    jax.clear_caches()
    yield
    monkeypatch.undo()
    jax.clear_caches()


def _without_layouts(make):
    """XLA:CPU takes no layout but its own."""

    class PagedBuffer(buffers.PagedBuffer):
        def _in_layout(self, page):
            return page

    def of(x, pages, codec, on_host, leaf_count=1):
        made = make(x, pages, codec, on_host, leaf_count)
        parts = tuple(PagedBuffer(**vars(part)) for part in made.parts)
        return PagedArray(made.codec, parts)

    return of


def trained(page_size, codec, shape, steps=2):
    tx = po.paged_adamw(1e-2, page_size=page_size, min_paged_size=0, codec=codec)
    params = reference.arrays(jnp.float32, 0, {"w": shape})
    gradients = reference.arrays(jnp.float32, 1, {"w": shape})
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(steps):
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return state, params


def moments(state):
    found = optax.tree.get(state, "mu"), optax.tree.get(state, "nu")
    return jax.tree.map(np.asarray, found)


@functools.cache
def in_one_page(codec, shape):
    return trained("1GiB", codec, shape)


def assert_same(found, wanted, *, coded=True):
    both = moments(found[0]), moments(wanted[0])
    # XLA:CPU contracts a product and a sum otherwise in another fusion. Of what is
    # coded only scales may differ, as bits or as numbers.
    close = functools.partial(np.testing.assert_allclose, rtol=3e-7, atol=1e-9)

    def same(x, y):
        if coded and not np.array_equal(x, y):
            x, y = (x.view(np.float32), y.view(np.float32))
        close(x, y)

    jax.tree.map(same, *both)
    np.testing.assert_allclose(found[1]["w"], wanted[1]["w"], rtol=2e-7, atol=2e-7)


def in_turn(*codecs):
    """Each shape with two of the codecs, each codec with half of the shapes."""
    pairs = itertools.cycle(zip(codecs, codecs[1:] + codecs[:1], strict=True))
    cases = [
        (x, codec) for x, pair in zip(SHAPES, pairs, strict=False) for codec in pair
    ]
    return pytest.mark.parametrize(("shape", "codec"), cases, ids=str)


@pytest.mark.quick("(3, 40, 50)-dynamic_int8")
@in_turn("dynamic_int8", "dynamic_int4", "float8_e4m3", "bfloat16_stochastic")
def test_rows(shape, codec):
    assert_same(trained("16KiB", codec, shape), in_one_page(codec, shape))


@pytest.mark.quick("(3, 40, 50)-None", "(256, 1003)-float8")
@in_turn(None, *CODECS)
def test_tiles(shape, codec, on_tiles):
    """A TPU's pages, at a size at which every leaf that can be is cut."""
    found, wanted = trained("16KiB", codec, shape), in_one_page(codec, shape)
    assert_same(found, wanted, coded=codec is not None)


@pytest.mark.slow
def test_noise_of_pages_of_columns(on_tiles):
    """Each value's bits are those of its place in the moment, not in its page."""
    shape, codec = (257, 768), "bfloat16_stochastic"
    assert_same(trained("16KiB", codec, shape), in_one_page(codec, shape))


def test_tiles_are_several(on_tiles):
    """The test above cuts what a TPU can cut."""
    count = lambda shape, codec: (
        cut(
            shape,
            (MomentFormat(4, codec and arranged(named(codec, True), shape)),),
            2**14,
        )
        .on("tpu")
        .count
    )
    assert sum(count(shape, None) > 1 for shape in SHAPES) >= 6
    assert sum(count(shape, "dynamic_int8") > 1 for shape in SHAPES) >= 4


def test_rows_of_odd_sizes_are_cut():
    """Blocks run along columns: along rows the smallest page would be 256 of them."""
    for shape in SHAPES[:2]:
        codec = arranged(named("dynamic_int8", True), shape)
        assert (
            4 * cut(shape, (MomentFormat(4, codec),), 2**14).on("gpu").entries <= 2**14
        )


def test_pages_of_eight_bits_hold_a_mebibyte_of_values():
    """By default, and not much more: XLA:GPU keeps several times as much of them."""
    tx = po.paged_adamw_8bit(1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paged_optax.backend.memory.platform", lambda: "gpu")
        plan = po.plan(tx, square(16))
    pages = {moment.pages for moment in plan.moments if moment.on_host}
    assert pages == {64}


def test_pages_of_codes_on_the_device():
    """A page's size, where nothing travels, and where there is room anyway."""
    codec = arranged(named("dynamic_int8", True), (4096, 14336))
    counts = [
        cut(
            (4096, 14336), (MomentFormat(4, codec, host),) * 2, 2**24, 1, room
        ).gpu.count
        for host in (True, False)
        for room in (0, 2**28)
    ]
    assert counts == [32, 16, 32, 1]
    fewer = cut(
        (4096, 14336), (MomentFormat(4, codec, False),) * 2, 2**20, 1, 2**28
    ).gpu
    assert 4 * fewer.entries <= 2**24  # who asks for smaller pages gets them


@pytest.mark.quick("(64, 12, 64)-dynamic_int4")
@in_turn(*CODECS)
def test_arranged_codes_are_the_codecs_own(shape, codec):
    """Of the moment, or of the transposed one where blocks run along columns."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    codec = named(codec, signed=True)
    stored = arranged(codec, shape).encode(x)
    like = arranged(codec, shape).stored(shape)
    assert jax.tree.map(jnp.shape, stored) == jax.tree.map(jnp.shape, like)
    plain = unarranged(codec, stored, shape)
    kept = arranged(codec, shape)
    turned = axis_of_blocks(kept) == -2
    codec = kept.codec if isinstance(kept, Arranged) else codec
    own = codec.encode(jnp.swapaxes(x, -1, -2) if turned else x)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(
            np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)
        ),
        plain,
        own,
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(256, 1003), (257, 768), (64, 12, 64), (300, 300)])
def test_bitsandbytes_round_trip(shape):
    """Codes in words come out in the parameter's shape, or transposed, and go back."""
    tx = po.paged_adamw_8bit(1e-3, min_paged_size=0, page_size="16KiB")
    params = reference.arrays(jnp.float32, 0, {"w": shape})
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    entries = po.to_bitsandbytes(state, params)
    along_columns = shape == (256, 1003)
    wanted = shape[::-1] if along_columns else shape
    assert entries["w"]["state1"].shape == wanted
    again = po.from_bitsandbytes(tx.init(params), entries)
    jax.tree.map(np.testing.assert_array_equal, moments(again), moments(state))


def test_rows_longer_than_a_page_are_flat():
    pages = cut((7, 1000003), (MomentFormat(4),), 2**20).gpu
    assert pages.view == (7 * 1000003,)
    assert pages.entries * 4 <= 2**20


def test_what_a_tpu_cannot_slice_is_refused_by_name():
    codec = arranged(named("dynamic_int8", True), (128, 200003))
    assert "block" in cut((128, 200003), (MomentFormat(4, codec),), 2**20).tpu.refused
    assert "bytes" in cut((128, 200003), (MomentFormat(1),), 2**20).tpu.refused
    here = MomentFormat(1, on_host=False)  # on the device any slice will do
    assert not cut((128, 200003), (here,), 2**20).tpu.refused


def test_sublanes():
    assert [sum(tiling.sublane_sizes(n)) for n in range(1, 40)] == list(range(1, 40))


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((7, 1000003), None),
        ((99999989,), None),
        ((99999989,), "bfloat16"),
        ((128, 200003), "dynamic_int8"),
        ((7, 11, 13, 10007), "dynamic_int8"),
        ((1000003, 7), "dynamic_int8"),
    ],
)
def test_a_refused_shape_can_be_paged_as_the_reason_says(shape, name):
    def refused(shape):
        codec = name and arranged(named(name, True), shape)
        return cut(shape, (MomentFormat(4, codec),), 2**20).tpu.refused

    (multiple,) = re.findall(
        r"pad its longest axis to a multiple of (\d+)", refused(shape)
    )
    padded, longest = list(shape), np.argmax(shape)
    padded[longest] += -padded[longest] % int(multiple)
    assert not refused(tuple(padded))


@pytest.mark.parametrize(
    "shape", [(2**31 + 4096,), (2**31 + 4096, 1), (1, 2**31 + 4096)]
)
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_more_entries_than_32_bits_count(platform, shape):
    """They are paged as a matrix, or refused by name; JAX counts to 2^31."""
    pages = cut(shape, (MomentFormat(4), MomentFormat(4)), 2**24).on(platform)
    assert bool(pages.refused) == (platform == "tpu")
    assert pages.refused or (max(pages.view) < 2**31 and pages.entries <= 2**22)
    params = jax.ShapeDtypeStruct(shape, jnp.float32)
    tx = po.paged_adamw(1e-3)
    jax.eval_shape(tx.update, params, po.abstract_state(tx, params), params)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(64, 512), (3, 40, 256), (256, 1003)], ids=str)
@pytest.mark.parametrize("codec", ["dynamic_int8", "dynamic_int4"])
def test_whole_leaves_are_coded_in_pieces_on_a_tpu(shape, codec, on_tiles, monkeypatch):
    """Bit for bit as at once."""
    tx = po.paged_lamb(1e-2, min_paged_size=0, codec=codec)
    params = reference.arrays(jnp.float32, 0, {"w": shape})
    found, counts = [], []
    copied = loop._by_pages
    monkeypatch.setattr(
        loop,
        "_by_pages",
        lambda x, *rest, **kw: counts.append(x.count) or copied(x, *rest, **kw),
    )
    for size in (2**14, 2**30):
        jax.clear_caches()
        monkeypatch.setattr(loop, "CODEC_PAGE", size)
        _, state = jax.jit(tx.update)(params, tx.init(params), params)
        found.append(moments(state))
    assert len(counts) >= 4
    assert min(counts) > 1
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize(
    ("page_size", "settings", "most"),
    [
        ("1MiB", {}, 0.01),  # whole, as Optax's own
        ("512KiB", {}, 5),
        ("1MiB", {"codec": "bfloat16"}, 5),
        ("1MiB", {"master_remainders": True}, 5),
    ],
    ids=str,
)
def test_temporaries_on_a_cpu(page_size, settings, most):
    """Nothing is as large as a moment, of 8 MiB, beside what is donated."""
    dtype = jnp.bfloat16 if "master_remainders" in settings else jnp.float32
    params = {"w": jnp.ones((1024, 2048), dtype)}
    gradients = {"w": jnp.ones((1024, 2048), dtype)}
    tx = po.paged_adamw(1e-3, page_size=page_size, **settings)
    step = jax.jit(tx.update, donate_argnums=(0, 1))
    compiled = step.lower(gradients, tx.init(params), params).compile()
    found = compiled.memory_analysis().temp_size_in_bytes / 2**20
    assert found <= most, found
