"""Of scanned layers the optimizer sees the loss's own names, whatever their axis."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import paged_optax as po

LENGTH, WIDTH, INNER, STEPS = 4, 72, 96, 4
PAGED = {"page_size": 4096, "min_paged_size": 0}


def normal(number, *shape):
    key = jax.random.fold_in(jax.random.key(0), number)
    return 0.1 * jax.random.normal(key, shape)


def params_of(axis):
    """The stacks are neither first nor last in the order of the leaves."""
    return {
        "z_embed": normal(3, 50, WIDTH),
        "blocks": {
            "up": jnp.moveaxis(normal(1, LENGTH, WIDTH, INNER), 0, axis),
            "down": jnp.moveaxis(normal(2, LENGTH, INNER, WIDTH), 0, axis),
        },
        "a_norm": jnp.ones(WIDTH),
    }


def loss_of(axis):
    def loss(params, batch):
        x = params["z_embed"][batch[:, :-1]]
        layer = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)
        first = lambda w: jnp.moveaxis(w, axis, 0)
        x, _ = lax.scan(layer, x, jax.tree.map(first, params["blocks"]))
        logits = (x * params["a_norm"]) @ params["z_embed"].T
        labels = batch[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss


BATCHES = [jax.random.randint(jax.random.key(i), (3, 17), 0, 50) for i in range(STEPS)]


def by_path(choose):
    name = jax.tree_util.keystr
    return lambda params: jax.tree_util.tree_map_with_path(
        lambda path, x: choose(name(path)), params
    )


UP = by_path(lambda name: name == "['blocks']['up']")
FROZEN = by_path(lambda name: "frozen" if "embed" in name else "trained")


def by_number(updates, params):
    leaves, structure = jax.tree.flatten(updates)
    return structure.unflatten([(1 + n) / 4 * x for n, x in enumerate(leaves)])


TRANSFORMATIONS = {
    "mask": lambda: po.paged_adamw(1e-2, weight_decay=0.5, mask=UP, **PAGED),
    "labels": lambda: optax.partition(
        {"trained": po.paged_adamw(1e-2, **PAGED), "frozen": optax.set_to_zero()},
        FROZEN,
    ),
    "frozen by prefix": lambda: optax.partition(
        {"trained": po.paged_adamw(1e-2, **PAGED), "frozen": optax.set_to_zero()},
        {"z_embed": "trained", "blocks": "frozen", "a_norm": "trained"},
    ),
    "rate by leaf": lambda: optax.chain(optax.trace(0.9), optax.stateless(by_number)),
    "guarded": lambda: po.apply_if_finite(
        optax.adamw(1e-2, weight_decay=0.3, mask=UP), 3
    ),
    "eight bits": lambda: po.paged_adamw_8bit(1e-2, **PAGED),
}


def distance(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    numbers = lambda x: np.asarray(x).astype(np.float64)
    return max(np.abs(numbers(x) - numbers(y)).max(initial=0) for x, y in pairs)


@pytest.fixture
def double():
    """Float64, whose roundings Adam does not make visible on any CPU."""
    with jax.enable_x64(True):
        yield


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_scanned_layers_have_the_numbers_of_optax(name, axis):
    """Parameters and state, which goes back and forth in the middle of training."""
    if axis and name == "eight bits":
        pytest.skip("blocks of codes follow the layers, see the next test")
    loss, tx, params = loss_of(axis), TRANSFORMATIONS[name](), params_of(axis)
    dtype, most = ("float32", 2e-6) if name == "eight bits" else ("float64", 1e-12)
    params = optax.tree.cast(params, dtype)

    @jax.jit
    def ordinary(params, state, batch):
        gradients = jax.grad(loss)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    model = po.split_layers(loss, params, BATCHES[0])
    stacks = model.stack(params)
    state = model.init(tx, stacks)
    on_host = {"host_dtype": dtype} if name == "guarded" else {}
    workspace = model.workspace(stacks, **on_host)
    step = jax.jit(po.layerwise_step(model, tx))
    theirs = params, tx.init(params)
    for n, batch in enumerate(BATCHES):
        theirs = ordinary(*theirs, batch)
        stacks, state, workspace, _ = step(stacks, state, workspace, batch)
        if n == STEPS // 2:
            state = model.stack_state(model.unstack_state(state))
    assert distance(theirs[0], model.unstack(stacks)) < most
    assert distance(theirs[1], model.unstack_state(state)) < most


def test_codes_of_another_axis_stay_in_stacks():
    """Their blocks are each layer's; the message names the leaf and the way out."""
    params = params_of(1)
    model = po.split_layers(loss_of(1), params, BATCHES[0])
    state = model.init(po.paged_adamw_8bit(1e-2, **PAGED), model.stack(params))
    with pytest.raises(ValueError, match=r"params\['blocks'\]\['\w+'\] are on axis 1"):
        model.unstack_state(state)


def test_products_of_vectors_on_another_axis_are_refused():
    """The layers' axis is first in their stack, and Muon's shapes are others then."""

    def loss(params, batch):
        layer = lambda x, w: (x + jnp.tanh(x @ w["up"]) + w["bias"], None)
        first = jax.tree.map(lambda w: jnp.moveaxis(w, 1, 0), params["blocks"])
        return jnp.mean(lax.scan(layer, batch, first)[0] ** 2)

    vectors = jnp.zeros((WIDTH, LENGTH))
    params = {"blocks": {"up": normal(1, WIDTH, LENGTH, WIDTH), "bias": vectors}}
    batch = jnp.ones((3, WIDTH))
    model, tx = po.split_layers(loss, params, batch), optax.contrib.muon(1e-2)
    stacks = model.stack(params)
    args = stacks, model.init(tx, stacks), model.workspace(stacks), batch
    with pytest.raises(ValueError, match=r"\['bias'\] is not .* on the first axis"):
        jax.eval_shape(po.layerwise_step(model, tx), *args)
