"""Peak of host memory over a state while it is saved. Needs a process of its own."""

import ctypes
import dataclasses
import gc
import pathlib
import pickle
import tempfile
import zlib
from collections.abc import Callable
from typing import Any

import flax.serialization
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

import paged_optax as po

LEAVES, COLUMNS = 8, 1024


def reset() -> int:
    """Bytes in memory now, from which the next peak is measured."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(text.partition("VmHWM:")[2].split()[0])


def digests(tree: Any) -> list[int]:
    return [zlib.crc32(np.array(x)) for x in jax.tree.leaves(tree)]


class Training:
    """AdamW on random values, which no compression shrinks."""

    def __init__(self, state_bytes: int):
        rows = state_bytes // (3 * 4 * LEAVES * COLUMNS)
        keys = jax.random.split(jax.random.key(0), LEAVES)
        params = {
            f"w{i}": jax.random.normal(k, (rows, COLUMNS)) for i, k in enumerate(keys)
        }
        tx = po.paged_adamw(1e-3)

        def step(params: Any, state: Any) -> Any:
            updates, state = tx.update(params, state, params)
            return optax.apply_updates(params, updates), state

        self.tree = {"params": params, "state": tx.init(params)}
        self.bytes = sum(x.nbytes for x in jax.tree.leaves(self.tree))
        trees = self.tree.values()
        self.jitted = po.jit_step(step, *trees, donate_argnums=(0, 1))
        typed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        shapes = jax.tree.map(typed, params)
        self.target = {"params": shapes, "state": po.abstract_state(tx, shapes)}

    def step(self) -> None:
        trees = jax.block_until_ready(self.jitted(*self.tree.values()))
        self.tree = dict(zip(self.tree, trees, strict=True))


#: Other writers than Orbax.
PLAIN: dict[str, Callable[[Any, Any], Any]] = {
    "pickle": pickle.dump,
    "pickle, device_get": lambda tree, file: pickle.dump(jax.device_get(tree), file, 5),
    "flax": lambda tree, file: file.write(flax.serialization.to_bytes(tree)),
}


@dataclasses.dataclass
class Orbax:
    """A manager that keeps one checkpoint."""

    folder: str
    asynchronous: bool
    compressed: bool

    def __post_init__(self):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=1, enable_async_checkpointing=self.asynchronous
        )
        handler = ocp.PyTreeCheckpointHandler(use_compression=self.compressed)
        self.manager = ocp.CheckpointManager(
            self.folder, options=options, item_handlers=handler
        )

    def restored(self, number: int, target: Any) -> Any:
        args = ocp.checkpoint_utils.construct_restore_args(target)
        args = ocp.args.PyTreeRestore(target, restore_args=args)
        return self.manager.restore(number, args=args)


def measure(
    name: str, state_bytes: int, saves: int, beside: bool = False
) -> tuple[float, bool]:
    """The peak over the state, and over a step alone, in states; if bits come back."""
    training, alone = Training(state_bytes), 0
    for _ in range(2):
        before = reset()
        training.step()
        alone = peak() - before if beside else 0
    with tempfile.TemporaryDirectory() as folder:
        orbax = None
        if name not in PLAIN:
            orbax = Orbax(folder, "async" in name, "compressed" in name)

        def save(number: int) -> None:
            if orbax is None:
                with open(f"{folder}/state", "wb") as file:
                    return PLAIN[name](training.tree, file)
            orbax.manager.save(number, args=ocp.args.PyTreeSave(training.tree))
            if beside:
                training.step()
            orbax.manager.wait_until_finished()

        before = reset()
        for number in range(saves):
            save(number)
        over = (peak() - before - alone) / training.bytes
        if orbax is None:
            return over, True
        saved = digests(training.tree)
        save(saves)
        found = orbax.restored(saves, training.target)
        orbax.manager.close()
        return over, digests(found) == saved and po.host_bytes(found["state"]) > 0
