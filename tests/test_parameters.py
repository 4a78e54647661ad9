"""One parameter's state, whatever state it is in: in, out, joined, counted, placed."""

import dataclasses
import functools
import re
import sys
from typing import Any, NamedTuple

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import paged_optax as po
from helpers.reference import ALIASES, SMALL_PAGES, arrays, assert_equal, kinds
from paged_optax.backend.memory import on_host

HOST, DEVICE = "pinned_host", "device"
#: 16 and 35 KiB, and one that is smaller than a page.
SHAPES = {"a": (64, 64), "b": (70, 128), "c": (9,)}
#: Both moments of "a" and of "c" fit; those of "b" do not.
BUDGET = "33KiB"
#: Bytes of both moments of each.
A, B, C = (2 * 4 * 64 * 64, 2 * 4 * 70 * 128, 2 * 4 * 9)
adam = functools.partial(po.paged_adam, 1e-2, **SMALL_PAGES)


def small(seed=0):
    return arrays(shapes=SHAPES, seed=seed)


def flat(tree):
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def paths(params):
    return [path for path, _ in flat(params)]


def named(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")


def filled(state, seed=7):
    """A state of random values, each array where it was."""
    random = np.random.default_rng(seed)

    def fill(x):
        if not x.ndim or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        value = np.abs(random.normal(size=x.shape)).astype(x.dtype)
        return jax.device_put(value, x.sharding)

    return jax.tree.map(fill, state)


def belonging(state, key_path):
    """A parameter's moments, found by how their paths in the state end.

    What `optax.MultiSteps` accumulates is no moment.
    """
    n = len(key_path)
    return {
        path[-n - 1].name: x
        for path, x in flat(state)
        if path[len(path) - n :] == key_path
        and isinstance(path[-n - 1], jax.tree_util.GetAttrKey)
        and path[-n - 1].name != "acc_grads"
        and jnp.issubdtype(x.dtype, jnp.inexact)
    }


def assert_updates_alike(update, params, first, second):
    """Two states, of which the first is known to work, are one to an update."""
    wanted, found = (update(params, state, params) for state in (first, second))
    # A moment that stays is fused otherwise than one that is paged.
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-7)


# -- states ---------------------------------------------------------------------

WRAPPERS = {
    "plain": lambda tx: tx,
    "chained": lambda tx: optax.chain(
        optax.clip(1.0), optax.chain(tx, optax.scale_by_schedule(lambda _: 0.5))
    ),
    "named chain": lambda tx: optax.named_chain(("clip", optax.clip(1.0)), ("tx", tx)),
    "masked": lambda tx: optax.masked(tx, {"a": True, "b": True, "c": False}),
    "injected": lambda tx: optax.inject_hyperparams(
        lambda scale: optax.chain(tx, optax.scale(scale))
    )(scale=0.5),
    "partition": lambda tx: optax.partition(
        {"adam": tx, "lion": po.paged_lion(1e-2, **SMALL_PAGES)},
        {"a": "adam", "b": "lion", "c": "adam"},
    ),
    "partly frozen": lambda tx: optax.partition(
        {"adam": tx, "none": optax.set_to_zero()},
        {"a": "adam", "b": "adam", "c": "none"},
    ),
    "finite": lambda tx: po.apply_if_finite(tx, 3),
    "multi steps": lambda tx: po.MultiSteps(tx, 2),
    "beside an unpaged trace": lambda tx: optax.chain(optax.trace(0.9), tx),
    "beside another": lambda tx: optax.chain(
        tx, po.paged_sgd(1e-2, momentum=0.9, device_budget=BUDGET, **SMALL_PAGES)
    ),
    "own steps": lambda tx: tx,
}


@functools.cache
def built(name):
    """A transformation, and its jitted update, which all tests share."""
    own = {"per_parameter_steps": True} if name == "own steps" else {}
    tx = WRAPPERS[name](adam(device_budget=BUDGET, **own))
    return tx, jax.jit(tx.update)


@pytest.fixture(params=WRAPPERS)
def wrapped(request):
    """A transformation, its update, and its state: "a" and "c" on the device."""
    tx, update = built(request.param)
    return tx, update, filled(tx.init(small()))


def paged_paths(state, params):
    return [path for path in paths(params) if belonging(state, path)]


def test_page_in_gives_the_moments_on_the_device(wrapped):
    """Each name of a moment once, with that moment's bits, in device memory."""
    _, _, state = wrapped
    params = small()
    before = kinds(state)
    for key_path in paged_paths(state, params):
        for path in (key_path, named(key_path), f"/{named(key_path)}/"):
            found = po.page_in(state, path)
            own = belonging(state, key_path)
            assert {"mu", "nu"} & set(found) == {"mu", "nu"} & set(own)
            for name in {"mu", "nu", "trace"} & set(own):
                assert_equal(found[name], own[name])
            assert set(kinds(found)) == {DEVICE}
    assert kinds(state) == before


@pytest.mark.quick("plain", "masked", "partition", "multi steps", "own steps")
def test_page_out_of_page_in_is_the_identity(wrapped):
    """Bit for bit; the moments on the host; the old state whole; updates go on."""
    tx, update, state = wrapped
    params = small()
    before, start = kinds(state), state
    for key_path in paged_paths(state, params):
        path = named(key_path)
        new = po.page_out(state, path, po.page_in(state, path))
        assert_equal(new, state)
        own = belonging(new, key_path)
        assert kinds([own[n] for n in ("mu", "nu") if n in own]) == [HOST] * len(
            own.keys() & {"mu", "nu"}
        )
        for (at, x), (_, old) in zip(flat(new), flat(state), strict=True):
            if at[-1:] != key_path:
                assert x is old
        state = new
    assert kinds(start) == before
    assert_updates_alike(update, params, start, state)


def test_page_out_takes_new_moments(wrapped):
    """One parameter's numbers change, and no other's."""
    _, _, state = wrapped
    params = small()
    for key_path in paged_paths(state, params):
        moments = po.page_in(state, key_path)
        doubled = {name: 2 * x for name, x in moments.items()}
        new = po.page_out(state, key_path, doubled)
        assert_equal(po.page_in(new, key_path), doubled)
        assert_equal(po.page_in(state, key_path), moments)
        for (at, x), (_, old) in zip(flat(new), flat(state), strict=True):
            assert at[-1:] == key_path or x is old


def test_residency_and_bytes_are_the_arrays_own(wrapped):
    """What a fresh look at the memory kind of every array says."""
    _, _, state = wrapped
    params = small()
    everything = [(x.nbytes, x.sharding.memory_kind) for x in jax.tree.leaves(state)]
    count = lambda arrays, kind: sum(n for n, where in arrays if where == kind)
    assert po.device_bytes(state) == count(everything, DEVICE)
    assert po.host_bytes(state) == count(everything, HOST)
    resident = 0
    for key_path in paged_paths(state, params):
        own = [
            (x.nbytes, x.sharding.memory_kind)
            for x in belonging(state, key_path).values()
        ]
        for path in (key_path, named(key_path)):
            assert po.device_bytes(state, path) == count(own, DEVICE)
            assert po.host_bytes(state, path) == count(own, HOST)
            assert po.is_device_resident(state, path) == (count(own, HOST) == 0)
        resident += count(own, HOST) == 0
    assert po.device_resident_count(state) == resident
    assert po.is_device_resident(state, "a")
    assert not po.is_device_resident(state, "b")


