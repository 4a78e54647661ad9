"""`jit_step` and `memory_report`: what they say is what there is."""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import paged_optax as po
from helpers.reference import SMALL_PAGES, assert_equal, kinds
from helpers.small import ALL_PAGED, DEVICE, ORDERS, TX, make_step, small
from paged_optax.compiling.donations import aliases


def run(step, arguments, results, made, gradients):
    out = step(*(made[name] for name in arguments), gradients)
    return dict(zip(results, out, strict=True))


@pytest.mark.quick("-2-")
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("results", ORDERS)
@pytest.mark.parametrize("arguments", ORDERS)
def test_every_order_of_arguments(arguments, results, devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    over = NamedSharding(mesh, PartitionSpec("x"))
    place = lambda tree: tree if devices == 1 else jax.device_put(tree, over)
    tx = po.paged_adam(1e-2, **SMALL_PAGES)  # its own: what `init` sees counts
    made = {"params": place(small()), "state": tx.init(place(small()))}
    example = (*(made[name] for name in arguments), place(small()))
    step = po.jit_step(
        make_step(arguments, results, tx), *example, donate_argnums=(0, 1)
    )
    # Before it runs: a buffer handed to the wrong memory ends the process on CPU.
    flat, _ = jax.tree.flatten(example)
    pairs = aliases(step.compiled.as_text())
    outputs = jax.tree.leaves(step.compiled.output_shardings)
    assert len(pairs) == len(flat) - 2  # all but the gradients
    for argument, output in pairs.items():
        kind = flat[argument].sharding.memory_kind
        assert outputs[output].memory_kind == kind, (output, argument)

    wanted = {"params": small(), "state": optax.adam(1e-2).init(small())}
    plain = jax.jit(make_step(arguments, results, optax.adam(1e-2)))
    for number in range(3):
        old = made
        made = run(step, arguments, results, made, place(small(number)))
        wanted = run(plain, arguments, results, wanted, small(number))
        assert kinds(made["state"]) == ALL_PAGED
        assert kinds(made["params"]) == [DEVICE, DEVICE]
        assert all(x.is_deleted() for x in jax.tree.leaves(old) if x.ndim)
    assert_equal(made["state"], wanted["state"])
    assert {len(x.devices()) for x in jax.tree.leaves(made["params"])} == {devices}


def test_gradients_may_be_donated_too():
    def step(params, state, gradients):
        updates, state = TX.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, updates

    params, state, gradients = small(), TX.init(small()), small(1)
    step = po.jit_step(step, params, state, gradients, donate_argnums=(0, 1, 2))
    params, state, updates = step(params, state, gradients)
    assert all(x.is_deleted() for x in jax.tree.leaves(gradients))
    assert kinds((params, state, updates)) == [DEVICE] * 2 + ALL_PAGED + [DEVICE] * 2


@pytest.mark.filterwarnings("ignore:nothing is donated")
@pytest.mark.parametrize("donated", [(), (0, 1, 2)], ids=str)
def test_a_python_number_among_the_arguments(donated):
    """It is an argument like any other: its new value counts, and nothing is lost."""
    params, tx = {"w": jnp.ones((64, 64))}, optax.sgd(1.0, momentum=0.9)
    tx = po.paged(tx, page_size=4096, min_paged_size=0)

    def step(params, state, scale):
        gradients = jax.tree.map(lambda x: jnp.full_like(x, scale), params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    step = po.jit_step(step, params, state, 0.5, donate_argnums=donated)
    params, state = step(params, state, 0.5)
    params, state = step(params, state, 0.25)
    # The first step moves by the trace 0.5, the second by 0.9 * 0.5 + 0.25.
    np.testing.assert_allclose(params["w"], 1 - 0.5 - 0.7, rtol=1e-6)


def test_shapes_are_enough_for_an_example():
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    arguments = (small(), TX.init(small()), small(1))
    shapes, order = jax.tree.map(shape, arguments), ("params", "state")
    step = po.jit_step(make_step(order, order), *shapes, donate_argnums=(0, 1))
    params, state = step(*arguments)
    assert kinds(params) == [DEVICE, DEVICE]
    assert kinds(state) == ALL_PAGED


def test_without_donation_nothing_is_consumed():
    order = ("params", "state")
    params, state = small(), TX.init(small())
    with pytest.warns(UserWarning, match="nothing is donated.*donate_argnames"):
        step = po.jit_step(make_step(order, order), params, state, params)
    first, second = step(params, state, params), step(params, state, params)
    assert_equal(first, second)
    assert kinds(first[1]) == ALL_PAGED


def test_donated_argument_from_the_last():
    step = po.jit_step(lambda x, y: (x, y + 1), donate_argnums=-1)
    x, y = jnp.ones(4), jnp.ones(5)
    step(x, y=y)
    assert y.is_deleted() and not x.is_deleted()


def named_step(params, state, gradients, rate=1.0, *, scale, sign=1):
    gradients = jax.tree.map(lambda g: sign * rate * scale * g, gradients)
    updates, state = TX.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize(
    "options",
    [
        {"donate_argnums": (0, 1)},
        {"donate_argnames": ("params", "state")},
        {"donate_argnums": 0, "donate_argnames": "state"},
    ],
    ids=str,
)
def test_arguments_by_name(options):
    """However they are given and named, the donated ones are reused."""
    wanted = named_step(small(), TX.init(small()), small(1), 0.5, scale=2.0, sign=-1)
    names = ("params", "state", "gradients", "rate")
    example = small(), TX.init(small()), small(1), 0.5
    compiled = po.jit_step(named_step, *example, scale=2.0, sign=-1, **options)
    decorated = po.jit_step(**options)(named_step)
    assert decorated.__name__ == "named_step" and decorated.compiled is None
    for step in (compiled, decorated):
        for count in (4, 2, 1, 0):  # so many by their places
            params, state = small(), TX.init(small())
            given = params, state, small(1), 0.5
            named = dict([*zip(names, given, strict=True)][count:])
            found = step(*given[:count], sign=-1, **named, scale=2.0)
            chex.assert_trees_all_close(found, wanted, rtol=1e-6)
            assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))
            assert kinds(found[1]) == ALL_PAGED


