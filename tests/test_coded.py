"""Moments that a codec stores, and master weights, in training and in memory."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import aot, reference
from helpers.programs import assert_in_place, square, updating
from paged_optax.codecs import (
    BFloat16Codec,
    DynamicInt4,
    DynamicInt8,
    Float8E4M3,
    Quantized,
    unarranged,
)

NAMES = [
    "dynamic_int8",
    "dynamic_int4",
    "float8_e4m3",
    "bfloat16",
    "bfloat16_stochastic",
]
SHAPES = {"even": (640, 512), "odd": (129, 65), "vector": (8192,), "small": (7,)}
ALL_PAGED = {"page_size": "16KiB", "min_paged_size": "1B"}


def in_bytes(stored):
    """Codes and scales as the codec made them, before they were arranged."""
    signed = jnp.issubdtype(stored.codes.dtype, jnp.signedinteger)
    return unarranged(DynamicInt8(signed), stored)


def trained(tx, steps=3, dtype=jnp.float32, eager=False):
    """Parameters and state after a few steps."""
    params = reference.arrays(dtype, 0, SHAPES)
    gradients = reference.arrays(dtype, 1, SHAPES)
    state = tx.init(params)
    update = tx.update if eager else jax.jit(tx.update)
    for step in range(steps):
        scaled = jax.tree.map(lambda x, n=step: x * (n + 1), gradients)
        updates, state = update(scaled, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.quick("-bfloat16-")
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


@pytest.mark.quick("float8_e4m3")
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
        ({"codec": "dynamic_int8", "master_dtype": "float32"}, 6.03125),
    ],
    ids=["8-bit", "4-bit", "master + 8-bit"],
)
def test_bytes_a_parameter(settings, wanted):
    """Host bytes a parameter of AdamW."""
    params = {"w": jnp.ones((1024, 1024), jnp.bfloat16)}
    tx = po.paged_adamw(1e-3, **settings)
    state = tx.init(params)
    assert po.host_bytes(state) / params["w"].size == wanted
    assert po.plan(tx, params).host_bytes == po.host_bytes(state)


@pytest.mark.quick("lion-float32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("optimizer", "reference_of"),
    [(po.paged_adamw_8bit, optax.adamw), (po.paged_lion_8bit, optax.lion)],
)
def test_bitsandbytes_protocol(optimizer, reference_of, dtype):
    """bitsandbytes' own test of its 8-bit optimizers, with its tolerances.

    50 steps beside the 32-bit optimizer; after each, its moments and parameters are
    set to those of the 8-bit one, so that every step is compared alone.
    """
    random = np.random.default_rng(0)
    shape = (1024, 256)
    draw = lambda scale: jnp.asarray(random.normal(size=shape) * scale, dtype)
    lr = 1e-3 if reference_of is optax.adamw else 1e-4
    tx, plain = optimizer(lr, page_size="64KiB"), reference_of(lr)
    params = {"w": draw(0.1)}
    state = tx.init(params)
    in_float32 = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    plain_state = plain.init(in_float32(params))
    update, plain_update = jax.jit(tx.update), jax.jit(plain.update)
    errors, relative = [], []
    signed = {"mu": True, "nu": False}
    for _ in range(50):
        gradients = {"w": draw(0.01)}
        updates, state = update(gradients, state, params)
        full = in_float32(params)
        plain_updates, plain_state = plain_update(
            in_float32(gradients), plain_state, full
        )
        params = optax.apply_updates(params, updates)
        full = optax.apply_updates(full, plain_updates)
        moments = {
            name: DynamicInt8(signed[name]).decode(in_bytes(x), shape)
            for name, x in po.page_in(state, "w").items()
        }
        for name, decoded in moments.items():
            exact = optax.tree.get(plain_state, name)["w"]
            close = np.isclose(exact, decoded, atol=3e-3, rtol=1e-3)
            assert (~close).sum() < 20, name
        error = np.abs(np.asarray(full["w"]) - np.asarray(in_float32(params)["w"]))
        errors.append(error.mean())
        relative.append((error / (np.abs(np.asarray(full["w"])) + 1e-9)).mean())
        plain_state = optax.tree.set(
            plain_state, **{name: {"w": x} for name, x in moments.items()}
        )
    bf16 = dtype == jnp.bfloat16
    if reference_of is optax.adamw:
        assert np.mean(errors) < (1.7e-4 if bf16 else 6e-5)
        assert np.mean(relative) < (1.6e-3 if bf16 else 6e-4)


@pytest.mark.quick("None")
@pytest.mark.parametrize("codec", [None, "dynamic_int8"])
def test_master_weights(codec):
    """The parameters are the master copy rounded, but where no difference says so.

    Over 1000 steps: everywhere else equal; there within one ulp of what was added; and
    as few such places at the end as at the beginning.
    """
    random = np.random.default_rng(0)
    tx = po.paged_adamw(1e-3, codec=codec, master_dtype="float32", **ALL_PAGED)
    params = {"w": jnp.asarray(random.normal(size=(64, 128)) * 0.02, jnp.bfloat16)}
    state = tx.init(params)

    @jax.jit
    def step(params, state, noise):
        gradients = jax.tree.map(lambda p, n: p * 0.5 + n, params, noise)
        updates, state = tx.update(gradients, state, params)
        assert updates["w"].dtype == jnp.bfloat16
        return optax.apply_updates(params, updates), state, updates

    wide = lambda x: np.asarray(x.astype(jnp.float32))
    counts = []
    for _ in range(1000):
        noise = {"w": jnp.asarray(random.normal(size=(64, 128)), jnp.bfloat16)}
        old = wide(params["w"])
        params, state, updates = step(params, state, noise)
        wanted = wide(state.master["w"].astype(jnp.bfloat16))
        found = wide(params["w"])
        differs = found != wanted
        counts.append(differs.sum())
        # Differences of numbers within a factor of two are exact (Sterbenz).
        expressible = (wanted * old > 0) & (
            np.abs(np.abs(wanted) - np.abs(old))
            <= np.minimum(*map(np.abs, (old, wanted)))
        )
        assert not np.any(differs & expressible)
        largest = np.maximum(np.abs(old), np.abs(wide(updates["w"])))
        assert np.all(np.abs(found - wanted) <= largest * 2.0**-7)
    assert np.mean(counts) < 0.02 * params["w"].size
    assert np.mean(counts[-100:]) <= np.mean(counts[:100]) + 0.01 * params["w"].size


def test_master_weights_learn_what_bfloat16_forgets():
    """Steps far below the parameters' resolution add up."""
    params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
    tx = po.paged(optax.sgd(1e-4), master_dtype="float32", **ALL_PAGED)
    state = tx.init(params)
    for _ in range(100):
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
    assert abs(float(params["w"][0, 0]) - 0.99) < 4e-3
    plain, bare = optax.sgd(1e-4), {"w": jnp.ones((64, 128), jnp.bfloat16)}
    updates, _ = plain.update(bare, plain.init(bare), bare)
    assert float(optax.apply_updates(bare, updates)["w"][0, 0]) == 1.0


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


