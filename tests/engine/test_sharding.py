"""Each device pages its own shard: numbers, bytes, and where everything lives."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_optax as po
from helpers import meshes, reference

#: Divided along the leading axis, the trailing, both, two axes on one dimension, none;
#: in pages that divide a shard and in pages that do not.
LEAVES: Any = {
    "leading": ((96, 64), P("x")),
    "trailing": ((40, 512), P(None, "y")),
    "both": ((64, 1024), P("x", "y")),
    "twice": ((128, 64), P(("x", "y"))),
    "stack": ((3, 64, 256), P(None, ("x", "y"))),
    "vector": ((8192,), P(("y", "x"))),
    "replicated": ((33, 65), P()),
    "bias": ((64,), P("y")),
}
SHAPES, SPECS = ({k: x[n] for k, x in LEAVES.items()} for n in (0, 1))
PAGED = {"page_size": "4KiB", "min_paged_size": "1KiB"}
divided = functools.partial(meshes.divided, specs=SPECS)


def mesh_of(axis_type=AxisType.Auto):
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)


def train(tx, params, gradients, *, jit=True, steps=3):
    state = tx.init(params)
    update = jax.jit(tx.update) if jit else tx.update
    for _ in range(steps):
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def specs_of(state):
    """Specs and memory kinds, without the Nones that end a spec."""

    def spec(x):
        found = list(x.sharding.spec)
        while found and found[-1] is None:
            found.pop()
        return tuple(found), x.sharding.memory_kind

    return [spec(x) for x in jax.tree.leaves(state)]


@pytest.mark.quick("adamw-jit-AxisType.Auto")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (po.paged_adamw, optax.adamw),
        (po.paged_lion, optax.lion),
        (po.paged_lamb, optax.lamb),
    ],
)
def test_numbers(ours, plain, jit, axis_type):
    """On eight devices the state is Optax's on one; it stays where init put it."""
    params = reference.arrays(jnp.float32, 0, SHAPES)
    gradients = reference.arrays(jnp.float32, 1, SHAPES)
    wanted, wanted_state = train(plain(1e-2), params, gradients)
    mesh = mesh_of(axis_type)
    tx = ours(1e-2, **PAGED)
    params, gradients = divided(params, mesh), divided(gradients, mesh)
    found, state = train(tx, params, gradients, jit=jit)
    reference.assert_equal(state, wanted_state)
    for name, x in found.items():
        np.testing.assert_allclose(x, wanted[name], rtol=0, atol=1e-6)
    assert specs_of(state) == specs_of(tx.init(params))
    kinds = {
        name: x.sharding.memory_kind for name, x in optax.tree.get(state, "mu").items()
    }
    assert kinds.pop("bias") == "device"
    assert set(kinds.values()) == {"pinned_host"}


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["dynamic_int8", "dynamic_int4"])
def test_codecs(codec):
    """Where shards are whole blocks, dividing them changes no bit."""
    params = reference.arrays(jnp.float32, 0, SHAPES)
    gradients = reference.arrays(jnp.float32, 1, SHAPES)
    build = lambda: po.paged_adamw(1e-2, codec=codec, **PAGED)
    _, wanted = train(build(), params, gradients)
    mesh = mesh_of()
    _, found = train(build(), divided(params, mesh), divided(gradients, mesh))
    for name in SHAPES:
        ours, theirs = (optax.tree.get(s, "mu")[name] for s in (found, wanted))
        assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, theirs), name
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.slow
def test_stochastic_rounding():
    """Where shards are ranges of the moment its bits are drawn as on one device."""
    ranges = ("leading", "twice", "vector", "replicated")
    params = reference.arrays(jnp.float32, 0, SHAPES)
    gradients = reference.arrays(jnp.float32, 1, SHAPES)
    build = lambda: po.paged_adamw(1e-2, codec="bfloat16_stochastic", **PAGED)
    _, wanted = train(build(), params, gradients)
    mesh = mesh_of()
    _, found = train(build(), divided(params, mesh), divided(gradients, mesh))
    found, wanted = (optax.tree.get(state, "mu") for state in (found, wanted))
    for name in ranges:
        np.testing.assert_array_equal(found[name], wanted[name])
    # Elsewhere each part draws its own bits: no two columns of parts are alike.
    noise = np.float32(found["trailing"]) != np.float32(wanted["trailing"])
    assert 0.05 < noise.mean() < 0.6


