"""`rebalance` is an LRU cache: against stack distances, and by what it moves."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import paged_optax as po
from helpers.moments import filled, flat
from helpers.reference import SMALL_PAGES, arrays, assert_equal
from helpers.small import DEVICE, HOST
from paged_optax.backend.types import is_traced


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
