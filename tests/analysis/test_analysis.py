"""What is read off a transformation's jaxpr: calls, constants, parameters, effects."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import checkify, io_callback
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import paged_optax as po
from helpers.reference import SMALL_PAGES, arrays, distances
from helpers.small import SHAPES, small
from paged_optax.analysis.flat import ELEMENTWISE
from paged_optax.backend.memory import donate_within_memory


def added_up(function):
    """Applies a function to each gradient, and adds up the gradients as they come."""

    def update(updates, state, params=None):
        del params
        return jax.tree.map(function, updates), jax.tree.map(jnp.add, state, updates)

    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )


def assert_as_unpaged(inner, pages, shapes=SHAPES, ulps=0):
    """Paged, eager and jitted, a transformation gives the numbers it gives alone."""
    tx, params = po.paged(inner, **SMALL_PAGES), arrays(shapes=shapes)
    moments = [x for x in po.plan(tx, params).moments if x.on_host]
    assert moments
    assert all((x.pages > 1) == pages for x in moments)
    for wrap in (jax.jit, lambda update: update):
        state, wanted = tx.init(params), inner.init(params)
        for seed in (1, 2):
            gradients = arrays(shapes=shapes, seed=seed)
            updates, state = wrap(tx.update)(gradients, state, params)
            right, wanted = jax.jit(inner.update)(gradients, wanted, params)
            found = distances((right, wanted), (updates, state))
            assert max(found.values(), default=0) <= ulps, found


# -- conditionals over all leaves ---------------------------------------------------


def test_a_conditional_over_all_leaves():
    """Each leaf makes its own choice between the branches."""
    assert_as_unpaged(optax.scale_by_novograd(weight_decay=0.1), pages=False, ulps=64)


# -- calls and what they close over ------------------------------------------------


def closed_over(make):
    """Multiplies by an array of the leaf's own shape, a constant of an inner call."""

    def function(x):
        factor = np.random.default_rng(9).normal(size=x.shape).astype(np.float32)
        return make(lambda x: x * factor)(x)

    return function


