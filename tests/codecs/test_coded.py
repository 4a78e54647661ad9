"""Moments that a codec stores: in training, in memory, and where gradients vanish."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import aot, extreme, reference, vanishing
from helpers.coded import ALL_PAGED, NAMES, SHAPES, in_bytes, trained
from helpers.extreme import BOUNDS, FINITE, compare_codec
from helpers.programs import MIB, assert_in_place, square, updating
from helpers.vanishing import EXACT, ROUNDING, SCENARIOS, eight_bits, largest_update
from paged_optax import codecs
from paged_optax.backend.platforms import GPU_FETCHES_AHEAD, GPU_NEEDS_RAW_INDEX
from paged_optax.codecs import DynamicInt4, DynamicInt8, Float8E4M3, Quantized


@pytest.mark.slow
@pytest.mark.parametrize("codec", NAMES)
def test_pages_change_no_bit(codec):
    """The state is the same bit for bit with pages of any size, eager and jitted."""
    build = lambda size: po.paged_adamw(
        1e-2, codec=codec, page_size=size, min_paged_size="1B"
    )
    results = [
        trained(build(size), eager=eager)
        for size, eager in [
            ("64KiB", False),
            ("1MiB", False),
            ("1GiB", False),
            ("16KiB", True),
        ]
    ]
    for params, state in results[1:]:
        reference.assert_equal(state, results[0][1])
        distances = reference.distances(params, results[0][0])
        assert max(distances.values(), default=0) <= 1, distances


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_moments_of_several_shapes(eager):
    """A factored moment is a vector, decoded beside a matrix or a flag of one bit."""
    shapes = {"tall": (5000, 40), "stack": (3, 4, 1400)}
    build = functools.partial(optax.adafactor, 1e-2, min_dim_size_to_factor=2)
    for wanted in (build(), optax.chain(optax.zero_nans(), build(), optax.zero_nans())):
        settings = {"page_size": 4096, "min_paged_size": 0}
        tx = po.paged(wanted, codec={"v_col": "dynamic_int8"}, **settings)
        params = reference.arrays(shapes=shapes)
        jit = (lambda f: f) if eager else jax.jit
        steps = reference.steps(tx, params, 3, jit=jit)
        for (one, *_), (other, *_) in zip(
            reference.steps(wanted, params, 3), steps, strict=True
        ):
            chex.assert_trees_all_close(one, other, rtol=2e-2)


@pytest.mark.quick("-bfloat16-")
@pytest.mark.parametrize("codec", NAMES)
def test_memory_kinds_and_dtypes(codec):
    """Stored moments stay on the host; small ones are float32, as bitsandbytes'."""
    params, state = trained(po.paged_adamw(1e-2, codec=codec, **ALL_PAGED))
    stored = jax.tree.leaves(optax.tree.get(state, "mu")["even"])
    assert {x.sharding.memory_kind for x in stored} == {"pinned_host"}
    assert optax.tree.get(state, "mu")["small"].dtype == jnp.float32
    assert {x.sharding.memory_kind for x in jax.tree.leaves(params)} == {"device"}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"codec": "dynamic_int8"}, 2.03125),
        ({"codec": "dynamic_int4"}, 1.0625),
        ({"codec": "float8_e4m3"}, 2.03125),
        ({"codec": "bfloat16"}, 4),
        ({"codec": "bfloat16_stochastic"}, 4),
        ({"codec": "dynamic_int8", "master_dtype": "float32"}, 6.03125),
    ],
    ids=["8-bit", "4-bit", "fp8", "bfloat16", "stochastic", "master + 8-bit"],
)
def test_bytes_a_parameter(settings, wanted):
    """Host bytes a parameter of AdamW."""
    params = {"w": jnp.ones((1024, 1024), jnp.bfloat16)}
    tx = po.paged_adamw(1e-3, **settings)
    state = tx.init(params)
    assert po.host_bytes(state) / params["w"].size == wanted
    assert po.plan(tx, params).host_bytes == po.host_bytes(state)


@pytest.mark.slow
def test_resident_and_coded():
    """With no budget at all, coded moments stay on the device, and give the numbers."""
    resident = po.paged_adamw_8bit(1e-2, device_budget=None, page_size="16KiB")
    params, state = trained(resident)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"device"}
    paged_params, paged_state = trained(po.paged_adamw_8bit(1e-2, **ALL_PAGED))
    reference.assert_equal(state, paged_state)
    assert max(reference.distances(params, paged_params).values(), default=0) <= 1


