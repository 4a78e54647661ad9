"""`jit_step` with other arguments: it compiles again where `jax.jit` does.

Each further program is checked as the first one was, and all of them are kept.
"""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import paged_optax as po
from helpers.reference import SMALL_PAGES, assert_equal, kinds
from helpers.small import ALL_PAGED, DEVICE, TX, small


def loss(params, batch):
    return jnp.mean((batch @ params["a"]) ** 2) + jnp.mean(params["b"] ** 2)


def trained(tx):
    """A step, and the list that grows by one whenever it is traced."""
    traces = []

    def step(params, state, batch, rate=1.0):
        traces.append(None)
        gradients = jax.grad(loss)(params, batch)
        gradients = jax.tree.map(lambda g: rate * g, gradients)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step, traces


def batches(lengths):
    return [
        jax.random.normal(jax.random.key(i), (length, 64))
        for i, length in enumerate(lengths)
    ]


def put(devices):
    if devices == 1:
        return lambda tree: tree
    place = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), PartitionSpec("x"))
    return lambda tree: jax.device_put(tree, place)


@pytest.mark.parametrize("donated", [(), (0, 1)], ids=str)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.filterwarnings("ignore:nothing is donated")
def test_a_last_batch_of_another_length(devices, donated):
    """Three epochs that end with a shorter batch: two programs, and their numbers."""
    place, tx = put(devices), po.paged_adam(1e-2, **SMALL_PAGES)
    step, traces = trained(tx)
    compiled = po.jit_step(step, donate_argnums=donated)

    def run(step, tx):
        params = place(small())
        state = tx.init(params)
        for _ in range(3):
            for batch in batches([8, 8, 6]):
                old = params, state
                params, state = step(params, state, place(batch))
                assert {x.is_deleted() for x in jax.tree.leaves(old) if x.ndim} == (
                    {step is compiled and bool(donated)}
                )
        return params, state

    found = run(compiled, tx)
    assert kinds(found) == [DEVICE] * 2 + ALL_PAGED
    assert len(traces) == 2, "a program for each length, and no more"
    assert len(compiled.compiled.in_avals[0]) == 3
    assert compiled.compiled.in_avals[0][2].shape == (8, 64), "the first one"
    assert_equal(found, run(jax.jit(step), tx))
    optax_adam = optax.adam(1e-2)
    wanted = run(jax.jit(trained(optax_adam)[0]), optax_adam)
    chex.assert_trees_all_close(found, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.filterwarnings("ignore:nothing is donated")
def test_what_jit_tells_apart():
    """Dtypes, Python numbers, structures, names and constants, each a program once."""

    def step(x, scale, extra=None):
        traces.append(None)
        return x * scale, extra

    traces, x = [], jnp.ones(4, jnp.bfloat16)
    calls = [
        lambda f: f(x, 2.0),
        lambda f: f(x, 3.0),
        lambda f: f(x, jnp.bfloat16(2)),
        lambda f: f(x, jnp.float32(2)),
        lambda f: f(x, np.float32(3)),
        lambda f: f(x.astype(jnp.float32), 2.0),
        lambda f: f(x[:3], 2),
        lambda f: f(x, 2.0, {"a": jnp.ones(2)}),
        lambda f: f(x, 2.0, {"b": jnp.ones(2)}),
        lambda f: f(x, 2.0, None),
    ]
    with jax.numpy_dtype_promotion("standard"):
        jitted, compiled = jax.jit(step), po.jit_step(step)
        wanted = [call(jitted) for call in calls]
        by_jit = len(traces)
        for _ in range(2):
            found = [call(compiled) for call in calls]
            chex.assert_trees_all_equal(found, wanted, strict=True)
        assert len(traces) == 2 * by_jit == 16


def test_arrays_elsewhere(compilations):
    """Committed to another device, or divided in another way."""
    compilations.clear()
    step = po.jit_step(lambda x: 2 * x, donate_argnums=0)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    places = [
        jax.devices()[0],
        jax.devices()[1],
        NamedSharding(mesh, PartitionSpec("x")),
        NamedSharding(mesh, PartitionSpec()),
    ]
    made = {}
    for number in range(3):
        for place in places:
            x = jax.device_put(np.arange(4, dtype=np.float32), place)
            y = step(x)
            assert x.is_deleted() and y.sharding.is_equivalent_to(x.sharding, 1)
            np.testing.assert_array_equal(y, 2 * np.arange(4))
            made[number] = len(compilations)
    assert made == {0: 4, 1: 4, 2: 4}


def test_each_program_is_checked():
    """A donated buffer that only the second program loses; the arguments stay."""

    @po.jit_step(donate_argnums=0)
    def step(x):
        return x + 1 if len(x) == 4 else x[:2]

    x, y = step(jnp.ones(4)), jnp.ones(5)
    first = step.compiled
    with pytest.raises(po.DonationError, match="argument 0"):
        step(y)
    assert not y.is_deleted()
    assert step.compiled is first
    np.testing.assert_array_equal(step(x), 3 * np.ones(4))


def test_a_moved_state_is_refused_with_a_new_batch():
    step, _ = trained(TX)
    params, state = small(), TX.init(small())
    step = po.jit_step(step, params, state, batches([8])[0], donate_argnums=(0, 1))
    kind = jax.devices()[0].default_memory().kind
    moved = jax.tree.map(
        lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), state
    )
    for length in (8, 6):
        with pytest.raises(ValueError, match=r"argument 1\[0\].mu\['a'\] belongs in"):
            step(params, moved, batches([length])[0])
    # An array that is free goes wherever the program wants it.
    params, state = step(params, jax.device_get(moved), batches([8])[0])
    assert kinds(state) == ALL_PAGED


