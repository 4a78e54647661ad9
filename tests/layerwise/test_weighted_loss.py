"""A loss that is a sum and a weight: the step of the whole batch, exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_optax as po
from helpers import layered
from helpers.layered import SETTINGS, by_optax, far
from helpers.programs import AHEAD
from paged_optax.layerwise import step as step_module

MOST = 0.05


def prologue(rest, batch):
    return rest["embed"][batch["tokens"]], None


def layer(weights, x, context, i):
    y = x * weights["norm"]["scale"]
    x = x + jax.nn.gelu(y @ weights["up"]) @ weights["down"]
    return x, jnp.sum(x * x, axis=-1)


def epilogue(rest, x, kept, batch):
    """What layers keep counts by token, too."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        (x * rest["norm"]) @ rest["head"], batch["targets"]
    )
    losses = losses + 0.01 * kept.mean(axis=0)
    total = jnp.sum(losses * batch["mask"])
    return po.WeightedLoss(total, batch["mask"].sum()), {"total": total}


def whole_loss(params, batch):
    """The mean over all tokens that count, of the batch as one."""
    batch = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), batch)
    x, _ = prologue(params, batch)
    length = len(jax.tree.leaves(params["layers"])[0])
    x, kept = jax.lax.scan(
        lambda x, given: layer(given[1], x, None, given[0]),
        x,
        (jnp.arange(length), params["layers"]),
    )
    loss, _ = epilogue(params, x, kept, batch)
    return loss.total / loss.weight


def batch_of(seed, counts, dtype=jnp.float64, size=(2, 8)):
    """Micro-batches of `size`, of which so many tokens count."""
    key = jax.random.key(seed)
    tokens = jax.random.randint(key, (len(counts), *size), 0, layered.WORDS)
    numbers = jnp.arange(np.prod(size)).reshape(size)
    mask = numbers < jnp.array(counts)[:, None, None]
    return {
        "tokens": tokens,
        "targets": jnp.roll(tokens, 1, axis=-1),
        "mask": mask.astype(dtype),
    }


MODEL = po.LayerwiseModel(prologue, layer, epilogue)


def trained(tx, params, batches, workspace=None, one=False, model=MODEL, **how):
    batches = [jax.tree.map(lambda x: x[0], b) for b in batches] if one else batches
    how |= (workspace or {}) | {"accumulate": not one, "donated": False}
    return layered.trained(model, tx, params, batches, **how)


HOST = {"host_dtype": jnp.float64}
DEFERRED = HOST | {"rest": True}
COUNTS = ((16, 1, 0, 7), (0, 5, 16, 16), (3, 0, 0, 0))


@pytest.mark.parametrize(
    ("workspace", "max_norm"),
    [
        ({}, None),
        ({}, MOST),
        (HOST, None),
        (HOST, MOST),
        ({"device_dtype": jnp.float64}, MOST),
        (DEFERRED, MOST),
    ],
    ids=["kept inputs", "two passes", "host", "host, clipped", "device", "deferred"],
)
@pytest.mark.parametrize("one", [False, True], ids=["micro-batches", "one batch"])
def test_is_the_step_of_the_whole_batch(workspace, max_norm, one):
    """In float64: every step's loss and norm, and all parameters and moments."""
    counts = [(9,), (16,), (1,)] if one else COUNTS
    with jax.enable_x64(True):
        batches = [batch_of(seed, each) for seed, each in enumerate(counts)]
        tx = po.paged_adamw(0.01, **SETTINGS)
        make = lambda: layered.parameters(3, dtype=jnp.float64)
        found = trained(tx, make(), batches, workspace, one, max_norm=max_norm)
        wanted = by_optax(whole_loss, optax.adamw(0.01), make(), batches, max_norm)
    assert float(wanted[2][0][1]) > MOST  # or nothing is clipped
    assert far(found, wanted) <= 1e-12


@AHEAD
@pytest.mark.parametrize("workspace", [{}, DEFERRED], ids=["beside", "ahead"])
def test_beside_other_layers(monkeypatch, workspace):
    """One batch, updated while other layers are computed."""
    monkeypatch.setattr(step_module, "_OVERLAPPED", ("cpu",))
    with jax.enable_x64(True):
        batches = [batch_of(seed, (count,)) for seed, count in enumerate((9, 16))]
        tx = po.paged_adamw(0.01, **SETTINGS)
        make = lambda: layered.parameters(3, dtype=jnp.float64)
        found = trained(tx, make(), batches, workspace=workspace, one=True)
        wanted = by_optax(whole_loss, optax.adamw(0.01), make(), batches)
    assert far(found, wanted) <= 1e-12


