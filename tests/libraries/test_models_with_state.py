"""Models with dropout, counters and running statistics, of three libraries.

The oracle is the ordinary step: `jax.grad` of the same loss, and Optax. Each loss takes
the parameters, the state and tokens, and returns the loss and the new state.
"""

import contextlib

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_optax as po
from helpers.reference import assert_equal

WIDTH, VOCAB, STEPS = 16, 24, 4
BATCHES = jax.random.randint(jax.random.key(3), (STEPS, 4, 9), 0, VOCAB)
TX = optax.adamw(1e-2, weight_decay=0.1)
PAGED = po.paged_adamw(1e-2, weight_decay=0.1, page_size=4096, min_paged_size=256)


def cross_entropy(logits, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


class Mask(nnx.Variable):
    """A layer's last dropout mask, and how many it drew."""


class Block(nnx.Module):
    def __init__(self, rngs, norm):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = norm(rngs) if norm is batch_norm else norm
        self.mask, self.drawn = Mask(jnp.ones((4, 8, WIDTH))), Mask(jnp.int32(0))

    def __call__(self, x):
        y = jnp.tanh(self.linear(x))
        y = y if self.norm is None else self.norm(y)
        self.mask[...] = self.dropout(jnp.ones(y.shape))
        self.drawn[...] += 1
        return x + self.mask[...] * self.dropout(y)


class Net(nnx.Module):
    def __init__(self, rngs, streams, norms):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List(map(Block, streams, norms))

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def batch_norm(rngs):
    return nnx.BatchNorm(WIDTH, rngs=rngs)


def own_streams():
    return [nnx.Rngs(params=n, dropout=10 + n) for n in range(4)]


def shared_norm():
    """One normalization, whose statistics pass from layer to layer."""
    return [batch_norm(nnx.Rngs(5))] * 4


class Scanned(nnx.Module):
    """Layers in stacks, each with statistics and a stream of random numbers."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        make = nnx.vmap(lambda rngs: Block(rngs, batch_norm))
        self.blocks = nnx.split_rngs(splits=4)(make)(rngs)

    def __call__(self, tokens):
        run = lambda x, block: block(x)
        run = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.embed.attend(run(self.embed(tokens), self.blocks))


def sharing(net):
    """All layers draw from one stream, which counts all masks."""
    for block in net.blocks:
        block.dropout.rngs = net.blocks[0].dropout.rngs
    return net


RNGS = nnx.Rngs(0)
NETS = {
    "one stream": lambda: Net(RNGS, [RNGS] * 4, [batch_norm] * 4),
    "shared stream": lambda: sharing(NETS["one stream"]()),
    "streams": lambda: Net(RNGS, own_streams(), [batch_norm] * 4),
    "some": lambda: Net(RNGS, own_streams(), [batch_norm, None] * 2),
    "odd": lambda: Net(RNGS, own_streams(), [batch_norm, None, None, None]),
    "shared norm": lambda: Net(RNGS, [RNGS] * 4, shared_norm()),
    "scanned": lambda: Scanned(RNGS),
}


def of_nnx(name):
    graph, params, state = nnx.split(NETS[name](), nnx.Param, ...)

    def loss(params, state, tokens):
        net = nnx.merge(graph, params, state, copy=True)
        value = cross_entropy(net(tokens[:, :-1]), tokens)
        return value, nnx.state(net, nnx.Not(nnx.Param))

    return loss, params, state


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.BatchNorm(use_running_average=False)(jnp.tanh(nn.Dense(WIDTH)(x)))
        return x + nn.Dropout(0.5, deterministic=False)(y), None


class LinenNet(nn.Module):
    scanned: bool

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCAB, WIDTH)
        x = embed(tokens)
        if self.scanned:
            axes = {"params": 0, "batch_stats": 0}
            split = {"params": True, "dropout": True}
            block = nn.scan(LinenBlock, axes, split_rngs=split, length=4)
            return embed.attend(block()(x)[0])
        for _ in range(4):
            x, _ = LinenBlock()(x)
        return embed.attend(x)


def of_linen(scanned):
    net = LinenNet(scanned)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = net.init(keys, BATCHES[0, :, :-1])
    state = {"batch_stats": variables["batch_stats"], "step": jnp.int32(0)}

    def loss(params, state, tokens):
        logits, new = net.apply(
            {"params": params, "batch_stats": state["batch_stats"]},
            tokens[:, :-1],
            rngs={"dropout": jax.random.fold_in(jax.random.key(2), state["step"])},
            mutable=["batch_stats"],
        )
        return cross_entropy(logits, tokens), {**new, "step": state["step"] + 1}

    return loss, variables["params"], state


class EquinoxBlock(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.norm = eqx.nn.BatchNorm(WIDTH, "batch", mode="ema")
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, state, key):
        y, state = self.norm(jnp.tanh(jax.vmap(self.linear)(x)).T, state)
        return x + self.dropout(y.T, key=key), state


class EquinoxNet(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[EquinoxBlock]

    def __init__(self, key):
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=key)
        self.blocks = [EquinoxBlock(k) for k in jax.random.split(key, 4)]

    def __call__(self, tokens, state, key):
        x = jax.vmap(self.embed)(tokens)
        for block, each in zip(self.blocks, jax.random.split(key, 4), strict=True):
            x, state = block(x, state, each)
        return x @ self.embed.weight.T, state


def of_equinox():
    net, state = eqx.nn.make_with_state(EquinoxNet)(jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss(params, state, tokens):
        state, key = state
        key, now = jax.random.split(key)
        run = jax.vmap(
            eqx.combine(params, static),
            in_axes=(0, None, 0),
            out_axes=(0, None),
            axis_name="batch",
        )
        logits, state = run(tokens[:, :-1], state, jax.random.split(now, 4))
        return cross_entropy(logits, tokens), (state, key)

    return loss, params, (state, jax.random.key(1))


MODELS = {
    **{f"nnx, {name}": lambda name=name: of_nnx(name) for name in NETS},
    "linen": lambda: of_linen(scanned=False),
    "linen, scanned": lambda: of_linen(scanned=True),
    "equinox": of_equinox,
}


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def plain(loss, params, state, tx=TX, batches=BATCHES):
    """Losses, parameters and the states after each step, of the ordinary step."""

    @jax.jit
    def step(params, moments, state, tokens):
        take = jax.value_and_grad(loss, has_aux=True)
        (value, state), gradients = take(params, state, tokens)
        updates, moments = tx.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, state, value

    moments, losses, states = tx.init(params), [], []
    for tokens in batches:
        params, moments, state, value = step(params, moments, state, tokens)
        losses.append(value)
        states.append(state)
    return losses, params, states


def split(loss, params, state, frozen=False, batch=BATCHES[0]):
    """The layerwise step, of the state in the batch or frozen."""
    if frozen:
        model = po.split_layers(loss, params, batch, frozen=state)
    else:
        with_batch = lambda params, batch: loss(params, *batch)
        model = po.split_layers(with_batch, params, (state, batch))
    layerwise = po.layerwise_step(model, PAGED)

    def step(params, moments, workspace, state, tokens):
        last = (tokens, model.stack_frozen(state)) if frozen else ((state, tokens),)
        *new, output = layerwise(params, moments, workspace, *last)
        return *new, output.metrics, output.loss

    params = model.stack(copied(params))
    args = params, model.init(PAGED, params), model.workspace(params)
    args = *args, state, batch
    return model, po.jit_step(step, *args, donate_argnums=(0, 1, 2)), args[:4]


def follow(run, args, losses, states, new, model, batches=BATCHES):
    """Holds each step to those, and the parameters after the last."""
    for tokens, wanted, after in zip(batches, losses, states, strict=True):
        *args, value = run(*args, tokens)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
        close(args[3], after)
    close(model.unstack(args[0]), new)


def raw(x):
    key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if key else x)


def close(found, wanted):
    same = lambda x, y: np.testing.assert_allclose(raw(x), raw(y), rtol=1e-4, atol=1e-5)
    jax.tree.map(same, found, wanted)


@pytest.mark.quick("-batch", "one stream-frozen", "nnx, scanned")
@pytest.mark.parametrize("frozen", [False, True], ids=["batch", "frozen"])
@pytest.mark.parametrize("name", MODELS)
def test_layer_by_layer(name, frozen):
    loss, params, state = MODELS[name]()
    if frozen and name == "nnx, scanned":
        with pytest.raises(ValueError, match="pass state in the batch"):
            split(loss, params, state, frozen)
        return
    model, step, args = split(loss, params, state, frozen)
    losses, new, states = plain(loss, params, state)
    follow(step, args, losses, states, new, model)
    assert len({float(x) for x in losses}) == STEPS
    masks = [x for x in jax.tree.leaves(states) if x.shape[-3:] == (4, 8, WIDTH)]
    masks = [mask for x in masks for mask in raw(x).reshape(-1, 4, 8, WIDTH)]
    assert len(masks) == 4 * STEPS * ("nnx" in name)
    assert len({x.tobytes() for x in masks}) == len(masks)


@pytest.mark.quick("one stream-every")
@pytest.mark.parametrize("several", [False, True], ids=["each step", "every second"])
@pytest.mark.parametrize("name", ["nnx, one stream", "linen", "equinox"])
def test_ordinary_steps(name, several):
    """With `MultiSteps` too: each micro-step changes the state."""
    around = lambda of, tx: of.MultiSteps(tx, 2) if several else tx
    model = MODELS[name]()
    close(plain(*model, tx=around(po, PAGED)), plain(*model, tx=around(optax, TX)))


@pytest.mark.parametrize("jit", ["nnx.jit", "jit_step"])
def test_an_nnx_optimizer(jit):
    def step(net, optimizer, tokens):
        run = lambda net: cross_entropy(net(tokens[:, :-1]), tokens)
        optimizer.update(net, nnx.grad(run)(net))
        return net, optimizer

    results = []
    for tx in (TX, PAGED):
        net = Net(nnx.Rngs(0), [nnx.Rngs(1)] * 4, [batch_norm] * 4)
        args, run = (net, nnx.Optimizer(net, tx, wrt=nnx.Param)), nnx.jit(step)
        if jit == "jit_step" and tx is PAGED:
            run = po.jit_step(step, *args, BATCHES[0], donate_argnums=(0, 1))
        for tokens in BATCHES:
            args = run(*args, tokens)
        results.append(nnx.state(args[0]))
    close(*results)


@pytest.mark.quick("one stream-None", "linen-float32")
@pytest.mark.parametrize("host_dtype", [None, "float32"])
@pytest.mark.parametrize("name", ["nnx, one stream", "linen"])
def test_micro_batches_see_the_state_before_the_step(name, host_dtype):
    """Each has a copy, and returns its own new state; their mean is the next state."""
    loss, params, state = MODELS[name]()
    with_batch = lambda params, batch: loss(params, *batch)
    model = po.split_layers(with_batch, params, (state, BATCHES[0]))
    copies = jax.tree.map(lambda x: jnp.stack([x] * STEPS), state)
    stacked = model.stack(copied(params))
    workspace = model.workspace(stacked, host_dtype=host_dtype)
    step = po.layerwise_step(model, PAGED, accumulate=True)
    args = stacked, model.init(PAGED, stacked), workspace, (copies, BATCHES)
    stacked, *_, output = po.jit_step(step, *args, donate_argnums=(0, 1, 2))(*args)

    take = jax.jit(jax.value_and_grad(loss, has_aux=True))
    results = [take(params, state, tokens) for tokens in BATCHES]
    stack = lambda *xs: jnp.stack(xs)
    (losses, states), gradients = jax.tree.map(stack, *results)
    close(output.metrics, states)
    np.testing.assert_allclose(output.loss, losses.mean(), rtol=1e-5)
    mean = jax.tree.map(lambda x: x.mean(0), gradients)
    updates, _ = TX.update(mean, TX.init(params), params)
    close(model.unstack(stacked), optax.apply_updates(params, updates))


def test_restored_in_the_middle(tmp_path):
    """From an Orbax checkpoint of the loss's own trees, bit for bit."""
    loss, params, state = MODELS["nnx, one stream"]()
    model, step, args = split(loss, params, state)
    for tokens in BATCHES[:2]:
        *args, _ = step(*args, tokens)
    stacked, moments, workspace, state = args
    saved = model.unstack(stacked), model.unstack_state(moments), state
    target = params, po.abstract_state(PAGED, params), state
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", saved)
        checkpointer.wait_until_finished()
        params, moments, state = checkpointer.restore(tmp_path / "saved", target)
    _, _, (_, _, workspace, _) = split(*MODELS["nnx, one stream"]())
    others = model.stack(params), model.stack_state(moments), workspace, state
    for tokens in BATCHES[2:]:
        *args, _ = step(*args, tokens)
        *others, _ = step(*others, tokens)
    assert_equal(jax.tree.leaves(others), jax.tree.leaves(args))


@pytest.mark.quick("one stream-AxisType.Auto", "linen-AxisType.Explicit")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", ["nnx, one stream", "linen"])
def test_two_devices(name, kind):
    """Statistics are of the whole batch, which the devices divide."""
    loss, params, state = MODELS[name]()
    losses, new, states = plain(loss, params, state)
    mesh = jax.make_mesh((2,), ("data",), (kind,), devices=jax.devices()[:2])
    place = lambda tree, *spec: jax.device_put(tree, NamedSharding(mesh, P(*spec)))
    with jax.set_mesh(mesh):
        args = place(params), place(state)
        model, step, args = split(loss, *args, batch=place(BATCHES[0], "data"))
        batches = [place(tokens, "data") for tokens in BATCHES]
        follow(step, args, losses, states, new, model, batches)


def adapted(rngs):
    """Layers of adapters around a frozen base, which has state too."""

    class Adapted(Block):
        def __init__(self, rngs):
            super().__init__(rngs, batch_norm)
            self.linear = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=4, rngs=rngs)

    return nnx.List([Adapted(rngs) for _ in range(4)])


