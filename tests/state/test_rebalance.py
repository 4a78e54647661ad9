"""`rebalance` within a budget, an LRU cache: what moves, what stays, what is not."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import moments
from helpers.moments import KERNEL, A, B, C, adam, filled, flat, nested, paths, small
from helpers.reference import SMALL_PAGES, arrays, assert_equal, kinds
from helpers.small import DEVICE, HOST
from paged_optax.backend.types import is_traced


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
    assert moments.resident(state) == "a"
    assert po.device_resident_count(po.rebalance(tx, state, [])) == 0


def test_everything_stays_or_leaves():
    """Without a budget, and without room."""
    state = po.rebalance(adam(device_budget=None), adam().init(small()), [])
    assert set(kinds(state)) == {DEVICE}
    assert kinds(po.rebalance(adam(), state, ["a", "b"])).count(HOST) == 6


def test_small_moments_stay_and_cost_nothing():
    small_stays = SMALL_PAGES | {"min_paged_size": "1KiB"}
    tx = po.paged_adam(1e-2, device_budget="32KiB", **small_stays)
    state = po.rebalance(tx, tx.init(small()), ["c", "b", "a"])
    assert moments.resident(state) == "ac"
    assert moments.resident(po.rebalance(tx, state, ["b"])) == "c"


@pytest.mark.parametrize(("less", "resident"), [(0, "ab"), (1, "b")])
def test_several_paged_transformations_share_their_budgets(less, resident):
    """The sum of them, for whichever parameters are recent; not a byte more."""
    tx = optax.partition(
        {"x": adam(device_budget=1000), "y": adam(device_budget=A + B - 1000 - less)},
        {"a": "x", "b": "y", "c": "x"},
    )
    state = po.rebalance(tx, tx.init(small()), ["c", "a", "b"])
    assert moments.resident(state) == resident


@pytest.mark.parametrize(
    ("budget", "resident"), [(A - 1, ""), (A + B - 1, "a"), (A + B, "ab")]
)
def test_a_byte_too_little(budget, resident):
    state = po.rebalance(adam(device_budget=budget), adam().init(small()), ["b", "a"])
    assert moments.resident(state, "ab") == resident


def test_rebalance_keeps_shards_where_they_are():
    sharding = moments.place_on("mesh")
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


def test_training_goes_on_between_moves():
    """Ten steps with a move before each are ten steps without."""
    tx, params = adam(device_budget=moments.BUDGET), small()
    update = jax.jit(tx.update)
    moved = still = tx.init(params)
    moved = jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), moved)
    for number in range(10):
        _, still = update(small(number), still, params)
        moved = po.rebalance(tx, moved, [("a", "c", "b")[number % 3]])
        _, moved = update(small(number), moved, params)
        assert po.is_device_resident(moved, "c") == (number % 3 == 1)
    assert_equal(moved, still)


def test_a_string_is_one_parameter():
    experts = {name: jnp.ones((512, 512)) for name in ("a", "ab", "b")}
    tx = po.paged_adamw(1e-3, device_budget="2MiB")
    state = po.rebalance(tx, tx.init(experts), "ab")
    assert moments.resident(state, experts) == "ab"


class Watch:
    """Adds up what `jax.live_arrays` knows on the device, at every `device_put`."""

    def __init__(self, monkeypatch, shapes):
        self.shapes, self.peak, self.moves = set(shapes), 0, []
        put = jax.device_put

        def watched(x, *args, **kwargs):
            before = [x for x in jax.tree.leaves(x) if isinstance(x, jax.Array)]
            if any(map(is_traced, before)):
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
        held = lambda history: by_stack_distance(history, sizes, room * size)
        state, hits = access(tx, state, sequence, held)
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
    held = lambda history: by_stack_distance(history, sizes, budget)
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch, shapes.values())
        state, hits = access(tx, state, sequence, held)
    assert hits == sum(name in held(sequence[:i]) for i, name in enumerate(sequence))
    assert watch.peak <= budget


def test_rebalance_evicts_before_it_fetches(monkeypatch):
    """With room for one, the old one is gone before the new one comes."""
    shapes = {name: (16, 137) for name in "abcd"}
    moment = 4 * 16 * 137
    tx, state = experts(shapes, 2 * moment)
    watch = Watch(monkeypatch, shapes.values())
    for name in "abcdacbd":
        state = po.rebalance(tx, state, [name])
        assert watch.now() == 2 * moment
    assert watch.peak == 2 * moment
    comes, goes = ([(moment, kind)] * 2 for kind in (DEVICE, HOST))
    assert watch.moves == comes + (goes + comes) * 7