@pytest.mark.parametrize("workspace", [{}, HOST], ids=["kept inputs", "host"])
def test_clips_each_layer(workspace):
    """Each layer of the whole batch's gradients, and the rest, by its own norm."""
    with jax.enable_x64(True):
        params, batch = layered.parameters(3, dtype=jnp.float64), batch_of(0, COUNTS[0])
        gradients = jax.jit(jax.grad(whole_loss))(params, batch)
        layers = gradients.pop("layers")
        most = 0.02
        scaled = lambda g: optax.clip_by_global_norm(most).update(g, None)[0]
        wanted = {"layers": jax.vmap(scaled)(layers), **scaled(gradients)}
        wanted = jax.tree.map(lambda p, g: p - g, params, wanted)
        how = {"workspace": workspace, "max_norm": most, "clip": "layer"}
        found = trained(po.paged_sgd(1.0), params, [batch], **how)
    assert far(found[0], wanted) <= 1e-12


@pytest.mark.parametrize("workspace", [{}, HOST, DEFERRED])
@pytest.mark.parametrize("one", [False, True])
def test_no_weight_is_no_gradient(workspace, one):
    """The loss is zero, and so are the gradients: momentum and decay go on alone."""
    with jax.enable_x64(True):
        counts = [(5,), (0,)] if one else [(5, 2), (0, 0)]
        batches = [batch_of(seed, each) for seed, each in enumerate(counts)]
        tx = po.paged_adamw(0.01, **SETTINGS)
        params = layered.parameters(2, dtype=jnp.float64)
        found = trained(tx, params, batches, workspace=workspace, one=one)
        adamw = optax.adamw(0.01)
        params, state, _ = by_optax(whole_loss, adamw, params, batches[:1])
        updates, state = adamw.update(
            jax.tree.map(jnp.zeros_like, params), state, params
        )
        params = optax.apply_updates(params, updates)
    assert [float(x) for x in found[2][1]] == [0, 0]
    assert far(found[:2], (params, state)) <= 1e-12