@pytest.mark.parametrize("steps", [0, 1])
def test_each_part_draws_its_own_noise(steps):
    """Divided along both axes: what is equal is rounded otherwise in each part."""
    part = jax.random.normal(jax.random.key(0), (16, 512))
    gradients = divided({"both": jnp.tile(part, (4, 2))}, mesh_of())
    inner = optax.adagrad(1e-2, initial_accumulator_value=0.1)
    tx = po.paged(inner, codec="bfloat16_stochastic", **PAGED)
    _, state = train(tx, gradients, gradients, steps=steps)
    sums = np.float32(optax.tree.get(state, "sum_of_squares")["both"])
    parts = sums.reshape(4, 16, 2, 512).swapaxes(1, 2).reshape(8, 16, 512)
    differ = [(x != y).mean() for x, y in itertools.combinations(parts, 2)]
    assert min(differ) > 0.1


@pytest.mark.parametrize(
    "given", ["shardings", "specs", "init", "state", "abstract_state", "place_state"]
)
def test_sources(given):
    """In a `jit` over automatic axes arrays do not say how they are divided."""
    mesh = mesh_of()
    params = divided(reference.arrays(jnp.float32, 0, SHAPES), mesh)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    asked = {"shardings": shardings, "state": shardings, "specs": SPECS}.get(given)
    tx = po.paged_adamw(1e-2, shardings=asked, **PAGED)
    with jax.set_mesh(mesh):
        if given == "init":
            state = tx.init(params)
        else:
            other = po.paged_adamw(1e-2, **PAGED).init(params)
            state = other
        if given in ("state", "abstract_state"):  # restored: `init` saw nothing
            target = po.abstract_state(tx, params)
            state = jax.device_put(other, jax.tree.map(lambda x: x.sharding, target))
        elif given == "place_state":
            state = po.place_state(tx, jax.device_get(other), params)
        compiled = jax.jit(tx.update).lower(params, state, params).compile()
    assert not po.memory_report(compiled).unsharded


def test_fallback_is_reported():
    """Nothing is known: the numbers are right, and the report says what to do."""
    mesh = mesh_of()
    params = divided(reference.arrays(jnp.float32, 0, SHAPES), mesh)
    known, unknown = (po.paged_adamw(1e-2, **PAGED) for _ in range(2))
    state = known.init(params)
    with pytest.warns(UserWarning, match="nothing else in this jax.jit") as told:
        compiled = jax.jit(unknown.update).lower(params, state, params).compile()
    assert len(told) == 1
    report = po.memory_report(compiled)
    assert report.unsharded
    assert "Paging fell back" in str(report)
    assert "shardings=" in str(report)
    _, wanted = known.update(params, state, params)
    reference.assert_equal(compiled(params, state, params)[1], wanted)


def injected(around, shardings=None):
    """AdamW of a rate in its state, which forgets its shardings if that is around."""
    if not around:
        return po.paged(optax.inject_hyperparams(optax.adamw)(1e-2), **PAGED)
    build = lambda rate, shardings: po.paged_adamw(rate, shardings=shardings, **PAGED)
    return optax.inject_hyperparams(build)(1e-2, shardings)


def stepping(tx):
    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