STEPS = {"multi steps": 2}


@pytest.mark.quick("plain", "multi steps", "own steps")
def test_get_step_counts_updates(wrapped, request):
    """The steps that moments have really had, under whatever counts beside them."""
    tx, update, _ = wrapped
    params = small()
    state = tx.init(params)
    for number in range(4):
        _, state = update(small(number), state, params)
    wanted = STEPS.get(request.node.callspec.params["wrapped"], 4)
    for key_path in paged_paths(state, params):
        assert int(po.get_step(state, key_path)) == wanted
        assert int(po.get_step(state, named(key_path))) == wanted


@pytest.mark.quick("plain", "masked", "partition", "multi steps", "own steps")
def test_init_param_restarts(wrapped):
    """As `init` makes it, and all others' arrays the very same objects."""
    tx, update, state = wrapped
    params = small()
    fresh = tx.init(params)
    for key_path in paged_paths(state, params):
        path = named(key_path)
        new = po.init_param(tx, state, params, path)
        chex.assert_trees_all_equal_structs(new, fresh)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, fresh)
        assert kinds(new) == kinds(fresh)
        for (at, x), (_, old), (_, made) in zip(
            flat(new), flat(state), flat(fresh), strict=True
        ):
            if at[-1:] == key_path:
                assert_equal(x, made)
            else:
                assert x is old
        update(params, new, params)


@pytest.mark.quick("plain", "multi steps", "own steps")
def test_rebalance_of_any_state(wrapped):
    """What fits goes to the device, the rest to the host, and updates go on."""
    tx, update, state = wrapped
    params = small()
    copy = jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), state)
    known = [named(path) for path in paged_paths(state, params)]
    # What "b" has is more than the budget: it is passed over.
    for recent in ([], ["c", "a", "b"] if "c" in known else ["a", "b"]):
        state = po.rebalance(tx, state, recent)
        assert_equal(state, copy)
        assert po.is_device_resident(state, "a") == bool(recent)
        assert not po.is_device_resident(state, "b")
        assert_updates_alike(update, params, copy, state)


def test_a_multi_steps_of_optax_is_read_too():
    tx = optax.MultiSteps(adam(device_budget=BUDGET), 2)
    state = filled(tx.init(small()))
    assert_equal(po.page_in(state, "b")["mu"], state.inner_opt_state[0].mu["b"])
    assert not po.is_device_resident(state, "b")
    assert po.is_device_resident(state, "a")
    assert int(po.get_step(state, "b")) == 0


def test_a_lookahead_is_read_too():
    fast = small()
    params = optax.LookaheadParams.init_synced(fast)
    tx = optax.lookahead(adam(), sync_period=5, slow_step_size=0.5)
    state = filled(tx.init(params))
    found = po.page_in(state, "b")
    assert_equal(found["nu"], optax.tree.get(state, "nu")["b"])


# -- Flax -----------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(32, 40, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        return self.layers[0](x) + self.layers[1](x)


def nnx_optimizer(**paging):
    model, tx = Block(nnx.Rngs(0)), adam(**paging)
    return model, tx, nnx.Optimizer(model, tx, wrt=nnx.Param)


def test_nnx_optimizer_moments():
    """`optimizer.opt_state` holds nnx Variables: paths end in `/value`, or not."""
    model, _, optimizer = nnx_optimizer()
    optimizer.update(model, nnx.state(model, nnx.Param))
    state = optimizer.opt_state
    for path in ("layers/0/kernel", "layers/0/kernel/value"):
        found = po.page_in(state, path)
        assert_equal(found["mu"], state[0].mu["layers"][0]["kernel"].get_value())
        assert not po.is_device_resident(state, path)
    new = po.page_out(state, "layers/0/kernel", po.page_in(state, "layers/0/kernel"))
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert_equal(new, state)
    assert po.host_bytes(state) == 2 * 2 * 4 * (32 * 40 + 40)
    assert po.host_bytes(state, "layers/1") == po.host_bytes(state) / 2
    assert po.device_resident_count(state) == 0
    optimizer.opt_state = new
    optimizer.update(model, nnx.state(model, nnx.Param))


def test_nnx_optimizer_steps():
    model, _, optimizer = nnx_optimizer()
    for _ in range(3):
        optimizer.update(model, nnx.state(model, nnx.Param))
    assert int(po.get_step(optimizer.opt_state, "layers/0/kernel")) == 3


def test_nnx_optimizer_own_steps():
    model, _, optimizer = nnx_optimizer(per_parameter_steps=True)
    optimizer.update(model, nnx.state(model, nnx.Param))
    state = po.increment_step(optimizer.opt_state, "layers/0/kernel")
    assert int(po.get_step(state, "layers/0/kernel")) == 2
    assert int(po.get_step(state, "layers/1/kernel")) == 1


def test_nnx_optimizer_init_param():
    model, tx, optimizer = nnx_optimizer()
    optimizer.update(model, nnx.state(model, nnx.Param))
    params = nnx.state(model, nnx.Param)
    state = po.init_param(tx, optimizer.opt_state, params, "layers/0/kernel")
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.opt_state)
    assert float(jnp.abs(po.page_in(state, "layers/0/kernel")["mu"]).max()) == 0
    assert float(jnp.abs(po.page_in(state, "layers/1/kernel")["mu"]).max()) > 0
    optimizer.opt_state = state
    optimizer.update(model, nnx.state(model, nnx.Param))


def test_nnx_optimizer_rebalance():
    kernel = 2 * 4 * 32 * 40
    model, tx, optimizer = nnx_optimizer(device_budget=kernel)
    recent = ["layers/0/kernel", "layers/1/kernel"]
    optimizer.opt_state = po.rebalance(tx, optimizer.opt_state, recent)
    state = optimizer.opt_state
    assert [po.is_device_resident(state, path) for path in recent] == [False, True]
    assert po.device_bytes(state, "layers") == kernel
    optimizer.update(model, nnx.state(model, nnx.Param))
    assert po.is_device_resident(optimizer.opt_state, "layers/1/kernel")


def test_nnx_abstract_state():
    model, tx, optimizer = nnx_optimizer()
    params = nnx.state(model, nnx.Param)
    target = po.abstract_state(tx, params)
    assert jax.tree.structure(target) == jax.tree.structure(tx.init(params))
    assert kinds(target) == kinds(optimizer.opt_state)


def test_linen_train_state():
    model = linen.Dense(70)
    params = model.init(jax.random.key(0), jnp.ones((1, 64)))
    tx = optax.chain(optax.clip_by_global_norm(1.0), adam())
    train = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    for _ in range(2):
        train = train.apply_gradients(grads=params)
    path = "params/kernel"
    moments = po.page_in(train.opt_state, path)
    assert_equal(moments["mu"], optax.tree.get(train, "mu")["params"]["kernel"])
    assert int(po.get_step(train.opt_state, path)) == 2
    new = train.replace(opt_state=po.page_out(train.opt_state, path, moments))
    assert_equal(new.opt_state, train.opt_state)
    assert kinds(new.opt_state) == kinds(train.opt_state)
    again = po.init_param(tx, train.opt_state, params, "params/bias")
    assert float(jnp.abs(po.page_in(again, "params/bias")["nu"]).max()) == 0
    assert po.page_in(again, path)["nu"].max() > 0
    assert_equal(
        train.replace(opt_state=po.rebalance(tx, new.opt_state, [])).opt_state,
        train.opt_state,
    )


