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
from helpers import apart, exact
from helpers.reference import (
    ALIASES,
    SHAPES,
    SMALL_PAGES,
    arrays,
    assert_equal,
    compare,
    compare_alias,
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
