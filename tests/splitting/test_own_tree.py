"""Layer by layer, any optimizer has Optax's numbers on the loss's own tree."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import paged_optax as po
from helpers.reference import kinds

LENGTH, WIDTH, INNER, VOCABULARY, STEPS = 4, 72, 96, 50, 4
PAGED = {"page_size": 4096, "min_paged_size": 0}


def normal(number, *shape):
    key = jax.random.fold_in(jax.random.key(0), number)
    return 0.1 * jax.random.normal(key, shape)


def params_of():
    layers = [
        {
            "up": normal(10 * i + 2, WIDTH, INNER),
            "down": normal(10 * i + 3, INNER, WIDTH),
            "norm": jnp.ones(WIDTH),
            "gain": jnp.float32(0.9),
        }
        for i in range(LENGTH)
    ]
    return {
        "embed": normal(1, VOCABULARY, WIDTH),
        "norm": jnp.ones(WIDTH),
        "layers": layers,
    }


PARAMS = params_of()
BATCHES = [
    jax.random.randint(jax.random.fold_in(jax.random.key(1), i), (3, 17), 0, VOCABULARY)
    for i in range(STEPS)
]


def scaled(x, gain):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def loss(params, batch):
    x = params["embed"][batch[:, :-1]]
    for layer in params["layers"]:
        y = jax.nn.gelu(scaled(x, layer["norm"]) @ layer["up"]) @ layer["down"]
        x = x + layer["gain"] * y
    logits = scaled(x, params["norm"]) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def by_path(choose):
    """A tree of the loss's own structure, by the layer's number; None: of none."""
    layer_of = lambda path: path[1].idx if path[0].key == "layers" else None
    return jax.tree_util.tree_map_with_path(
        lambda path, x: choose(layer_of(path), x), PARAMS
    )


DEPTH = by_path(lambda layer, x: 1.0 if layer is None else 0.8 ** (LENGTH - layer))
by_shape = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
by_size = functools.partial(jax.tree.map, lambda x: x.size > 100)
by_depth = optax.stateless(lambda u, p: jax.tree.map(lambda x, r: r * x, u, DEPTH))


def labelled(tx):
    labels = by_path(lambda layer, x: "frozen" if layer in (0, 1) else "trained")
    return optax.partition({"trained": tx, "frozen": optax.set_to_zero()}, labels)


#: As Optax and we make them: plain, paged, and in eight bits where that is coded.
TRANSFORMATIONS = {
    "adamw": lambda: optax.adamw(1e-2),
    "paged": lambda: po.paged_adamw(1e-2, **PAGED),
    "eight bits": lambda: po.paged_adamw_8bit(1e-2, **PAGED),
    "half of the budget": lambda: po.paged_adamw(1e-2, **PAGED, device_budget="300KiB"),
    "steps by parameter": lambda: po.paged_adamw(
        1e-2, **PAGED, per_parameter_steps=True
    ),
    "mask by shape": lambda: po.paged_adamw_8bit(
        1e-2, weight_decay=0.5, mask=by_shape, **PAGED
    ),
    "mask by size": lambda: optax.adamw(1e-2, weight_decay=0.5, mask=by_size),
    "masked by layer": lambda: optax.masked(
        optax.adamw(1e-2), by_path(lambda layer, x: layer in (None, 1, 3))
    ),
    "labels by shape": lambda: optax.partition(
        {True: po.paged_adamw(1e-2, **PAGED), False: optax.sgd(1e-2)}, by_shape
    ),
    "frozen lower layers": lambda: labelled(po.paged_adamw_8bit(1e-2, **PAGED)),
    "frozen by prefix": lambda: optax.masked(
        po.paged_adamw_8bit(1e-2, **PAGED),
        {"embed": False, "norm": True, "layers": [i > 1 for i in range(LENGTH)]},
    ),
    "no layer by prefix": lambda: optax.masked(
        po.paged_adamw(1e-2, **PAGED), {"embed": True, "norm": True, "layers": False}
    ),
    "muon": lambda: optax.contrib.muon(1e-2),
    "paged muon": lambda: po.paged_muon(1e-2, **PAGED),
    "lamb": lambda: optax.lamb(1e-2),
    "lamb, eight bits": lambda: po.paged_lamb(1e-2, codec="dynamic_int8", **PAGED),
    "lars": lambda: po.paged_lars(1e-1, **PAGED),
    "adafactor": lambda: po.paged_adafactor(1e-2, min_dim_size_to_factor=16, **PAGED),
    "adaptive clip": lambda: optax.chain(
        optax.adaptive_grad_clip(0.1), optax.lion(1e-3)
    ),
    "block rms": lambda: optax.chain(optax.clip_by_block_rms(1e-3), optax.sgd(1.0)),
    "centralized": lambda: optax.chain(
        optax.centralize(), po.paged_lion(1e-3, **PAGED)
    ),
    "rate by depth": lambda: optax.chain(po.paged_adamw_8bit(1e-2, **PAGED), by_depth),
    "rate by depth inside": lambda: po.paged(
        optax.chain(optax.scale_by_adam(), by_depth, optax.scale(-1e-2)), **PAGED
    ),
    "schedule": lambda: po.paged_adamw(optax.linear_schedule(1e-2, 0.0, 5), **PAGED),
    "injected": lambda: optax.inject_hyperparams(
        po.paged_adamw, static_args=tuple(PAGED)
    )(1e-2, **PAGED),
    "guarded": lambda: po.apply_if_finite(po.paged_adamw(1e-2, **PAGED), 3),
}
SLOW = {"half of the budget", "steps by parameter", "masked by layer", "schedule"}
SLOW |= {"labels by shape", "centralized", "block rms", "injected", "lars"}
SLOW |= {"adaptive clip", "lamb", "paged muon", "rate by depth", "mask by shape"}
NAMES = [
    pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else [])
    for x in TRANSFORMATIONS
]


def ordinary(tx):
    @jax.jit
    def step(params, state, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def values(tree):
    return [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(tree)]


def farthest(ours, theirs):
    pairs = zip(values(ours), values(theirs), strict=True)
    return max((float(np.abs(x - y).max()) for x, y in pairs if x.size), default=0.0)


@pytest.fixture(scope="module")
def model():
    return po.split_layers(loss, PARAMS, BATCHES[0])


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_optaxs_on_the_own_tree(model, name):
    tx = TRANSFORMATIONS[name]()
    params, state = PARAMS, tx.init(PARAMS)
    stacked = model.stack(PARAMS)
    moments, workspace = model.init(tx, stacked), model.workspace(stacked)
    assert jax.tree.structure(model.unstack_state(moments)) == jax.tree.structure(state)
    assert farthest(model.unstack_state(moments), state) == 0
    placed = kinds(moments)
    how = {"max_norm": 1e9} if name == "guarded" else {}
    step, plain = jax.jit(po.layerwise_step(model, tx, **how)), ordinary(tx)
    for batch in BATCHES:
        params, state, value = plain(params, state, batch)
        stacked, moments, workspace, output = step(stacked, moments, workspace, batch)
        assert abs(float(output.loss - value)) < 1e-5
    assert kinds(moments) == placed
    # A code may round the other way where a gradient has another last bit.
    coded = any(w in name for w in ("eight", "mask by", "depth", "frozen"))
    assert farthest(model.unstack(stacked), params) < (1e-3 if coded else 5e-6)
    again = model.unstack_state(moments)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    floats = lambda tree: [x for x in jax.tree.leaves(tree) if x.dtype == np.float32]
    assert farthest(floats(again), floats(state)) < 1e-5


def test_a_typed_key_is_a_constant_of_init(model):
    noise = optax.add_noise(0.1, 0.55, jax.random.key(7))
    tx = optax.chain(noise, po.paged_sgd(0.1))
    state = model.unstack_state(model.init(tx, model.stack(PARAMS)))
    chex.assert_trees_all_equal(state, tx.init(PARAMS))


def test_an_optimizer_of_the_losss_value_is_refused(model):
    tx, params = optax.contrib.momo(1.0), model.stack(PARAMS)
    args = params, model.init(tx, params), model.workspace(params), BATCHES[0]
    with pytest.raises(TypeError, match="'value'") as error:
        jax.eval_shape(po.layerwise_step(model, tx), *args)
    assert "layerwise_step passes tx.update no value" in error.value.__notes__[0]


@pytest.mark.parametrize(
    "name", ["eight bits", "frozen lower layers", "frozen by prefix", "paged muon"]
)
def test_a_state_goes_from_one_step_into_the_other(model, name):
    """The same bytes, in the middle of training, both ways."""
    tx = TRANSFORMATIONS[name]()
    plain = ordinary(tx)
    params, state, _ = plain(PARAMS, tx.init(PARAMS), BATCHES[0])
    moments = model.stack_state(state)
    like = model.init(tx, model.stack(params))
    assert jax.tree.structure(moments) == jax.tree.structure(like)
    assert kinds(moments) == kinds(like)
    assert farthest(model.unstack_state(moments), state) == 0
    traced = jax.jit(model.stack_state)(state)
    assert kinds(traced) == kinds(moments)
    chex.assert_trees_all_equal(traced, moments)
    stacked = model.stack(params)
    step = jax.jit(po.layerwise_step(model, tx))
    stacked, moments, *_ = step(stacked, moments, model.workspace(stacked), BATCHES[1])
    params, state, _ = plain(params, state, BATCHES[1])
    params_then = model.unstack(stacked), model.unstack_state(moments)
    ours, *_ = plain(*params_then, BATCHES[2])
    theirs, *_ = plain(params, state, BATCHES[2])
    assert farthest(ours, theirs) < 1e-3


def test_shapes_say_where_the_state_is_going_to_be(model):
    tx = po.paged_adamw_8bit(1e-2, **PAGED)
    stacked = model.stack(PARAMS)
    shapes = model.init(tx, model.stack(jax.eval_shape(lambda: PARAMS)))
    made = model.init(tx, stacked)
    assert jax.tree.structure(shapes) == jax.tree.structure(made)
    assert kinds(shapes) == kinds(made)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, made)


@pytest.mark.parametrize("stacked", [True, False])
def test_another_state_is_refused(model, stacked):
    """A state of the stacks in codes, or of the loss's own tree."""
    params = model.stack(PARAMS)
    tx, says = po.paged_adamw(1e-3), r"^state is .* model\.stack_state\(state\)"
    if stacked:
        tx, says = po.paged_adamw_8bit(1e-2, **PAGED), r"model\.init\(tx, params\)"
    args = params, tx.init(params if stacked else PARAMS), model.workspace(params)
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(po.layerwise_step(model, tx), *args, BATCHES[0])