# -- trees of parameters --------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


class CarryState(NamedTuple):
    """Parameters may have a name that ends as those of Optax's states do."""

    hidden: Any
    cell: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    inner: Any


@jax.tree_util.register_pytree_node_class
class Keyless:
    """A pytree that gives its children no names."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


TREES = {
    "dicts": lambda a, b, c: {"x": {"a": a, "a2": {"b": b}}, "y": {"": c}},
    "like fields": lambda a, b, c: {"mu": a, "count": b, "nu": {"mu": c}},
    "lists": lambda a, b, c: [a, [b, [c]]],
    "tuples": lambda a, b, c: (a, (b, (c,))),
    "named tuples": lambda a, b, c: Pair(a, Pair(b, [c])),
    "named like a state": lambda a, b, c: CarryState(a, {"z": CarryState(b, c)}),
    "dataclasses": lambda a, b, c: Layer(a, (Layer(b, c),)),
    "keyless": lambda a, b, c: {"k": Keyless(a, b), "l": c},
    "nnx state": lambda a, b, c: nnx.State(
        {"m": {"a": nnx.Param(a), "b": nnx.Param(b)}, "c": nnx.Param(c)}
    ),
    "with none": lambda a, b, c: {"a": a, "b": None, "c": [b, None, c]},
    "numbers": lambda a, b, c: {0: a, 1: {10: b, 1: c}},
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_trees_of_parameters(tree, own):
    """Every function, for parameters in every container, by both kinds of path."""
    params = TREES[tree](*small().values())
    tx = adam(device_budget=BUDGET, per_parameter_steps=own)
    state = filled(tx.init(params))
    scale = state[0]
    for i, (key_path, x) in enumerate(flat(params)):
        stays = x.shape != SHAPES["b"]
        mu, nu = (jax.tree.leaves(x)[i] for x in (scale.mu, scale.nu))
        for path in (key_path, named(key_path)):
            moments = po.page_in(state, path)
            assert set(moments) == {"mu", "nu"}
            assert_equal((moments["mu"], moments["nu"]), (mu, nu))
            assert po.is_device_resident(state, path) == stays
            where = po.device_bytes if stays else po.host_bytes
            assert where(state, path) == 2 * mu.nbytes
            assert_equal(po.page_out(state, path, moments), state)
            assert int(po.get_step(state, path)) == 0
            if own:
                more = po.increment_step(state, path)
                counts = [int(x) for x in jax.tree.leaves(more[0].count)]
                assert counts == [int(i == j) for j in range(3)]
                assert int(po.get_step(more, path)) == 1
    fresh = po.init_param(tx, state, params, path)
    for j, moment in enumerate(jax.tree.leaves(fresh[0].mu)):
        assert bool(np.abs(moment).max() > 0) == (i != j)
    assert kinds(fresh) == kinds(state)
    assert po.device_resident_count(state) == 2
    moved = po.rebalance(tx, state, [path for path, x in flat(params) if x.size == 9])
    assert po.device_resident_count(moved) == 1


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_a_bare_array(own):
    """Parameters that are one array have the empty path."""
    params = small()["b"]
    tx = adam(per_parameter_steps=own)
    state = filled(tx.init(params))
    for path in ("", (), "/"):
        moments = po.page_in(state, path)
        assert_equal(moments["mu"], state[0].mu)
        assert_equal(po.page_out(state, path, moments), state)
        assert not po.is_device_resident(state, path)
        assert po.host_bytes(state, path) == 2 * params.nbytes
    _, state = tx.update(params, state, params)
    assert int(po.get_step(state, "")) == 1
    assert po.device_resident_count(state) == 0
    fresh = po.init_param(tx, state, params, "")
    assert float(jnp.abs(fresh[0].mu).max()) == 0
    assert kinds(fresh) == kinds(state)
    state = po.rebalance(adam(device_budget="1MiB"), state, [""])
    assert po.device_resident_count(state) == 1


def test_a_bare_array_increments_its_own_step():
    tx = adam(per_parameter_steps=True)
    state = po.increment_step(tx.init(small()["b"]), "")
    assert int(po.get_step(state, "")) == 1


# -- optimizers -----------------------------------------------------------------

MOMENTS = {
    "paged_adamw": {"mu", "nu"},
    "paged_lion": {"mu"},
    "paged_ademamix": {"m1", "m2", "nu"},
    "paged_adafactor": {"v_row", "v_col", "v", "ema"},
    "paged_muon": {"mu"},
    "paged_sgd": {"trace"},
    "paged_rmsprop": {"nu", "trace"},
}


@pytest.mark.quick("paged_adamw", "paged_muon")
@pytest.mark.parametrize("alias", MOMENTS)
def test_optimizers(alias):
    """Moments by Optax's names; identity; a new parameter joins; all numbers kept."""
    _, kwargs = ALIASES[alias]
    tx = getattr(po, alias)(1e-2, **kwargs, **SMALL_PAGES)
    # Adafactor factors from 128 rows and columns on.
    params = arrays(shapes={"w": (130, 140), "v": (300,), "s": (), "new": (129, 128)})
    state = filled(tx.init(params))
    assert set(po.page_in(state, "w")) == MOMENTS[alias]
    for name in params:
        moments = po.page_in(state, name)
        assert_equal(moments, belonging(state, (jax.tree_util.DictKey(name),)))
        assert_equal(po.page_out(state, name, moments), state)
    less = {name: x for name, x in params.items() if name != "new"}
    start = filled(tx.init(less))
    joined = po.init_param(tx, start, params, "new")
    fresh = tx.init(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(joined, fresh)
    assert jax.tree.structure(joined) == jax.tree.structure(fresh)
    assert kinds(joined) == kinds(fresh)
    old = dict(flat(start))
    for (path, x), (_, made) in zip(flat(joined), flat(fresh), strict=True):
        if path in old:
            assert x is old[path]
        else:
            assert_equal(x, made)
    jax.jit(tx.update)(params, joined, params)


@pytest.mark.slow
def test_coded_moments():
    """A moment in codes and scales goes in and out, moves and joins as one."""
    own = {"per_parameter_steps": True, "codec": "dynamic_int8"}
    tx, params = adam(device_budget="9KiB", **own), small()
    _, state = tx.update(params, tx.init(params), params)
    size = 2 * (64 * 64 + 64 * 64 // 256 * 4)
    moments = po.page_in(state, "a")
    assert [str(x.dtype) for x in jax.tree.leaves(moments)] == [
        "int32",
        "float32",
        "uint32",
        "float32",
    ]
    assert set(kinds(moments)) == {DEVICE}
    assert po.is_device_resident(state, "a")
    assert po.device_bytes(state, "a") == size
    out = po.page_out(state, "a", moments)
    assert_equal(out, state)
    assert po.host_bytes(out, "a") == size
    with pytest.raises(ValueError, match="'mu'"):
        po.page_out(state, "a", moments | {"mu": jnp.ones((64, 64))})
    wanted = jax.tree.map(np.array, out)
    moved = po.rebalance(tx, out, ["a"])
    assert_equal(moved, wanted)
    assert po.is_device_resident(moved, "a")
    assert not po.is_device_resident(moved, "b")
    again = po.init_param(tx, moved, params, "b")
    assert_equal(po.page_in(again, "b"), po.page_in(tx.init(params), "b"))
    assert_equal(po.page_in(again, "a"), moments)
    assert [int(po.get_step(again, name)) for name in "abc"] == [1, 0, 1]
    target = po.abstract_state(tx, params)
    assert jax.tree.structure(target) == jax.tree.structure(tx.init(params))
    assert kinds(target) == kinds(tx.init(params))
    tx.update(params, again, params)


def test_two_fields_of_one_name_are_told_apart():
    tx = optax.chain(adam(), adam())
    state = filled(tx.init(small()))
    moments = po.page_in(state, "b")
    assert len(moments) == 4
    assert all(re.search("(mu|nu)$", name) for name in moments)
    found = sorted(float(x.sum()) for x in moments.values())
    own = [x for path, x in flat(state) if path[-1:] == (jax.tree_util.DictKey("b"),)]
    assert found == sorted(float(jnp.asarray(np.asarray(x)).sum()) for x in own)
    assert_equal(po.page_out(state, "b", moments), state)


# -- in and out -----------------------------------------------------------------


@pytest.fixture
def state():
    return filled(adam().init(nested()))


def nested():
    a, b, c = small().values()
    return {"blocks": [{"q": {"kernel": a, "bias": c}}, {"q": {"kernel": b}}]}


KERNEL = "blocks/0/q/kernel"


def test_moments_that_are_read_are_nobody_elses():
    """`page_in` copies: what is done to its result leaves the state alone."""
    state = filled(adam(device_budget=None).init(small()))
    wanted = jax.tree.map(np.array, state)
    change = jax.jit(lambda x: jax.tree.map(lambda x: x + 1, x), donate_argnums=0)
    change(po.page_in(state, "b"))
    assert_equal(state, wanted)


def test_under_jit(state):
    @jax.jit
    def double(state):
        moments = po.page_in(state, KERNEL)
        return po.page_out(state, KERNEL, jax.tree.map(lambda x: 2 * x, moments))

    new = double(state)
    assert kinds(new) == kinds(state)
    wanted = jax.tree.map(lambda x: 2 * x, po.page_in(state, KERNEL))
    assert_equal(po.page_in(new, KERNEL), wanted)
    own = adam(per_parameter_steps=True).init(nested())
    more = jax.jit(lambda state: po.increment_step(state, KERNEL))(own)
    assert int(po.get_step(more, KERNEL)) == 1
    assert kinds(more) == kinds(own)


def test_numpy_moments(state):
    moments = jax.tree.map(np.asarray, po.page_in(state, KERNEL))
    new = po.page_out(state, KERNEL, moments)
    assert_equal(new, state)
    assert kinds(new) == kinds(state)


@pytest.mark.parametrize("numpy", [False, True], ids=["jax", "numpy"])
@pytest.mark.parametrize("where", ["device", "mesh"])
def test_moments_go_back_beside_their_parameter(where, numpy):
    """To the device or the shards that they came from, whatever they are given as."""
    if where == "device":
        sharding = SingleDeviceSharding(jax.devices()[3])
    else:
        mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
        sharding = NamedSharding(mesh, PartitionSpec("x"))
    params = jax.device_put({"w": jnp.ones((64, 64))}, sharding)
    state = adam().init(params)
    moments = po.page_in(state, "w")
    assert moments["mu"].sharding.is_equivalent_to(sharding, 2)
    if numpy:
        moments = jax.tree.map(np.asarray, moments)
    new = po.page_out(state, "w", moments)
    for x in (new[0].mu["w"], new[0].nu["w"]):
        assert x.sharding.is_equivalent_to(sharding.with_memory_kind(HOST), 2)
    adam().update(params, new, params)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: {"mu": m["mu"]}, ("['mu']", "['mu', 'nu']", "page_in")),
        (lambda m: m | {"xi": m["mu"]}, ("'xi'", "['mu', 'nu']")),
        (lambda m: {}, ("[]", "['mu', 'nu']")),
        (lambda m: m | {"nu": m["nu"][1:]}, ("'nu'", "[63, 64]", "[64, 64]")),
        (lambda m: m | {"nu": m["nu"].T[None]}, ("'nu'", "[1, 64, 64]", "[64, 64]")),
        (
            lambda m: m | {"mu": m["mu"].astype(jnp.bfloat16)},
            ("'mu'", "bfloat16", "float32"),
        ),
        (
            lambda m: m | {"mu": np.ones((64, 64), np.int32)},
            ("'mu'", "int32", "float32"),
        ),
    ],
    ids=["missing", "unknown", "none", "shape", "rank", "dtype", "integers"],
)
def test_moments_of_another_kind_are_refused(state, change, words):
    with pytest.raises(ValueError) as error:
        po.page_out(state, KERNEL, change(po.page_in(state, KERNEL)))
    for word in (KERNEL, *words):
        assert word in str(error.value)


