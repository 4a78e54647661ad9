"""`jit_step`, `plan` and `memory_report`: what they say is what there is."""

import functools
import re
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import paged_optax as po
from helpers import aot
from helpers.exact import scale_by_value
from helpers.programs import on_device, square, state_on
from helpers.reference import SMALL_PAGES, assert_equal, kinds
from helpers.small import ALL_PAGED, DEVICE, HOST, ORDERS, TX, small, step_of
from paged_optax.compiling.host_arithmetic import warn_of_host_compute

# -- jit_step -----------------------------------------------------------------


def run(step, arguments, results, made, gradients):
    out = step(*(made[name] for name in arguments), gradients)
    return dict(zip(results, out, strict=True))


@pytest.mark.quick("-2-")
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("results", ORDERS)
@pytest.mark.parametrize("arguments", ORDERS)
def test_every_order_of_arguments(arguments, results, devices):
    if devices == 1:
        place = lambda tree: tree  # noqa: E731
    else:
        mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
        place = lambda tree: jax.device_put(  # noqa: E731
            tree, NamedSharding(mesh, PartitionSpec("x"))
        )
    tx = po.paged_adam(1e-2, **SMALL_PAGES)  # its own: what `init` sees counts
    made = {"params": place(small()), "state": tx.init(place(small()))}
    example = (*(made[name] for name in arguments), place(small()))
    step = po.jit_step(step_of(arguments, results, tx), *example, donate_argnums=(0, 1))
    # Before it runs: a buffer handed to the wrong memory ends the process on CPU.
    flat, _ = jax.tree.flatten(example)
    header = step.compiled.as_text().split("\n", 1)[0]
    pairs = re.findall(r"\{(\d+)\}: \((\d+),", header)
    outputs = jax.tree.leaves(step.compiled.output_shardings)
    assert len(pairs) == len(flat) - 2  # all but the gradients
    for output, argument in pairs:
        kind = flat[int(argument)].sharding.memory_kind
        assert outputs[int(output)].memory_kind == kind, (output, argument)

    wanted = {"params": small(), "state": optax.adam(1e-2).init(small())}
    plain = jax.jit(step_of(arguments, results, optax.adam(1e-2)))
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
    def shapes(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
        )

    arguments = (small(), TX.init(small()), small(1))
    order = ("params", "state")
    step = po.jit_step(step_of(order, order), *shapes(arguments), donate_argnums=(0, 1))
    params, state = step(*arguments)
    assert kinds(params) == [DEVICE, DEVICE]
    assert kinds(state) == ALL_PAGED


def test_without_donation_nothing_is_consumed():
    order = ("params", "state")
    params, state = small(), TX.init(small())
    with pytest.warns(UserWarning, match="nothing is donated.*donate_argnames"):
        step = po.jit_step(step_of(order, order), params, state, params)
    first, second = step(params, state, params), step(params, state, params)
    assert_equal(first, second)
    assert kinds(first[1]) == ALL_PAGED


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_lost_buffers_are_named():
    def narrowing(params, state, gradients):
        updates, state = TX.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        return params | {"b": params["b"].astype(jnp.bfloat16)}, state

    params, state = small(), TX.init(small())
    with pytest.raises(po.DonationError) as error:
        po.jit_step(narrowing, params, state, params, donate_argnums=(0, 1))
    message = str(error.value)
    assert "1 donated buffer is not reused: argument 0['b']" in message
    assert "float32[70,128]" in message
    assert "donate_argnums" in message


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_dropped_state_is_named():
    def forgetful(params, state, gradients):
        updates, _ = TX.update(gradients, state, params)
        return optax.apply_updates(params, updates)

    params, state = small(), TX.init(small())
    with pytest.raises(po.DonationError) as error:
        po.jit_step(forgetful, params, state, params, donate_argnums=(0, 1))
    assert "argument 1[0]" in str(error.value)
    assert "not reused" in str(error.value)


def test_donation_error_comes_without_jax_warning():
    # The suite makes warnings errors, as users may: ours must be the one they see.
    def forgetful(params, state, gradients):
        updates, _ = TX.update(gradients, state, params)
        return optax.apply_updates(params, updates)

    params, state = small(), TX.init(small())
    with pytest.raises(po.DonationError):
        po.jit_step(forgetful, params, state, params, donate_argnums=(0, 1))