@pytest.mark.quick("by path")
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


def test_seeds_of_stochastic_rounding():
    """A seed gives the same bits again, another seed others."""
    gradients = reference.arrays(jnp.float32, 1, {"w": (64, 128)})

    def stored(codec):
        tx = po.paged(optax.trace(0.9), codec=codec, **ALL_PAGED)
        _, state = tx.update(gradients, tx.init(gradients))
        return optax.tree.get(state, "trace")["w"]

    first, again, other = (
        stored(BFloat16Codec(stochastic=True, seed=seed)) for seed in (0, 0, 1)
    )
    reference.assert_equal(again, first)
    reference.assert_equal(stored("bfloat16_stochastic"), first)
    assert 0.1 < np.mean(np.asarray(other) != np.asarray(first)) < 0.9


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        ("int8", ("'int8'", "dynamic_int8")),
        ({"mu": DynamicInt8(signed=False)}, ("'mu'", "use a signed one.")),
        ({"numu": "bfloat16"}, ("'numu'", "mu, nu", "(w,")),
        (DynamicInt8(signed=False), ("signed=False", "'mu'")),
        (3, ("codec=3",)),
        ({1: "bfloat16"}, ("key 1",)),
    ],
    ids=str,
)
def test_bad_codecs(codec, words):
    """A codec unknown, or unfit for a moment, is refused by name."""
    with pytest.raises(ValueError) as error:
        po.paged_adamw(1e-3, codec=codec).init({"w": jnp.ones((64, 128))})
    for word in words:
        assert word in str(error.value)


