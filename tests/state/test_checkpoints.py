"""Checkpoints: saved from host memory, restored into it, and trained on bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import paged_optax as po
from helpers import checkpoints
from helpers.checkpoints import SHAPES, bits, paged_adamw, standard, target_of, train
from helpers.reference import arrays, assert_equal, kinds
from helpers.small import DEVICE, HOST

STATES = {
    "adamw": paged_adamw(),
    "steps of its own": paged_adamw(per_parameter_steps=True),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), paged_adamw()),
    "injected": optax.inject_hyperparams(lambda learning_rate: paged_adamw())(1e-2),
    "masked": optax.masked(
        paged_adamw(), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "MultiSteps": po.MultiSteps(paged_adamw(), 3),
    "apply_if_finite": po.apply_if_finite(paged_adamw(), 3),
    "bfloat16 mu": paged_adamw(mu_dtype=jnp.bfloat16),
    "schedule free": po.paged(
        optax.contrib.schedule_free_adamw(1e-2), **checkpoints.PAGING
    ),
}


@functools.cache
def begun(name):
    """Parameters and state after two steps."""
    tx, params = STATES[name], arrays(shapes=SHAPES)
    return train(tx, params, tx.init(params), range(2))


@pytest.mark.quick("adamw", "own", "MultiSteps", "bfloat16 mu")
@pytest.mark.parametrize(
    ("way", "name"),
    [
        *((standard, name) for name in STATES),
        *(
            (way, name)
            for way in (
                checkpoints.manager,
                checkpoints.pytree,
                checkpoints.flax_bytes,
                checkpoints.flax_dict,
            )
            for name in ("steps of its own", "MultiSteps", "bfloat16 mu")
        ),
    ],
)
def test_a_restored_state_is_paged_and_the_same(tmp_path, way, name):
    """Structure, bits and memory kinds of the state that was saved."""
    tx, (params, state) = STATES[name], begun(name)
    assert HOST in kinds(state) and DEVICE in kinds(state)
    target = target_of(tx, params)
    assert kinds(target) == kinds((params, state))
    checkpoints.assert_same(way(tmp_path, (params, state), target), (params, state))


@functools.cache
def straight(name):
    """The end of 20 steps without a stop, and their middle."""
    tx, params = STATES[name], arrays(shapes=SHAPES)
    middle = train(tx, params, tx.init(params), range(10))
    return middle, train(tx, *middle, range(10, 20))


@functools.cache
def in_one_go(name):
    tx, params = STATES[name], arrays(shapes=SHAPES)
    return train(tx, params, tx.init(params), range(20))


@checkpoints.WAYS
@pytest.mark.parametrize("name", ["adamw", "MultiSteps"])
def test_resume_after_10_of_20_steps_is_20_straight(tmp_path, way, name):
    """Bit for bit; the tenth step of MultiSteps leaves a half-filled accumulator."""
    tx = STATES[name]
    middle = straight(name)[0]
    restored = way(tmp_path, middle, target_of(tx, middle[0]))
    checkpoints.assert_same(train(tx, *restored, range(10, 20)), in_one_go(name))


# -- other transformations, other pages, other devices ----------------------------


def test_a_checkpoint_of_adamw_becomes_paged_and_back(tmp_path):
    """One format: `optax.adamw` restores into `paged_adamw`, and the other way."""
    params = arrays(shapes=SHAPES)
    adamw, paged = optax.adamw(1e-2, weight_decay=0.1), paged_adamw()
    middle = train(adamw, params, adamw.init(params), range(3))
    assert set(kinds(middle)) == {DEVICE}
    (tmp_path / "there").mkdir()
    there = standard(tmp_path / "there", middle, target_of(paged, params))
    assert bits(there) == bits(middle)
    assert kinds(there) == kinds((params, paged.init(params)))
    further = train(paged, *there, range(3, 6))
    (tmp_path / "back").mkdir()
    back = standard(tmp_path / "back", further, target_of(adamw, params))
    assert bits(back) == bits(further)
    assert set(kinds(back)) == {DEVICE}
    # And the state is the one that never was paged: see test_numbers for its rounding.
    assert_equal(back[1], train(adamw, *middle, range(3, 6))[1])


@pytest.mark.parametrize(
    "paging",
    [
        {"page_size": "16KiB"},
        {"page_size": "1GiB"},
        {"device_budget": "6KiB"},
        {"device_budget": None},
        {"min_paged_size": "4KiB"},
        {"min_paged_size": "1B"},
    ],
    ids=str,
)
def test_other_pages_change_no_number(tmp_path, paging):
    """What is saved depends on neither page size nor residency."""
    saved, (_, wanted) = straight("adamw")[0], straight("adamw")[1]
    tx = paged_adamw(**paging)
    restored = standard(tmp_path, saved, target_of(tx, saved[0]))
    assert bits(restored) == bits(saved)
    assert kinds(restored[1]) == kinds(tx.init(saved[0]))
    assert_equal(train(tx, *restored, range(10, 20))[1], wanted)


def mesh_of(devices):
    return Mesh(np.array(jax.devices()[:devices]), ("x",))


def sharded(devices):
    """Parameters with every matrix over some devices, whole on each where it is not."""
    mesh, shapes = mesh_of(devices), {"w": (64, 32), "u": (128, 16), "t": (3,)}
    return {
        name: jax.device_put(
            x, NamedSharding(mesh, PartitionSpec(*["x"][: x.ndim // 2]))
        )
        for name, x in arrays(shapes=shapes).items()
    }


@pytest.mark.parametrize("way", [standard, checkpoints.manager, checkpoints.flax_bytes])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_another_number_of_devices(tmp_path, way, devices):
    """Saved over four devices, restored over others: each its own shard of it."""
    tx, params = paged_adamw(), sharded(4)
    gradients = jax.tree.map(lambda x: x + 1, params)
    _, state = tx.update(gradients, tx.init(params), params)
    there = sharded(devices)
    target = target_of(tx, there)
    found, restored = way(tmp_path, (params, state), target)
    assert bits((found, restored)) == bits((params, state))
    for x, wanted in zip(
        jax.tree.leaves((found, restored)), jax.tree.leaves(target), strict=True
    ):
        assert x.sharding.memory_kind == wanted.sharding.memory_kind
        assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim)
    for name in ("w", "u"):
        moment = optax.tree.get(restored, "mu")[name]
        assert moment.sharding.memory_kind == HOST
        assert len(moment.addressable_shards) == devices
        assert {x.data.shape[0] for x in moment.addressable_shards} == {
            moment.shape[0] // devices
        }
    # And it goes on: the next step's numbers are those of the devices before.
    _, wanted = tx.update(gradients, state, params)
    gradients = jax.tree.map(
        lambda x, y: jax.device_put(x, y.sharding), gradients, there
    )
    _, ours = tx.update(gradients, restored, found)
    assert kinds(ours) == kinds(restored)
    assert_equal(jax.tree.map(np.array, ours), jax.tree.map(np.array, wanted))


def test_a_state_restored_for_parameters_on_another_device_goes_on(tmp_path):
    """All of it is beside its parameters, the step count too."""
    tx, params = STATES["adamw"], arrays(shapes=SHAPES)
    params = jax.device_put(params, jax.devices()[3])
    _, state = tx.update(params, tx.init(params), params)
    found, restored = standard(tmp_path, (params, state), target_of(tx, params))
    for x in jax.tree.leaves((found, restored)):
        assert x.devices() == {jax.devices()[3]}
    checkpoints.assert_same(
        tx.update(found, restored, found), tx.update(params, state, params)
    )