@pytest.mark.parametrize("donated", [3, (0, 5), -1])
def test_donated_argument_that_is_not_there(donated):
    order = ("params", "state")
    params, state = small(), TX.init(small())
    with pytest.raises(ValueError) as error:
        po.jit_step(
            step_of(order, order), params, state, params, donate_argnums=donated
        )
    assert "donate_argnums names argument" in str(error.value)
    assert "has 3 arguments, argument 0, argument 1, argument 2" in str(error.value)


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
    calls = [
        lambda step, p, s, g: step(p, s, g, 0.5, sign=-1, scale=2.0),
        lambda step, p, s, g: step(p, s, scale=2.0, gradients=g, rate=0.5, sign=-1),
        lambda step, p, s, g: step(
            state=s, gradients=g, params=p, scale=2.0, sign=-1, rate=0.5
        ),
    ]
    compiled = po.jit_step(
        named_step,
        small(),
        TX.init(small()),
        small(1),
        0.5,
        scale=2.0,
        sign=-1,
        **options,
    )
    decorated = po.jit_step(**options)(named_step)
    assert decorated.__name__ == "named_step" and decorated.compiled is None
    for step in (compiled, decorated):
        for call in calls:
            params, state = small(), TX.init(small())
            found = call(step, params, state, small(1))
            chex.assert_trees_all_close(found, wanted, rtol=1e-6)
            assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))
            assert kinds(found[1]) == ALL_PAGED


def test_static_arguments():
    """They are constants of the program, and no other is taken for them."""

    def step(params, state, sign, gradients):
        assert isinstance(sign, str)
        gradients = jax.tree.map(lambda g: -g if sign == "-" else g, gradients)
        updates, state = TX.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    wanted = step(small(), TX.init(small()), "-", small(1))
    step = po.jit_step(step, donate_argnums=(0, 1), static_argnums=2)
    found = step(small(), TX.init(small()), "-", small(1))
    chex.assert_trees_all_close(found, wanted, rtol=1e-6)
    with pytest.raises(TypeError, match=r"static ones \{2: '-'\}.*\{2: '\+'\}"):
        step(*found, "+", small(1))


def test_a_step_takes_its_own_arguments():
    step = po.jit_step(named_step, donate_argnames=("params", "state", "moments"))
    with pytest.raises(ValueError, match="donate_argnames names argument 'moments'"):
        step(small(), TX.init(small()), small(1), scale=1.0)
    with pytest.raises(TypeError, match="missing a required argument: 'state'"):
        po.jit_step(named_step)(small(), scale=1.0)


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
    """A name after `*args` is no position; a name in `**kwargs` no positional one."""

    @po.jit_step(donate_argnames="state")
    def step(*args, state):
        return args[0] + args[1], state + 1

    one, other, state = jnp.ones(4), jnp.ones(5), jnp.ones(6)
    step(one, other[:4], state=state)
    assert state.is_deleted() and not one.is_deleted() and not other.is_deleted()

    @po.jit_step(donate_argnames="a")
    def step(a, /, **others):
        return a, others["a"] + 1

    one, other = jnp.ones(4), jnp.ones(5)
    step(one, a=other)
    assert other.is_deleted() and not one.is_deleted()


def test_constants_are_told_apart():
    scaled = po.jit_step(lambda x, c: x * (10 if c is True else c), static_argnums=1)
    np.testing.assert_array_equal(scaled(jnp.ones(2), 1), [1, 1])
    for other in (True, 1.0, 2):
        with pytest.raises(TypeError, match="static"):
            scaled(jnp.ones(2), other)
    with pytest.raises(TypeError, match="argument 1 is of type dict"):
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


def test_no_step():
    for call in (lambda: po.jit_step(None, 1), lambda: po.jit_step(donate_argnum=0)):
        with pytest.raises(TypeError, match="the step is a function"):
            call()


def test_report_of_a_step():
    order = ("params", "state")
    params, state = small(), TX.init(small())
    step = po.jit_step(
        step_of(order, order), params, state, params, donate_argnums=(0, 1)
    )
    report = po.memory_report(step.compiled)
    size = sum(x.nbytes for x in jax.tree.leaves((params, state, params)))
    assert report.device_arguments + report.host_arguments == size
    gradients = sum(x.nbytes for x in jax.tree.leaves(params))
    assert report.device_aliased + report.host_aliased == size - gradients
    assert "scratch" in str(report)
    assert report.hlo not in repr(report)