def test_adapters_of_a_frozen_base():
    net = Net(nnx.Rngs(0), [], [])
    net.blocks = adapted(nnx.Rngs(1))
    graph, adapters, base, state = nnx.split(net, nnx.LoRAParam, nnx.Param, ...)
    noise = lambda x: x + 0.1 * jax.random.normal(jax.random.key(4), x.shape)
    adapters = jax.tree.map(noise, adapters)

    def loss(adapters, base, batch):
        state, tokens = batch
        net = nnx.merge(graph, adapters, base, state, copy=True)
        value = cross_entropy(net(tokens[:, :-1]), tokens)
        return value, nnx.state(net, nnx.Not(nnx.Param))

    closed = lambda adapters, state, tokens: loss(adapters, base, (state, tokens))
    losses, new, states = plain(closed, adapters, state)
    model = po.split_layers(loss, adapters, (state, BATCHES[0]), frozen=base)
    stacked, frozen = model.stack(copied(adapters)), model.stack_frozen(base)
    assert "layers" in frozen and len(frozen["layers"])
    args = stacked, model.init(PAGED, stacked), model.workspace(stacked), state
    layerwise = jax.jit(po.layerwise_step(model, PAGED))

    def step(*args):
        *new, output = layerwise(*args[:3], args[3:], frozen)
        return *new, output.metrics, output.loss

    follow(step, args, losses, states, new, model)


