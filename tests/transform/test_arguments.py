"""Arguments that are numbers, sizes, or in the wrong memory, and masks in variables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paged_optax as po
from helpers.reference import SMALL_PAGES, arrays
from helpers.small import small

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


def test_numbers_are_gradients_and_parameters_as_in_optax():
    expected, _ = optax.adamw(1e-2).update(2.0, optax.adamw(1e-2).init(3.0), 3.0)
    tx = po.paged_adamw(1e-2, per_parameter_steps=True, **PAGING)
    updates, _ = tx.update(2.0, tx.init(3.0), 3.0)
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


# -- the arguments of `paged` -----------------------------------------------------


@pytest.mark.parametrize("argument", ["page_size", "device_budget"])
def test_a_size_that_is_injected(argument):
    """Optax makes an array of it, which no trace can read."""
    build = optax.inject_hyperparams(po.paged_adamw)
    with pytest.raises(ValueError, match=f"{argument}=.*static_args='{argument}'"):
        build(1e-3, **{argument: 1 << 20}).init({"w": jnp.ones((64, 64))})
    build = optax.inject_hyperparams(po.paged_adamw, static_args=argument)
    build(1e-3, **{argument: 1 << 20}).init({"w": jnp.ones((64, 64))})


@pytest.mark.parametrize("size", [4096, "4096", "4KiB", " 4.0 KiB ", "4.096KB"])
def test_ways_to_write_a_size(size):
    params = small()
    plan = po.plan(po.paged_adam(1e-3, page_size=size, min_paged_size=0), params)
    wanted = po.plan(po.paged_adam(1e-3, **SMALL_PAGES), params)
    assert plan.moments == wanted.moments


# -- update ----------------------------------------------------------------------


def test_an_extra_argument_without_a_hash():
    tx, params = po.paged_lion(1e-3, **SMALL_PAGES), small()
    updates, _ = tx.update(params, tx.init(params), params, layers={1, 2})
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_clipping_a_single_leaf_is_within_it():
    params = {"w": arrays()["odd"]}
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3))
    tx = po.paged(inner, **SMALL_PAGES)
    updates, _ = tx.update(params, tx.init(params), params)
    assert float(optax.tree.norm(updates)) > 0