# -- arithmetic on host arrays --------------------------------------------------

odd = lambda step: step % 2 == 1  # noqa: E731
#: Optax's wrappers that select between host arrays or multiply them, and ours.
SKIPPING = {
    "MultiSteps": lambda of, tx: of.MultiSteps(tx, 3),
    "apply_if_finite": lambda of, tx: of.apply_if_finite(tx, 3),
    "conditionally_transform": lambda of, tx: of.conditionally_transform(tx, odd),
    "conditionally_mask": lambda of, tx: of.conditionally_mask(tx, odd),
    "lookahead": lambda of, tx: of.lookahead(tx, 3, 0.5, reset_state=True),
}
#: What XLA:GPU copies for a conditional in some versions only, and XLA:TPU never.
CONDITIONAL = set(SKIPPING) - {"MultiSteps", "lookahead"}


def traced(tx, wrapper="", params=None):
    gradients = params = small() if params is None else params
    if wrapper == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
    step = step_of(("params", "state"), ("params", "state"), tx)
    return jax.make_jaxpr(step)(params, tx.init(params), gradients)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("name", SKIPPING)
def test_optax_wrappers_are_warned_of_on_accelerators(name, platform):
    """Each by the name of its cure, which is not warned of."""
    jaxpr = traced(SKIPPING[name](optax, TX), name)
    copies = platform == "cuda" and jax.__version_info__ < (0, 11, 2)
    if copies or name not in CONDITIONAL:
        with pytest.warns(UserWarning, match=rf"on float32<host>.*paged_optax.*{name}"):
            warn_of_host_compute(jaxpr, platform)
    else:
        warn_of_host_compute(jaxpr, platform)
    warn_of_host_compute(jaxpr, "cpu")
    warn_of_host_compute(traced(SKIPPING[name](po, TX), name), platform)


def test_a_users_own_arithmetic_is_warned_of():
    state = TX.init(small())
    jaxpr = jax.make_jaxpr(lambda state: jax.tree.map(lambda x: x + x, state))(state)
    with pytest.warns(UserWarning, match=r"`add`.*test_step\.py:\d+.*device_put"):
        warn_of_host_compute(jaxpr, "cuda")


@pytest.mark.quick("codec2", "master", "inner0")
@pytest.mark.parametrize(
    "paging",
    [
        {"codec": "dynamic_int8"},
        {"codec": "dynamic_int4"},
        {"codec": "bfloat16_stochastic"},
        {"master_dtype": "float32"},
        {"per_parameter_steps": True},
        {"inner": optax.lamb(1e-2)},
        {"inner": optax.contrib.muon(1e-2)},
        {"inner": optax.flatten(optax.adam(1e-2))},
        {"inner": optax.contrib.schedule_free_adamw(1e-2)},
    ],
    ids=lambda paging: "-".join(map(str, paging)),
)
def test_no_transformation_of_ours_is_warned_of(paging):
    paging = {"inner": optax.adamw(1e-2)} | paging
    tx = po.paged(**paging, **SMALL_PAGES)
    # Moments of few values are paged here too, and not computed on the host.
    jaxpr = traced(tx, params=small() | {"few": jnp.ones((5, 8))})
    for platform in ("cuda", "tpu"):
        warn_of_host_compute(jaxpr, platform)


@pytest.mark.compiler
def test_jit_step_warns_before_xla_fails():
    params = square(2)
    tx = optax.MultiSteps(po.paged_adamw(1e-3), 4)
    step = step_of(("params", "state"), ("params", "state"), tx)

    def build(mesh):
        params_there = on_device(mesh, params)
        example = params_there, state_on(mesh, tx, params), params_there
        po.jit_step(step, *example, donate_argnums=(0, 1))

    with pytest.warns(UserWarning, match="use paged_optax.MultiSteps"):
        with pytest.raises(jax.errors.JaxRuntimeError):
            aot.v5e(build)


# -- plan ---------------------------------------------------------------------