ONE = {
    "page_in": lambda state, path: po.page_in(state, path),
    "page_out": lambda state, path: po.page_out(state, path, {}),
    "get_step": lambda state, path: po.get_step(state, path),
    "increment_step": lambda state, path: po.increment_step(state, path),
}
ANY = ONE | {
    "is_device_resident": lambda state, path: po.is_device_resident(state, path),
    "device_bytes": lambda state, path: po.device_bytes(state, path),
    "host_bytes": lambda state, path: po.host_bytes(state, path),
    "rebalance": lambda state, path: po.rebalance(adam(), state, [path]),
    "init_param": lambda state, path: po.init_param(adam(), state, nested(), path),
}
MISSPELT = [
    "blocks/0/q/kernal",
    "blocks/q/kernel",
    "block/0/q/kernel",
    "blocks/0/q/ker",
    "blocks/0/q/kernel/value",
]


@pytest.mark.parametrize("function", ANY)
@pytest.mark.parametrize("path", MISSPELT)
def test_unknown_path(state, function, path):
    """The error has the path that was asked for, and close names."""
    with pytest.raises(ValueError) as error:
        ANY[function](state, path)
    message = str(error.value)
    assert f"path={path!r}" in message
    assert repr(KERNEL) in message


def test_unknown_key_path(state):
    with pytest.raises(ValueError, match="'blocks/1/q/bias'.*Close names"):
        po.page_in(state, (*paths(nested())[2][:-1], jax.tree_util.DictKey("bias")))


def test_a_masked_parameter_is_unknown():
    tx = WRAPPERS["masked"](adam())
    with pytest.raises(ValueError, match="'c'.*no such parameter"):
        po.page_in(tx.init(small()), "c")


def test_a_state_without_parameters():
    with pytest.raises(ValueError, match="has no parameters"):
        po.page_in(adam().init({}), "w")
    assert po.device_resident_count(adam().init({})) == 0


@pytest.mark.parametrize("function", ONE)
@pytest.mark.parametrize("path", ["", "blocks", "blocks/0", "/blocks/0/q/"])
def test_a_group_where_one_parameter_is_asked_for(state, function, path):
    with pytest.raises(ValueError) as error:
        ONE[function](state, path)
    for word in (f"path={path.strip('/')!r}", "parameters", "name one"):
        assert word in str(error.value)


def test_a_group_of_one_is_its_member(state):
    assert_equal(po.page_in(state, "blocks/1"), po.page_in(state, "blocks/1/q/kernel"))


