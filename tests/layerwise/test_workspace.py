"""The gradient workspace, contract C-GRADWS-001, and the layerwise step's numbers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_optax as po
from helpers import layered
from helpers.layered import SETTINGS, far, layerwise, plain_step, run
from paged_optax.backend.memory import on_host


def cases():
    """Nearly all on the device, and those that matter with gradients on the host."""
    for layers, accumulate, max_norm, tied, host_dtype in itertools.product(
        (1, 2, 5), (1, 4), (None, 0.05), (False, True), (None, jnp.float32)
    ):
        if host_dtype is None or (layers, tied) == (5, True):
            few = tied == (max_norm is None) and accumulate == 1
            if layers == 5 or few:
                yield layers, accumulate, max_norm, tied, host_dtype


@pytest.mark.quick("2-1-0.05-False-None")
@pytest.mark.parametrize(
    ("layers", "accumulate", "max_norm", "tied", "host_dtype"), list(cases())
)
def test_equals_a_plain_step(layers, accumulate, max_norm, tied, host_dtype):
    """Each step from where the plain one stands: Adam divides what float32 rounds."""
    params = layered.parameters(layers, tied)
    shape = (4, 8) if accumulate == 1 else (accumulate, 2, 8)
    clip = [] if max_norm is None else [optax.clip_by_global_norm(max_norm)]
    tx = optax.chain(*clip, optax.adamw(1e-3, weight_decay=0.1))
    plain, plain_state = plain_step(tx, accumulate > 1), tx.init(params)
    paged = po.paged_adamw(1e-3, weight_decay=0.1, **SETTINGS)
    step = jax.jit(layerwise(paged, max_norm=max_norm, accumulate=accumulate > 1))
    workspace = po.GradientWorkspace.allocate(params["layers"], host_dtype=host_dtype)
    homes = jax.tree.map(lambda x: x.sharding, paged.init(params))
    assert "pinned_host" in {x.memory_kind for x in jax.tree.leaves(homes)}
    for seed in range(2):
        batch, state = (
            layered.batch(seed, shape),
            jax.device_put(plain_state[-1], homes),
        )
        found, state, workspace, output = step(params, state, workspace, batch)
        params, plain_state, loss, norm, _ = plain(params, plain_state, batch)
        assert far(found, params) < 1e-6
        for name in ("mu", "nu"):
            wanted = optax.tree.get(plain_state, name)
            assert far(optax.tree.get(state, name), wanted) < 1e-6, name
        assert far(output.loss, loss) < 1e-6
        assert far(output.gradient_norm, norm) < 1e-6
        assert int(optax.tree.get(state, "count")) == seed + 1
        assert jax.tree.map(lambda x: x.sharding.memory_kind, state) == jax.tree.map(
            lambda x: x.memory_kind, homes
        )


def test_c_gradws_001_precondition_allocated_once():
    """Precondition: one layer's sizes, and no others are accepted."""
    params = layered.parameters(5)
    workspace = po.GradientWorkspace.allocate(params["layers"])
    assert jax.tree.map(jnp.shape, workspace.gradients) == jax.tree.map(
        lambda x: x.shape[1:], params["layers"]
    )
    other = layered.parameters(5)
    other["layers"]["up"] = jnp.ones((5, 64, 192))
    tx = po.paged_adamw(1e-3)
    with pytest.raises(ValueError, match=r"\['up'\].*\(64, 128\).*\(64, 192\)"):
        layerwise(tx)(other, tx.init(other), workspace, layered.batch())


@pytest.mark.parametrize("device_dtype", [None, jnp.float32])
def test_c_gradws_001_postcondition_holds_the_layer_handled_last(device_dtype):
    """Postcondition: after a step, the first layer's gradients, or their sums."""
    params, several = layered.parameters(3), device_dtype is not None
    batch = layered.batch(0, (3, 2, 8) if several else (4, 8))
    tx = po.paged_adamw(1e-3, **SETTINGS)
    *_, gradients = plain_step(optax.adamw(1e-3), several)(
        params, optax.adamw(1e-3).init(params), batch
    )
    room = {"device_dtype": device_dtype}
    workspace = po.GradientWorkspace.allocate(params["layers"], **room)
    # Whatever it held before.
    workspace = jax.tree.map(lambda x: x + 7, workspace)
    step = layerwise(tx, accumulate=several)
    _, _, workspace, _ = run(step, params, tx.init(params), workspace, [batch])
    wanted = jax.tree.map(lambda x: x[0], gradients["layers"])
    assert far(workspace.gradients, wanted) < 1e-6


