"""Arguments that are no arrays, or in the wrong memory, and masks in variables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paged_optax as po

PAGING = {"page_size": 4096, "min_paged_size": 0}
PARAMS = {"a": jnp.ones((64, 256)), "b": jnp.ones(300)}


# -- gradients in host memory ------------------------------------------------------


@pytest.mark.parametrize("first", [optax.clip_by_global_norm(1.0), optax.zero_nans()])
def test_jit_step_names_what_is_computed_on_in_host_memory(first):
    """No code of this package is called before Optax computes on the gradients."""
    tx = optax.chain(first, po.paged_adamw(1e-2, **PAGING))

    def loss(params):
        return sum(
            jnp.sum(jax.device_put(x, jax.memory.Space.Device) ** 2)
            for x in jax.tree.leaves(params)
        )

    def step(params, state):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    hosted = PARAMS | {"a": jax.device_put(PARAMS["a"], jax.memory.Space.Host)}
    with pytest.raises(ValueError, match=r"'a'.*jax\.memory\.Space\.Device"):
        po.jit_step(step, hosted, tx.init(PARAMS), donate_argnums=1)


# -- what is no array ---------------------------------------------------------------

SHAPE = jax.ShapeDtypeStruct((64, 256), jnp.float32)
LEAVES = {"placeholder": ..., "text": "a", "number": 1.5, "object": np.array([None])}
TX = po.paged_adamw(1e-2, per_parameter_steps=True, **PAGING)

ENTRIES = {
    "update": lambda state: TX.update(PARAMS, state, PARAMS),
    "MultiSteps": lambda state: po.apply_if_finite(TX, 3).update(
        PARAMS, po.apply_if_finite(TX, 3).init(PARAMS)._replace(inner_state=state)
    ),
    "place_state": lambda state: po.place_state(TX, state, PARAMS),
    "page_in": lambda state: po.page_in(state, "a"),
    "page_out": lambda state: po.page_out(state, "a", {}),
    "rebalance": lambda state: po.rebalance(TX, state, ["a"]),
    "init_param": lambda state: po.init_param(TX, state, PARAMS, "b"),
    "get_step": lambda state: po.get_step(state, "a"),
    "increment_step": lambda state: po.increment_step(state, "a"),
    "is_device_resident": lambda state: po.is_device_resident(state, "a"),
    "device_bytes": po.device_bytes,
    "host_bytes": lambda state: po.host_bytes(state, "a"),
    "master_weights": lambda state: po.master_weights(PARAMS, state),
    "to_bitsandbytes": po.to_bitsandbytes,
    "from_bitsandbytes": lambda state: po.from_bitsandbytes(state, {}),
}
#: These need values.
CONCRETE = """update MultiSteps page_in rebalance get_step increment_step master_weights
    to_bitsandbytes""".split()


def with_leaf(leaf):
    state = TX.init(PARAMS)
    return (state[0]._replace(mu=state[0].mu | {"a": leaf}), *state[1:])


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_of_a_state_that_is_no_array_is_named(entry, leaf):
    with pytest.raises(TypeError, match=r"\.mu\['a'\].*abstract_state\(tx, params\)"):
        ENTRIES[entry](with_leaf(LEAVES[leaf]))


@pytest.mark.parametrize("entry", CONCRETE)
def test_a_shape_without_values_is_named(entry):
    with pytest.raises(TypeError, match=r"\.mu\['a'\] is of type ShapeDtypeStruct"):
        ENTRIES[entry](with_leaf(SHAPE))


@pytest.mark.parametrize("leaf", ["placeholder", "text", "object", "shape"])
def test_gradients_and_parameters_that_are_no_arrays(leaf):
    other = PARAMS | {"a": (LEAVES | {"shape": SHAPE})[leaf]}
    state = TX.init(PARAMS)
    with pytest.raises(TypeError, match=r"updates\['a'\] is of type"):
        TX.update(other, state, PARAMS)
    with pytest.raises(TypeError, match=r"params\['a'\] is of type"):
        TX.update(PARAMS, state, other)


def test_numbers_are_gradients_and_parameters_as_in_optax():
    expected, _ = optax.adamw(1e-2).update(2.0, optax.adamw(1e-2).init(3.0), 3.0)
    updates, _ = TX.update(2.0, TX.init(3.0), 3.0)
    np.testing.assert_allclose(updates, expected, rtol=1e-6)


# -- masks and labels in Flax's variables ---------------------------------------------


class Model(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        self.scale = nnx.Param(jnp.ones(300))


def chosen(of):
    """For each parameter a value, each in its variable."""
    return jax.tree.map(of, nnx.state(Model(), nnx.Param))


def is_matrix(x):
    return x.ndim > 1


def label(x):
    return "matrix" if x.ndim > 1 else "vector"


#: Transformations by what makes `adamw`, and by what pages others.
MASKED = {
    "mask": lambda adamw, paged: adamw(1e-2, weight_decay=0.5, mask=chosen(is_matrix)),
    "function": lambda adamw, paged: adamw(
        1e-2, weight_decay=0.5, mask=lambda params: jax.tree.map(is_matrix, params)
    ),
    "masked inside": lambda adamw, paged: paged(
        optax.masked(optax.adamw(1e-2), chosen(is_matrix))
    ),
    "masked outside": lambda adamw, paged: optax.masked(adamw(1e-2), chosen(is_matrix)),
    "labels inside": lambda adamw, paged: paged(
        optax.partition(
            {"matrix": optax.adamw(1e-2), "vector": optax.sgd(1e-2)}, chosen(label)
        )
    ),
    "labels outside": lambda adamw, paged: optax.partition(
        {"matrix": adamw(1e-2), "vector": optax.sgd(1e-2)}, chosen(label)
    ),
}


def three_steps(tx):
    params = nnx.state(Model(), nnx.Param)
    gradients, state = jax.tree.map(lambda x: 0.1 * x, params), tx.init(params)
    for _ in range(3):
        updates, state = jax.jit(tx.update)(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("codec", [None, "bfloat16"])
@pytest.mark.parametrize("masked", MASKED)
def test_masks_and_labels_in_variables(masked, codec):
    """As in Optax; a codec's moments are nearly the same."""
    expected = three_steps(MASKED[masked](optax.adamw, lambda inner: inner))
    paging = {**PAGING, "codec": codec}
    actual = three_steps(
        MASKED[masked](
            lambda *args, **kwargs: po.paged_adamw(*args, **kwargs, **paging),
            lambda inner: po.paged(inner, **paging),
        )
    )
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6 if codec is None else 1e-3)


def test_active_in_variables():
    params = nnx.state(Model(), nnx.Param)
    tx = po.paged_adamw(1e-2, **PAGING)
    updates, _ = tx.update(params, tx.init(params), params, active=chosen(is_matrix))
    moved = jax.tree.map(lambda x: bool(jnp.any(x)), updates)
    assert jax.tree.leaves(moved) == jax.tree.leaves(chosen(is_matrix))


def test_extra_arguments_in_variables():
    """`inner` gets them as the gradients are."""

    def update(updates, state, params=None, *, scales):
        return jax.tree.map(lambda x, scale: x * scale, updates, scales), state

    tx = po.paged(
        optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    )
    params = nnx.state(Model(), nnx.Param)
    doubled, _ = tx.update(
        params,
        tx.init(params),
        params,
        scales=jax.tree.map(lambda x: x * 0 + 2, params),
    )
    for x, y in zip(jax.tree.leaves(doubled), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(x, 2 * y)