TRANSFORMATIONS = {
    "adam": lambda: TX,
    "budget": lambda: po.paged_adam(1e-2, device_budget="32KiB", min_paged_size=0),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), TX),
    "masked": lambda: optax.masked(TX, {"a": True, "b": False}),
    "partition": lambda: optax.partition(
        {"x": TX, "y": po.paged_lion(1e-2, **SMALL_PAGES)}, {"a": "x", "b": "y"}
    ),
    "inject": lambda: optax.inject_hyperparams(
        lambda learning_rate: po.paged_adam(learning_rate, **SMALL_PAGES)
    )(learning_rate=1e-2),
    "whole leaves": lambda: po.paged_lamb(1e-2, **SMALL_PAGES),
    "flatten": lambda: optax.flatten(TX),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_plan_totals_are_those_of_the_state(name):
    tx, params = TRANSFORMATIONS[name](), small()
    plan = po.plan(tx, params)
    moments = [x for x in jax.tree.leaves(tx.init(params)) if x.ndim]
    on = {
        kind: sum(x.nbytes for x in moments if x.sharding.memory_kind == kind)
        for kind in (HOST, DEVICE)
    }
    counts = sum(x.bytes for x in plan.moments if not x.shape)
    assert plan.host_bytes == on[HOST] > 0
    assert plan.device_bytes == on[DEVICE] + counts
    assert plan.link_bytes == 2 * on[HOST]
    assert plan.link_seconds == pytest.approx(plan.link_bytes / 25e9)
    assert 0 < plan.scratch_bytes <= 4 * on[HOST]
    for x in plan.moments:
        if x.on_host:
            assert x.page_bytes * (x.pages - 1) < x.bytes <= x.page_bytes * x.pages


def test_plan_twice_and_after_init_of_shapes():
    params = small()
    first = po.plan(TX, params)
    jax.eval_shape(TX.init, params)
    assert po.plan(TX, params) == first
    shapes = jax.eval_shape(lambda: params)
    assert po.plan(TX, shapes) == first
    assert "moments on the host" in str(first)


def test_plan_prints_every_group_and_the_totals():
    params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    params |= {f"v{i}": jax.ShapeDtypeStruct((1024,), jnp.bfloat16) for i in range(3)}
    plan = po.plan(
        po.paged_adamw(1e-3, page_size="8MiB"), params, link_gigabytes_per_second=50
    )
    lines = str(plan).splitlines()
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
    assert cells[0] == ["moments", "shape", "dtype", "where", "pages", "bytes"]
    assert ["[0].mu['w'] +1", "4096x4096", "float32", "host", "8 x 8.0 MiB"] in [
        row[:5] for row in cells
    ]
    assert ["[0].mu['v0'] +5", "1024", "bfloat16", "device", "-", "12.0 KiB"] in cells
    assert ["moments on the host", "128.0 MiB"] in cells
    assert ["over the link a step", "256.0 MiB"] in cells
    assert any(row[0] == "seconds a step at 50 GB/s" for row in cells)
    assert plan.link_seconds == pytest.approx(2**28 / 50e9)
    assert plan.scratch_bytes == 4 * 8 * 2**20


def test_plan_allocates_nothing():
    params = {"w": jax.ShapeDtypeStruct((1 << 19, 1 << 10), jnp.float32)}
    assert po.plan(po.paged_adamw(1e-3), params).host_bytes == 2**32


def test_plan_needs_the_extra_arguments_of_update():
    tx = po.paged(scale_by_value(), **SMALL_PAGES)
    plan = po.plan(tx, small(), extra_args={"value": 1.0})
    assert plan.host_bytes == 2**14 + 70 * 128 * 4


def test_plan_warns_where_the_host_pool_is_too_small(monkeypatch):
    name = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    params = {"w": jax.ShapeDtypeStruct((1 << 20, 1 << 13), jnp.float32)}  # 32 GiB
    tx = po.paged_adamw(1e-3)
    monkeypatch.delenv(name, raising=False)
    po.plan(tx, params)  # 64 GiB of moments in a pool of 64: no warning
    params["v"] = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    with pytest.warns(UserWarning, match=name) as warned:
        po.plan(tx, params)
    (asked,) = re.findall(rf"{name}=(\d+)", str(warned[0].message))
    monkeypatch.setenv(name, asked)
    po.plan(tx, params)
    monkeypatch.setenv(name, "1")
    with pytest.warns(UserWarning, match="1.0 GiB"):
        po.plan(tx, params)