def test_mu_dtype_is_refused():
    """A codec says how moments are stored, and mu_dtype too: one too many."""
    tx = po.paged_adamw(1e-3, mu_dtype=jnp.bfloat16, codec="dynamic_int8")
    with pytest.raises(ValueError, match="mu_dtype"):
        tx.init({"w": jnp.ones((64, 128))})


def test_another_codecs_state():
    """A state of float32 moments is no state of coded ones."""
    params = {"w": jnp.ones((64, 128))}
    state = po.paged_adamw(1e-3).init(params)
    with pytest.raises(ValueError, match="DynamicInt8"):
        po.paged_adamw_8bit(1e-3).update(params, state, params)


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


def test_bitsandbytes_state():
    """A state goes to bitsandbytes' layout and comes back bit for bit."""
    tx = po.paged_adamw_8bit(1e-2, **ALL_PAGED)
    _, state = trained(tx)
    entries = po.to_bitsandbytes(state)
    assert entries["even"]["state1"].dtype == np.uint8
    assert entries["even"]["absmax2"].shape == (640 * 512 // 256,)
    assert entries["even"]["step"] == 3
    blank = tx.init(reference.arrays(jnp.float32, 0, SHAPES))
    again = po.from_bitsandbytes(blank, entries)
    reference.assert_equal(again, state)
    assert reference.kinds(again) == reference.kinds(state)
    with pytest.raises(ValueError, match="no parameter 'even'"):
        po.from_bitsandbytes(blank, {})
    entries["even"]["qmap1"] = entries["even"]["qmap1"] * 2
    with pytest.raises(ValueError, match="qmap1"):
        po.from_bitsandbytes(blank, entries)


@pytest.mark.quick("partition")
@pytest.mark.parametrize("kind", ["per_parameter_steps", "partition", "chain"])
def test_bitsandbytes_has_the_steps_of_each_parameter(kind):
    """As many as its updates, there and back; those of schedules come along."""
    params = {"a": jnp.ones((64, 64)), "b": jnp.ones((64, 128))}
    rate = optax.linear_schedule(1e-2, 0.0, 9)
    one = functools.partial(po.paged_adamw_8bit, rate, **ALL_PAGED)
    tx = optax.chain(optax.clip(1.0), one(per_parameter_steps=kind != "chain"))
    if kind == "partition":
        tx = optax.partition({"a": one(), "b": one()}, {"a": "a", "b": "b"})
    alone = kind != "chain"
    state, update = tx.init(params), jax.jit(tx.update)
    for number in range(3):
        new = update(params, state, params)[1]
        if kind == "per_parameter_steps":
            active = {"a": True, "b": number == 0}
            new = tx.update(params, state, params, active=active)[1]
        elif kind == "partition" and number:
            new = new._replace(
                inner_states=new.inner_states | {"b": state.inner_states["b"]}
            )
        state = new
    entries = po.to_bitsandbytes(state)
    assert {name: entry["step"] for name, entry in entries.items()} == {
        "a": 3,
        "b": 1 if alone else 3,
    }
    again = po.from_bitsandbytes(tx.init(params), entries)
    counts = lambda tree: [
        int(x) for x in jax.tree.leaves(tree) if x.dtype == "int32" and not x.ndim
    ]
    assert (
        counts(again)
        == counts(state)
        == (
            2 * [3, 1]
            if kind == "per_parameter_steps"
            else [3, 3, 1, 1]
            if alone
            else [3, 3]
        )
    )


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
    return compile_for(updating(tx, square(leaves)))


@pytest.mark.quick("h200-dynamic_int8")
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("codec", "leaves"),
    [("dynamic_int8", 16), ("dynamic_int4", 3), ("float8_e4m3", 3)],
)
@pytest.mark.parametrize("compile_for", [aot.h200, aot.v5e])
def test_scratch(compile_for, codec, leaves):
    """No more scratch than in 32 bits, everything in place; the first of 16 leaves."""
    plain = compiled(compile_for, None, leaves)
    coded = compiled(compile_for, codec, leaves)
    assert_in_place(coded)
    assert coded.device_temp <= plain.device_temp
    if compile_for is aot.h200:
        found = aot.descriptors(coded.hlo)
        page = 512 * 4096 // (2 if codec == "dynamic_int4" else 1)
        assert {stride for _, _, _, stride in found} == {page}
        assert {first for _, _, first, _ in found} == {0}


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