def test_static_arguments():
    """They are constants of a program, and no other is taken for them."""

    def step(params, state, sign, gradients):
        assert isinstance(sign, str)
        gradients = jax.tree.map(lambda g: -g if sign == "-" else g, gradients)
        updates, state = TX.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    wanted = step(small(), TX.init(small()), "-", small(1))
    step = po.jit_step(step, donate_argnums=(0, 1), static_argnums=2)
    found = step(small(), TX.init(small()), "-", small(1))
    chex.assert_trees_all_close(found, wanted, rtol=1e-6)
    back = [step(small(), TX.init(small()), sign, small(1)) for sign in "+-"]
    opposite = jax.tree.map(lambda g: -g, small(1))
    wanted = [step(small(), TX.init(small()), "-", opposite), found]
    chex.assert_trees_all_equal(back, wanted)


def test_a_second_attempt_is_traced_anew():
    """What JAX keeps of a first call that failed is not taken for the second."""
    setting = {"crop": True}

    @po.jit_step(donate_argnums=0)
    def step(x):
        return x[:2] if setting["crop"] else 2 * x

    with pytest.raises(po.DonationError) as kept:
        step(jnp.ones(4))
    setting["crop"] = False
    np.testing.assert_array_equal(step(jnp.ones(4)), 2 * np.ones(4))
    del kept


def test_donation_of_arguments_without_a_position():
    """A name after `*args` is no position, nor is one in `**kwargs`."""

    @po.jit_step(donate_argnames="state")
    def step(*args, state):
        return args[0] + args[1], state + 1

    one, other, state = jnp.ones(4), jnp.ones(5), jnp.ones(6)
    step(one, other[:4], state=state)
    assert state.is_deleted() and not one.is_deleted() and not other.is_deleted()

    @po.jit_step(donate_argnames="b")
    def step(a, /, **others):
        return a, others["b"] + 1

    one, other = jnp.ones(4), jnp.ones(5)
    step(one, b=other)
    assert other.is_deleted() and not one.is_deleted()


def test_constants_are_told_apart():
    scaled = po.jit_step(lambda x, c: x * (10 if c is True else c), static_argnums=1)
    np.testing.assert_array_equal(scaled(jnp.ones(2), 1), [1, 1])
    for other, wanted in [(True, 10), (1.0, 1), (2, 2), (1, 1)]:
        np.testing.assert_array_equal(scaled(jnp.ones(2), other), [wanted] * 2)
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        po.jit_step(lambda x, c: x, static_argnums=1)(jnp.ones(2), {})
    by_name = po.jit_step(
        lambda x, y=1.0, mode="a": x + (mode == "b"), static_argnums=2
    )
    np.testing.assert_array_equal(by_name(jnp.ones(2), mode="b"), [2, 2])


def test_wrapped_steps_and_methods():
    def doubled(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **{name: 2 * x for name, x in kwargs.items()})

        return wrapper

    step = po.jit_step(doubled(lambda p, k=1.0: p * k))
    np.testing.assert_array_equal(step(jnp.ones(2), k=3.0), [6, 6])

    class Trainer(NamedTuple):
        rate: float

        @po.jit_step
        def step(self, x):
            return self.rate * x

    np.testing.assert_array_equal(Trainer(2.0).step(jnp.ones(2)), [2, 2])


def test_values_of_half_a_byte():
    """A frozen base of four bits, on the host too; jax 0.10.2 refuses it compiled."""
    codes = jnp.arange(64 * 64, dtype=jnp.uint8).reshape(64, 64).astype(jnp.uint4)
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    traced = []

    def step(params, codes, key):
        traced.append(1)
        scale = jax.device_put(codes, jax.memory.Space.Device).astype(jnp.float32)
        return params + scale + jax.random.normal(key, params.shape)

    compiled, key = po.jit_step(step, donate_argnums=0), jax.random.key(0)
    for placed in (codes, jax.device_put(codes, host)):
        wanted = step(jnp.zeros((64, 64)), placed, key)
        counts = []
        for _ in range(2):
            params = jnp.zeros((64, 64))
            found = compiled(params, placed, key)
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
            assert params.is_deleted()
            counts.append(len(traced))
        assert counts[0] == counts[1]


def test_report_of_a_step():
    order = ("params", "state")
    params, state = small(), TX.init(small())
    step = po.jit_step(
        make_step(order, order), params, state, params, donate_argnums=(0, 1)
    )
    report = po.memory_report(step.compiled)
    size = sum(x.nbytes for x in jax.tree.leaves((params, state, params)))
    assert report.device_arguments + report.host_arguments == size
    gradients = sum(x.nbytes for x in jax.tree.leaves(params))
    assert report.device_aliased + report.host_aliased == size - gradients
    assert "scratch" in str(report)
    assert report.hlo not in repr(report)
