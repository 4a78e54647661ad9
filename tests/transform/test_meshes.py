"""Meshes of explicit and of automatic axes, against Optax on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_optax as po
from helpers import reference
from helpers.meshes import divided, mesh_of

PAGED: Any = {"page_size": 1024, "min_paged_size": 300}
#: One that stays on the device, one of at most 1024 values that does not, and another.
SHAPES = {"b": (64,), "m": (16, 64), "v": (64, 96)}
SPECS = {"b": P("x"), "m": P("x"), "v": P(None, "x")}
WHOLE = dict.fromkeys(SPECS, P())
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


def train(tx, params, gradients, *, jit=True, jit_init=False):
    state = (jax.jit(tx.init) if jit_init else tx.init)(params)
    update = jax.jit(tx.update) if jit else tx.update
    before = placements(state)
    for _ in range(2):
        updates, state = update(gradients, state, params)
    return updates, state, before


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize(
    "masters", [{"master_dtype": "float32"}, {"master_remainders": True}], ids=str
)
def test_a_rate_on_explicit_axes_that_an_update_closes_over(masters, jit):
    """As `inject_hyperparams` closes over the one that a first update returned."""
    make = lambda learning_rate: po.paged_adamw(learning_rate, **PAGED, **masters)
    params = reference.arrays(jnp.bfloat16, 0, SHAPES)
    mesh, found = mesh_of(EXPLICIT), []
    for place in (lambda x: x, lambda x: divided(x, mesh, WHOLE)):
        tx = optax.inject_hyperparams(make)(0.01)
        given = place(params)
        state, update = tx.init(given), jax.jit(tx.update) if jit else tx.update
        for _ in range(3):
            updates, state = update(given, state, given)
        found.append(updates)
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(np.float32(x), np.float32(y)), *found
    )


def placements(tree):
    """How each leaf is divided, without the Nones that end a spec, and its memory."""
    found = []
    for x in jax.tree.leaves(tree):
        local = x.sharding.shard_shape(x.shape)
        found.append((local, len(x.sharding.device_set), x.sharding.memory_kind))
    return found


DTYPES = ("dtype", "gradients")
#: Settings of Optax's optimizers, of AdamW under other names; and dtypes.
CASES: Any = {
    "adamw": {},
    "gradients in bfloat16": {"gradients": "bfloat16"},
    "mu in bfloat16": {"mu_dtype": "bfloat16"},
    "mu in float32": {
        "mu_dtype": "float32",
        "dtype": "bfloat16",
        "gradients": "bfloat16",
    },
    "adagrad": {},
    "lamb": {},
    "lars": {},
    "muon": {},
    "adafactor": {"min_dim_size_to_factor": 8},
    "fromage": {},
}


@pytest.mark.quick("-adamw-False", "lamb")
@pytest.mark.parametrize(
    ("case", "jit_init"),
    [*((case, False) for case in CASES), ("adamw", True), ("adagrad", True)],
)
def test_numbers_on_explicit_axes(case, jit_init):
    """Optax's numbers; each moment stays where and as `init` made it."""
    settings = dict(CASES[case])
    dtypes = [settings.pop(name, "float32") for name in DTYPES]
    of = getattr(optax, case, None) or getattr(optax.contrib, case, optax.adamw)
    plain = of(1e-2, **settings)
    params, gradients = (reference.arrays(x, n, SHAPES) for n, x in enumerate(dtypes))
    wanted, wanted_state, _ = train(plain, params, gradients)
    mesh = mesh_of(EXPLICIT)
    with jax.set_mesh(mesh):
        updates, state, before = train(
            po.paged(plain, **PAGED),
            divided(params, mesh, SPECS),
            divided(gradients, mesh, SPECS),
            jit_init=jit_init,
        )
    low = "bfloat16" in (*dtypes, settings.get("mu_dtype"))
    close = {"rtol": 2e-2, "atol": 1e-4} if low else {"rtol": 1e-5, "atol": 1e-6}
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(np.float32(x), np.float32(y), **close),
        (updates, state),
        (wanted, wanted_state),
    )
    assert placements(state) == before
    for name, x in updates.items():
        assert jax.typeof(x).sharding.spec[0] == (SPECS[name][0])
    if case != "fromage":  # it keeps no moments
        assert any("pinned_host" in x for x in before)


@pytest.mark.quick("jit")
@pytest.mark.parametrize("axis_type", [EXPLICIT, AUTO], ids=str)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("moved", ["gradients", "parameters"])
def test_gradients_divided_otherwise(moved, jit, axis_type):
    """Moments stay divided as `init` made them, and updates as parameters are."""
    params = reference.arrays(jnp.float32, 0, SHAPES)
    gradients = reference.arrays(jnp.float32, 1, SHAPES)
    wanted, wanted_state, _ = train(optax.adamw(1e-2), params, gradients)
    mesh = mesh_of(axis_type)
    own, others = (SPECS, WHOLE) if moved == "gradients" else (WHOLE, SPECS)
    with jax.set_mesh(mesh):
        params = divided(params, mesh, own)
        updates, state, before = train(
            po.paged_adamw(1e-2, **PAGED),
            params,
            divided(gradients, mesh, others),
            jit=jit,
        )
    reference.assert_equal(state, wanted_state)
    for name, x in updates.items():
        np.testing.assert_allclose(x, wanted[name], rtol=1e-5, atol=1e-7)
    hosted = lambda placed: [x for x in placed if "pinned_host" in x]
    assert hosted(placements(state)) == hosted(before) != []
    if axis_type is EXPLICIT:
        assert jax.tree.map(lambda x: jax.typeof(x).sharding, updates) == jax.tree.map(
            lambda x: jax.typeof(x).sharding, params
        )