CALLS = {
    "checkpoint": (jax.checkpoint(jnp.square), True),
    "checkpoint of a call": (jax.checkpoint(jax.jit(jnp.square)), True),
    "checkpoint with a policy": (
        jax.checkpoint(jnp.square, policy=jax.checkpoint_policies.everything_saveable),
        True,
    ),
    "custom_jvp": (jax.nn.relu, True),
    "constant of a jit": (closed_over(jax.jit), True),
    "constant of a checkpoint": (closed_over(jax.checkpoint), True),
    "constant of a jit in a jit": (closed_over(lambda f: jax.jit(jax.jit(f))), True),
    "constant of a jit in a checkpoint": (
        closed_over(lambda f: jax.checkpoint(jax.jit(f))),
        True,
    ),
    "shard_map": (
        lambda x: jax.shard_map(
            jnp.square, mesh=jax.make_mesh((1,), ("x",)), in_specs=P(), out_specs=P()
        )(x),
        False,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_seen_through(name):
    function, pages = CALLS[name]
    assert_as_unpaged(added_up(function), pages)


def test_a_key_closed_over_in_a_call():
    key = jax.random.key(3)
    noisy = jax.jit(lambda x: x + jax.random.normal(key, x.shape))
    assert_as_unpaged(added_up(noisy), pages=False)


# -- primitives and their parameters -----------------------------------------------


def _whole(x):
    return jnp.round(100 * x).astype(jnp.int32)


def _positive(x):
    return 1.5 + jnp.abs(x)


def _uses(names, *arguments):
    """For each name the primitive applied to what is made of an array."""

    def use(name, x):
        of_jax = getattr(lax, name, None) or getattr(jnp, f"bitwise_{name}")
        return of_jax(*(make(x) for make in arguments))

    return {name: functools.partial(use, name) for name in names.split()}


#: A use of each primitive that the analysis takes for element-wise.
USES = _uses(
    """abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh
    digamma erf erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p logistic
    neg round rsqrt sign sin sinh sqrt square stop_gradient tan tanh""",
    lambda x: x,
)
USES |= _uses(
    "add atan2 div eq ge gt le lt max min mul ne nextafter pow rem sub",
    lambda x: x,
    lambda x: 2 * x - 1,
)
USES |= _uses("igamma igammac zeta", _positive, lambda x: _positive(2 * x))
USES |= _uses("clz not population_count", _whole)
USES |= _uses(
    "and or shift_left shift_right_arithmetic shift_right_logical xor",
    _whole,
    lambda _: 3,
)
USES |= {
    "pair_donated": donate_within_memory,
    "add_any": jax.grad(lambda x: jnp.sum(jnp.sin(x) * x)),
    "bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, jnp.int32) // 2**20,
    "clamp": lambda x: lax.clamp(-0.5, x, 0.5),
    "complex": lambda x: jnp.abs(lax.complex(x, 2 * x)),
    "conj": lambda x: jnp.imag(jnp.conj(lax.complex(x, x))),
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "copy": jnp.copy,
    "imag": lambda x: jnp.imag(lax.complex(1.0 + 0 * x, x)),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "real": lambda x: jnp.real(lax.complex(x, 1.0 + 0 * x)),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 3),
    "select_n": lambda x: jnp.where(x > 0, x, -2 * x),
}


@pytest.mark.slow
def test_every_elementwise_primitive():
    """Each is used as its name says, all in one leaf, and pages as rows."""
    # A `shard_map` alone has `pvary`: test_shard_map's numbers need it.
    assert USES.keys() == ELEMENTWISE - {"pvary"}
    for name, use in USES.items():
        jaxpr = jax.make_jaxpr(use)(jnp.ones((2, 2)))
        assert f" {name}" in str(jaxpr) or f" {name}[" in str(jaxpr), name

    def update(updates, state, params=None):
        del state, params
        return updates, {
            name: jax.tree.map(lambda x, use=use: use(x).astype(x.dtype), updates)
            for name, use in USES.items()
        }

    def init(params):
        return dict.fromkeys(USES, jax.tree.map(jnp.zeros_like, params))

    inner = optax.GradientTransformation(init, update)
    # XLA:CPU contracts the polynomials behind `tanh` and others in one program only.
    assert_as_unpaged(inner, pages=True, shapes={"a": (32, 64)}, ulps=8)


#: Functions that keep a leaf's shape, and whether each value is made of its own alone.
SHAPED = {
    "reshape, other dimensions": (lambda x: lax.reshape(x, x.shape, (1, 0)), False),
    "reshape, there and back": (lambda x: x.ravel().reshape(x.shape), False),
    "transpose": (lambda x: x.T.reshape(x.shape), False),
    "rev": (lambda x: x[::-1], False),
    "iota": (lambda x: x * lax.broadcasted_iota(x.dtype, x.shape, 0), False),
    "cumsum": (lambda x: jnp.cumsum(x, axis=1), False),
    "a row to all": (lambda x: x + x[:1], False),
    "a column to all": (lambda x: lax.broadcast_in_dim(x[:, 0], x.shape, (0,)), False),
    "a scalar of the leaf to all": (lambda x: jnp.full_like(x, x[0, 0]), False),
    "a scalar to all": (lambda x: x + jnp.full_like(x, 2.0), True),
    "a scalar chooses": (lambda x: lax.select(jnp.bool_(True), x, 2 * x), True),
    "scalars clamp": (lambda x: lax.clamp(-0.5, x, 0.5), True),
    "arrays clamp": (lambda x: lax.clamp(-abs(x), jnp.sin(x), abs(x)), True),
}


@pytest.mark.quick("transpose", "cumsum", "a scalar chooses", "arrays clamp")
@pytest.mark.parametrize("name", SHAPED)
def test_what_keeps_the_shape(name):
    function, pages = SHAPED[name]
    assert_as_unpaged(added_up(function), pages)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 2 * jnp.reshape(x, ()).reshape(x.shape),
        lambda x: jnp.broadcast_to(jnp.reshape(x, ()) ** 2, x.shape),
        lambda x: lax.select(jnp.reshape(x, ()) > 0, x, 2 * x),
    ],
    ids=["reshape", "broadcast", "select"],
)
def test_a_single_value_as_a_scalar(function):
    shapes = {"one": (1,), "deep": (1, 1, 1), "scalar": ()}
    assert_as_unpaged(added_up(function), pages=False, shapes=shapes)