@pytest.mark.parametrize(
    "mistaken",
    [
        lambda p, s, b: (s, p, b),
        lambda p, s, b: (p, s[0], b),
        lambda p, s, b: (p | {"a": p["a"][:32]}, s, b),
    ],
    ids=["swapped", "state", "shape"],
)
def test_a_mistake_leaves_the_arguments(mistaken):
    """After an error of its trace, a step runs with the arguments that it had."""
    params, state, batch = small(), TX.init(small()), batches([8])[0]
    step = po.jit_step(trained(TX)[0], params, state, batch, donate_argnums=(0, 1))
    with pytest.raises((TypeError, ValueError)):
        step(*mistaken(params, state, batch))
    params, state = step(params, state, batch)
    assert kinds(state) == ALL_PAGED


def flax_module():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    return model, nnx.split, nnx.merge, lambda model, x: model(x)


def equinox_module():
    model = eqx.nn.Linear(64, 64, key=jax.random.key(0))
    split = lambda model: eqx.partition(model, eqx.is_array)[::-1]
    return model, split, eqx.combine, lambda model, x: jax.vmap(model)(x)


@pytest.mark.parametrize("codec", [None, "dynamic_int8"])
@pytest.mark.parametrize("made", [flax_module, equinox_module])
def test_modules(made, codec):
    """A Flax module and an Equinox one, with their optimizers' states."""
    tx, traces = po.paged_adamw(1e-2, codec=codec, **SMALL_PAGES), []
    model, split, merge, apply = made()

    def step(weights, state, batch):
        traces.append(None)
        rest, params = split(weights)
        loss = lambda params: jnp.mean(apply(merge(rest, params), batch) ** 2)
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return merge(rest, optax.apply_updates(params, updates)), state

    def run(step):
        rest, params = split(model)
        carry = merge(rest, jax.tree.map(jnp.copy, params)), tx.init(params)
        for batch in batches([8, 6, 8, 6]):
            carry = step(*carry, batch)
        return jax.tree.leaves(carry)

    found = run(po.jit_step(step, donate_argnums=(0, 1)))
    assert len(traces) == 2
    assert_equal(found, run(jax.jit(step)))


@pytest.mark.parametrize("deferred", [False, True])
def test_layerwise_steps(deferred):
    """A step layer by layer and its finish, with a shorter batch between."""
    tx = po.paged_adamw(1e-2, **SMALL_PAGES)
    step = po.layerwise_step(
        po.LayerwiseModel(
            lambda rest, batch: (batch, None),
            lambda weights, x, context, i: (x + x @ weights["kernel"], None),
            lambda rest, x, kept, batch: jnp.mean((x @ rest["out"] - 1.0) ** 2),
        ),
        tx,
        max_norm=1.0,
    )

    def run(compiled, finish):
        params = {
            "layers": {"kernel": jnp.full((3, 64, 64), 0.01, jnp.float32)},
            "out": jnp.ones((64, 64)),
        }
        options = {"host_dtype": "float32", "rest": {"out": params["out"]}}
        workspace = po.GradientWorkspace.allocate(
            params["layers"], **(options if deferred else {})
        )
        carry = params, tx.init(params), workspace
        for batch in batches([8, 6, 8]):
            *carry, _ = compiled(*carry, batch)
        return finish(*carry)[:2] if deferred else carry[:2]

    jitted = lambda f: po.jit_step(f, donate_argnums=(0, 1, 2))
    found = run(jitted(step), jitted(step.finish))
    assert_equal(found, run(jax.jit(step), jax.jit(step.finish)))
