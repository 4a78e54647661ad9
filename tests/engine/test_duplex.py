"""Pages travel both ways at once: the link's time, and the numbers of one page."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import aot, programs, reference, schedule, step_model
from helpers.programs import BOTH_WAYS, MIB, leaf_shapes, square, updating
from paged_optax.backend import platforms
from paged_optax.engine import loop
from paged_optax.engine import pages as page_types
from paged_optax.engine.loop import Loop
from paged_optax.engine.sharing import MomentFormat, cut

_COMPILERS = [pytest.param(aot.h200, marks=BOTH_WAYS, id="h200"), aot.v5e]


def compiled(compile_for, tx, params, pages=16):
    """The report of an update in place, and its time over the link's least."""
    report, plan = compile_for(updating(tx, params)), po.plan(tx, params)
    programs.assert_in_place(report)
    trips = len(params) * [pages]
    return report, step_model.over_floor(report.hlo, plan.host_bytes, trips)


@pytest.mark.compiler
@pytest.mark.parametrize("compile_for", _COMPILERS)
def test_default_settings_are_at_the_links_rate(compile_for):
    """16 leaves of 4096x4096: 1.10 of the least time, in pages of 4 MiB."""
    tx, params = po.paged_adamw(1e-3), square(16)
    report, time = compiled(compile_for, tx, params)
    assert time <= 1.10
    plan = po.plan(tx, params)
    assert report.device_temp <= min(plan.scratch_bytes + 8 * MIB, 32 * MIB)
    assert step_model.traffic(report.hlo, 16 * [16]) == plan.link_bytes


def gpt_2():
    """The 148 parameter shapes of GPT-2 124M."""
    layer = {f"norm {i}": (768,) for i in range(4)}
    layer |= {"in": (768, 2304), "in bias": (2304,)}
    layer |= {"out": (768, 768), "out bias": (768,), "up": (768, 3072)}
    layer |= {"up bias": (3072,), "down": (3072, 768), "down bias": (768,)}
    outer = {"tokens": (50257, 768), "places": (1024, 768)}
    outer |= {f"norm {i}": (768,) for i in range(2)}
    return leaf_shapes({**outer, **{f"{i}": dict(layer) for i in range(12)}})


_MATRICES = functools.partial(square, 8, (2048, 2048))


@pytest.mark.compiler
@pytest.mark.skipif(
    not platforms.GPU_HAS_STREAMS_BY_DIRECTION,
    reason="the figures are those of jax 0.12",
)
@pytest.mark.parametrize(
    ("tx", "params", "most"),
    [
        (po.paged_adamw(1e-3), _MATRICES, 8.0),
        (po.paged_adamw_8bit(1e-3), _MATRICES, 3.3),
        (po.paged_lion(1e-3), _MATRICES, 4.4),
        pytest.param(po.paged_adamw(1e-3), gpt_2, 31.0, marks=pytest.mark.slow),
        pytest.param(
            po.paged_adamw(1e-3), programs.llama, 1550, marks=pytest.mark.slow
        ),
    ],
    ids=["float32", "int8", "lion", "GPT-2", "Llama"],
)
def test_default_pages_of_an_h200(tx, params, most):
    """Milliseconds by the step model's low end, and 64 MiB of pages at most."""
    params, options = params(), aot.options_on("h200")
    report = aot.h200(updating(tx, params), options=options)
    low, _ = step_model.between(report.hlo, step_model.H200)
    assert 1e3 * low <= most
    assert po.plan(tx, params).scratch_bytes <= 64 * MIB
    assert report.device_temp <= 65 * MIB


@pytest.mark.compiler
@pytest.mark.parametrize("compile_for", _COMPILERS)
def test_masters(compile_for):
    """Three arrays a parameter: each is written while another is read."""
    tx = po.paged_adamw(1e-3, master_dtype="float32")
    assert compiled(compile_for, tx, programs.bfloat16(square(4)))[1] <= 1.10


@pytest.mark.compiler
@BOTH_WAYS
def test_updates_are_computed_while_pages_travel():
    """Of each leaf's loop: the moments before the transfers, the updates meanwhile."""
    report, _ = compiled(aot.h200, po.paged_adamw(1e-3, page_size="16MiB"), square(2))
    assert [x.kernels >= 1 for x in schedule.flights(report.hlo)] == [True, True]


@pytest.mark.compiler
@pytest.mark.slow
def test_eight_bits_on_a_tpu():
    """64 pages of 1 MiB."""
    tx = po.paged_adamw_8bit(1e-3)
    assert compiled(aot.v5e, tx, square(2), pages=64)[1] <= 1.10


@pytest.mark.compiler
@BOTH_WAYS
def test_a_smaller_last_page_is_read_and_written_exactly():
    """4099 rows: full pages, read one page ahead, and what does not fill one."""
    params = leaf_shapes({"w": (4099, 4096)})
    report = aot.h200(updating(po.paged_adamw(1e-3), params))
    programs.assert_in_place(report)
    pages = cut((4099, 4096), (MomentFormat(4), MomentFormat(4))).gpu
    assert pages.axis_size % pages.size
    page = 4 * pages.entries
    places = {place[:1] + place[2:] for place in aot.descriptors(report.hlo)}
    ends = aot.ends(pages, page)
    assert places == {("read", page, page), ("write", 0, page), *ends}


