"""`abstract_state` is the state that `init` would make, without a byte."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import paged_optax as po
from helpers.moments import BUDGET, MOMENTS, WRAPPERS, adam, place_on, small
from helpers.reference import ALIASES, SMALL_PAGES, kinds
from helpers.small import DEVICE, HOST
from paged_optax.backend.memory import on_host

_BUDGET = {"device_budget": BUDGET}
ABSTRACT = {
    **{x: lambda x=x: WRAPPERS[x](adam(**_BUDGET)) for x in WRAPPERS},
    **{
        alias: lambda alias=alias: getattr(po, alias)(
            1e-2, **_BUDGET, **ALIASES[alias][1], **SMALL_PAGES
        )
        for alias in MOMENTS
    },
    "own steps": lambda: adam(per_parameter_steps=True),
    "bfloat16 mu": lambda: adam(mu_dtype=jnp.bfloat16),
    "unpaged": lambda: optax.adamw(1e-2),
}


@pytest.mark.parametrize("name", ABSTRACT)
def test_abstract_state_is_that_of_init(name):
    """Structure, shape, dtype and placement of every array, of arrays and of shapes."""
    tx, params = ABSTRACT[name](), small()
    state = tx.init(params)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    for given in (params, shapes):
        target = po.abstract_state(tx, given)
        assert jax.tree.structure(target) == jax.tree.structure(state)
        for x, wanted in zip(*map(jax.tree.leaves, (target, state)), strict=True):
            assert isinstance(x, jax.ShapeDtypeStruct)
            assert (x.shape, x.dtype) == (wanted.shape, wanted.dtype)
            assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim)
            assert x.sharding.memory_kind == wanted.sharding.memory_kind


@pytest.mark.parametrize("device", [0, 3])
def test_what_is_made_by_its_placements_is_paged(device):
    """Restores make arrays so; those in host memory must have its type too."""
    params = jax.device_put(small(), jax.devices()[device])
    for x in jax.tree.leaves(po.abstract_state(adam(), params)):
        zeros = np.zeros(x.shape, x.dtype)
        made = jax.make_array_from_callback(
            x.shape, x.sharding, lambda i, z=zeros: z[i]
        )
        assert on_host(made) == (x.sharding.memory_kind == HOST)


def test_abstract_state_allocates_nothing():
    params = {"w": jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)}  # 4 TiB
    po.abstract_state(po.paged_adamw(1e-2), params)
    before = sorted(id(x) for x in jax.live_arrays())
    target = po.abstract_state(po.paged_adamw(1e-2), params)
    assert sorted(id(x) for x in jax.live_arrays()) == before
    assert kinds(target) == [DEVICE, HOST, HOST]


@pytest.mark.parametrize("where", ["device", "mesh"])
def test_abstract_state_is_beside_the_parameters(where):
    sharding = place_on(where)
    params = jax.device_put({name: small()[name] for name in "ab"}, sharding)
    tx = adam(device_budget=BUDGET)
    state = tx.init(params)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    for given in (params, shapes):
        target = po.abstract_state(tx, given)
        for x, wanted in zip(*map(jax.tree.leaves, (target[0], state[0])), strict=True):
            # A count of `init` is committed nowhere; a restored one must be with them.
            place = wanted.sharding if x.ndim else sharding
            place = place.with_memory_kind(wanted.sharding.memory_kind)
            assert x.sharding.device_set == place.device_set
            assert x.sharding.memory_kind == place.memory_kind
            assert not x.ndim or x.sharding.is_equivalent_to(place, x.ndim)
            assert x.ndim or x.sharding.is_fully_replicated


@pytest.mark.parametrize("codec", [None, "dynamic_int8"])
@pytest.mark.parametrize("boxes", ["none", "linen", "nnx"])
def test_state_shardings_are_those_of_init(boxes, codec):
    """Of shapes that know no shardings, those of a state of arrays that do."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    specs = {"w": PartitionSpec("x", "y"), "v": PartitionSpec(None, "x")}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    params = {name: jnp.ones((512, 2048)) for name in shardings}
    tx = adam(codec=codec)
    wanted = tx.init(jax.device_put(params, shardings))
    box = {
        "none": lambda x, names: x,
        "linen": linen.LogicallyPartitioned,
        "nnx": lambda x, names: nnx.Param(x),
    }[boxes]
    shapes = {
        name: box(jax.ShapeDtypeStruct(x.shape, x.dtype), tuple(specs[name]))
        for name, x in params.items()
    }
    # A box is told by a leaf, as Linen does, or boxed itself, as NNX does.
    if boxes == "nnx":
        shardings = {name: nnx.Param(x) for name, x in shardings.items()}
    found = po.state_shardings(tx, shapes, shardings)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for x, array in pairs:
        assert x.memory_kind == array.sharding.memory_kind
        assert x.mesh == mesh
        if array.ndim:
            assert x.is_equivalent_to(array.sharding, array.ndim)


def test_state_shardings_by_a_prefix():
    sharding = place_on("mesh")
    params = {name: small()[name] for name in "ab"}
    one = po.state_shardings(adam(), params, sharding)
    assert one == po.state_shardings(adam(), params, dict.fromkeys("ab", sharding))
    assert HOST in {x.memory_kind for x in jax.tree.leaves(one)}


def test_an_uneven_sharding_is_refused():
    with pytest.raises(ValueError, match="does not divide evenly"):
        po.state_shardings(adam(), {"w": jnp.ones((3, 4))}, {"w": place_on("mesh")})