part = nnx.filter_state


def returned(loss):
    """The loss alone, of one tuple of the state and tokens."""
    return lambda params, batch: loss(params, *batch)[0]


PLAIN = {"embed": jnp.ones((VOCAB, WIDTH)), "layers": [jnp.eye(WIDTH)] * 4}


def of_equinox_batches():
    """Statistics that the loss does not read, as in training with NNX and Linen."""
    norm = eqx.nn.BatchNorm(WIDTH, "batch", mode="batch")
    state = eqx.nn.State(norm)

    def loss(params, state, tokens):
        x = params["embed"][tokens[:, :-1]].mean(1)
        for layer in params["layers"]:
            x, state = jax.vmap(norm, (0, None), (0, None), axis_name="batch")(x, state)
            x = x + jnp.tanh(x @ layer)
        return jnp.mean(x**2), state

    return loss, PLAIN, state


LOSING = {
    "nnx": lambda: of_nnx("one stream"),
    "linen": lambda: of_linen(scanned=False),
    "equinox": of_equinox_batches,
}
NEW = "computes a new value of "


@pytest.mark.filterwarnings("ignore:the loss (computes|draws)")  # the other one
@pytest.mark.quick("nnx")
@pytest.mark.parametrize("name", LOSING)
def test_statistics_that_are_not_returned_are_warned_of(name):
    """In the batch, frozen, closed over; also under names of the user's."""
    loss, params, state = LOSING[name]()
    if name == "nnx":
        keys, state = part(state, nnx.Not(nnx.BatchStat)), part(state, nnx.BatchStat)
        merged, take = loss, nnx.merge_state
        loss = lambda params, state, tokens: merged(params, take(keys, state), tokens)
    if name == "linen":
        step, state = state["step"], {"mine": state["batch_stats"]}
        linen, take = loss, lambda x: {"batch_stats": x["mine"], "step": step}
        loss = lambda params, state, tokens: linen(params, take(state), tokens)
    alone = returned(loss)
    swapped = lambda params, state, tokens: alone(params, (state, tokens))
    closed = lambda params, tokens: alone(params, (state, tokens))
    with pytest.warns(UserWarning, match=rf"{NEW}batch\[0\].*\(at /.*output\.metrics"):
        po.split_layers(alone, params, (state, BATCHES[0]))
    with pytest.warns(UserWarning, match=rf"{NEW}frozen.*old one"):
        po.split_layers(swapped, params, BATCHES[0], frozen=state)
    for run in (closed, lambda params, tokens: loss(params, state, tokens)):
        with pytest.warns(UserWarning, match=rf"{NEW}a closed-over array.*\(at /"):
            po.split_layers(run, params, BATCHES[0])


