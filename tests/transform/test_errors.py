"""What bad input gets, eager and jitted, where one call of wrong_calls.md cannot show.

Each error names the argument, the value and the way out.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import paged_optax as po
from helpers.reference import SMALL_PAGES, arrays
from helpers.small import small


def check(error, *words):
    message = str(error.value)
    for word in words:
        assert word in message, (word, message)


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


@pytest.mark.parametrize("kind", ["unknown", "unpinned_host", "device"])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_memory_kind_that_cannot_hold_moments(kind, jit):
    with pytest.raises(ValueError) as error:
        tx = po.paged_adam(1e-3, host_memory_kind=kind, **SMALL_PAGES)
        (jax.jit(tx.init) if jit else tx.init)(small())
    check(error, f"host_memory_kind={kind!r}", "pinned_host", "auto")


def test_memory_kind_is_checked_where_nothing_is_paged():
    # Small leaves today, large ones tomorrow: a typing error shows at once.
    with pytest.raises(ValueError, match="host_memory_kind='unknown'"):
        po.paged_adam(1e-3, host_memory_kind="unknown").init({"w": jnp.ones(3)})


# -- update ----------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["eager", "jit"])
def update(request):
    tx = po.paged_adamw(1e-3, **SMALL_PAGES)
    return jax.jit(tx.update) if request.param else tx.update


@pytest.fixture
def state():
    return po.paged_adamw(1e-3, **SMALL_PAGES).init(small())


def test_gradients_without_a_leaf(update, state):
    with pytest.raises(ValueError) as error:
        update({"a": small()["a"]}, state, small())
    check(error, "gradients", "structure", "['b']")


def test_gradients_in_another_container(update, state):
    with pytest.raises(ValueError) as error:
        update(tuple(small().values()), state, small())
    check(error, "gradients", "structure")


def test_gradient_of_another_shape(update, state):
    with pytest.raises(ValueError) as error:
        update(small() | {"b": jnp.ones((70, 127))}, state, small())
    check(error, "gradient ['b']", "(70, 127)", "(70, 128)")


def test_gradients_and_parameters_without_a_leaf_of_the_state(update, state):
    less = {"a": small()["a"]}
    with pytest.raises(ValueError) as error:
        update(less, state, less)
    check(error, "state", "['b']", "structure")


def test_gradients_and_parameters_of_another_shape_than_the_state(update, state):
    other = small() | {"b": jnp.ones((70, 127))}
    with pytest.raises(ValueError) as error:
        update(other, state, other)
    check(error, "['b']", "(70, 127)", "(70, 128)")


def test_gradients_alone_of_another_shape_than_the_state():
    tx = po.paged_adam(1e-3, **SMALL_PAGES)
    with pytest.raises(ValueError) as error:
        tx.update(small() | {"b": jnp.ones((70, 127))}, tx.init(small()))
    check(error, "['b']", "(70, 127)", "(70, 128)")


def test_gradients_of_a_wider_dtype_than_the_state():
    tx = po.paged_adam(1e-3, **SMALL_PAGES)
    state = tx.init(small(dtype=jnp.bfloat16))
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError) as error:
            update(small(), state, small(dtype=jnp.bfloat16))
        check(error, "mu['a']", "bfloat16", "float32", "gradients", "dtype")


def test_state_of_another_transformation(update):
    with pytest.raises(ValueError):
        update(small(), optax.sgd(1e-3, momentum=0.9).init(small()), small())


@pytest.mark.parametrize("where", ["update", "jit", "plan"])
def test_clipping_by_global_norm_inside(where):
    tx = po.paged(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))
    params = small()
    with pytest.raises(po.CrossLeafError) as error:
        if where == "plan":
            po.plan(tx, params)
        elif where == "jit":
            jax.jit(tx.update)(params, tx.init(params), params)
        else:
            tx.update(params, tx.init(params), params)
    check(error, "`add`", "['a']", "['b']", "optax.chain(", "clip_by_global_norm")
    assert isinstance(error.value, ValueError)


def test_other_reductions_across_leaves():
    params = small()
    for inner in (optax.contrib.prodigy(1e-3), optax.scale_by_lbfgs()):
        tx = po.paged(inner, **SMALL_PAGES)
        with pytest.raises(po.CrossLeafError, match="outside"):
            tx.update(params, tx.init(params), params)


@pytest.mark.parametrize(
    "inner",
    [
        optax.apply_if_finite(optax.adam(1e-2), 3),
        optax.flatten(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))),
        optax.flatten(optax.lamb(1e-2)),
        optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    ],
    ids=["apply_if_finite", "flatten clip", "flatten lamb", "MultiSteps"],
)
def test_reductions_over_leaves_laid_end_to_end(inner):
    # Accepted, they would bring all moments to the device at once.
    params = small()
    tx = po.paged(inner, **SMALL_PAGES)
    with pytest.raises(po.CrossLeafError, match="all parameters|and parameter"):
        tx.update(params, tx.init(params), params)


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
