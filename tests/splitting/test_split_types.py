"""What `split_layers` traced, and what its model is then given: as by `jax.jit`."""

import gc
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import paged_optax as po

DRAW = np.random.default_rng(0)


def weights(*shape, dtype=jnp.float32):
    return jnp.asarray(0.3 * DRAW.normal(size=shape), dtype)


def params_of(dtype=jnp.float32):
    return {"layers": [{"w": weights(8, 8, dtype=dtype)} for _ in range(3)]}


def run(layers, x):
    for layer in layers:
        x = x + jnp.tanh(x @ layer["w"])
    return x


def loss(params, x):
    x = run(params["layers"], x.astype(params["layers"][0]["w"].dtype))
    return jnp.mean(x.astype(jnp.float32) ** 2)


X = weights(4, 8)


def test_layers_in_another_order_are_refused():
    def either(params, batch):
        back = batch["back"] is not None
        return jnp.mean(run(params["layers"][:: -1 if back else 1], batch["x"]) ** 2)

    params = params_of()
    model = po.split_layers(either, params, {"x": X, "back": None})
    with pytest.raises(ValueError, match=r"loss takes its layers in the order \[2, 1"):
        model.loss(model.stack(params), {"x": X, "back": 1})


@pytest.mark.parametrize("values", [(0.37, np.float32(0.37)), (np.float32(0.37), 0.37)])
def test_weak_types_of_a_batch(values):
    def scaled(params, batch):
        x = run(params["layers"], batch["x"]) * batch["scale"]
        return jnp.mean(x).astype(jnp.float32), x

    params = params_of(jnp.bfloat16)
    first, then = ({"x": X.astype(jnp.bfloat16), "scale": y} for y in values)
    model = po.split_layers(scaled, params, first)
    _, x = jax.jit(model.loss)(model.stack(params), then)
    assert x.dtype == jax.jit(scaled)(params, then)[1].dtype


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_parameters_of_another_dtype(dtypes):
    first, params = map(params_of, dtypes)
    model = po.split_layers(loss, first, X)
    text = str(jax.make_jaxpr(model.loss)(model.stack(params), X))
    assert f"{dtypes[0]}[4,8] = dot" not in text
    value = jax.jit(model.loss)(model.stack(params), X)
    rtol = 1e-6 if dtypes[1] == "float32" else 1e-2
    np.testing.assert_allclose(value, jax.jit(loss)(params, X), rtol=rtol)


def test_the_mesh_and_the_precision_around():
    def looks(params, x):
        mesh = jax.sharding.get_abstract_mesh()
        return loss(params, x) * (2 if mesh.empty else 3)

    params = params_of()
    model = po.split_layers(looks, params, X)
    stacked, before = model.stack(params), looks(params, X)
    mesh = jax.make_mesh((1,), ("x",), (AxisType.Auto,))
    with jax.set_mesh(mesh):
        within = jax.jit(model.loss)(model.stack(params), X)
    np.testing.assert_allclose(within, 1.5 * before, rtol=1e-6)
    np.testing.assert_allclose(model.loss(stacked, X), before, rtol=1e-6)
    text = lambda: str(jax.make_jaxpr(model.loss)(stacked, X))
    plain = text()
    with jax.default_matmul_precision("highest"):
        assert text().count("HIGHEST") and text() != plain
    assert text() == plain


def test_a_loss_is_traced_once_and_freed():
    traced = []

    def counted(params, x):
        traced.append(x)
        return loss(params, x)

    params = params_of()
    model, tx = po.split_layers(counted, params, X), po.paged_sgd(0.1)
    stacked = model.stack(params)
    step = jax.jit(po.layerwise_step(model, tx))
    step(stacked, tx.init(stacked), model.workspace(stacked), X)
    model.loss(stacked, X)
    # Once for JAX's cache, which the split itself is traced by.
    assert len(traced) == 1
    reference = weakref.ref(model._functions.split)
    del model, step
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("on_host", [False, True, "all"])
def test_parameters_made_before_the_mesh(kind, on_host):
    params = {"layers": [{"w": weights(128, 128)} for _ in range(3)]}
    arrays = jax.tree.map(np.asarray, params)
    with jax.set_mesh(jax.make_mesh((8,), ("x",), (kind,))):
        model = po.split_layers(loss, params, weights(4, 128))
        for tree in (params, arrays):
            stacked = model.stack(tree, on_host=on_host, min_size=0)
            w = stacked["layers"]["w"]
            assert isinstance(w, np.ndarray) or len(w.sharding.device_set) == 8
            assert not on_host or w.sharding.memory_kind == "pinned_host"
            jax.tree.map(np.testing.assert_array_equal, model.unstack(stacked), arrays)


def test_a_scan_within_a_scan_on_explicit_axes():
    """Unrolled, it would write rows of one type into rows of another."""

    def layer(x, w):
        mix = lambda h, row: (0.5 * h + row, jnp.tanh(h + row))
        return jax.lax.scan(mix, jnp.zeros(8), x @ w, unroll=2)[1], None

    loss = lambda stack, x: jnp.mean(jax.lax.scan(layer, x, stack)[0] ** 2)
    stack, x = weights(3, 8, 8), weights(5, 8)
    theirs = jax.jit(jax.value_and_grad(loss))(stack, x)
    model = po.split_layers(loss, stack, x)
    ours = lambda stack: model.loss(model.stack(stack), x)
    with jax.set_mesh(jax.make_mesh((1,), ("x",), (AxisType.Explicit,))):
        found = jax.jit(jax.value_and_grad(ours))(stack)
    chex.assert_trees_all_close(found, theirs, rtol=1e-5)


