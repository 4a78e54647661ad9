r"""One process of several: trains on its own devices, saves, and restores.

    python tests/helpers/process.py \
        NUMBER PROCESSES PORT FOLDER LAST_STEP [KILLED AT_STEP]

Begins at the last checkpoint in the folder, if there is one. Process 0 writes what all
parameters and moments have become.
"""

import os
import pathlib
import signal
import sys

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import paged_optax as po

SHAPES = {"even": (256, 512), "wide": (64, 1024), "bias": (64,)}
SPECS = {
    "even": PartitionSpec("data"),
    "wide": PartitionSpec(None, "data"),
    "bias": PartitionSpec(),
}


def values(seed):
    """The same arrays in every process."""
    random = np.random.default_rng(seed)
    return {k: random.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}


def transformation():
    return po.paged_adamw(1e-2, page_size="16KiB", min_paged_size="1KiB")


def main():
    number, processes, port, folder, last = sys.argv[1:6]
    killed = tuple(sys.argv[6:8])
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(number))
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    shardings = {k: NamedSharding(mesh, spec) for k, spec in SPECS.items()}

    def everywhere(tree):
        return {
            k: jax.make_array_from_callback(x.shape, shardings[k], lambda i, x=x: x[i])
            for k, x in tree.items()
        }

    params, tx = everywhere(values(0)), transformation()
    state = tx.init(params)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.ndim > 1} == {
        "pinned_host"
    }

    @jax.jit
    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    with ocp.CheckpointManager(pathlib.Path(folder).absolute() / "saved") as manager:
        first = manager.latest_step() or 0
        if first:
            target = {"params": params, "state": po.abstract_state(tx, params)}
            target["params"] = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                params,
            )
            found = manager.restore(first, args=ocp.args.StandardRestore(target))
            params, state = found["params"], found["state"]
        for number_of_step in range(first + 1, int(last) + 1):
            if killed == (number, str(number_of_step)):
                os.kill(os.getpid(), signal.SIGKILL)
            params, state = step(params, state, everywhere(values(number_of_step)))
            tree = {"params": params, "state": state}
            manager.save(number_of_step, args=ocp.args.StandardSave(tree))
            manager.wait_until_finished()
    kinds = [x.sharding.memory_kind for x in jax.tree.leaves(state)]
    leaves = jax.tree.leaves((params, state))
    leaves = [jax.device_put(x, jax.memory.Space.Device) for x in leaves]
    whole = multihost_utils.process_allgather(leaves, tiled=True)
    if number == "0":
        arrays = {f"{i:02}": np.asarray(x) for i, x in enumerate(whole)}
        np.savez(
            pathlib.Path(folder) / "result.npz",
            first=first,
            on_host=kinds.count("pinned_host"),
            devices=jax.device_count(),
            **arrays,
        )


if __name__ == "__main__":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    main()
