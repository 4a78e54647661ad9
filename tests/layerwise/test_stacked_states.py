"""States of stacked layers: initialized, converted, restored and placed."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import paged_optax as po
from helpers.checkpoints import standard

LAYERS, WIDTH = 3, 64
PAGED = {"page_size": 4096, "min_paged_size": 0}


def loss(params, batch):
    x = params["embed"][batch]
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"] * layer["gain"]
    return jnp.mean((x @ params["embed"].T) ** 2)


def params_of(layers=LAYERS, dtype=jnp.float32):
    matrix = lambda n, *shape: (
        0.1 * jax.random.normal(jax.random.key(n), shape)
    ).astype(dtype)
    layer = lambda n: {
        "up": matrix(2 * n, WIDTH, 128),
        "down": matrix(2 * n + 1, 128, WIDTH),
        "gain": jnp.ones(WIDTH, dtype),
    }
    return {"embed": matrix(99, 32, WIDTH), "layers": [layer(n) for n in range(layers)]}


PARAMS, BATCH = params_of(), jnp.arange(16)
MODEL = po.split_layers(loss, PARAMS, BATCH)
by_layer = [
    jax.tree.map(lambda _, n=n: n > 0, x) for n, x in enumerate(PARAMS["layers"])
]

TRANSFORMATIONS = {
    "muon": lambda: po.paged_muon(1e-2, **PAGED),
    "eight bits": lambda: po.paged_adamw_8bit(1e-2, **PAGED),
    "adafactor": lambda: po.paged_adafactor(1e-2, min_dim_size_to_factor=16, **PAGED),
    "partition": lambda: optax.partition(
        {True: po.paged_adamw(1e-2, **PAGED), False: optax.sgd(1e-2, 0.9)},
        lambda tree: jax.tree.map(lambda x: x.ndim == 2, tree),
    ),
    "masked": lambda: optax.masked(
        po.paged_adamw_8bit(1e-2, **PAGED), {"embed": True, "layers": by_layer}
    ),
    "masked by prefix": lambda: optax.masked(
        po.paged_adamw_8bit(1e-2, **PAGED),
        {"embed": True, "layers": [False] + [True] * 2},
    ),
    "masters": lambda: po.paged_adamw(1e-2, master_dtype="float32", **PAGED),
}


def equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.dtype == y.dtype and x.sharding.memory_kind == y.sharding.memory_kind
        assert jax.typeof(x).memory_space == jax.typeof(y).memory_space
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def stepped(tx, params):
    """Stacked parameters and their state after one step."""
    stacked = MODEL.stack(params)
    workspace = MODEL.workspace(stacked)
    step = jax.jit(po.layerwise_step(MODEL, tx))
    stacked, state, *_ = step(stacked, MODEL.init(tx, stacked), workspace, BATCH)
    return stacked, state


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_stacked_state_is_restored(name, tmp_path):
    dtype = jnp.bfloat16 if name == "masters" else jnp.float32
    tx = TRANSFORMATIONS[name]()
    stacked, state = stepped(tx, params_of(dtype=dtype))
    shapes = jax.eval_shape(lambda: stacked)
    target = MODEL.init(tx, shapes)
    equal(standard(tmp_path, state, target), state)
    pickled = pickle.loads(pickle.dumps(jax.device_get(state)))
    equal(MODEL.place_state(tx, pickled, shapes), state)
    placed = MODEL.place_state(tx, state, stacked)
    assert jax.tree.all(jax.tree.map(lambda x, y: x is y, placed, state))


@pytest.mark.parametrize("codec", [None, "dynamic_int8"])
@pytest.mark.parametrize("axis", ["Auto", "Explicit"])
def test_a_state_of_several_devices_is_restored(codec, axis, tmp_path):
    types = (getattr(jax.sharding.AxisType, axis),)
    mesh = jax.make_mesh((2,), ("d",), types, devices=jax.devices()[:2])
    place = lambda x: jax.device_put(
        x, NamedSharding(mesh, PartitionSpec(*("d",) * (x.ndim == 2)))
    )
    params = jax.tree.map(place, PARAMS)
    tx = po.paged_adamw(1e-2, codec=codec, **PAGED)
    stacked = MODEL.stack(params)
    state = MODEL.init(tx, stacked)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), stacked
    )
    target = MODEL.init(tx, shapes)
    equal(standard(tmp_path, state, target), state)
    equal(MODEL.place_state(tx, jax.device_get(state), stacked), state)


def test_a_state_of_the_models_own_stacks_is_placed():
    def scanned(params, batch):
        turn = lambda x, w: (x + jnp.tanh(x @ w), None)
        return jnp.mean(
            jax.lax.scan(turn, params["embed"][batch], params["up"])[0] ** 2
        )

    params = {"embed": jnp.eye(32, WIDTH), "up": jnp.full((3, WIDTH, WIDTH), 0.1)}
    model, tx = po.split_layers(scanned, params, BATCH), po.paged_adamw(1e-2, **PAGED)
    stacked = model.stack(params)
    state = model.init(tx, stacked)
    equal(model.place_state(tx, jax.device_get(state), stacked), state)
    assert jax.tree.structure(model.init(tx, jax.eval_shape(lambda: stacked)))


def total(number):
    """A transformation whose state is computed from all parameters."""
    init = lambda params: {"total": number(jax.tree.leaves(params))}
    return optax.GradientTransformation(init, lambda u, state, params=None: (u, state))


def test_a_state_that_depends_on_all_sizes():
    tx = total(lambda leaves: jnp.float32(sum(x.size for x in leaves)))
    tx = optax.chain(tx, po.paged_adamw(1e-3, **PAGED))
    found = MODEL.unstack_state(MODEL.init(tx, MODEL.stack(PARAMS)))
    both = map(jax.tree.leaves, (found, tx.init(PARAMS)))
    jax.tree.map(np.testing.assert_array_equal, *both)


@pytest.mark.parametrize(
    ("tx", "words"),
    [
        (
            total(lambda leaves: sum(map(jnp.sum, leaves))),
            r"`init` computes state\['total'\] from parameters of several layers",
        ),
        (
            po.paged(
                optax.GradientTransformation(
                    lambda params: jax.tree.map(
                        lambda x: x + params["embed"].sum(), params
                    ),
                    lambda updates, state, params=None: (updates, state),
                ),
                **PAGED,
            ),
            "`init` computes state",
        ),
        (optax.flatten(optax.adam(1e-3)), "optax.flatten"),
    ],
    ids=["sum", "embed", "flatten"],
)
def test_an_init_that_combines_layers_is_refused(tx, words):
    with pytest.raises(ValueError, match=words):
        MODEL.init(tx, MODEL.stack(PARAMS))


def test_an_update_by_another_layer_is_refused():
    first = lambda tree: tree["layers"][0]["gain"].sum()
    tx = optax.stateless(
        lambda u, p: jax.tree.map(lambda x: jnp.ones_like(x) * first(u), u)
    )
    stacked = MODEL.stack(PARAMS)
    step = po.layerwise_step(MODEL, tx)
    with pytest.raises(ValueError, match="update.* from parameters of several layers"):
        step(stacked, MODEL.init(tx, stacked), MODEL.workspace(stacked), BATCH)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.up(x))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(32, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def net_loss(net, batch):
    return jnp.mean(net(batch) ** 2)


@pytest.mark.parametrize("name", ["adamw", "eight bits", "masked", "muon"])
def test_a_state_continues_in_an_nnx_optimizer(name):
    """`unstack_state` has Optax's structure, with Flax's variables."""
    matrices = lambda tree: jax.tree.map(lambda x: x.ndim == 2, tree)
    tx = {
        "adamw": lambda: po.paged_adamw(1e-2, **PAGED),
        "eight bits": lambda: po.paged_adamw_8bit(1e-2, **PAGED),
        "masked": lambda: optax.masked(po.paged_adamw(1e-2, **PAGED), matrices),
        "muon": lambda: po.paged_muon(1e-2, **PAGED),
    }[name]()
    net = Net()
    graph, params = nnx.split(net)
    model = po.split_layers(
        lambda params, batch: net_loss(nnx.merge(graph, params), batch), params, BATCH
    )
    stacked = model.stack(params)
    state, workspace = model.init(tx, stacked), model.workspace(stacked)
    step = jax.jit(po.layerwise_step(model, tx))
    stacked, state, *_ = step(stacked, state, workspace, BATCH)
    state = model.unstack_state(state)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    nnx.update(net, model.unstack(stacked))
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
    structure = jax.tree.structure(optimizer.opt_state)
    optimizer.opt_state = nnx.data(structure.unflatten(jax.tree.leaves(state)))
    optimizer.update(net, nnx.grad(net_loss)(net, BATCH))
    assert optimizer.opt_state
    # The same steps in Optax.
    _, expected = nnx.split(Net())
    moments = tx.init(expected)
    for _ in range(2):
        gradients = jax.grad(lambda p: net_loss(nnx.merge(graph, p), BATCH))(expected)
        updates, moments = tx.update(gradients, moments, expected)
        expected = optax.apply_updates(expected, updates)
    atol = 1e-3 if name == "eight bits" else 1e-5
    close = functools.partial(np.testing.assert_allclose, atol=atol)
    jax.tree.map(close, *map(jax.tree.leaves, (nnx.state(net, nnx.Param), expected)))