@pytest.mark.quick("nan-dynamic_int8")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nothing_turns_finite(name, value):
    """A moment that is not finite does not come back as a number."""
    tx = po.paged_adamw(1e-3, codec=name, **ALL_PAGED)
    params = {"w": jnp.ones((64, 128))}
    gradients = {"w": jnp.ones((64, 128)).at[3, 5].set(value)}
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(gradients, state, params)
    assert not np.isfinite(np.asarray(updates["w"][3, 5]))
    updates, _ = tx.update(params, state, params)
    assert not np.isfinite(np.asarray(updates["w"][3, 5]))


def test_seeds_of_stochastic_rounding():
    """A seed gives the same bits again, another seed others."""
    gradients = reference.arrays(jnp.float32, 1, {"w": (64, 128)})

    def stored(codec):
        tx = po.paged(optax.trace(0.9), codec=codec, **ALL_PAGED)
        _, state = tx.update(gradients, tx.init(gradients))
        return optax.tree.get(state, "trace")["w"]

    first, again, other = (
        stored(codecs.BFloat16Codec(stochastic=True, seed=seed)) for seed in (0, 0, 1)
    )
    reference.assert_equal(again, first)
    reference.assert_equal(stored("bfloat16_stochastic"), first)
    assert 0.1 < np.mean(np.asarray(other) != np.asarray(first)) < 0.9


def handing_over():
    """Moments that are the parameters, the gradients, or one another."""

    def init(params):
        # Optax's names: the codec takes no sign's bit for `nu`.
        return {"trace": params, "mu": params, "nu": jax.tree.map(abs, params)}

    def update(updates, state, params=None):
        del params
        return state["mu"], {
            "trace": updates,
            "mu": state["nu"],
            "nu": jax.tree.map(jnp.square, updates),
        }

    return optax.GradientTransformation(init, update)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["dynamic_int8", "float8_e4m3", "bfloat16"])
def test_a_moment_that_is_handed_over_is_stored_by_its_codec(codec):
    """Made by `init` or by `update`, of no arithmetic at all."""
    inner = handing_over()
    params = reference.arrays(shapes=SHAPES)
    tx = po.paged(inner, codec=codec, **ALL_PAGED)
    state, wanted = tx.init(params), inner.init(params)
    shapes = jax.eval_shape(tx.init, params)
    for wrap in (jax.jit, lambda update: update, jax.jit):
        # Two roundings: to a step of the map, or to half of a bit.
        near = lambda x, y: np.testing.assert_allclose(x, y, atol=0.04 * abs(y).max())
        updates, state = wrap(tx.update)(params, state, params)
        right, wanted = inner.update(params, wanted, params)
        assert set(reference.kinds(updates)) == {jax.devices()[0].default_memory().kind}
        jax.tree.map(near, updates, right)
        described = jax.tree.map(lambda x: (x.shape, x.dtype), (state, shapes))
        assert described[0] == described[1]
        assert reference.kinds(state) == reference.kinds(tx.init(params))


@pytest.mark.slow
def test_partial_updates():
    """An inactive parameter's codes and scales stay."""
    tx = po.paged_adamw_8bit(1e-2, per_parameter_steps=True, **ALL_PAGED)
    params, state = trained(tx)
    active = {"even": jnp.asarray(False), "odd": True, "vector": False, "small": True}
    updates, after = jax.jit(tx.update)(params, state, params, active=active)
    assert not np.any(np.asarray(updates["even"]))
    reference.assert_equal(po.page_in(after, "even"), po.page_in(state, "even"))
    assert reference.distances(po.page_in(after, "odd"), po.page_in(state, "odd"))
    assert [int(po.get_step(after, name)) for name in ("even", "odd")] == [3, 4]