FORGETFUL = {
    "alone": lambda: injected(True),
    "chain": lambda: optax.chain(optax.clip(1.0), injected(True)),
    "masked": lambda: optax.masked(injected(True), dict.fromkeys(SHAPES, True)),
    "MultiSteps": lambda: po.MultiSteps(injected(True), 2).gradient_transformation(),
    "int8": lambda: optax.inject_hyperparams(
        lambda rate: po.paged_adamw_8bit(rate, **PAGED)
    )(1e-2),
}


@pytest.mark.quick("alone-init", "MultiSteps-abstract_state", "int8-abstract_state")
@pytest.mark.parametrize("described", [False, True], ids=["init", "abstract_state"])
@pytest.mark.parametrize("kind", FORGETFUL)
def test_jit_step_tells_what_a_transformation_forgets(kind, described):
    """The arguments say how they are divided, so that nothing is gathered."""
    mesh, tx = mesh_of(), FORGETFUL[kind]()
    params = divided(reference.arrays(jnp.float32, 0, SHAPES), mesh)
    state = tx.init(params)
    moments = lambda state: [x for x in jax.tree.leaves(state) if x.ndim]
    _, wanted = stepping(tx)(params, state, params)
    where, wanted = specs_of(moments(wanted)), jax.device_get(wanted)
    given = po.abstract_state(tx, params) if described else state
    step = po.jit_step(stepping(tx), params, given, params, donate_argnums=1)
    assert step.compiled is not None
    assert not po.memory_report(step.compiled).unsharded
    _, found = step(params, state, params)
    assert specs_of(moments(found)) == where
    reference.assert_equal(found, wanted)


def test_a_train_state_of_what_forgets():
    """Also with its first count of steps, which is a Python number."""
    params = divided(reference.arrays(jnp.float32, 0, SHAPES), mesh_of())
    state = TrainState.create(apply_fn=None, params=params, tx=injected(True))
    step = po.jit_step(
        lambda s, grads: s.apply_gradients(grads=grads), donate_argnums=0
    )
    gradients = jax.tree.map(jnp.copy, params)
    assert not po.memory_report(step.compile(state, gradients)).unsharded
    assert step(state, gradients).step == 1


def test_a_step_on_two_meshes():
    """The arguments of each program tell, and not what was there before."""
    mesh, other = mesh_of(), jax.make_mesh((4,), ("z",), (AxisType.Auto,))
    params, tx = {"w": jnp.ones((64, 64))}, injected(True)
    step = po.jit_step(stepping(tx), donate_argnums=1)
    for place in (NamedSharding(mesh, P("x")), NamedSharding(other, P(None, "z"))):
        given = jax.device_put(params, place)
        state = tx.init(given)
        compiled = step.compile(given, state, given)
        assert not po.memory_report(compiled).unsharded
        assert "all-gather" not in compiled.as_text()


def test_a_jit_of_a_transformation_that_forgets():
    """It warns of what was divided, once, and not where it knows."""
    mesh = mesh_of()
    params = divided(reference.arrays(jnp.float32, 0, SHAPES), mesh)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    for tx in (injected(False), injected(True, shardings)):
        compiled = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
        assert not po.memory_report(compiled).unsharded
    tx = injected(True)
    for state in (tx.init(params), po.abstract_state(tx, params)):
        po.abstract_state(tx, params)
        with pytest.warns(UserWarning, match="around paged") as told:
            jax.jit(lambda *args: tx.update(*args)).lower(params, state, params)
        jax.jit(lambda *args: tx.update(*args)).lower(params, state, params)
        assert len(told) == 1


@pytest.mark.parametrize("kind", ["one device", "whole", "explicit", "by leaf"])
def test_what_is_not_divided_is_not_told_of(kind):
    """Nor what types tell, nor where a page is a whole leaf anyway."""
    types = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,)
    mesh = jax.make_mesh((1 if kind == "one device" else 8,), ("x",), types)
    place = NamedSharding(mesh, P(None) if kind == "whole" else P("x"))
    params = {f"of {kind}": jax.device_put(jnp.ones((64, 128)), place)}
    build = po.paged_lamb if kind == "by leaf" else po.paged_adamw
    tx = optax.inject_hyperparams(lambda rate: build(rate, **PAGED))(1e-2)
    po.abstract_state(tx, params)
    jax.jit(tx.update).lower(params, tx.init(params), params)


