"""The ways to write a checkpoint and to read it, and runs to save."""

import functools

import flax
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training import orbax_utils

import paged_optax as po
from helpers.reference import arrays, kinds

#: Several pages, a stack, one page, and one that stays on the device.
SHAPES = {"w": (70, 32), "stack": (3, 5, 130), "v": (40,), "t": (3,)}
PAGING = {"page_size": "4KiB", "min_paged_size": "64B"}


def paged_adamw(**paging):
    return po.paged_adamw(1e-2, weight_decay=0.1, **(PAGING | paging))


@functools.cache
def compiled(tx, places):
    """A step with everything donated, compiled once for states in these places."""

    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, updates

    params = arrays(shapes=SHAPES)
    state = tx.init(params)
    assert tuple(kinds(state)) == places
    return po.jit_step(step, params, state, params, donate_argnums=(0, 1, 2))


def train(tx, params, state, numbers):
    """Some steps of a run, by their numbers, jitted and donated."""
    step = compiled(tx, tuple(kinds(state)))
    params, state = jax.tree.map(_copied, (params, state))
    for number in numbers:
        gradients = arrays(shapes=SHAPES, seed=100 + number)
        params, state, _ = step(params, state, gradients)
    return params, state


def _copied(x):
    return jax.device_put(np.array(x), x.sharding)


def bits(tree):
    return [(x.dtype, x.shape, np.array(x).tobytes()) for x in jax.tree.leaves(tree)]


def assert_same(found, wanted):
    """Bit for bit, in structure and in place."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert bits(found) == bits(wanted)
    assert kinds(found) == kinds(wanted)


# -- how a checkpoint is written and read -----------------------------------------


def standard(directory, saved, target):
    """Orbax's `StandardCheckpointer`."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "standard", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(directory / "standard", target)


def manager(directory, saved, target):
    """Orbax's `CheckpointManager`, asynchronous as by default."""
    with ocp.CheckpointManager(directory / "manager") as checkpoints:
        checkpoints.save(0, args=ocp.args.StandardSave(saved))
        checkpoints.wait_until_finished()
        return checkpoints.restore(0, args=ocp.args.StandardRestore(target))


def pytree(directory, saved, target):
    """Orbax's `PyTreeCheckpointer`, with the arguments that Flax derives."""
    saving = orbax_utils.save_args_from_target(saved)
    restoring = ocp.checkpoint_utils.construct_restore_args(target)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(directory / "pytree", saved, save_args=saving)
        found = directory / "pytree"
        return checkpointer.restore(found, item=target, restore_args=restoring)


def flax_bytes(directory, saved, target):
    """Flax's own format: NumPy arrays, then one `device_put` into place."""
    del directory
    read = flax.serialization.from_bytes(target, flax.serialization.to_bytes(saved))
    return jax.device_put(read, jax.tree.map(lambda x: x.sharding, target))


def flax_dict(directory, saved, target):
    """Flax's dicts of arrays, as NumPy arrays."""
    del directory
    read = jax.tree.map(np.array, flax.serialization.to_state_dict(saved))
    read = flax.serialization.from_state_dict(target, read)
    return jax.device_put(read, jax.tree.map(lambda x: x.sharding, target))


WAYS = pytest.mark.parametrize(
    "way", [standard, manager, pytree, flax_bytes, flax_dict]
)


def target_of(tx, params):
    """Where parameters and state belong, allocating nothing."""
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    return shapes, po.abstract_state(tx, shapes)