def test_a_state_of_another_mask_is_refused_and_placed(model):
    """Its layers would lose their moments when it is unstacked."""
    stacked, tx = model.stack(PARAMS), TRANSFORMATIONS["frozen by prefix"]()
    mask = {"embed": False, "norm": True, "layers": [False] + [True] * (LENGTH - 1)}
    other = optax.masked(po.paged_adamw_8bit(1e-2, **PAGED), mask)
    state = model.init(tx, stacked)
    args = stacked, state, model.workspace(stacked), BATCHES[0]
    with pytest.raises(ValueError, match=r"another mask in tx, by model\.place_state"):
        jax.eval_shape(po.layerwise_step(model, other), *args)
    placed = model.place_state(other, state, stacked)
    wanted = model.init(other, stacked)
    assert jax.tree.structure(placed) == jax.tree.structure(wanted)
    with pytest.raises(ValueError, match="the state has no moments in a tree"):
        model.stack_state(state)


@pytest.mark.parametrize("key", ["layers/*", "*/up", "embed"])
def test_a_codec_by_path(model, key):
    tx = po.paged_adamw(1e-2, eps=1e-3, codec={key: "dynamic_int8"}, **PAGED)
    stacked = model.stack(PARAMS)
    state, workspace = model.init(tx, stacked), model.workspace(stacked)
    step = po.layerwise_step(model, tx)
    stacked, state, *_ = step(stacked, state, workspace, BATCHES[0])
    gradients = jax.grad(loss)(PARAMS, BATCHES[0])
    updates, expected = tx.update(gradients, tx.init(PARAMS), PARAMS)
    expected = optax.apply_updates(PARAMS, updates), expected
    found = model.unstack(stacked), model.unstack_state(state)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    chex.assert_trees_all_close(found[0], expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", ["Auto", "Explicit"])
def test_a_state_on_devices_comes_back_there(model, axis):
    types = (getattr(jax.sharding.AxisType, axis),)
    mesh = jax.make_mesh((4,), ("d",), types, devices=jax.devices()[:4])
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    put = lambda x: jax.device_put(x, rows) if x.ndim == 2 else x
    layers = jax.tree.map(put, PARAMS["layers"])
    state = po.paged_adamw(1e-2, **PAGED).init(PARAMS | {"layers": layers})
    found = model.unstack_state(model.stack_state(state))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("codec", ["bfloat16", "dynamic_int8"])
def test_a_codec_of_one_layer_is_refused(model, codec):
    tx = po.paged_adamw(1e-2, codec={"layers/0/*": codec}, **PAGED)
    stacked, state = model.stack(PARAMS), tx.init(PARAMS)
    for make in (lambda: model.init(tx, stacked), lambda: model.stack_state(state)):
        with pytest.raises(ValueError, match="layer 1 is stored as .* of layer 0 as"):
            make()


def test_coefficients_in_host_memory():
    """Muon's are paged too, and the layers' small matrices are updated together."""
    layers = [{"w": normal(i, 5, 5)} for i in range(3)]

    def loss(params, batch):
        for layer in params["layers"]:
            batch = batch + jnp.tanh(batch @ layer["w"])
        return jnp.mean(batch**2)

    params, batch = {"layers": layers}, normal(9, 4, 5)
    tx = po.paged(optax.contrib.muon(1e-2), **PAGED)
    model = po.split_layers(loss, params, batch)
    stacks = model.stack(params)
    args = stacks, model.init(tx, stacks), model.workspace(stacks), batch
    stacks, *_ = jax.jit(po.layerwise_step(model, tx))(*args)
    updates, _ = tx.update(jax.grad(loss)(params, batch), tx.init(params), params)
    assert farthest(model.unstack(stacks), optax.apply_updates(params, updates)) < 2e-6