@functools.cache
def compiled(compile_for, codec, leaves):
    tx = po.paged_adamw(1e-3, page_size="8MiB", codec=codec)
    return compile_for(updating(tx, square(leaves))), po.plan(tx, square(leaves))


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("codec", "leaves"), [("dynamic_int8", 16), ("dynamic_int4", 3), ("float8_e4m3", 3)]
)
@pytest.mark.parametrize("compile_for", [aot.h200, aot.v5e])
def test_scratch(compile_for, codec, leaves):
    """No more scratch than pages of 32 bits take in turn, everything in place."""
    coded, plan = compiled(compile_for, codec, leaves)
    assert_in_place(coded)
    assert coded.device_temp <= 4 * 8 * MIB + leaves * 4 * 54 * 2**10
    if compile_for is aot.h200:
        found = aot.descriptors(coded.hlo)
        (page,) = {x.page_bytes for x in plan.moments if x.on_host}
        # Codes, and scales where they are many.
        sizes = {page // 8, page // 128} if codec == "dynamic_int4" else {page // 4}
        # The first page is read, and the last written, in two pieces.
        pieces = {size // 2 for size in sizes} if GPU_FETCHES_AHEAD else set()
        assert {stride for _, _, _, stride in found} == sizes | pieces
        (count,) = {x.pages for x in plan.moments if x.on_host}
        for way, _, first, stride in found:
            if stride in pieces:
                last = (count - 1) * 2 * stride
                assert first == (0 if way == "read" else last)
                continue
            ahead = way == "read" and not GPU_NEEDS_RAW_INDEX
            assert first == (stride if ahead else 0)


@pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_state_of_the_parameters_own_tree(way):
    """What is no field of a state of Optax's is a parameter's moment all the same."""
    add = lambda updates, state, params=None: (
        updates,
        jax.tree.map(jnp.add, state, updates),
    )
    inner = optax.GradientTransformation(optax.tree.zeros_like, add)
    tx = po.paged(inner, codec="bfloat16", **ALL_PAGED)
    params = reference.arrays(jnp.float32, 0, {"a": (64, 64), "b": (129, 65)})
    state = tx.init(params)
    for _ in range(2):
        _, state = way(tx.update)(params, state, params)
    assert [x.dtype for x in jax.tree.leaves(state)] == [jnp.bfloat16] * 2
    assert po.host_bytes(state, "a") == 64 * 64 * 2
    wanted = jax.tree.map(lambda x: 2 * x, params)
    close = lambda x, y: np.testing.assert_allclose(np.float32(x), y, rtol=2**-7)
    jax.tree.map(close, state, wanted)


@pytest.mark.parametrize("codec", ["dynamic_int8", "float8_e4m3"])
def test_a_single_value_made_of_coded_moments(codec):
    """No gradient enters the flag of `zero_nans`: it is a leaf of its own, a scalar."""
    by_moments = optax.GradientTransformation(
        optax.scale_by_adam().init, lambda _, state, params=None: (state.mu, state)
    )
    tx = po.paged(optax.chain(by_moments, optax.zero_nans()), codec=codec, **ALL_PAGED)
    params = {"w": jnp.ones((64, 1024))}
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert not state[1].found_nan["w"]
    chex.assert_trees_all_equal(updates, {"w": jnp.zeros((64, 1024))})


def test_choice_by_moment_and_path():
    """The last rule that applies counts; keys are moments or parameter patterns."""
    params = {"embed": jnp.ones((64, 128)), "block": {"kernel": jnp.ones((64, 128))}}
    codec = {
        "mu": "bfloat16",
        "nu": "dynamic_int8",
        "embed": "float32",
        "block/*": {"mu": DynamicInt8()},
    }
    state = po.paged_adamw(1e-3, codec=codec).init(params)[0]
    assert state.mu["embed"].dtype == state.nu["embed"].dtype == jnp.float32
    assert isinstance(state.mu["block"]["kernel"], Quantized)
    assert isinstance(state.nu["block"]["kernel"], jax.Array)


def test_a_parameter_called_as_a_moment():
    """The key of a rule is the moment's name; rules by moment are for the parameter."""
    params = {"nu": jnp.ones((64, 128)), "w": jnp.ones((64, 128))}
    coded = lambda rules: {
        (moment, name)
        for moment in ("mu", "nu")
        for name, x in getattr(
            po.paged_adamw(1e-3, codec=rules).init(params)[0], moment
        ).items()
        if isinstance(x, Quantized)
    }
    assert coded({"nu": "dynamic_int8"}) == {("nu", "nu"), ("nu", "w")}
    assert coded({"nu": {"mu": "dynamic_int8"}}) == {("mu", "nu")}
    assert coded({"w": "dynamic_int8"}) == {("mu", "w"), ("nu", "w")}


def energies(decay=0.9):
    """A user's own transformation: `energy` averages squares, `drift` gradients."""

    def init(params):
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)
        return {"energy": zeros(), "drift": zeros()}

    def update(updates, state, params=None):
        del params
        mean = lambda old, new: decay * old + (1 - decay) * new
        energy = jax.tree.map(lambda e, g: mean(e, g * g), state["energy"], updates)
        drift = jax.tree.map(mean, state["drift"], updates)
        moved = jax.tree.map(lambda d, e: -d / (jnp.sqrt(e) + 1e-8), drift, energy)
        return moved, {"energy": energy, "drift": drift}

    return optax.GradientTransformation(init, update)


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec",
    [
        {"*": "dynamic_int8", "energy": DynamicInt8(signed=False)},
        {"*": {"drift": "dynamic_int8", "energy": DynamicInt8(signed=False)}},
    ],
    ids=["by moment", "by path and moment"],
)
def test_squares_of_ones_own(codec):
    """An unsigned codec for a moment of another name: by naming it."""
    params = {"w": jnp.ones((64, 128))}
    gradients = reference.arrays(jnp.float32, 1, {"w": (64, 128)})
    decoded = {}
    for name, rules in {"signed": "dynamic_int8", "unsigned": codec}.items():
        tx = po.paged(energies(), codec=rules, **ALL_PAGED)
        _, state = tx.update(gradients, tx.init(params), params)
        stored = state["energy"]["w"]
        stored = jax.device_put(stored, jax.memory.Space.Device)
        decoded[name] = DynamicInt8(name == "signed").decode(
            in_bytes(stored), (64, 128)
        )
    exact = 0.1 * np.asarray(gradients["w"]) ** 2
    error = {name: np.abs(x - exact).mean() for name, x in decoded.items()}
    assert error["unsigned"] < 0.7 * error["signed"]  # it has a bit more
    for rules in (DynamicInt8(signed=False), {"w": DynamicInt8(signed=False)}):
        with pytest.raises(ValueError, match=r"name it: codec=\{'(energy|drift)': "):
            po.paged(energies(), codec=rules).init(params)


