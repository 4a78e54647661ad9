"""A step that nobody holds is gone, with its program and what it closes over."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import paged_optax as po

SETTINGS = {"page_size": 4096, "min_paged_size": 0}


def ordinary(tx, params, constant, _):
    state = tx.init(params)

    def step(params, state, unused):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state, constant.sum()

    step = po.jit_step(step, params, state, jnp.ones(3), donate_argnums=(0, 1))
    params, state, _ = step(params, state, jnp.ones(3))
    step(params, state, jnp.ones(3))


def layerwise(tx, params, constant, settings):
    model = po.LayerwiseModel(
        lambda rest, batch: (batch, None),
        lambda weights, x, context, i: (x + x @ weights["kernel"], None),
        lambda rest, x, kept, batch: jnp.mean((x - constant[:64]) ** 2),
    )
    step = po.layerwise_step(model, tx)
    params = {"layers": {"kernel": params["w"].reshape(4, 64, 64)}}
    workspace = po.GradientWorkspace.allocate(params["layers"], **settings)
    args = params, tx.init(params), workspace, jnp.ones((8, 64))
    compiled = po.jit_step(step, *args, donate_argnums=(0, 1, 2))
    *args, _ = compiled(*args)
    compiled(*args, jnp.ones((8, 64)))


@pytest.mark.quick("None", "layerwise")
@pytest.mark.parametrize("codec", [None, "dynamic_int8"])
@pytest.mark.parametrize(
    ("train", "settings"),
    [
        (ordinary, {}),
        (ordinary, {"divided": True}),
        (layerwise, {}),
        (layerwise, {"host_dtype": "float32"}),
    ],
    ids=["ordinary", "divided", "layerwise", "gradients on the host"],
)
def test_what_a_step_closed_over_is_freed(train, settings, codec):
    """Frozen weights of a notebook's cell, which is run again.

    jax 0.11.2 to 0.12.0.1 keep a program for ever if its unused arguments stay in it.
    """
    settings = dict(settings)
    divided = settings.pop("divided", False)

    def run():
        params = {"w": jnp.ones((256, 64))}
        if divided:
            mesh = jax.make_mesh((8,), ("data",))
            params = jax.device_put(params, NamedSharding(mesh, PartitionSpec("data")))
        constant = jnp.arange(70_001, dtype=jnp.float32)
        tx = po.paged_adamw(0.1, codec=codec, **SETTINGS)
        train(tx, params, constant, settings)
        return weakref.ref(constant), weakref.ref(tx.update.args[0])

    programs = []
    for _ in range(3):
        references = run()
        gc.collect()
        assert [x() for x in references] == [None, None]
        programs.append(len(jax.devices()[0].client.live_executables()))
    assert programs[1] == programs[2]


def test_a_donated_argument_that_nothing_reads_gives_its_buffer():
    """Such as a state that the step begins anew, also within a function of its own."""
    double = lambda p, old: 2 * p
    for function in double, jax.jit(double):
        old, params = jnp.ones((256, 256)), jnp.full((256, 256), 2.0)
        step = po.jit_step(function, params, old, donate_argnums=(1,))
        found = step(params, old)
        np.testing.assert_array_equal(found, np.full((256, 256), 4.0))
        assert old.is_deleted()
        assert not params.is_deleted()
    with pytest.raises(po.DonationError, match="argument 1"):
        po.jit_step(lambda p, old: p.sum(), params, params, donate_argnums=(1,))


def test_a_buffer_that_is_carried_and_not_read(compilations):
    """JAX leaves it out of a loop, as a layerwise step's accumulators. One program."""

    def run():
        constant = jnp.arange(70_001, dtype=jnp.float32)

        def step(params, old):
            turn = lambda _, c: (c[0] + constant.sum(), c[1] * 2)
            return jax.lax.fori_loop(0, 3, turn, (params, old))[0], 2 * params

        args = jnp.ones((256, 256)), jnp.ones((256, 256))
        jax.block_until_ready((constant, args))
        compilations.clear()
        step = po.jit_step(step, *args, donate_argnums=(0, 1))
        assert len(compilations) == 1
        step(*args)
        assert [x.is_deleted() for x in args] == [True, True]
        return weakref.ref(constant)

    reference = run()
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("old", ["array", "numpy", "shape"])
def test_on_a_mesh_a_donated_argument_that_nothing_reads(old):
    """And that is on none of its devices yet."""
    mesh = jax.make_mesh((8,), ("data",))
    place = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.device_put(jnp.ones((256, 512)), place)
    given = {
        "array": jnp.zeros((256, 512)),
        "numpy": np.zeros((256, 512), np.float32),
        "shape": jax.ShapeDtypeStruct((256, 512), jnp.float32),
    }[old]
    step = po.jit_step(lambda old, x: (x + 1, 2 * x), given, x, donate_argnums=0)
    found, _ = step(jnp.zeros((256, 512)), x)
    np.testing.assert_array_equal(found, np.full((256, 512), 2.0))


def test_an_argument_that_nothing_reads_may_be_anywhere():
    """On one device and on several, committed or not."""
    mesh = jax.make_mesh((8,), ("data",))
    for spec in (PartitionSpec("data"), PartitionSpec()):
        place = NamedSharding(mesh, spec)
        params = jax.device_put(jnp.ones((64, 64)), place)
        for unused in (3, jnp.ones(5), jax.device_put(jnp.ones(8), place), None):
            step = po.jit_step(
                lambda p, unused: 2 * p, params, unused, donate_argnums=(0,)
            )
            found = step(jax.device_put(jnp.ones((64, 64)), place), unused)
            np.testing.assert_array_equal(found, np.full((64, 64), 2.0))
            assert found.sharding.is_equivalent_to(place, 2)


@pytest.mark.parametrize("spec", [None, PartitionSpec("data")], ids=["one", "several"])
def test_an_argument_that_nothing_reads_may_be_on_another_device(spec):
    """As under `jax.jit`, though a donated buffer that nothing reads is kept."""
    place = jax.devices()[0]
    if spec is not None:
        place = NamedSharding(jax.make_mesh((8,), ("data",)), spec)
    elsewhere = jax.device_put(jnp.ones(5), jax.devices()[1])
    params, old = (jax.device_put(jnp.ones((8, 8)), place) for _ in range(2))
    step = po.jit_step(lambda p, old, unused: (2 * p, p + 1), donate_argnums=(0, 1))
    np.testing.assert_array_equal(step(params, old, elsewhere)[0], 2 * np.ones((8, 8)))
    assert old.is_deleted()


@pytest.mark.parametrize(
    "make",
    [
        lambda: jnp.arange(9, dtype=jnp.int4),
        lambda: jnp.ones(5, jnp.float8_e4m3fn),
        lambda: jnp.ones((2, 3), jnp.complex64),
        lambda: jax.random.key(0),
        lambda: jnp.array(True),
        lambda: jax.device_put(jnp.ones((8, 128)), jax.memory.Space.Host),
    ],
    ids=["int4", "float8", "complex", "key", "flag", "host"],
)
def test_what_nothing_reads_may_be_of_any_kind(make):
    """A barrier takes them all, and their buffers are reused."""
    old, new, params = make(), make(), jnp.ones((4, 4))
    step = lambda params, old, new: (params + 1, new)
    step = po.jit_step(step, params, old, new, donate_argnums=(0, 1))
    _, found = step(params, old, new)
    assert old.is_deleted()
    assert found.dtype == new.dtype
    assert found.sharding.memory_kind == new.sharding.memory_kind