@pytest.mark.compiler
def test_two_pages_go_in_turn_on_a_gpu():
    """A loop of one turn would be unrolled, and its transfers would double."""
    report, _ = compiled(aot.h200, po.paged_adamw(1e-3), square(1, (768, 768)))
    half = 4 * 768 * 768 // 2
    places = {place[:1] + place[2:] for place in aot.descriptors(report.hlo)}
    assert places == {("read", 0, half), ("write", 0, half)}


@pytest.mark.compiler
@pytest.mark.parametrize("compile_for", [aot.h200, aot.v5e])
def test_one_moment_goes_in_turn(compile_for):
    """The plan counts both ways. Two leaves alternate, see `test_together`."""
    tx, params = po.paged_lion(1e-3), square(1)
    assert compiled(compile_for, tx, params)[1] == pytest.approx(2)
    plan = po.plan(tx, params, link_gigabytes_per_second=1e-9)
    assert plan.link_seconds == plan.link_bytes


def test_the_plans_seconds():
    """A moment of 8 pages takes the time of 9, where both directions work."""
    plan = po.plan(po.paged_adamw(1e-3), square(1), link_gigabytes_per_second=1e-9)
    duplex = not platforms.GPU_NEEDS_RAW_INDEX
    wanted = plan.host_bytes * 9 / 8 if duplex else plan.link_bytes
    assert plan.link_seconds == wanted


@pytest.fixture
def bidirectional(monkeypatch):
    """Pages take both ways on the CPU too."""
    monkeypatch.setattr(page_types, "GPU_FETCHES_AHEAD", True)
    monkeypatch.setattr(Loop, "_in_turn", Loop._duplex)
    jax.clear_caches()
    yield
    monkeypatch.undo()
    jax.clear_caches()


TRANSFORMATIONS = {
    "adamw": functools.partial(po.paged_adamw, 1e-2),
    "three moments": functools.partial(po.paged_ademamix, 1e-2),
    "amsgrad": lambda **kw: po.paged(optax.amsgrad(1e-2), **kw),
    "bfloat16": functools.partial(po.paged_adamw, 1e-2, codec="bfloat16"),
    "masters": functools.partial(po.paged_adamw, 1e-2, master_dtype="float32"),
    "remainders": functools.partial(po.paged_adamw, 1e-2, master_remainders=True),
}


def assert_as_in_one_page(name, shape, active=None):
    """A step under `jit` and an eager one."""
    low = name in ("masters", "remainders")
    dtype = jnp.bfloat16 if low else jnp.float32
    params = reference.arrays(dtype, 0, {"w": shape})
    gradients = reference.arrays(dtype, 1, {"w": shape})

    def trained(page_size):
        tx = TRANSFORMATIONS[name](page_size=page_size, min_paged_size=0)
        state, theirs = tx.init(params), params
        for update in (jax.jit(tx.update), tx.update):
            updates, state = update(gradients, state, theirs, active=active)
            theirs = optax.apply_updates(theirs, updates)
        return theirs, state

    both = map(jax.tree.leaves, (trained("8KiB"), trained("1GiB")))
    for found, wanted in zip(*both, strict=True):
        # XLA:CPU contracts a product and a sum otherwise in another fusion.
        atol = 4 if found.dtype == jnp.int16 else 1e-8  # so many float32 numbers
        found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
        np.testing.assert_allclose(found, wanted, rtol=3e-6, atol=atol)


@pytest.mark.quick("(64, 3, 50)")
@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("shape", [(257, 96), (64, 3, 50)], ids=str)
def test_numbers(name, shape, bidirectional):
    """Several pages and a smaller last one."""
    assert_as_in_one_page(name, shape)


def test_a_skipped_step(bidirectional):
    assert_as_in_one_page("adamw", (257, 96), jnp.bool(False))


def test_a_page_that_is_read_too_early_shows(bidirectional, monkeypatch):
    """The comparison above tells pages that lie at another place."""
    right = loop.exchange
    early = lambda arrays, exchanged, current, results, at, _, *rest: right(
        arrays, exchanged, current, results, at, at, *rest
    )
    monkeypatch.setattr(loop, "exchange", early)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_as_in_one_page("adamw", (257, 96))


@pytest.mark.parametrize(
    ("codec", "settings", "shape"),
    [
        ({"mu": "bfloat16", "nu": "dynamic_int8"}, {}, (4099, 1023)),
        ({"mu": "bfloat16", "nu": "dynamic_int8"}, {}, (50257, 1600)),
        ("dynamic_int8", {"master_remainders": True}, (50257, 1600)),
        ("dynamic_int8", {"master_remainders": True}, (51865, 384)),
        ("dynamic_int8", {"master_dtype": "float32"}, (30522, 768)),
        ("dynamic_int4", {"master_remainders": True, "page_size": 2**14}, (1023, 129)),
        ("float8_e4m3", {"master_remainders": True, "page_size": 2**14}, (1023, 129)),
    ],
)
def test_pieces_hold_whole_blocks(codec, settings, shape):
    """Half a page may end within a block of one of several moments."""
    tx = po.paged_adamw(1e-3, codec=codec, **settings)
    dtype = jnp.bfloat16 if settings else jnp.float32
    params = {"w": jax.ShapeDtypeStruct(shape, dtype)}
    state = po.abstract_state(tx, params)
    jax.jit(tx.update).trace(params, state, params)