@pytest.mark.filterwarnings("ignore:the loss (computes|draws)")  # the other one
@pytest.mark.parametrize("name", LOSING)
def test_old_statistics_that_are_returned_are_warned_of(name):
    """All of them, as from a merged copy, and one layer's with the others' new."""
    loss, params, state = LOSING[name]()
    old = lambda params, batch: (returned(loss)(params, batch), batch[0])
    with pytest.warns(UserWarning, match=rf"{NEW}batch\[0\].*\(at /"):
        po.split_layers(old, params, (state, BATCHES[0]))

    def mixed(params, batch):
        value, new = loss(params, *batch)
        leaves, structure = jax.tree.flatten(new)
        floats = [jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 0 for x in leaves]
        last = max(n for n, is_float in enumerate(floats) if is_float)
        leaves[last] = jax.tree.leaves(batch[0])[last]
        return value, structure.unflatten(leaves)

    with pytest.warns(UserWarning, match=rf"{NEW}batch\[0\].*\(at /"):
        po.split_layers(mixed, params, (state, BATCHES[0]))


@pytest.mark.parametrize("returns", ["the old", "none", "new", "new, by a key"])
def test_counts_of_masks_that_are_not_returned(returns):
    """NNX's counts from a merged copy; a key of each batch changes them too."""
    rngs = nnx.Rngs(0)
    drop = lambda: (nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    module = nnx.Sequential(*[nnx.Sequential(*drop()) for _ in range(3)])
    graph, params, state = nnx.split(module, nnx.Param, ...)

    def loss(params, batch):
        state, x, key = batch
        model = nnx.merge(graph, params, state, copy=True)
        if returns == "new, by a key":
            nnx.reseed(model, default=key)
        value, new = jnp.mean(model(x) ** 2), nnx.state(model, nnx.Not(nnx.Param))
        return value, {"the old": state, "none": None}.get(returns, new)

    batch = state, jnp.ones((4, 8)), jax.random.key(1)
    says = pytest.warns(UserWarning, match="does not return the new count")
    with contextlib.nullcontext() if "new" in returns else says:
        po.split_layers(loss, params, batch, layers="layers")


@pytest.mark.filterwarnings("ignore:the loss (computes|draws)")  # the other one
def test_closed_over_keys_are_warned_of():
    loss, params, state = MODELS["equinox"]()
    closed = lambda params, batch: loss(params, (batch[0], state[1]), batch[1])[0]
    with pytest.warns(UserWarning, match=r"closed-over array, key<fry>\[\].*\(at "):
        po.split_layers(closed, params, (state[0], BATCHES[0]))
    # A key of each batch, or a number of it that a closed-over key is folded with.
    folded = lambda params, batch: loss(
        params, (batch[0], jax.random.fold_in(state[1], batch[2])), batch[1]
    )
    po.split_layers(folded, params, (state[0], BATCHES[0], jnp.int32(0)))


def test_options_that_metrics_depend_on_are_no_state():
    padding, weights = jnp.int32(0), jnp.arange(4.0)

    def loss(params, tokens):
        x = params["embed"][tokens]
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer)
        kept = (tokens != padding).mean(1) * weights
        return jnp.mean(x**2), (kept.mean(), (tokens != padding).sum(dtype=jnp.int32))

    po.split_layers(loss, PLAIN, BATCHES[0])