def test_a_prefix_of_a_name_is_no_group():
    params = {"w": {"x": small()["a"]}, "w2": {"x": small()["b"]}}
    state = adam().init(params)
    assert po.host_bytes(state, "w") == 2 * params["w"]["x"].nbytes
    assert po.host_bytes(state, "w2") == 2 * params["w2"]["x"].nbytes


def test_groups_have_bytes_and_residency():
    state = adam(device_budget=BUDGET).init(nested())
    assert po.device_bytes(state, "blocks/0") == A + C
    assert po.host_bytes(state, "blocks") == po.host_bytes(state) == B
    assert po.device_bytes(state, "blocks") == A + C
    assert po.device_bytes(state) == A + C + 4
    assert po.is_device_resident(state, "blocks/0")
    assert not po.is_device_resident(state, "blocks")
    assert not po.is_device_resident(state, "")


# -- hyperparameters are no moments ---------------------------------------------


def injected(**paging):
    """Adam whose b1 is a hyperparameter, for a parameter that is called b1 too."""
    tx = optax.inject_hyperparams(lambda b1: adam(b1=b1, **paging))(b1=0.9)
    params = {"w1": small()["a"], "b1": small()["b"]}
    state = filled(tx.init(params))
    return tx, params, state._replace(hyperparams={"b1": jnp.float32(0.5)})


def test_hyperparameters_of_a_parameters_name_are_left_alone():
    tx, params, state = injected()
    assert set(po.page_in(state, "b1")) == {"mu", "nu"}
    assert po.host_bytes(state, "b1") == 2 * params["b1"].nbytes
    assert po.device_bytes(state, "b1") == 0
    assert po.device_resident_count(state) == 0
    moments = po.page_in(state, "b1")
    assert_equal(po.page_out(state, "b1", moments), state)
    assert int(po.get_step(state, "b1")) == 0
    assert float(po.rebalance(tx, state, ["b1"]).hyperparams["b1"]) == 0.5


def test_init_param_leaves_hyperparameters_alone():
    tx, params, state = injected()
    new = po.init_param(tx, state, params, "b1")
    assert float(new.hyperparams["b1"]) == 0.5
    assert float(jnp.abs(po.page_in(new, "b1")["mu"]).max()) == 0


# -- joining --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("plain", False),
        ("plain", True),
        ("injected", False),
        ("multi steps", False),
        ("multi steps", True),
    ],
)
def test_a_parameter_joins(name, own):
    """A state as for all parameters; the others' arrays and counts as they were."""
    tx = WRAPPERS[name](adam(device_budget=BUDGET, per_parameter_steps=own))
    less = {"a": small()["a"]}
    state, update = tx.init(less), jax.jit(tx.update)
    for _ in range(2):
        _, state = update(less, state, less)
    state = po.init_param(tx, state, less | {"c": small()["c"]}, "c")
    new = po.init_param(tx, state, small(), "b")
    fresh = tx.init(small())
    chex.assert_trees_all_equal_structs(new, fresh)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, fresh)
    assert kinds(new) == kinds(fresh)
    old = dict(flat(state))
    for (path, x), (_, made) in zip(flat(new), flat(fresh), strict=True):
        if path in old:
            assert x is old[path]
        else:
            assert_equal(x, made)
    if own:
        assert int(po.get_step(new, "b")) == 0
        assert int(po.get_step(new, "a")) == int(po.get_step(state, "a")) > 0
    updates, after = update(small(), new, small())
    assert jax.tree.structure(updates) == jax.tree.structure(small())
    assert kinds(after) == kinds(fresh)


@pytest.mark.parametrize("old", ["missing", "present"])
def test_a_group_joins_or_restarts(old):
    tx = adam(per_parameter_steps=True)
    adapter = {"down": jnp.ones((64, 33)), "up": jnp.ones((33, 64))}
    base = {"base": {"w": small()["b"]}}
    params = base | {"adapter": adapter}
    state = filled(tx.init(base if old == "missing" else params))
    state = po.increment_step(state, "base/w")
    if old == "present":
        state = po.increment_step(state, "adapter/up")
    new = po.init_param(tx, state, params, "adapter")
    chex.assert_trees_all_equal_shapes_and_dtypes(new, tx.init(params))
    assert kinds(new) == kinds(tx.init(params))
    for name in ("adapter/down", "adapter/up"):
        assert float(jnp.abs(po.page_in(new, name)["mu"]).max()) == 0
        assert int(po.get_step(new, name)) == 0
    assert new[0].mu["base"]["w"] is state[0].mu["base"]["w"]
    assert int(po.get_step(new, "base/w")) == 1
    tx.update(params, new, params)


def test_joining_parameters_must_all_be_named():
    tx, params = adam(), small()
    state = tx.init({"a": params["a"]})
    with pytest.raises(ValueError) as error:
        po.init_param(tx, state, params, "b")
    for word in ("mu", "'c'", "'b'"):
        assert word in str(error.value)
    with pytest.raises(ValueError, match="'d'.*params"):
        po.init_param(tx, state, params, "d")


def test_joining_allocates_its_own_moments_alone():
    """The others' are neither copied nor made again."""
    made = []

    def init(params):
        state = adam().init(params)
        made.append([x for x in jax.tree.leaves(state) if not _is_traced(x)])
        return state

    tx, params = adam()._replace(init=init), small()
    state = tx.init({name: params[name] for name in ("a", "c")})
    made.clear()
    po.init_param(tx, state, params, "b")
    assert 0 < sum(x.nbytes for each in made for x in each) <= B + 64


def _is_traced(x):
    return isinstance(x, jax.core.Tracer)


def test_a_joined_parameter_lives_beside_its_own():
    device = jax.devices()[3]
    params = jax.device_put({name: small()[name] for name in "ab"}, device)
    state = adam().init({"a": params["a"]})
    new = po.init_param(adam(), state, params, "b")
    assert new[0].mu["b"].devices() == {device}
    assert kinds(new[0].mu) == [HOST, HOST]
    adam().update(params, new, params)


# -- steps ----------------------------------------------------------------------


def test_increment_step_adds_one_to_one():
    tx = po.paged_adamw(lambda count: 1e-2, per_parameter_steps=True, **SMALL_PAGES)
    state = tx.init(nested())
    new = po.increment_step(po.increment_step(state, KERNEL), KERNEL)
    assert int(po.get_step(new, KERNEL)) == 2
    assert int(po.get_step(state, KERNEL)) == 0
    counts = [x for path, x in flat(new) if x.dtype == jnp.int32]
    # Adam counts steps, and so does the schedule.
    assert sorted(map(int, counts)) == [0, 0, 0, 0, 2, 2]
    tx.update(nested(), new, nested())


def test_increment_step_stops_at_the_largest_count():
    state = adam(per_parameter_steps=True).init({"w": small()["a"]})
    top = jnp.int32(2**31 - 1)
    state = optax.tree.set(state, count={"w": top})
    assert int(po.get_step(po.increment_step(state, "w"), "w")) == 2**31 - 1


@pytest.mark.parametrize(
    "tx", [adam(), po.paged_sgd(1e-2, momentum=0.9, **SMALL_PAGES)], ids=["one", "none"]
)
def test_increment_step_without_a_count_of_its_own(tx):
    with pytest.raises(ValueError, match="'a'.*per_parameter_steps=True"):
        po.increment_step(tx.init(small()), "a")