def test_one_device_does_not_fall_back():
    params = {"w": jnp.ones((512, 512))}
    tx = po.paged_adamw(1e-2)
    compiled = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
    assert not po.memory_report(compiled).unsharded


def test_rebalance_within_the_budget_of_each_device():
    """An eighth of two parameters' moments has room, and half of one has not."""
    mesh = mesh_of()
    place = NamedSharding(mesh, P(("x", "y")))
    params = {name: jax.device_put(jnp.ones((64, 64)), place) for name in "abc"}
    size = 2 * 4 * 64 * 64 // 8
    for room, wanted in [(2, "bc"), (1.9, "c"), (0.5, "")]:
        tx = po.paged_adamw(1e-3, min_paged_size=0, device_budget=int(room * size))
        state = tx.init(params)
        state = po.rebalance(tx, state, ["a", "b", "c"])
        found = [name for name in "abc" if po.is_device_resident(state, name)]
        assert found == list(wanted)


def test_bad_shardings():
    mesh = mesh_of()
    params = {"w": jnp.ones((6, 10)), "b": jnp.ones(3)}
    whole = NamedSharding(mesh, P())
    for shardings, words in [
        ({"w": whole}, r"nothing for parameter \['b'\]"),
        ({"w": NamedSharding(mesh, P("x")), "b": whole}, r"\['w'\] of shape \(6, 10\)"),
        ({"w": NamedSharding(mesh, P(None, None, "x")), "b": whole}, r"\['w'\]"),
        (P("x"), "no mesh around"),
    ]:
        with pytest.raises(ValueError, match=words):
            po.paged_adamw(1e-2, shardings=shardings).init(params)


@pytest.mark.parametrize("asked", [False, True], ids=["out_shardings", "shardings"])
def test_init_in_a_jit(asked):
    """The same state as outside, each shard on its device's host."""
    mesh = mesh_of()
    params = divided(reference.arrays(jnp.float32, 0, SHAPES), mesh)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    eager = po.paged_adamw(1e-2, **PAGED).init(params)
    tx = po.paged_adamw(1e-2, shardings=shardings if asked else None, **PAGED)
    out = jax.tree.map(lambda x: x.sharding, eager)
    state = jax.jit(tx.init, out_shardings=None if asked else out)(params)
    reference.assert_equal(state, eager)
    # `bias` and the step count, which stay, are divided as XLA likes.
    hosted = lambda tree: [spec for spec in specs_of(tree) if "pinned_host" in spec]
    assert hosted(state) == hosted(eager)


@pytest.mark.parametrize("model", ["llama2-7b", "llama3-70b", "llama3-405b"])
def test_scaling_plan(model, recwarn):
    """An eighth of the bytes a device, and of the seconds but for small shards."""
    params, tx = po.model_shapes(model), po.paged_adamw(1e-4, master_dtype="float32")
    count = sum(x.size for x in jax.tree.leaves(params))
    plans = {
        devices: po.plan(tx, params, mesh=jax.sharding.AbstractMesh((devices,), "x"))
        for devices in (8, 64, 1024)
    }
    for devices, plan in plans.items():
        total = (plan.host_bytes + plan.device_bytes) * devices
        assert 12 * count <= total <= 12.02 * count
        assert plan.bytes_per_host == 8 * plan.host_bytes
        assert f"each of {devices} devices" in str(plan)
    assert plans[8].link_bytes / plans[1024].link_bytes == pytest.approx(128, 0.01)
    assert 64 < plans[8].link_seconds / plans[1024].link_seconds < 129