@pytest.mark.quick("(64, 512)")
@pytest.mark.parametrize(
    ("stored", "read"),
    [
        (DynamicInt8(), DynamicInt8(signed=False)),
        (DynamicInt8(), Float8E4M3()),
        (DynamicInt8(signed=False), Float8E4M3()),
        (DynamicInt4(), DynamicInt4(signed=False)),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(8192,), (64, 512), (129, 65), (768, 1057)], ids=str)
def test_a_state_tells_what_stored_it(stored, read, shape):
    """Codes that mean other numbers are refused, either way, packed in words or not."""
    params = {"w": jnp.ones(shape)}
    build = lambda codec: po.paged(
        optax.scale_by_rms(), codec={"nu": codec}, **ALL_PAGED
    )
    for writer, reader in ((stored, read), (read, stored)):
        state = build(writer).init(params)
        with pytest.raises(ValueError, match="own init"):
            jax.eval_shape(build(reader).update, params, state, params)
        jax.eval_shape(build(writer).update, params, state, params)


@pytest.mark.parametrize("change", ["new", "gone"])
def test_a_leaf_too_many_or_too_few_is_named(change):
    """And no other, though a codec's moments are several arrays each."""
    params = {name: jnp.ones((64, 512)) for name in "abc"}
    tx = po.paged_adamw_8bit(1e-2, min_paged_size=0)
    state = tx.init(params)
    if change == "new":
        params["new"] = params["a"]
    else:
        params["gone"] = params.pop("b")
    with pytest.raises(ValueError, match=r"they differ at state\[0\].mu\['(new|b)'\]"):
        tx.update(params, state, params)


@functools.cache
def exact(name: str) -> float:
    return largest_update(SCENARIOS[name], EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_eight_bits_by_default(name):
    tx = po.paged_adamw_8bit(vanishing.LEARNING_RATE, weight_decay=0.0)
    assert largest_update(SCENARIOS[name], tx) <= 2 * exact(name)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int4", "fp8"])
def test_other_codecs(codec):
    tx = eight_bits(codec=vanishing.CODECS[codec])
    name = "equal examples"
    assert largest_update(SCENARIOS[name], tx) <= 2 * exact(name)


@pytest.mark.slow
def test_a_map_that_rounds_to_zero_shows_why():
    name = "equal examples"
    tx = eight_bits(codec=ROUNDING)
    assert largest_update(SCENARIOS[name], tx) > 50 * exact(name)


compared = functools.cache(compare_codec)
CODED = [("paged_adamw", codec) for codec in BOUNDS]
CODED += [("paged_ademamix", "dynamic_int8"), ("paged_lion", "dynamic_int8")]


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(("alias", "codec"), CODED)
@pytest.mark.parametrize("stream", FINITE)
def test_streams(alias, codec, stream):
    """Within the bounds of test_codecs.py of each exact step; updates are not large."""
    errors, sizes = compared(alias, codec)
    assert errors[stream] <= 1 + 1e-6
    assert sizes[stream] <= 2


def test_a_stream_ends_where_it_says():
    """Moments of the converging stream are denormal at the end."""
    last = FINITE["converging"](extreme.STEPS - 1)
    assert 0 < abs(last).max() < 1e-38