@pytest.mark.filterwarnings("ignore:the loss (computes|draws)")  # the other one
def test_frozen_state_that_is_not_returned_is_warned_of():
    loss, params, state = MODELS["nnx, one stream"]()
    keys, statistics = part(state, nnx.RngState), part(state, nnx.BatchStat)
    rest, others = (part(state, nnx.Not(x)) for x in (nnx.RngState, nnx.BatchStat))

    def without(params, frozen, batch):
        others, tokens = batch
        return loss(params, nnx.merge_state(frozen, others), tokens)[0]

    for frozen, more, words in (
        (keys, rest, r"random numbers.*frozen\['blocks'\].*count.*same in each step"),
        (statistics, others, r"\['norm'\]\['mean'\]"),
    ):
        with pytest.warns(UserWarning, match=rf"{words}.*output\.metrics.*nnx.reseed"):
            po.split_layers(without, params, (more, BATCHES[0]), frozen=frozen)
    # Statistics that are read, as in an evaluation, are not lost.
    scaled = lambda params, frozen, batch: (
        without(params, frozen, batch)
        * jnp.mean(jnp.stack([jnp.mean(x) for x in jax.tree.leaves(frozen)]))
    )
    po.split_layers(scaled, params, (others, BATCHES[0]), frozen=statistics)


