"""The same numbers as Optax: every alias, many compositions, odd shapes and values.

Twice: bit for bit in a process where XLA:CPU rounds every formula one way (`exact`),
and here as a user meets it, with the ulps that its fusions cost.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import apart, exact, reference
from helpers.reference import (
    ALIASES,
    SHAPES,
    SMALL_PAGES,
    arrays,
    assert_equal,
    compare,
    compare_alias,
    distances,
    kinds,
    steps,
)

# Strict dtypes are for what Optax writes strictly: not `decay**count` of its adams.
pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("strict_ranks")]


# -- bit for bit ----------------------------------------------------------------


@pytest.fixture(scope="module")
def exactly():
    with apart.process(exact.__file__, exact.FLAGS) as ask:
        yield ask


#: Of gradients at the ends of the floats too: infinite, NaN, denormal, vanishing.
EXTREME = [f"extreme {x}" for x in ALIASES if not x.endswith("_32bit")]


@pytest.mark.quick("-paged_adamw-", "-extreme paged_adamw-")
@pytest.mark.parametrize("name", [*ALIASES, *exact.COMPOSITIONS, *EXTREME])
def test_bit_for_bit_where_xla_rounds_one_way(exactly, name):
    found = exactly(name)
    if name.endswith("paged_muon"):
        # Its matrices are normed and multiplied, and XLA:CPU lays them out, and so
        # orders the sums, by what surrounds them: see `test_muon_in_double_precision`.
        assert found["state"] == {}
        assert name in EXTREME or max(found["parameters"].values()) <= 1024
    else:
        assert found == {"state": {}, "parameters": {}}


# -- as XLA:CPU comes -------------------------------------------------------------

# Ulps by which the state and the parameters may differ after 25 steps; 0 where no
# line is here. Measured with jax 0.10.2 and 0.12.0.1 on x86-64; every line but muon's
# and float16's is 0 with the flags of `exact`, which is why:
#
# - `a * b + c` is contracted into one fused multiply-add in one of the programs only.
#   This is all that moves a state: the traces of sgd, rmsprop and lars and the
#   averages of adafactor, on leaves of a few values, by an ulp of their own.
# - `(m / c) / (sqrt(n) + e)` becomes `m / (c * (sqrt(n) + e))` where one program holds
#   both divisions: adam and all that is made of it.
# - float16 on jax 0.12: its `rsqrt` has other last bits in a vector than in a scalar.
_DIVISION = {
    "paged_adamw": (0, 4),
    "paged_adam": (0, 4),
    "paged_nadamw": (0, 5),
    "paged_ademamix": (0, 4),
    "paged_lamb": (0, 5),
}
ROUNDED = {
    jnp.float32: _DIVISION
    | {
        "paged_sgd": (1, 1),
        "paged_rmsprop": (1, 3),
        "paged_lars": (1, 0),
        "paged_adafactor": (2, 1),
        "paged_muon": (0, 128),
    },
    jnp.float16: _DIVISION
    | {
        "paged_adagrad": (0, 2),
        "paged_rmsprop": (3, 32),
        "paged_adafactor": (1, 0),
        "paged_muon": (0, 5),
    },
    jnp.bfloat16: {"paged_adafactor": (1, 0)},
}

#: Those that Optax writes without implicit promotion.
STRICT = {"paged_lion", "paged_sgd", "paged_rmsprop", "paged_adagrad", "paged_lars"}


@pytest.mark.quick(
    "-paged_adamw-float32",
    "-paged_lion-float32",
    "-paged_lamb-float32",
    "-paged_muon-float32",
)
@pytest.mark.parametrize("dtype", ROUNDED, ids=lambda x: x.__name__)
@pytest.mark.parametrize("alias", [x for x in ALIASES if not x.endswith("_32bit")])
def test_alias_matches_optax(alias, dtype):
    shapes = {name: shape for name, shape in SHAPES.items() if name != "large"}
    promotion = "strict" if alias in STRICT else "standard"
    with jax.numpy_dtype_promotion(promotion):
        found = compare_alias(alias, arrays(dtype, shapes=shapes))
    state, parameters = ROUNDED[dtype].get(alias, (0, 0))
    assert max(found["state"].values(), default=0) <= state, found
    assert max(found["parameters"].values(), default=0) <= parameters, found


def test_muon_in_double_precision():
    # 2**29 times finer: what is left in float32 is rounding, and nothing else.
    with jax.enable_x64():
        params = arrays(jnp.float64, shapes={"odd": (129, 65)})
        tx = optax.contrib.muon(1e-2)
        wanted = list(steps(tx, params, 5))[-1]
        found = list(steps(po.paged_muon(1e-2, **SMALL_PAGES), params, 5))[-1]
        chex.assert_trees_all_close(found[1], wanted[1], rtol=1e-11, atol=1e-13)


# -- other trees and values -----------------------------------------------------


@pytest.mark.parametrize("params", [{}, {"w": None}], ids=["empty", "none"])
def test_nothing_to_update(params):
    tx = po.paged_adamw(1e-2)
    updates, state = tx.update(params, tx.init(params), params)
    assert updates == params
    assert int(optax.tree.get(state, "count")) == 1


@pytest.mark.slow
def test_complex_parameters():
    real, imaginary = arrays(seed=1), arrays(seed=2)
    params = jax.tree.map(jax.lax.complex, real, imaginary)

    def gradients(number):
        return jax.tree.map(
            jax.lax.complex, arrays(seed=number), arrays(seed=number + 50)
        )

    found = compare(
        optax.adam(1e-2),
        po.paged_adam(1e-2, **SMALL_PAGES),
        params,
        5,
        gradients=gradients,
    )
    assert max(found["state"].values(), default=0) <= 2
    assert max(found["parameters"].values(), default=0) <= 8


@pytest.mark.slow
def test_numpy_parameters_and_gradients():
    given = arrays(shapes={"w": (70, 33)})
    params = jax.tree.map(np.asarray, given)
    tx = po.paged_adamw(1e-2, **SMALL_PAGES)
    wanted = tx.update(given, tx.init(given), given)
    assert_equal(tx.update(params, tx.init(params), params), wanted)


@pytest.mark.parametrize(
    ("shape", "page_size", "count"),
    [
        ((4099, 17), "16KiB", 18),  # a last page of fewer rows
        ((100_003,), "64KiB", 7),  # one long axis
        ((2, 3, 64, 33), "4KiB", None),  # leading axes become rows
        ((5, 40_000), "8KiB", None),  # a row longer than a page
        ((8, 7, 31), "4KiB", None),
    ],
)
def test_shapes_of_several_pages(shape, page_size, count):
    params = arrays(shapes={"w": shape})
    paged = po.paged_lion(1e-2, page_size=page_size, min_paged_size=0)
    (mu,) = (x for x in po.plan(paged, params).moments if x.on_host)
    assert mu.pages == count if count else mu.pages > 1
    assert compare(optax.lion(1e-2), paged, params, 3) == {
        "state": {},
        "parameters": {},
    }


@pytest.mark.slow
def test_page_size_changes_no_bit_of_the_state():
    params = arrays(shapes={"w": (700, 1024), "v": (300_001,)})
    runs = []
    for size, pages in (("64KiB", 19), ("1MiB", 2), ("1GiB", 1)):
        tx = po.paged_adamw(1e-2, page_size=size, min_paged_size=0)
        assert po.plan(tx, params).moments[1].pages == pages
        runs.append(list(steps(tx, params, 3))[-1])
    for _, found, state in runs[1:]:
        assert_equal(state, runs[0][2])
        # A leaf that is one page is fused otherwise (jax 0.10.2): see `ROUNDED`.
        chex.assert_trees_all_close(found, runs[0][1], rtol=1e-6, atol=1e-7)


def test_zero_size_leaves():
    params = arrays(shapes={"a": (0,), "b": (0, 128), "c": (128, 0), "w": (64, 33)})
    for tx, paged in (
        (optax.lion(1e-2), po.paged_lion(1e-2, **SMALL_PAGES)),
        (optax.lars(1e-2), po.paged_lars(1e-2, **SMALL_PAGES)),
    ):
        assert compare(tx, paged, params, 3) == {"state": {}, "parameters": {}}


@pytest.mark.slow
def test_bfloat16_gradients_of_float32_parameters():
    params = arrays()
    paged = po.paged_adamw(1e-2, **SMALL_PAGES)
    found = compare(
        optax.adamw(1e-2),
        paged,
        params,
        5,
        gradients=lambda number: arrays(jnp.bfloat16, seed=number),
    )
    updates, _ = paged.update(arrays(jnp.bfloat16), paged.init(params), params)
    # The widening of a gradient is fused otherwise too, which moves a contraction.
    assert max(found["state"].values(), default=0) <= 1
    assert max(found["parameters"].values(), default=0) <= 4
    chex.assert_trees_all_equal_dtypes(updates, params)


@pytest.mark.slow
@pytest.mark.parametrize("alias", ["paged_adamw", "paged_sgd", "paged_lamb"])
def test_eager_equals_jitted(alias):
    shapes = {x: SHAPES[x] for x in ("scalar", "seven", "odd")}
    optimizer, kwargs = ALIASES[alias]
    paged = getattr(po, alias)(1e-2, **kwargs, **SMALL_PAGES)
    params = arrays(shapes=shapes)
    jitted = list(steps(paged, params, 5))[-1]
    eager = list(steps(paged, params, 5, jit=lambda f: f))[-1]
    assert_equal(eager, jitted)
    # Eager Optax rounds after every operation, so that nothing contracts.
    reference = list(steps(optimizer(1e-2, **kwargs), params, 5, jit=lambda f: f))[-1]
    chex.assert_trees_all_close(eager, reference, rtol=2e-6, atol=1e-6)


def _counting(inner, counts):
    def update(updates, state, params=None, **extra_args):
        counts.append(None)
        return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)


@pytest.mark.slow
def test_members_of_an_ensemble():
    """Made by `vmap`, or stacked, which is what moments on the host are updated by."""
    shapes = {"w": (3, 64, 64), "v": (3, 300)}
    params, gradients = arrays(shapes=shapes), arrays(shapes=shapes, seed=1)
    inner, tx = optax.adam(1e-2), po.paged_adam(1e-2, **SMALL_PAGES)
    resident = po.paged_adam(1e-2, device_budget=None)
    start = jax.vmap(inner.init)(params)
    wanted = jax.jit(jax.vmap(inner.update))(gradients, start, params)[1]
    state = jax.vmap(resident.init)(params)
    found = jax.jit(jax.vmap(resident.update))(gradients, state, params)[1]
    assert_equal(found, wanted)
    state = jax.vmap(tx.init)(params)
    assert_equal(state, start)
    assert "pinned_host" in kinds(state)
    with pytest.raises(ValueError, match=r"stacked parameters, without vmap"):
        jax.eval_shape(jax.vmap(tx.update), gradients, state, params)
    found = jax.jit(tx.update)(gradients, tx.init(params), params)[1]
    assert_equal(found[0].mu, wanted[0].mu)


@pytest.mark.slow
def test_schedule_free_around_paging():
    """Its parameters for evaluation are computed of what stays on the device."""
    params = arrays(shapes={"w": (70, 128)})
    results = []
    for make, paging in ((optax.adamw, {}), (po.paged_adamw, SMALL_PAGES)):
        tx = optax.contrib.schedule_free(make(1e-2, b1=0.0, **paging), 1e-2)
        *_, (_, new, state) = steps(tx, params, 3)
        results.append(optax.contrib.schedule_free_eval_params(state, new))
    assert "pinned_host" in kinds(state)
    # A difference of the parameters and of z: no more exact than these are.
    scale = reference.largest([new, state.z, results[0]])
    assert max(distances(*results, scale).values(), default=0) <= 8
    tx = po.paged(optax.contrib.schedule_free(optax.sgd(1e-2), 1e-2), **SMALL_PAGES)
    with pytest.raises(ValueError, match="memory_space of all inputs passed to"):
        optax.contrib.schedule_free_eval_params(tx.init(params), params)


@pytest.mark.parametrize("moving", [False, True], ids=["resident", "paged"])
def test_one_array_given_for_two_moments(moving):
    """Each place of a state gets its own new value, though one array be in several."""
    shapes = {"w": (70, 128), "v": (300,)}
    params, gradients = arrays(shapes=shapes), arrays(shapes=shapes, seed=1)
    space = jax.memory.Space.Host if moving else jax.memory.Space.Device

    def update(tx, space, state):
        zeros = jax.device_put(jax.tree.map(jnp.zeros_like, params), space)
        state = (state[0]._replace(mu=zeros, nu=zeros), *state[1:])
        return tx.update(gradients, state, params)[1]

    inner, paged = optax.adam(1e-2), po.paged_adam(1e-2, **SMALL_PAGES)
    paged = paged if moving else po.paged_adam(1e-2, device_budget=None)
    state = inner.init(params)
    device = jax.memory.Space.Device
    right = jax.jit(lambda state: update(inner, device, state))(state)
    found = jax.jit(lambda state: update(paged, space, state))(state)
    assert_equal(found, right)


@pytest.mark.quick("around")
@pytest.mark.parametrize("where", ["inside", "around"])
def test_injected_learning_rate_changes_between_steps(where):
    traced = []

    def build(page):
        lion = lambda learning_rate: optax.lion(learning_rate)  # noqa: E731
        if where == "inside":
            return page(_counting(optax.inject_hyperparams(lion)(1e-2), traced))
        return optax.inject_hyperparams(
            lambda learning_rate: page(_counting(lion(learning_rate), traced))
        )(learning_rate=1e-2)

    def final(tx):
        params = arrays()
        state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
        traced.clear()
        for number in range(4):
            rate = jnp.float32(1e-2 / (number + 1))
            state = optax.tree.set(state, learning_rate=rate)
            updates, state = update(arrays(seed=number), state, params)
            params = optax.apply_updates(params, updates)
        assert len(traced) == 1
        return params, state

    wanted = final(build(lambda inner: inner))
    found = final(build(lambda inner: po.paged(inner, **SMALL_PAGES)))
    assert "pinned_host" in kinds(found[1])
    assert_equal(found, wanted)


def test_extra_arguments_of_every_type():
    def update(updates, state, params=None, *, value, scale, flag, name, **extra_args):
        del params, extra_args
        assert flag is True and name == "x"
        rate = (value * scale).astype(jnp.float32)
        return jax.tree.map(lambda u: u * rate, updates), state

    inner = optax.GradientTransformationExtraArgs(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )
    tx = po.paged(inner, **SMALL_PAGES)
    params = arrays()
    values = {"value": jnp.float32(3.0), "scale": 2.0, "flag": True, "name": "x"}
    updates, _ = tx.update(params, tx.init(params), params, **values)
    assert_equal(updates, jax.tree.map(lambda x: x * 6.0, params))


def test_new_value_of_an_extra_argument_is_no_new_program(caplog):
    tx = po.paged(exact.scale_by_value(), **SMALL_PAGES)
    params = arrays()
    state = tx.init(params)
    for value in (1.0, 2.0, 3.0):
        with jax.log_compiles(value > 1.0):
            _, state = tx.update(params, state, params, value=value)
    assert "Compiling" not in caplog.text
    assert distances(state, tx.init(params)) != {}