def bare(layers, x):
    for w in layers:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


BARE = [weights(8, 8) for _ in range(3)]
TREES = {
    "a list": (BARE, lambda p: p),
    "a tuple": (tuple(BARE), lambda p: p),
    "numbers": (dict(enumerate(BARE)), lambda p: [p[n] for n in range(3)]),
    "digits": ({str(n): w for n, w in enumerate(BARE)}, lambda p: [*p.values()]),
    "within a tuple": ((weights(8, 8), BARE), lambda p: [p[0], *p[1]]),
    "and a head": ([*BARE, weights(8, 4)], lambda p: p),
    "nnx": (nnx.state(nnx.List(map(nnx.Param, BARE))), lambda p: [p[n][:] for n in p]),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("layers", [None, "*"])
def test_layers_that_are_bare_arrays(name, layers):
    params, of = TREES[name]
    named = layers if name != "within a tuple" else layers and "1"
    run = lambda params, x: bare(of(params), x)
    model = po.split_layers(run, params, X, layers=named)
    stacked = model.stack(params)
    assert jax.tree.leaves(stacked["layers"])[0].shape == (3, 8, 8)
    value, gradients = jax.jit(jax.value_and_grad(model.loss))(stacked, X)
    wanted, theirs = jax.jit(jax.value_and_grad(run))(params, X)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    chex.assert_trees_all_close(model.unstack(gradients), theirs, atol=1e-6, rtol=1e-7)
    assert "3" in repr(model)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.linear(x)))


def dropped(rngs, name):
    """A model with dropout, and its loss with a key in the batch if a name is given."""
    net = nnx.List([Block(rngs) for _ in range(3)])
    graph, params, other = nnx.split(net, nnx.Param, ...)

    def loss(params, frozen, batch):
        net = nnx.merge(graph, params, frozen)
        if name:
            nnx.reseed(net, **{name: batch["key"]})
        x = batch["x"]
        for block in net:
            x = block(x)
        return jnp.mean(x**2)

    return loss, params, other


@pytest.mark.parametrize("name", ["default", "dropout"])
def test_dropout_by_a_key_in_the_batch(name):
    loss, params, other = dropped(nnx.Rngs(**{"params": 0, name: 1}), name)
    batches = [{"x": X, "key": jax.random.key(n)} for n in range(3)]
    model, tx = po.split_layers(loss, params, batches[0], frozen=other), po.paged_sgd(0)
    stacked, fixed = model.stack(params), model.stack_frozen(other)
    args = stacked, tx.init(stacked), model.workspace(stacked)
    step, losses = jax.jit(po.layerwise_step(model, tx)), []
    # A copy is made where the loss is traced: Flax changes no variables of others.
    copied = lambda p, b: loss(p, jax.tree.map(lambda x: x, other), b)
    plain, split = jax.jit(jax.value_and_grad(copied)), jax.jit(jax.grad(model.loss))
    for batch in batches:
        *args, output = step(*args, batch, fixed)
        losses.append(float(output.loss))
        value, theirs = plain(params, batch)
        np.testing.assert_allclose(output.loss, value, rtol=1e-5)
        gradient = model.unstack(split(args[0], fixed, batch))
        chex.assert_trees_all_close(gradient, theirs, atol=1e-5, rtol=1e-7)
    assert len({*losses}) == 3


@pytest.mark.parametrize("rngs", [nnx.Rngs(0), nnx.Rngs(params=0, dropout=1)])
def test_dropout_that_repeats_is_warned_of(rngs):
    loss, params, other = dropped(rngs, None)
    with pytest.warns(UserWarning, match=r"same in each step.*nnx.reseed\(model"):
        po.split_layers(loss, params, {"x": X}, frozen=other)
    everything = nnx.state(nnx.merge(*nnx.split(Block(rngs))))
    with pytest.raises(TypeError, match="no gradient.*nnx.reseed"):
        po.split_layers(lambda p, b: 0.0, everything, X)


def test_other_frozen_keys_and_integers_are_not_warned_of():
    frozen = {"key": jax.random.key(0), "raw": jax.random.PRNGKey(1)}
    frozen["codes"] = jnp.ones(8, jnp.int8)

    def loss(params, frozen, batch):
        x = run(params["layers"], batch["x"] * frozen["codes"])
        for name in ("key", "raw"):
            folded = jax.random.fold_in(frozen[name], batch["step"])
            x *= jax.random.bernoulli(folded, 0.5, x.shape)
        return jnp.mean(x**2)

    po.split_layers(loss, params_of(), {"x": X, "step": 1}, frozen=frozen)


def test_a_mask_that_repeats_within_a_scan_is_warned_of():
    def loss(params, frozen, x):
        def turn(x, given):
            w, key = given
            return x * jax.random.bernoulli(key, 0.5, x.shape) @ w, None

        return jnp.mean(jax.lax.scan(turn, x, (params["w"], frozen["keys"]))[0])

    frozen = {"keys": jax.random.split(jax.random.key(0), 3)}
    with pytest.warns(UserWarning, match=r"frozen\['keys'\]"):
        po.split_layers(loss, {"w": weights(3, 8, 8)}, X, frozen=frozen)