def test_state_among_the_parameters_is_refused():
    _, params, state = MODELS["nnx, one stream"]()
    linen, equinox = MODELS["linen"]()[2], MODELS["equinox"]()[1:]
    keys, mean = (part(state, x) for x in (nnx.RngState, nnx.BatchStat))
    both, floats = nnx.merge_state, eqx.filter(equinox, eqx.is_inexact_array)
    for given, words in (
        (both(params, keys), r"no gradient.*same in each step.*nnx\.state"),
        (both(params, mean), r"'mean'\].*a running statistic.*nnx\.state"),
        ({"batch_stats": linen["batch_stats"]}, "batch_stats.*a running statistic"),
        (floats, r"params\[1\].*is a running statistic"),
    ):
        with pytest.raises(TypeError, match=words):
            po.split_layers(lambda params, batch: 0.0, given, BATCHES[0])


def test_statistics_among_the_parameters_by_other_names_are_warned_of():
    loss, params, state = MODELS["linen"]()

    def mine(params, tokens):
        state = {"batch_stats": params["mine"], "step": tokens[0, 0]}
        return loss(params["net"], state, tokens)

    params = {"net": params, "mine": state["batch_stats"]}
    for run in (mine, lambda *args: mine(*args)[0]):
        with pytest.warns(UserWarning, match=r"not depend on params\['mine'\].*decay"):
            po.split_layers(run, params, BATCHES[0])