_COPIES, _REMAINDERS = {"master_dtype": "float32"}, {"master_remainders": True}


@pytest.mark.quick("-jit-", "remainders")
@pytest.mark.parametrize(
    ("jit", "kept"),
    [(False, _COPIES), (True, _COPIES), (True, _REMAINDERS)],
    ids=["eager", "jit", "remainders"],
)
def test_master_weights_on_explicit_axes(jit, kept):
    """Parameters in bfloat16, gradients in float32: Optax's on float32 parameters."""
    masters = reference.arrays(jnp.float32, 0, SHAPES)
    low = optax.tree.cast(masters, jnp.bfloat16)
    masters = optax.tree.cast(low, jnp.float32)
    gradients = reference.arrays(jnp.float32, 1, SHAPES)
    _, wanted, _ = train(optax.adamw(1e-2, weight_decay=0.0), masters, gradients)
    mesh = mesh_of(EXPLICIT)
    tx = po.paged_adamw(1e-2, weight_decay=0.0, **kept, **PAGED)
    with jax.set_mesh(mesh):
        _, state, before = train(
            tx, divided(low, mesh, SPECS), divided(gradients, mesh, SPECS), jit=jit
        )
    assert placements(state) == before
    reference.assert_equal(state.inner_state, wanted)


def test_extra_arguments_on_explicit_axes():
    """Numbers, arrays of NumPy's, and gates among a traced update's arguments."""
    inner = optax.GradientTransformationExtraArgs(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None, *, scale, shift: (
            jax.tree.map(lambda g: g * scale + shift, updates),
            jax.tree.map(jnp.add, state, updates),
        ),
    )
    mesh = mesh_of(EXPLICIT)
    tx = po.paged(inner, **PAGED)
    with jax.set_mesh(mesh):
        gradients = divided(reference.arrays(jnp.float32, 1, SHAPES), mesh, SPECS)
        state = tx.init(gradients)
        step = jax.jit(
            lambda g, s, on: tx.update(g, s, scale=2, shift=np.float32(1), active=on)
        )
        for on in (True, False):
            updates, new = step(gradients, state, jnp.bool_(on))
            for name, g in gradients.items():
                np.testing.assert_allclose(updates[name], on * (2 * g + 1), rtol=1e-6)
                np.testing.assert_array_equal(new[name], on * g)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_factors_of_a_divided_parameter(jit):
    """They are paged by all devices, whole, whatever their parameter's shards."""
    params = {"w": jnp.linspace(-1, 1, 128 * 32).reshape(128, 32)}
    settings = {"min_dim_size_to_factor": 8}
    wanted, wanted_state, _ = train(optax.adafactor(1e-2, **settings), params, params)
    mesh = mesh_of(AUTO)
    tx = po.paged_adafactor(1e-2, page_size=256, min_paged_size=256, **settings)
    params = divided(params, mesh, {"w": P("x")})
    updates, state, before = train(tx, params, params, jit=jit)
    np.testing.assert_allclose(updates["w"], wanted["w"], rtol=1e-4)
    hosted = lambda placed: [x for x in placed if "pinned_host" in x]
    assert hosted(before) == [((128,), 8, "pinned_host")]
    assert [kind for *_, kind in placements(state)] == [kind for *_, kind in before]
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(wanted_state), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


@pytest.mark.parametrize("codec", [None, "dynamic_int8"])
def test_factors_stay_whole_and_are_donated(codec):
    """XLA would divide the factor of the parameter's divided axis."""
    mesh = mesh_of(AUTO)
    params = divided({"w": jnp.ones((512, 1024))}, mesh, {"w": P("x")})
    tx = po.paged_adafactor(1e-2, min_paged_size=0, codec=codec)

    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    before = placements(state)
    _, state = po.jit_step(step, donate_argnums=(0, 1))(params, state)
    assert placements(state) == before
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state))


@pytest.mark.parametrize("where", ["plan", "plan of a mesh", "abstract_state"])
def test_described_parameters_that_do_not_divide_evenly(where):
    """They could not be made, nor could their moments."""
    mesh = jax.sharding.AbstractMesh((8,), ("x",))
    place = NamedSharding(mesh, P(None, "x"))
    params = {"w": jax.ShapeDtypeStruct((64, 100), jnp.float32, sharding=place)}
    tx = po.paged_adamw(1e-3)
    call = {
        "plan": lambda: po.plan(tx, params),
        "plan of a mesh": lambda: po.plan(tx, params, mesh=mesh),
        "abstract_state": lambda: po.abstract_state(tx, params),
    }[where]
    with pytest.raises(ValueError, match=r"\['w'\] of shape \(64, 100\).*evenly"):
        call()
