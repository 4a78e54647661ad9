"""Layers in any container, their moments in any codec, in each way to train them."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import paged_optax as po
from helpers import containers
from helpers.coded import NAMES
from helpers.layered import far

SETTINGS = {"page_size": 4096, "min_paged_size": 0}


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train layers; with masters, of parameters in bfloat16."""

    tx: dict[str, Any] = dataclasses.field(default_factory=dict)
    deferred: bool = False
    offloaded: bool = False
    workspace: str | None = None

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.masters else "float32"

    @property
    def masters(self) -> bool:
        return any(name.startswith("master") for name in self.tx)


WAYS = {
    "layerwise": Way(),
    "deferred": Way(deferred=True),
    "resident": Way({"device_budget": None}),
    "offloaded": Way(offloaded=True),
    "own steps": Way({"per_parameter_steps": True}),
    "masters": Way({"master_dtype": "float32"}),
    "remainders": Way({"master_remainders": True}),
    "wide remainders": Way({"master_remainders": True}, workspace="float32"),
    "deferred remainders": Way({"master_remainders": "int8"}, deferred=True),
}

BATCHES = [jax.random.normal(jax.random.key(seed), (4, 64)) for seed in (1, 2)]


def layerwise(tx, params, way, batches=BATCHES):
    """Two layerwise steps; what is given keeps its containers and its memory."""
    model = po.LayerwiseModel(
        containers.prologue, containers.layer, containers.epilogue
    )
    step = po.layerwise_step(model, tx)
    wide = jnp.promote_types(jax.tree.leaves(params)[0].dtype, "float32")
    deferred = {"host_dtype": wide, "rest": True} if way.deferred else {}
    workspace = model.workspace(params, dtype=way.workspace, **deferred)
    if way.offloaded:
        params = params | {"layers": po.offload(params["layers"], 0)}
    given = params, tx.init(params), workspace
    described = lambda tree: jax.tree.map(
        lambda x: (x.shape, str(x.dtype), x.sharding.memory_kind), tree
    )
    before, compiled = described(given[:2]), jax.jit(step)
    for batch in batches:
        *given, _ = compiled(*given, batch)
    if way.deferred:
        given = jax.jit(step.finish)(*given)
    assert described(tuple(given[:2])) == before
    return given[0], given[1]


def by_grad(tx, params, gradients_dtype=None, batches=BATCHES):
    """Two ordinary steps."""
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        gradients = jax.grad(containers.loss)(params, batch)
        if gradients_dtype is not None:
            gradients = optax.tree.cast(gradients, gradients_dtype)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for batch in batches:
        params, state = step(params, state, batch)
    return params, state


def by_optax(masters, dtype):
    """Two steps of AdamW on masters, of which the model sees the rounded ones."""
    tx = optax.adamw(0.01)
    state = tx.init(masters)
    for batch in BATCHES:
        params = optax.tree.cast(masters, dtype)
        gradients = jax.jit(jax.grad(containers.loss))(params, batch)
        gradients = jax.tree.map(lambda g, m: g.astype(m.dtype), gradients, masters)
        updates, state = tx.update(gradients, state, masters)
        masters = optax.apply_updates(masters, updates)
    return masters


def a_third(*choices):
    """A third of all combinations, in which each two choices meet."""
    numbered = itertools.product(*(enumerate(each) for each in choices))
    return [
        tuple(x for _, x in chosen)
        for chosen in numbered
        if sum(number for number, _ in chosen) % 3 == 2
    ]


@pytest.mark.quick(
    "State-dynamic_int8-layerwise",
    "State-bfloat16-remainders",
    "nested-bfloat16-resident",
    "module-None-deferred",
)
@pytest.mark.parametrize(
    ("container", "codec", "way"), a_third(containers.CONTAINERS, [None, *NAMES], WAYS)
)
def test_it_is_the_ordinary_step(container, codec, way):
    """By `jax.grad` and the same transformation. The noise of each layer is its own."""
    way = WAYS[way]
    tx = po.paged_adamw(0.01, codec=codec, **way.tx, **SETTINGS)
    params = containers.model(containers.CONTAINERS[container], way.dtype)
    found, state = layerwise(tx, params, way)
    wanted, wanted_state = by_grad(tx, params, way.workspace)
    noise = 1e-3 if codec == "bfloat16_stochastic" else 1e-6
    assert far(found, wanted) <= noise
    assert far(found, params) > 0.01
    if way.masters:
        masters = po.master_weights(found, state)
        assert far(masters, po.master_weights(wanted, wanted_state)) <= noise
    if noise == 1e-6:
        assert far(state, wanted_state) <= 1e-4