def test_get_step_where_none_is_counted():
    tx = po.paged_sgd(1e-2, momentum=0.9, **SMALL_PAGES)
    with pytest.raises(ValueError, match="'a' counts no steps"):
        po.get_step(tx.init(small()), "a")


def test_get_step_of_a_schedule_alone():
    tx = po.paged_sgd(lambda count: 1e-2, momentum=0.9, **SMALL_PAGES)
    state = tx.init(small())
    for _ in range(3):
        _, state = tx.update(small(), state, small())
    assert int(po.get_step(state, "a")) == 3


def test_get_step_of_each_label():
    """Under `optax.partition` every transformation counts for its own."""
    tx = optax.partition(
        {"x": adam(), "y": po.MultiSteps(adam(), 2).gradient_transformation()},
        {"a": "x", "b": "y", "c": "x"},
    )
    state = tx.init(small())
    for _ in range(4):
        _, state = jax.jit(tx.update)(small(), state, small())
    assert [int(po.get_step(state, name)) for name in "abc"] == [4, 2, 4]


def test_get_step_of_each_labels_schedule():
    """Beside its moments, not in their state: the count of the same label."""
    sgd = po.paged_sgd(lambda count: 1e-2, momentum=0.9, **SMALL_PAGES)
    tx = optax.partition(
        {"x": sgd, "y": po.MultiSteps(sgd, 2).gradient_transformation()},
        {"a": "x", "b": "y", "c": "x"},
    )
    state, update = tx.init(small()), jax.jit(tx.update)
    for _ in range(4):
        _, state = update(small(), state, small())
    assert [int(po.get_step(state, name)) for name in "abc"] == [4, 2, 4]


# -- rebalance ------------------------------------------------------------------


class Watch:
    """Adds up what `jax.live_arrays` knows on the device, at every `device_put`."""

    def __init__(self, monkeypatch, shapes):
        self.shapes, self.peak, self.moves = set(shapes), 0, []
        put = jax.device_put

        def watched(x, *args, **kwargs):
            before = [x for x in jax.tree.leaves(x) if isinstance(x, jax.Array)]
            if any(map(_is_traced, before)):
                return put(x, *args, **kwargs)
            self.look()
            moved = put(x, *args, **kwargs)
            self.look()
            for old, new in zip(before, jax.tree.leaves(moved), strict=False):
                if old.sharding.memory_kind != new.sharding.memory_kind:
                    self.moves.append((old.nbytes, new.sharding.memory_kind))
            return moved

        monkeypatch.setattr(jax, "device_put", watched)

    def look(self):
        self.peak = max(self.peak, self.now())

    def now(self):
        return sum(
            x.nbytes
            for x in jax.live_arrays()
            if x.shape in self.shapes and x.sharding.memory_kind == DEVICE
        )


def experts(shapes, budget, page=po.paged_adam):
    """Many parameters' paged state, all of it on the host, and no parameter alive."""
    tx = page(1e-2, device_budget=budget, **SMALL_PAGES)
    params = arrays(shapes=shapes)
    state = po.rebalance(tx, filled(tx.init(params)), [])
    assert po.device_resident_count(state) == 0
    for x in jax.tree.leaves(params):
        x.delete()
    return tx, state


def by_stack_distance(history, sizes, budget):
    """What a byte-sized LRU holds: those that fit with all that were used since."""
    held, total = [], 0
    for name in dict.fromkeys(reversed(history)):
        if sizes[name] > budget:
            continue
        total += sizes[name]
        if total > budget:
            break
        held.append(name)
    return set(held)


def resident_in(state):
    """Parameters on the device; all moments of one are in one place."""
    places = {}
    for path, x in flat(state[0]):
        if x.ndim:
            places.setdefault(path[-1].key, set()).add(x.sharding.memory_kind)
    assert all(len(where) == 1 for where in places.values())
    return {name for name, where in places.items() if where == {DEVICE}}


def access(tx, state, sequence, oracle):
    """Runs a sequence of accesses; returns the last state and the hits."""
    hits, history = 0, []
    wanted = jax.tree.map(np.array, state)
    for number, name in enumerate(sequence):
        hits += po.is_device_resident(state, name)
        history.append(name)
        before = jax.tree.leaves(state)
        state = po.rebalance(tx, state, history[-40:])
        assert resident_in(state) == oracle(history)
        for old, new in zip(before, jax.tree.leaves(state), strict=True):
            assert new is old or old.is_deleted()
        if number % 100 == 99:
            assert_equal(state, wanted)
    assert_equal(state, wanted)
    return state, hits


def sequence_of(seed, count, names):
    """Accesses with some locality, as routed experts and sampled layers have it."""
    random = np.random.default_rng(seed)
    weights = random.dirichlet(np.ones(len(names)))
    return [str(x) for x in random.choice(list(names), size=count, p=weights)]


LONG = hypothesis.settings(
    max_examples=1,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    # Each example takes seconds, and a shorter one would say no more.
    phases=[hypothesis.Phase.generate],
)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
@LONG
@hypothesis.given(seed=st.integers(0, 2**32), room=st.integers(2, 6))
def test_rebalance_is_an_lru_cache(count, seed, room):
    """Many accesses: hits of `functools.lru_cache`, never over budget, bits kept."""
    shapes = {f"e{i}": (8, 131) for i in range(8)}
    size = 4 * 8 * 131
    tx, state = experts(shapes, room * size, po.paged_lion)
    sequence = sequence_of(seed, count, shapes)
    cache = functools.lru_cache(maxsize=room)(lambda name: name)
    sizes = dict.fromkeys(shapes, size)
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch, shapes.values())
        state, hits = access(
            tx,
            state,
            sequence,
            lambda history: by_stack_distance(history, sizes, room * size),
        )
    for name in sequence:
        cache(name)
    assert hits == cache.cache_info().hits > 0
    assert 0 < watch.peak <= room * size
    # Every miss moves one parameter in, and none moves for nothing.
    fetched = sum(kind == DEVICE for _, kind in watch.moves)
    assert fetched == count - hits


@pytest.mark.slow
@hypothesis.settings(LONG, max_examples=2)
@hypothesis.given(seed=st.integers(0, 2**32), kibibytes=st.integers(17, 40))
def test_rebalance_of_mixed_sizes(seed, kibibytes):
    """Sizes from 1 to 8 rows: what fits with all that was used since, no byte more."""
    shapes = {f"e{i}": (i + 1, 259) for i in range(8)}
    sizes = {name: 2 * 4 * rows * 259 for name, (rows, _) in shapes.items()}
    budget = kibibytes * 1024
    tx, state = experts(shapes, budget)
    sequence = sequence_of(seed, 300, shapes)
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch, shapes.values())
        state, hits = access(
            tx,
            state,
            sequence,
            lambda history: by_stack_distance(history, sizes, budget),
        )
    wanted = sum(
        name in by_stack_distance(sequence[:i], sizes, budget)
        for i, name in enumerate(sequence)
    )
    assert hits == wanted
    assert watch.peak <= budget


def test_rebalance_evicts_before_it_fetches(monkeypatch):
    """With room for one, the old one is gone before the new one comes."""
    shapes = {name: (16, 137) for name in "abcd"}
    size = 2 * 4 * 16 * 137
    tx, state = experts(shapes, size)
    watch = Watch(monkeypatch, shapes.values())
    for name in "abcdacbd":
        state = po.rebalance(tx, state, [name])
        assert watch.now() == size
    assert watch.peak == size
    moment = size // 2
    first, *others = _quads(watch)
    assert first == [(moment, DEVICE)] * 2
    assert others == [[(moment, HOST)] * 2 + [(moment, DEVICE)] * 2] * 7


