r"""A training script that may be killed at any moment, and says in which phase it is.

    python tests/helpers/trainer.py WAY FOLDER LAST_STEP \
        [--processes 4 --number 0 --port 1234] [--straight] [--spoil]

It begins at the last checkpoint in the folder, if there is one, as
The guide *Save and restore* says: Orbax writes in the background while steps
go on. What it restored and what it came to are lines of the folder's `log`: the step,
and a digest of all parameters and moments. `--straight` is the run to compare with: it
logs a digest where others write a checkpoint.
"""

import argparse
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import paged_optax as po
from helpers import layered

#: What a process is doing, as the first byte of its file `phase` says.
PHASES = (
    *("starting", "restoring", "stepping", "saving"),
    *("stepping beside a save", "ending"),
)
SAVED_EVERY = 5
SHAPES = {"even": (256, 512), "wide": (64, 1024), "bias": (64,)}
SPECS = {
    "even": PartitionSpec("data"),
    "wide": PartitionSpec(None, "data"),
    "bias": PartitionSpec(),
}
PAGES = {"page_size": "16KiB", "min_paged_size": "1KiB"}


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train."""

    #: Makes what goes from step to step: parameters and state, and where they are
    #: trained by layers, the workspace.
    begin: Callable[[], tuple[Any, ...]]
    step: Callable[..., tuple[Any, ...]]  # takes and returns it, and takes a batch
    batch: Callable[[int], Any]  # makes a step's batch
    #: How much of it is saved, from the first on: all that the next step needs.
    saved: int = 2


def all_devices() -> Mesh:
    """Those of all processes."""
    return Mesh(np.array(jax.devices()), ("data",))


def everywhere(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array that every process has whole, divided over all devices."""
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def values(seed: int) -> dict[str, jax.Array]:
    """The same arrays in every process, divided over all devices."""
    random, made, mesh = np.random.default_rng(seed), {}, all_devices()
    for name, shape in SHAPES.items():
        x = random.normal(size=shape).astype(np.float32)
        made[name] = everywhere(x, NamedSharding(mesh, SPECS[name]))
    return made


def ordinary(tx: optax.GradientTransformation) -> Way:
    """All gradients at once."""

    def begin() -> tuple[Any, ...]:
        params = values(0)
        return params, tx.init(params)

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, ...]:
        gradients = jax.tree.map(lambda x, y: 0.1 * x + y, params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return Way(begin, step, values)


def by_layers(tx: optax.GradientTransformation, deferred: bool = False) -> Way:
    """One layer's gradients at a time, the layers' weights on the host.

    If deferred, over all devices, and each update waits for the next step.
    """

    def begin() -> tuple[Any, ...]:
        params = layered.parameters(layers=3)
        how = {}
        if deferred:
            places = po.fully_sharded(params, all_devices())
            params = jax.tree.map(everywhere, params, places)
            rest = {name: x for name, x in params.items() if name != "layers"}
            how = {"host_dtype": "float32", "rest": rest}
        state = tx.init(params)
        workspace = po.GradientWorkspace.allocate(params["layers"], **how)
        params["layers"] = po.offload(params["layers"], min_size="16KiB")
        return params, state, workspace

    def batch(number: int) -> Any:
        if not deferred:
            return layered.batch(number)
        made = layered.batch(number, shape=(8, 8))
        made["key"] = jax.random.key_data(made["key"])
        rows = lambda x: PartitionSpec(*["data"] * (x.ndim - 1))
        place = lambda x: everywhere(x, NamedSharding(all_devices(), rows(x)))
        return jax.tree.map(place, made)

    step = layered.layerwise(tx, max_norm=0.5)
    return Way(begin, lambda *given: step(*given)[:3], batch, saved=2 + deferred)


WAYS: dict[str, Callable[[], Way]] = {
    "adamw": lambda: ordinary(po.paged_adamw(1e-2, **PAGES)),
    "8 bits": lambda: ordinary(po.paged_adamw_8bit(1e-2, **PAGES)),
    "layerwise": lambda: by_layers(po.paged_adamw(1e-2, **layered.SETTINGS)),
    "deferred": lambda: by_layers(po.paged_adamw(1e-2, **layered.SETTINGS), True),
}


class Diary:
    """What a process tells the one that kills it, in files that outlive it."""

    def __init__(self, folder: pathlib.Path, number: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT
        self._phase = os.open(folder / f"phase{number}", flags)
        self._log = os.open(folder / "log", flags | os.O_APPEND)
        self._writes = number == 0
        self.enter("starting")

    def enter(self, phase: str) -> None:
        os.pwrite(self._phase, bytes([PHASES.index(phase)]), 0)

    def write(self, event: str, step: int, saved: Any) -> None:
        """Logs what parameters and state are, all bits of them."""
        # Of copies: NumPy's view of an array would keep it from being donated.
        leaves = jax.tree.leaves(saved)
        leaves = [jax.device_put(x, jax.memory.Space.Device) for x in leaves]
        leaves = [jax.device_put(x, x.sharding, may_alias=False) for x in leaves]
        if jax.process_count() > 1:
            leaves = multihost_utils.process_allgather(leaves, tiled=True)
        digest = hashlib.sha256()
        for x in map(np.asarray, leaves):
            digest.update(f"{x.dtype} {x.shape}".encode() + x.tobytes())
        if self._writes:
            os.write(self._log, f"{event} {step} {digest.hexdigest()}\n".encode())


def spoiled(carry: Any) -> Any:
    """The same with one moment zeroed: what a test must notice."""
    params, state, *rest = carry
    mu = optax.tree.get(state, "mu")
    first, *others = jax.tree.leaves(mu)
    zeros = jax.device_put(np.zeros(first.shape, first.dtype), first.sharding)
    mu = jax.tree.unflatten(jax.tree.structure(mu), [zeros, *others])
    return params, optax.tree.set(state, mu=mu), *rest


def train(way: Way, diary: Diary, options: argparse.Namespace) -> None:
    """Goes on from the last checkpoint to the last step."""
    carry = way.begin()
    saved = slice(way.saved)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        carry[saved],
    )
    donated = tuple(range(len(carry)))
    step = po.jit_step(way.step, *carry, way.batch(1), donate_argnums=donated)
    with ocp.CheckpointManager(options.folder / "saved") as manager:
        diary.enter("restoring")
        first = manager.latest_step() or 0
        if first:
            found = manager.restore(first, args=ocp.args.StandardRestore(target))
            carry = (*found, *carry[way.saved :])
        if options.spoil and first:
            carry = spoiled(carry)
        diary.write("restored", first, carry[saved])
        for number in range(first + 1, options.last + 1):
            beside = manager.is_saving_in_progress()
            diary.enter("stepping beside a save" if beside else "stepping")
            carry = jax.block_until_ready(step(*carry, way.batch(number)))
            if number % SAVED_EVERY:
                continue
            if options.straight:
                diary.write("reached", number, carry[saved])
            else:
                diary.enter("saving")
                manager.save(number, args=ocp.args.StandardSave(carry[saved]))
        diary.enter("saving")
    diary.enter("ending")
    diary.write("ended", options.last, carry[saved])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("last", type=int)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--port", type=int)
    parser.add_argument("--straight", action="store_true")
    parser.add_argument("--spoil", action="store_true")
    options = parser.parse_args()
    diary = Diary(options.folder, options.number)
    if options.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"localhost:{options.port}"
        jax.distributed.initialize(address, options.processes, options.number)
    train(WAYS[options.way](), diary, options)


if __name__ == "__main__":
    main()