# -- leaves laid end to end ----------------------------------------------------------


def test_moments_before_leaves_are_laid_end_to_end():
    """They would all be on the device at once: each part pages alone."""
    parts = optax.scale_by_lion(), optax.flatten(optax.trace(0.9))
    params = small()
    tx = po.paged(optax.chain(*parts), **SMALL_PAGES)
    for run in (
        lambda: po.plan(tx, params),
        lambda: tx.update(params, tx.init(params)),
    ):
        with pytest.raises(po.CrossLeafError, match=r"`concatenate`.*outside"):
            run()
    apart = optax.chain(*(po.paged(part, **SMALL_PAGES) for part in parts))
    wanted = optax.chain(*parts)
    found = jax.jit(apart.update)(params, apart.init(params), params)
    right = jax.jit(wanted.update)(params, wanted.init(params), params)
    assert distances(right, found) == {}


# -- effects -----------------------------------------------------------------------


def _prints(x):
    jax.debug.print("{}", jnp.sum(x))
    return x


def _prints_within(x):
    return lax.fori_loop(0, 2, lambda _, x: jax.jit(_prints)(x), x)


def _calls_back(x):
    jax.debug.callback(lambda x: None, x)
    return x


def _is_given_by_the_host(x):
    return io_callback(lambda x: x, x, x)


def _checks(x):
    checkify.check(jnp.all(x < 9), "large")
    return x


def _writes(x):
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = 2 * x
    return ref[...]


EFFECTS = {
    "debug_print": _prints,
    "debug_print, within a scan": _prints_within,
    "debug_callback": _calls_back,
    "io_callback": _is_given_by_the_host,
    "check": _checks,
    "new_ref": _writes,
}


@pytest.mark.parametrize("name", EFFECTS)
@pytest.mark.parametrize("where", ["update", "init", "plan"])
def test_effects_are_refused(name, where):
    inner = added_up(EFFECTS[name])
    if where == "init":
        init = lambda params: jax.tree.map(EFFECTS[name], params)
        inner = optax.GradientTransformation(init, inner.update)
    tx, params = po.paged(inner, **SMALL_PAGES), small()
    with pytest.raises(ValueError) as error:
        if where == "update":
            jax.jit(tx.update)(params, tx.init(params), params)
        elif where == "plan":
            po.plan(tx, params)
        else:
            tx.init(params)
    for word in (f"`{name.split(',')[0]}`", "effect", "optax.chain("):
        assert word in str(error.value)


def test_effects_outside_happen(capsys):
    printing = optax.stateless(lambda updates, _: jax.tree.map(_prints, updates))
    tx = optax.chain(printing, po.paged_lion(1e-3, **SMALL_PAGES))
    params = {"a": jnp.ones((64, 64))}
    jax.jit(tx.update)(params, tx.init(params), params)
    jax.effects_barrier()
    assert capsys.readouterr().out == "4096.0\n"


def test_checks_outside_are_made():
    checking = optax.stateless(lambda updates, _: jax.tree.map(_checks, updates))
    tx = optax.chain(checking, po.paged_lion(1e-3, **SMALL_PAGES))
    params = {"a": jnp.ones((64, 64))}
    update = jax.jit(checkify.checkify(tx.update))
    for gradients, large in ((params, False), ({"a": 9 * params["a"]}, True)):
        error, _ = update(gradients, tx.init(params), params)
        assert ("large" in (error.get() or "")) == large


def test_collectives_are_no_effects():
    inner = added_up(lambda x: x + lax.pmean(jnp.sum(x), "x"))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    params = small()

    def updates(tx):
        update = lambda g: tx.update(g, tx.init(g))[0]
        shards = {"mesh": mesh, "in_specs": P("x"), "out_specs": P("x")}
        return jax.jit(jax.shard_map(update, check_vma=False, **shards))(params)

    found = updates(po.paged(inner, **SMALL_PAGES))
    chex.assert_trees_all_close(found, updates(inner), rtol=1e-6)


def test_callbacks_without_effects_run():
    tx = added_up(lambda x: jax.pure_callback(lambda x: np.asarray(x)[::-1], x, x))
    assert_as_unpaged(tx, pages=False)