def _quads(watch):
    first, rest = watch.moves[:2], watch.moves[2:]
    return [first, *(rest[i : i + 4] for i in range(0, len(rest), 4))]


def test_rebalance_moves_nothing_that_is_in_place():
    tx = adam(device_budget=BUDGET)
    state = tx.init(small())
    again = po.rebalance(tx, state, ["a", "c"])
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        assert new is old
        assert not old.is_deleted()


def test_rebalance_deletes_what_moved_and_nothing_else():
    tx = adam(device_budget=BUDGET)
    state = tx.init(small())
    a, b, c = (state[0].mu[name] for name in "abc")
    new = po.rebalance(tx, state, ["c"])
    assert a.is_deleted()
    assert new[0].mu["b"] is b
    assert new[0].mu["c"] is c
    assert new[0].count is state[0].count


def test_rebalance_of_groups_and_repeated_paths():
    tx = adam(device_budget=A + C)
    state = po.rebalance(tx, tx.init(nested()), ["blocks/0", "blocks/1"])
    # 71 KiB of the most recent are over the budget alone: it is passed over.
    assert po.device_bytes(state, "blocks") == A + C
    tx = adam(device_budget=B + C)
    state = po.rebalance(tx, state, ["blocks/0/q/bias", "blocks/0/q", "blocks/1"])
    assert po.device_bytes(state, "blocks") == B
    state = po.rebalance(tx, state, [KERNEL, "blocks/1", "blocks/0/q/bias"])
    assert po.device_bytes(state, "blocks") == B + C
    state = po.rebalance(tx, state, ["blocks/1", KERNEL, "blocks/1", KERNEL])
    assert po.device_bytes(state, "blocks") == A
    by_key = po.rebalance(tx, state, [paths(nested())[1]])
    assert not po.is_device_resident(by_key, "blocks/1")


def test_rebalance_of_generators_and_nothing_used():
    tx = adam(device_budget="1MiB")
    state = po.rebalance(tx, tx.init(small()), iter(["a"]))
    assert [po.is_device_resident(state, name) for name in "abc"] == [
        True,
        False,
        False,
    ]
    assert po.device_resident_count(po.rebalance(tx, state, [])) == 0


def test_a_parameter_larger_than_the_budget_is_passed_over():
    tx = adam(device_budget=BUDGET)
    state = po.rebalance(tx, tx.init(small()), ["c", "a", "b"])
    assert [po.is_device_resident(state, name) for name in "abc"] == [True, False, True]


def test_without_a_budget_everything_stays():
    tx = adam(device_budget=None)
    state = adam().init(small())
    state = po.rebalance(tx, state, [])
    assert set(kinds(state)) == {DEVICE}


def test_without_room_everything_leaves():
    state = adam(device_budget=None).init(small())
    assert kinds(po.rebalance(adam(), state, ["a", "b"])).count(HOST) == 6


def test_small_moments_stay_and_cost_nothing():
    small_stays = SMALL_PAGES | {"min_paged_size": "1KiB"}
    tx = po.paged_adam(1e-2, device_budget="32KiB", **small_stays)
    state = po.rebalance(tx, tx.init(small()), ["c", "b", "a"])
    assert [po.is_device_resident(state, name) for name in "abc"] == [True, False, True]
    state = po.rebalance(tx, state, ["b"])
    assert [po.is_device_resident(state, name) for name in "abc"] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(("less", "resident"), [(0, "ab"), (1, "b")])
def test_several_paged_transformations_share_their_budgets(less, resident):
    """The sum of them, for whichever parameters are recent; not a byte more."""
    tx = optax.partition(
        {"x": adam(device_budget=1000), "y": adam(device_budget=A + B - 1000 - less)},
        {"a": "x", "b": "y", "c": "x"},
    )
    state = po.rebalance(tx, tx.init(small()), ["c", "a", "b"])
    assert {n for n in "abc" if po.is_device_resident(state, n)} == set(resident)


@pytest.mark.parametrize(("budget", "resident"), [(0, ""), (-1, "a"), (None, "ab")])
def test_a_byte_too_little(budget, resident):
    budget = {0: A - 1, -1: A + B - 1, None: A + B}[budget]
    state = po.rebalance(adam(device_budget=budget), adam().init(small()), ["b", "a"])
    assert {n for n in "ab" if po.is_device_resident(state, n)} == set(resident)


def test_rebalance_keeps_shards_where_they_are():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    params = jax.device_put({name: small()[name] for name in "ab"}, sharding)
    tx = adam(device_budget="33KiB")
    state = filled(tx.init(params))
    wanted = jax.tree.map(np.array, state)
    for recent in (["b", "a"], ["b"], ["a"]):
        state = po.rebalance(tx, state, recent)
        assert_equal(state, wanted)
        for x in jax.tree.leaves((state[0].mu, state[0].nu)):
            kind = x.sharding.memory_kind
            assert x.sharding.is_equivalent_to(sharding.with_memory_kind(kind), 2)


def test_rebalance_is_refused_in_jit():
    tx = adam(device_budget=BUDGET)
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda state: po.rebalance(tx, state, ["a"]))(tx.init(small()))


def test_rebalance_of_an_unpaged_transformation():
    tx = optax.adam(1e-2)
    with pytest.raises(ValueError, match="no paged transformation"):
        po.rebalance(tx, tx.init(small()), ["a"])


def test_training_goes_on_between_moves():
    """Ten steps with a move before each are ten steps without."""
    tx, params = adam(device_budget=BUDGET), small()
    update = jax.jit(tx.update)
    moved = still = tx.init(params)
    moved = jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), moved)
    for number in range(10):
        _, still = update(small(number), still, params)
        moved = po.rebalance(tx, moved, [("a", "c", "b")[number % 3]])
        _, moved = update(small(number), moved, params)
        assert po.is_device_resident(moved, "c") == (number % 3 == 1)
    assert_equal(moved, still)


# -- device_budget="auto" -------------------------------------------------------

PARAMETERS = sum(x.nbytes for x in small().values())


@pytest.fixture
def statistics(monkeypatch):
    """Makes the device say how much memory it has, and how much is in use."""

    def pretend(limit, used):
        module = sys.modules["paged_optax.transform.configuration"]
        monkeypatch.setattr(module, "device_memory", lambda: (limit, used))

    return pretend


def limit_for(free):
    """A device that has this much left when 1000 bytes are in use, reserve taken."""
    limit = (free + PARAMETERS + 1000) * 4 // 3
    while limit - limit // 4 - 1000 - PARAMETERS < free:
        limit += 1
    assert limit - limit // 4 - 1000 - PARAMETERS == free
    return limit, 1000


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("free", "resident"),
    [
        (A + B + C, "abc"),
        (A + B + C - 1, "ab"),
        (A + B, "ab"),
        (A + B - 1, "ac"),
        (A, "a"),
        (A - 1, "c"),
        (0, ""),
    ],
)
def test_auto_takes_what_is_left(statistics, free, resident, jit):
    """The free memory, less the gradients, less a quarter of the device."""
    statistics(*limit_for(free))
    tx = adam(device_budget="auto")
    state = (jax.jit(tx.init) if jit else tx.init)(small())
    assert {n for n in "abc" if po.is_device_resident(state, n)} == set(resident)
    # Where moments live is told beforehand as well.
    assert kinds(po.abstract_state(tx, small())) == kinds(state)
    plan = po.plan(tx, small())
    assert [x.on_host for x in plan.moments] == [k == HOST for k in kinds(state)]


