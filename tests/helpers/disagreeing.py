"""One process of two that are built differently, in one way after the other.

python tests/helpers/disagreeing.py NUMBER PROCESSES PORT FOLDER

It writes, for each way, what error the first update raised.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import paged_optax as po
from paged_optax.backend import processes

SETTINGS = {"page_size": "4KiB", "min_paged_size": 0}
ROWS, COLUMNS = PartitionSpec("x"), PartitionSpec(None, "x")


def parameters(spec=ROWS):
    mesh = jax.make_mesh((jax.device_count(),), ("x",), (AxisType.Auto,))
    place = NamedSharding(mesh, spec)
    shape = (64, 64) if len(spec) < 3 else (3, 64, 64)
    ones = np.ones(shape, np.float32)
    return {"w": jax.make_array_from_callback(shape, place, ones.__getitem__)}


def train(tx, params=None, init=None, compile=jax.jit):
    """One step, of a transformation whose `init` may not be called."""
    params = parameters() if params is None else params
    state = (init or tx).init(params)

    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    if compile is jax.jit:
        compile = lambda step, *args: jax.jit(step).lower(*args).compile()
    return jax.block_until_ready(compile(step, params, state)(params, state))


def adamw(rate=1e-3, **settings):
    return po.paged_adamw(rate, **SETTINGS | settings)


def layerwise(max_norm=None, **settings):
    params = {"layers": parameters(PartitionSpec(None, "x", None))}
    model = po.LayerwiseModel(
        lambda rest, batch: (batch, None),
        lambda weights, x, context, i: (x @ weights["w"], None),
        lambda rest, x, kept, batch: jnp.mean(x),
    )
    tx = adamw(**settings)
    args = params, tx.init(params), model.workspace(params), parameters()["w"]
    po.jit_step(po.layerwise_step(model, tx, max_norm=max_norm), *args)


def trains(*settings, **how):
    """What each process does, by the settings of its `adamw`, or of them both."""
    both = settings * (2 // len(settings))
    return [lambda each=each: train(adamw(**each), **how) for each in both]


#: By what differs: what the first process does, and the second. Neither does what it
#: did before, for that would not be compared again.
WAYS = {
    "nothing": trains({}),
    "nothing again": trains({}),
    "the page size": trains({"rate": 2.0}, {"rate": 2.0, "page_size": "8KiB"}),
    "the budget": trains({"device_budget": "1MiB"}, {"device_budget": "2MiB"}),
    "the codec": trains({"codec": "bfloat16"}, {"codec": {"mu": "bfloat16"}}),
    "the masters": trains({"master_dtype": "float32"}, {"b1": 0.8}),
    "the rate": trains({"rate": 0.25}, {"rate": 0.5}),
    "the sharding": [
        lambda: train(adamw(0.125), parameters(ROWS)),
        lambda: train(adamw(0.125), parameters(COLUMNS)),
    ],
    "who called init": [
        lambda: train(adamw(0.0625)),
        lambda: train(adamw(0.0625), init=adamw()),
    ],
    "by jit_step": trains({"b2": 0.75}, {"b2": 0.5}, compile=po.jit_step),
    "layerwise, nothing": [layerwise, layerwise],
    "layerwise, the norm": [
        lambda: layerwise(max_norm=1.0),
        lambda: layerwise(max_norm=2.0),
    ],
    "layerwise, the page size": [
        lambda: layerwise(page_size="8KiB"),
        lambda: layerwise(page_size="16KiB"),
    ],
    "who comes": [lambda: train(adamw(b1=0.5)), lambda: None],
}


def main():
    number, count, port, folder = sys.argv[1:]
    jax.distributed.initialize(f"localhost:{port}", int(count), int(number))
    found = {}
    for way, both in WAYS.items():
        processes.PATIENCE = 2.0 if way == "who comes" else 100.0
        try:
            both[int(number)]()
            found[way] = None
        except ValueError as error:
            found[way] = str(error)
    (pathlib.Path(folder) / f"found{number}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    main()
