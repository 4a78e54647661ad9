"""`nnx.Optimizer` with every codec: whole, adapted, stacked and partitioned models.

The oracle is the same training without Flax's containers: Optax itself in float32, and
else `tx.update` on trees of plain arrays. Gradients are given, so that the states must
be equal bit for bit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import paged_optax as po
from helpers.reference import assert_equal
from paged_optax.backend.memory import on_host

PAGES = {"page_size": 4096, "min_paged_size": 256}
STEPS = 10


class Net(nnx.Module):
    def __init__(self, rngs, **options):
        sizes = {"lora_rank": 64, "use_bias": False}
        self.a = nnx.LoRALinear(64, 64, **sizes, rngs=rngs, **options)


class Stack(nnx.Module):
    """Layers for `nnx.scan`, whose metadata has an axis of layers."""

    def __init__(self, rngs, **options):
        make = lambda rngs: nnx.Linear(32, 32, rngs=rngs, **options)
        metadata = {nnx.PARTITION_NAME: None}
        stacked = nnx.vmap(make, transform_metadata=metadata)
        self.layers = nnx.split_rngs(splits=4)(stacked)(rngs)

    def __call__(self, x):
        run = lambda x, layer: nnx.gelu(layer(x))
        return nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def divided(*axes):
    lecun = nnx.initializers.lecun_normal()
    return {"kernel_init": nnx.with_partitioning(lecun, axes)}


#: Each model, what of it is trained, and what divides its kernels.
MODELS = {
    "full": (Net, nnx.Param, ()),
    "LoRA": (Net, nnx.LoRAParam, ()),
    "stacked": (Stack, nnx.Param, ()),
    "partitioned": (Net, nnx.Param, ("fsdp", "tensor")),
    "stacked and partitioned": (Stack, nnx.Param, (None, "fsdp")),
}
CODECS = [
    None,
    {"mu": "bfloat16_stochastic", "nu": "dynamic_int8"},
    {"mu": "dynamic_int8", "nu": "bfloat16"},
    {"mu": "dynamic_int4", "nu": "float8_e4m3"},
]
WAYS = ["eager", "nnx.jit", "jit_step"]

#: Every model in every codec; every way with every model and every codec.
CASES = [
    (model, codec, WAYS[(i + j) % len(WAYS)])
    for i, model in enumerate(MODELS)
    for j, codec in enumerate(CODECS)
]


def made(model, tx):
    """A model and its optimizer, on a mesh if it is divided, and what is trained."""
    new, wrt, axes = MODELS[model]
    model = new(nnx.Rngs(0), **(divided(*axes) if axes else {}))
    return model, nnx.Optimizer(model, tx, wrt=wrt), wrt


def mesh_of(model):
    size = 2 if MODELS[model][2] else 1
    types, devices = (AxisType.Auto,) * 2, jax.devices()[: size**2]
    return jax.make_mesh((size, size), ("fsdp", "tensor"), types, devices=devices)


def gradients_of(params, number):
    """Gradients of parameters at one step, of the parameters' own placement."""
    random = np.random.default_rng(number)
    draw = lambda x: random.normal(size=x.shape).astype(x.dtype)
    place = lambda x: jax.device_put(draw(x), x.sharding if x.committed else None)
    return jax.tree.map(place, params)


def make_step(way, model, optimizer, gradients):
    """A step that updates in place, whatever compiles it."""
    update = lambda model, optimizer, gradients: optimizer.update(model, gradients)
    if way == "eager":
        return lambda m, o, g: (update(m, o, g), (m, o))[1]
    if way == "nnx.jit":
        compiled = nnx.jit(update, donate_argnums=(0, 1))
        return lambda m, o, g: (compiled(m, o, g), (m, o))[1]

    def step(model, optimizer, gradients):
        update(model, optimizer, gradients)
        return model, optimizer

    return po.jit_step(step, model, optimizer, gradients, donate_argnums=(0, 1))


def moments(tree):
    return [x for x in jax.tree.leaves(tree) if x.nbytes >= 1024]


@pytest.mark.quick("-stacked-None")
@pytest.mark.parametrize(("model", "codec", "way"), CASES, ids=str)
def test_ten_steps(model, codec, way):
    tx = po.paged_adamw(1e-2, codec=codec, **PAGES)
    plain = optax.adamw(1e-2) if codec is None else tx
    with jax.set_mesh(mesh_of(model)):
        module, optimizer, wrt = made(model, tx)
        params = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(module, wrt)))
        state = plain.init(params)
        update, step = jax.jit(plain.update), None
        for number in range(STEPS):
            pure = gradients_of(params, number)
            gradients = nnx.state(module, wrt)
            nnx.replace_by_pure_dict(gradients, pure)
            step = step or make_step(way, module, optimizer, gradients)
            module, optimizer = step(module, optimizer, gradients)
            updates, state = update(pure, state, params)
            params = optax.apply_updates(params, updates)

    found = nnx.as_pure(optimizer.opt_state)
    assert moments(found)
    assert all(map(on_host, moments(found)))
    assert not any(map(on_host, jax.tree.leaves(nnx.state(module))))
    # Flax's mappings sort their keys, as dicts do.
    assert_equal(jax.tree.leaves(found), jax.tree.leaves(state))
    trained = nnx.to_pure_dict(nnx.state(module, wrt))
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
    jax.tree.map(close, trained, params)
    shardings = {x.sharding.spec for x in moments(found)} if MODELS[model][2] else set()
    assert not MODELS[model][2] or any(tuple(spec) for spec in shardings)