@pytest.mark.parametrize("memory", [(0, 0), (10**9, 10**9), (10**5, 10**6)], ids=str)
def test_auto_without_room_or_statistics_pages_everything(statistics, memory):
    statistics(*memory)
    tx = adam(device_budget="auto")
    assert po.device_resident_count(tx.init(small())) == 0


def test_auto_on_this_machine_pages_everything():
    """XLA:CPU keeps no statistics."""
    assert po.device_resident_count(adam(device_budget="auto").init(small())) == 0


def test_auto_counts_resident_moments_as_free_when_it_rebalances(statistics):
    tx = adam(device_budget="auto")
    limit, used = limit_for(A)
    statistics(limit, used)
    state = tx.init(small())
    assert po.is_device_resident(state, "a")
    statistics(limit, used + A)  # they are in use now
    state = po.rebalance(tx, state, ["a"])
    assert po.is_device_resident(state, "a")
    state = po.rebalance(tx, state, ["a", "c"])
    assert [po.is_device_resident(state, name) for name in "abc"] == [
        False,
        False,
        True,
    ]
    statistics(limit, used + C)
    state = po.rebalance(tx, state, ["c", "a"])
    assert [po.is_device_resident(state, name) for name in "abc"] == [
        True,
        False,
        False,
    ]


def test_auto_is_taken_once_by_several(statistics):
    statistics(*limit_for(A))
    tx = optax.chain(adam(device_budget="auto"), adam(device_budget="auto"))
    state = tx.init({name: jnp.zeros(0) for name in "abc"} | small())
    state = po.rebalance(adam(), jax.tree.map(lambda x: x, state), [])
    state = po.rebalance(tx, state, ["c"])
    state = po.rebalance(tx, state, ["a"])
    assert po.device_bytes(state) - 2 * 4 <= A


def test_auto_reserves_for_the_parameters_whatever_their_moments_are(statistics):
    """A moment of bfloat16 says less of its parameter's size than one of float32."""
    tx = adam(device_budget="auto", mu_dtype=jnp.bfloat16)
    limit, used = limit_for(A * 3 // 4 - 1)
    statistics(limit, used)
    state = tx.init(small())
    assert not po.is_device_resident(state, "a")
    statistics(limit, used + po.device_bytes(state, "c"))  # it is in use now
    state = po.rebalance(tx, state, ["a"])
    assert not po.is_device_resident(state, "a")


def test_auto_is_refused_in_one_of_several_processes(monkeypatch, statistics):
    statistics(10**9, 0)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    tx = adam(device_budget="auto")
    for do in (
        lambda: tx.init(small()),
        lambda: jax.jit(tx.init)(small()),
        lambda: po.abstract_state(tx, small()),
    ):
        with pytest.raises(ValueError, match="'auto' in one of 2 processes.*bytes"):
            do()
    adam(device_budget=BUDGET).init(small())


def test_another_word_than_auto_is_refused():
    with pytest.raises(ValueError, match="device_budget='Auto'"):
        adam(device_budget="Auto")


# -- abstract_state -------------------------------------------------------------

ABSTRACT = {
    **{
        name: lambda name=name: WRAPPERS[name](adam(device_budget=BUDGET))
        for name in WRAPPERS
    },
    **{
        alias: lambda alias=alias: getattr(po, alias)(
            1e-2, device_budget=BUDGET, **ALIASES[alias][1], **SMALL_PAGES
        )
        for alias in MOMENTS
    },
    "own steps": lambda: adam(per_parameter_steps=True),
    "bfloat16 mu": lambda: adam(mu_dtype=jnp.bfloat16),
    "unpaged": lambda: optax.adamw(1e-2),
}


@pytest.mark.parametrize("name", ABSTRACT)
def test_abstract_state_is_that_of_init(name):
    """Structure, shape, dtype and placement of every array, of arrays and of shapes."""
    tx, params = ABSTRACT[name](), small()
    state = tx.init(params)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    for given in (params, shapes):
        target = po.abstract_state(tx, given)
        assert jax.tree.structure(target) == jax.tree.structure(state)
        for x, wanted in zip(
            jax.tree.leaves(target), jax.tree.leaves(state), strict=True
        ):
            assert isinstance(x, jax.ShapeDtypeStruct)
            assert (x.shape, x.dtype) == (wanted.shape, wanted.dtype)
            assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim)
            assert x.sharding.memory_kind == wanted.sharding.memory_kind


@pytest.mark.parametrize("device", [0, 3])
def test_what_is_made_by_its_placements_is_paged(device):
    """Restores make arrays so; those in host memory must have its type too."""
    params = jax.device_put(small(), jax.devices()[device])
    for x in jax.tree.leaves(po.abstract_state(adam(), params)):
        zeros = np.zeros(x.shape, x.dtype)
        made = jax.make_array_from_callback(
            x.shape, x.sharding, lambda i, z=zeros: z[i]
        )
        assert on_host(made) == (x.sharding.memory_kind == HOST)


def test_abstract_state_allocates_nothing():
    params = {"w": jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)}  # 4 TiB
    po.abstract_state(po.paged_adamw(1e-2), params)
    before = sorted(id(x) for x in jax.live_arrays())
    target = po.abstract_state(po.paged_adamw(1e-2), params)
    assert sorted(id(x) for x in jax.live_arrays()) == before
    assert kinds(target) == [DEVICE, HOST, HOST]


@pytest.mark.parametrize("where", ["device", "mesh"])
def test_abstract_state_is_beside_the_parameters(where):
    if where == "device":
        sharding = SingleDeviceSharding(jax.devices()[3])
    else:
        mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
        sharding = NamedSharding(mesh, PartitionSpec("x"))
    params = jax.device_put({name: small()[name] for name in "ab"}, sharding)
    tx = adam(device_budget=BUDGET)
    state = tx.init(params)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    for given in (params, shapes):
        target = po.abstract_state(tx, given)
        for x, wanted in zip(
            jax.tree.leaves(target[0]), jax.tree.leaves(state[0]), strict=True
        ):
            # A count of `init` is committed nowhere; a restored one must be with them.
            place = wanted.sharding if x.ndim else sharding
            place = place.with_memory_kind(wanted.sharding.memory_kind)
            assert x.sharding.device_set == place.device_set
            assert x.sharding.memory_kind == place.memory_kind
            assert not x.ndim or x.sharding.is_equivalent_to(place, x.ndim)
            assert x.ndim or x.sharding.is_fully_replicated


def test_abstract_state_places_what_was_read_from_elsewhere():
    tx = adam(device_budget=BUDGET)
    state = filled(tx.init(small()))
    read = jax.tree.map(np.array, state)
    target = po.abstract_state(tx, small())
    placed = jax.device_put(read, jax.tree.map(lambda x: x.sharding, target))
    assert kinds(placed) == kinds(state)
    assert_equal(placed, state)
    assert_updates_alike(jax.jit(tx.update), small(), state, placed)