def test_c_gradws_001_invariant_never_reallocated():
    """Invariant: the same buffers throughout, for 50 steps."""
    params = layered.parameters(3)
    tx = po.paged_adamw(1e-3, **SETTINGS)
    workspace = po.GradientWorkspace.allocate(params["layers"])
    args = [params, tx.init(params), workspace, layered.batch()]
    addresses = lambda tree: [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]
    first = addresses(args[2])
    step = po.jit_step(layerwise(tx), *args, donate_argnums=(0, 1, 2))
    for _ in range(50):
        *args[:3], _ = step(*args)
        assert addresses(args[2]) == first


def test_c_gradws_001_accumulators_grow_until_zeroed():
    """Matrices are overwritten; norms grow unless they are zeroed."""
    params = layered.parameters(3)
    workspace = po.GradientWorkspace.allocate(params["layers"])
    ones = jax.tree.map(jnp.ones_like, workspace.gradients)
    grown = workspace.write(ones).write(ones)
    assert float(grown.gradients["norm"]["scale"][0]) == 2
    assert float(grown.gradients["up"][0, 0]) == 1
    zeroed = workspace.write(ones).zero_accumulators().write(ones)
    assert float(zeroed.gradients["norm"]["scale"][0]) == 1
    everything = po.GradientWorkspace.allocate(params["layers"], accumulate=["*"])
    assert all(everything.accumulates)


def test_offload_of_shapes():
    """They are placed as the arrays would be."""
    params = layered.parameters(3)["layers"]
    shapes = po.offload(jax.eval_shape(lambda: params), min_size="16KiB")
    arrays = po.offload(params, min_size="16KiB")
    assert shapes["up"].sharding.memory_kind == "pinned_host"
    assert shapes["norm"]["scale"].sharding is None
    assert arrays["up"].sharding.memory_kind == "pinned_host"
    # What a restore makes of them has the type of host memory, and is fetched.
    values = np.asarray(params["up"])
    made = jax.make_array_from_callback(
        values.shape, shapes["up"].sharding, lambda index: values[index]
    )
    assert on_host(made)


def test_each_layer_draws_its_own_bits():
    """Layers of equal gradients are rounded stochastically, and not alike."""
    tx = optax.chain(
        po.paged(optax.trace(0.9), codec="bfloat16_stochastic", min_paged_size=0),
        optax.scale(-1e-3),
    )
    step = po.layerwise_step(
        po.LayerwiseModel(
            lambda rest, batch: (batch, None),
            lambda weights, x, context, i: (x, jnp.vdot(weights["w"], x)),
            lambda rest, x, kept, batch: jnp.sum(kept),
        ),
        tx,
    )
    params = {"layers": {"w": jnp.ones((3, 64, 128))}}
    state = tx.init(params)
    workspace = po.GradientWorkspace.allocate(params["layers"])
    batch = jax.random.normal(jax.random.key(0), (64, 128))
    _, state, *_ = jax.jit(step)(params, state, workspace, batch)
    first, *others = np.float32(optax.tree.get(state, "trace")["layers"]["w"])
    np.testing.assert_allclose(first, batch, rtol=2**-7)
    for other in others:
        assert 0.1 < np.mean(first != other) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("host_dtype", [None, jnp.float32], ids=["device", "host"])
def test_on_a_mesh(host_dtype):
    """Parameters and batch over eight devices: the numbers of one."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    axis = {"up": P(None, "data"), "down": P(None, None, "data")}
    spec = lambda path: axis.get(getattr(path[-1], "key", None), P())
    place = lambda path, x: jax.device_put(x, NamedSharding(mesh, spec(path)))
    results = []
    for divide in (False, True):
        tx = po.paged_adamw(1e-3, page_size="16KiB", min_paged_size="1KiB")
        here = layered.parameters(3)
        here = jax.tree_util.tree_map_with_path(place, here) if divide else here
        batches = [layered.batch(seed, (8, 8)) for seed in range(2)]
        if divide:
            rows = NamedSharding(mesh, P("data"))
            for batch in batches:
                for name in ("tokens", "targets"):
                    batch[name] = jax.device_put(batch[name], rows)
        state = tx.init(here)
        workspace = po.GradientWorkspace.allocate(here["layers"], host_dtype=host_dtype)
        placed = [
            (x.sharding.memory_kind, getattr(x.sharding, "spec", None))
            for x in jax.tree.leaves((here, state, workspace))
        ]
        step = layerwise(tx, max_norm=0.05)
        results.append(run(step, here, state, workspace, batches))
        if divide:
            found = jax.tree.leaves(results[-1][:3])
            for x, (kind, wanted) in zip(found, placed, strict=True):
                assert x.sharding.memory_kind == kind
                entries = len(x.shape)
                whole = NamedSharding(mesh, wanted or P())
                assert x.sharding.is_equivalent_to(
                    whole.with_memory_kind(kind), entries
                )
    (params, *_, output), (wanted, *_, exact) = reversed(results)
    assert far(params, wanted) < 1e-5
    assert far(output.gradient_norm, exact.gradient_norm) < 1e-6