@pytest.mark.parametrize("max_norm", [None, MOST])
def test_devices_with_unequal_tokens(max_norm):
    """Over eight devices, of which each holds other numbers of tokens."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    place = NamedSharding(mesh, P(None, "data"))
    with jax.enable_x64(True):
        batch = batch_of(0, (37, 0, 64), size=(8, 8))
        tx = po.paged_adamw(0.01, page_size="16KiB", min_paged_size="1KiB")
        params = layered.parameters(3, dtype=jnp.float64)
        divided = jax.device_put(batch, place)
        whole = jax.device_put(params, NamedSharding(mesh, P()))
        wanted = by_optax(whole_loss, optax.adamw(0.01), params, [batch], max_norm)
        for workspace in ({}, HOST):
            found = trained(tx, whole, [divided], workspace, max_norm=max_norm)
            assert far(found, wanted) <= 1e-12


@pytest.mark.parametrize("mask", [jnp.int32, jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_dtypes(dtype, mask):
    """Weights that are integers; a total in fewer bits than its weight needs."""

    def epilogue(rest, x, kept, batch):
        total = jnp.sum(jnp.square(x - 1) * batch["mask"].astype(x.dtype)[..., None])
        return po.WeightedLoss(total, batch["mask"].sum())

    step = po.layerwise_step(
        po.LayerwiseModel(
            lambda rest, batch: (batch["x"], None),
            lambda weights, x, context, i: (x + x @ weights["w"], None),
            epilogue,
        ),
        tx := po.paged_sgd(1.0),
        accumulate=True,
    )
    make = lambda: {"layers": {"w": jnp.full((2, 64, 64), 0.01, dtype)}}
    count = jnp.array([4001, 3, 0])
    masks = (jnp.arange(4096) < count[:, None]).astype(mask)
    x = jax.random.normal(jax.random.key(0), (3, 4096, 64), dtype)
    for host_dtype in (None, "float32"):
        params = make()
        workspace = po.GradientWorkspace.allocate(
            params["layers"], dtype="float32", host_dtype=host_dtype
        )
        batch = {"x": x, "mask": masks}
        *_, output = jax.jit(step)(params, tx.init(params), workspace, batch)
        assert output.loss.dtype == jnp.float32

        def whole(params, x):
            for w in params["layers"]["w"].astype(jnp.float32):
                x = x + x @ w
            weights = masks.astype(jnp.float32).reshape(-1, 1)
            return jnp.sum(jnp.square(x - 1) * weights) / weights.sum()

        loss, gradients = jax.value_and_grad(whole)(
            params, x.astype(jnp.float32).reshape(-1, 64)
        )
        near = {"rtol": 1e-5 if dtype == jnp.float32 else 0.02}
        np.testing.assert_allclose(output.loss, loss, **near)
        norm = optax.tree.norm(gradients)
        np.testing.assert_allclose(output.gradient_norm, norm, **near)


def test_metrics_and_weights_take_no_gradient():
    """A weight made of parameters is data; metrics are those of each micro-batch."""

    def made(rest, x, kept, batch):
        loss, metrics = epilogue(rest, x, kept, batch)
        return loss._replace(weight=loss.weight * rest["norm"][0]), metrics

    params, batch = layered.parameters(2), batch_of(0, (5, 16), jnp.float32)
    results = []
    for how in (epilogue, made):
        tx, model = po.paged_sgd(0.1), po.LayerwiseModel(prologue, layer, how)
        step = po.layerwise_step(model, tx, accumulate=True)
        given = params, tx.init(params), model.workspace(params), batch
        results.append(jax.jit(step)(*given))
    found, wanted = results
    assert far(found[0], wanted[0]) == 0
    total = wanted[3].metrics["total"]
    np.testing.assert_allclose(wanted[3].loss, total.sum() / 21, rtol=1e-6)


@pytest.mark.parametrize("weights", [(0.0, 3.0), (1.0, -1.0, 2.0), (2.0, 0.0, 1.0)])
@pytest.mark.parametrize("workspace", [{}, HOST, DEFERRED])
def test_totals_beside_tokens(workspace, weights):
    """A micro-batch of no weight, or all until then, may have a total all the same."""

    def with_balance(rest, x, kept, batch):
        loss, _ = epilogue(rest, x, kept, batch)
        return po.WeightedLoss(loss.total + kept.sum(), batch["weight"])

    def whole(params, batch):
        every = [jax.tree.map(lambda x, i=i: x[i], batch) for i in range(len(weights))]
        total = 0.0
        for each in every:
            x, _ = prologue(params, each)
            x, kept = jax.lax.scan(
                lambda x, given: layer(given, x, None, 0), x, params["layers"]
            )
            total = total + with_balance(params, x, kept, each).total
        return total / sum(weights)

    with jax.enable_x64(True):
        counts = [0 if weight == 0 else 9 for weight in weights]
        batch = batch_of(0, counts) | {"weight": jnp.array(weights)}
        parameters = layered.parameters(2, dtype=jnp.float64)
        wanted = by_optax(whole, optax.sgd(1.0), parameters, [batch])
        model = po.LayerwiseModel(prologue, layer, with_balance)
        given = parameters, [batch], workspace
        found = trained(po.paged_sgd(1.0), *given, model=model)
    assert far(found[0], wanted[0]) <= 1e-11


@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_gradients_have_the_parameters_dtype(dtype):
    """Of what is beside the layers too, unless the workspace has a wider one."""
    params = layered.parameters(2, dtype=jnp.bfloat16)
    batch = batch_of(0, (9, 3), jnp.float32)
    masters = {} if dtype is None else {"master_dtype": "float32"}
    tx = po.paged_adamw(0.01, **SETTINGS, **masters)
    step = po.layerwise_step(MODEL, tx, accumulate=True)
    given = params, tx.init(params), MODEL.workspace(params, dtype=dtype)
    found = jax.eval_shape(step, *given, batch)[:3]
    types = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert types(found) == types(given)


@pytest.mark.parametrize("host_dtype", [None, "float16", "float32"])
@pytest.mark.parametrize("weight", [1.0, 1e-6])
def test_float16_holds_neither_totals_nor_inverse_weights(host_dtype, weight):
    """Sums of totals beyond 65,504, and weights whose inverse is."""

    def epilogue(rest, x, kept, batch):
        total = jnp.sum(x.astype("float32") @ rest["head"].astype("float32"))
        total = total * jnp.float32(weight)
        total = total.astype("float16") if weight == 1 else total
        return po.WeightedLoss(total, jnp.float32(8 * weight))

    functions = (
        lambda rest, batch: (batch, None),
        lambda weights, x, context, i: (jnp.tanh(x @ weights["w"]), None),
        epilogue,
    )
    params = {
        "layers": {"w": jnp.full((2, 64, 64), 1 / 64, "float16")},
        "head": jnp.full(64, 64.0, "float16"),
    }
    tx = po.paged_sgd(1.0, **SETTINGS)
    step = po.layerwise_step(po.LayerwiseModel(*functions), tx, accumulate=True)
    workspace = po.GradientWorkspace.allocate(params["layers"], host_dtype=host_dtype)
    batch = jnp.ones((4, 8, 64), "float16")
    new, *_, output = jax.jit(step)(params, tx.init(params), workspace, batch)

    def whole(params):
        x = batch.reshape(-1, 64)
        for w in params["layers"]["w"]:
            x = jnp.tanh(x @ w)
        return jnp.mean(x.astype("float32") @ params["head"].astype("float32"))

    loss, gradients = jax.value_and_grad(whole)(params)
    np.testing.assert_allclose(output.loss, loss, rtol=1e-3)
    moved = params["head"].astype("float32") - new["head"].astype("float32")
    by_head = gradients["head"].astype("float32")
    np.testing.assert_allclose(moved, by_head, rtol=0.05)