@pytest.mark.quick("nested-own steps")
@pytest.mark.parametrize("way", [name for name, way in WAYS.items() if not way.masters])
@pytest.mark.parametrize("container", containers.CONTAINERS)
def test_it_is_optaxs_in_float64(container, way):
    with jax.enable_x64(True):
        make = containers.CONTAINERS[container]
        params = containers.model(make, "float64")
        tx = po.paged_adamw(0.01, **WAYS[way].tx, **SETTINGS)
        found, _ = layerwise(tx, params, WAYS[way])
        assert far(found, by_optax(params, "float64")) <= 1e-12


@pytest.mark.quick("FrozenDict-remainders")
@pytest.mark.parametrize("way", [name for name, way in WAYS.items() if way.masters])
@pytest.mark.parametrize("container", containers.CONTAINERS)
def test_masters_are_optaxs(container, way):
    """The gradients are those of bfloat16 parameters, to their last bits."""
    make = containers.CONTAINERS[container]
    params = containers.model(make, "bfloat16")
    tx = po.paged_adamw(0.01, **WAYS[way].tx, **SETTINGS)
    found = po.master_weights(*layerwise(tx, params, WAYS[way]))
    wanted = by_optax(optax.tree.cast(params, "float32"), "bfloat16")
    moved = far(params, wanted)
    assert far(found, wanted) <= 0.02 * moved


@pytest.mark.quick("struct-dynamic_int8")
@pytest.mark.parametrize("codec", [None, *NAMES])
@pytest.mark.parametrize("container", containers.CONTAINERS)
def test_layers_of_parts_of_blocks(container, codec):
    """Blocks that two layers share cannot be cut; all else is as ordinary."""
    params = containers.model(containers.CONTAINERS[container], width=67)
    tx = po.paged_adamw(0.01, codec=codec, **SETTINGS)
    if codec is None or "bfloat16" in codec:
        found, _ = layerwise(tx, params, Way())
        assert far(found, by_grad(tx, params)[0]) <= 1e-3
        return
    with pytest.raises(ValueError, match=r"\(2, 64, 67\).*layers of whole blocks"):
        layerwise(tx, params, Way())


@pytest.mark.quick("dynamic_int8-layerwise")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("codec", NAMES)
def test_rows_of_parts_of_words(codec, way):
    """A stack's codes share words along its rows, whose number is no multiple of 4."""
    way, rows = WAYS[way], 131
    make = containers.CONTAINERS["dict"]
    params = containers.model(make, way.dtype, width=256, rows=rows)
    batches = [jax.random.normal(jax.random.key(seed), (4, rows)) for seed in (1, 2)]
    tx = po.paged_adamw(0.01, codec=codec, **way.tx, **SETTINGS)
    found, state = layerwise(tx, params, way, batches)
    wanted, wanted_state = by_grad(tx, params, way.workspace, batches)
    noise = 1e-3 if codec == "bfloat16_stochastic" else 1e-6
    assert far(found, wanted) <= noise
    if noise == 1e-6:
        assert far(state, wanted_state) <= 1e-4


def test_what_refuses_one_layer_is_said():
    """Not guessed at: its own words are in the message."""
    params = containers.model(containers.CONTAINERS["State"])
    paged = po.paged_adamw(0.01, codec="dynamic_int8", **SETTINGS)

    def update(updates, state, params=None):
        if jax.tree.leaves(updates)[-1].shape[0] == 1:
            raise ValueError("no stack of one, please")
        return paged.update(updates, state, params)

    tx = optax.GradientTransformation(paged.init, update)
    with pytest.raises(ValueError, match="of one layer: no stack of one, please"):
        layerwise(tx, params, Way())
