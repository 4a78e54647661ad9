"""Moments and workspaces that have left the host, in a layerwise step."""

import copy
import pickle
import warnings

import jax
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import paged_optax as po
from helpers import layered
from helpers.checkpoints import standard
from helpers.layered import far, layerwise

SMALL = {"page_size": 4096, "min_paged_size": 0}


def allocated(params, deferred, dtype="float32"):
    return layered.MODEL.workspace(params, host_dtype=dtype, rest=deferred)


def started(tx, deferred=True):
    """One step of a run: parameters, state, and a workspace with gradients in it."""
    params = layered.parameters(2)
    step = layerwise(tx, max_norm=0.05)
    given = params, tx.init(params), allocated(params, deferred)
    return step, jax.jit(step)(*given, layered.batch())[:3]


def kinds(tree):
    return jax.tree.map(lambda x: jax.typeof(x).memory_space, tree)


MOVES = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "device_put": lambda x: jax.device_put(x, SingleDeviceSharding(jax.devices()[0])),
    "numpy": jax.device_get,
}


@pytest.mark.quick("pickle", "numpy-host")
@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "host"])
@pytest.mark.parametrize("move", list(MOVES))
def test_a_workspace_that_moved_is_told_of(move, deferred):
    """Eager and compiled, by the step and `finish`; and `place_state` mends it."""
    step, (params, state, workspace) = started(po.paged_adamw(1e-3, **SMALL), deferred)
    run = jax.jit(step)
    wanted = run(params, state, workspace, layered.batch(1))
    moved = MOVES[move](workspace)
    calls = [step, jax.jit(step)]
    if move == "numpy":
        del calls[0]
    for call in calls:
        with pytest.warns(UserWarning, match=r"workspace\.host\['down'\].*put"):
            call(params, state, moved, layered.batch(1))
    if deferred:
        with pytest.warns(UserWarning, match=r"place_state\(tx, workspace, params\)"):
            jax.jit(step.finish)(params, state, moved)
    tx = po.paged_adamw(1e-3, **SMALL)
    back = po.place_state(tx, moved, params)
    assert kinds(back) == kinds(workspace)
    assert jax.tree.structure(back) == jax.tree.structure(workspace)
    found = run(params, state, back, layered.batch(1))
    assert far(found, wanted) == 0


@pytest.mark.quick("adamw", "chain", "finite", "injected", "not paged")
@pytest.mark.parametrize(
    ("make", "raises"),
    [
        (lambda how: po.paged_adamw(1e-3, on_moved=how, **SMALL), True),
        (
            lambda how: optax.chain(optax.clip(1.0), po.paged_lion(1e-3, on_moved=how)),
            1,
        ),
        (
            lambda how: optax.masked(
                po.paged_adamw_8bit(1e-3, on_moved=how, **SMALL),
                lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
            ),
            True,
        ),
        (lambda how: po.apply_if_finite(po.paged_sgd(1e-3, on_moved=how), 3), True),
        (lambda how: optax.inject_hyperparams(po.paged_adam)(1e-3, on_moved=how), True),
        (lambda how: optax.adamw(1e-3), False),
    ],
    ids=["adamw", "chain", "masked, 8 bits", "finite", "injected", "not paged"],
)
def test_on_moved_of_what_is_inside(make, raises):
    step, (params, state, workspace) = started(make("raise"))
    moved = MOVES["pickle"](workspace)
    if raises:
        with pytest.raises(ValueError, match=r"workspace\.host\['down'\]"):
            jax.eval_shape(step, params, state, moved, layered.batch())
        with pytest.raises(ValueError, match=r"workspace\.host\['down'\]"):
            jax.eval_shape(step.finish, params, state, moved)
    else:
        with pytest.warns(UserWarning, match=r"workspace\.host\['down'\]"):
            jax.eval_shape(step, params, state, moved, layered.batch())


@pytest.mark.quick("adamw", "finite-host", "partition-host")
@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "host"])
@pytest.mark.parametrize(
    "make",
    [
        lambda how: po.paged_adamw(1e-3, on_moved=how, **SMALL),
        lambda how: po.paged_adamw_8bit(1e-3, on_moved=how, **SMALL),
        lambda how: po.paged_adamw(1e-3, master_dtype="float32", on_moved=how, **SMALL),
        lambda how: po.apply_if_finite(po.paged_adamw(1e-3, on_moved=how, **SMALL), 2),
        lambda how: optax.chain(
            optax.clip(1.0), po.paged_adamw(1e-3, on_moved=how, **SMALL)
        ),
        lambda how: optax.partition(
            {"a": po.paged_adamw(1e-3, on_moved=how, **SMALL), "b": optax.sgd(0.1)},
            lambda p: {name: "b" if name == "embed" else "a" for name in p},
        ),
    ],
    ids=["adamw", "8 bits", "masters", "finite", "chain", "partition"],
)
def test_moments_that_moved_are_told_of(make, deferred):
    """As `update` does: once, and `place_state` ends it; `"raise"` raises."""
    step, (params, state, workspace) = started(make("warn"), deferred)
    moved = MOVES["pickle"](state)
    given = workspace, layered.batch(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(step, params, moved, *given)
    assert len(caught) == 1
    assert "place_state(tx, state, params)" in str(caught[0].message)
    back = po.place_state(make("warn"), moved, params)
    jax.eval_shape(step, params, back, *given)
    step = layerwise(make("raise"), max_norm=0.05)
    jax.eval_shape(step, params, state, *given)
    with pytest.raises(ValueError, match=r"moments .*place_state"):
        jax.eval_shape(step, params, moved, *given)
    if deferred:
        with pytest.raises(ValueError, match=r"moments .*place_state"):
            jax.eval_shape(step.finish, params, moved, workspace)


def test_what_stays_is_not_told_of():
    """Moments in a budget, small ones, and a copy that keeps its memory."""
    for tx in (po.paged_adamw(1e-3, device_budget=None), po.paged_adamw(1e-3)):
        step, given = started(tx)
        jax.eval_shape(step, *copy.deepcopy(given), layered.batch(1))


def test_gradients_of_all_layers_on_the_device():
    """Nothing is told of them, and a restore leaves them there."""
    params, tx = layered.parameters(2), po.paged_adamw(1e-3, on_moved="raise", **SMALL)
    workspace = po.GradientWorkspace.allocate(params["layers"], device_dtype="float32")
    assert set(jax.tree.leaves(kinds(workspace))) == {jax.memory.Space.Device}
    target = po.abstract_state(workspace, params)
    assert jax.tree.structure(target) == jax.tree.structure(workspace)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(target)} == {"device"}
    given = params, tx.init(params), workspace, layered.batch()
    jax.eval_shape(layerwise(tx, max_norm=0.05), *given)
    with pytest.raises(ValueError, match="host_dtype and device_dtype"):
        po.GradientWorkspace.allocate(
            params["layers"], device_dtype="float32", host_dtype="float32"
        )


@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "host"])
@pytest.mark.parametrize("shapes", [True, False], ids=["of shapes", "of arrays"])
def test_a_restore_into_its_place(tmp_path, shapes, deferred):
    """`abstract_state` of a workspace is Orbax's target, and nothing is told."""
    tx = po.paged_adamw(1e-3, on_moved="raise", **SMALL)
    step, (params, state, workspace) = started(tx, deferred)
    saved = {"params": params, "state": state, "workspace": workspace}
    described = workspace
    if shapes:
        described = allocated(jax.eval_shape(lambda: params), deferred)
    target = {
        "params": params,
        "state": po.abstract_state(tx, params),
        "workspace": po.abstract_state(described, params),
    }
    restored = standard(tmp_path, saved, target)
    assert kinds(restored["workspace"]) == kinds(workspace)
    found = jax.jit(step)(*restored.values(), layered.batch(1))
    wanted = jax.jit(step)(params, state, workspace, layered.batch(1))
    assert far(found, wanted) == 0


@pytest.mark.parametrize("axis", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("devices", [1, 8])
def test_on_a_mesh(devices, axis):
    """Divided as the layers are, less the leading axis; the others as the rest is."""
    mesh = jax.make_mesh(
        (devices,), ("data",), (axis,), devices=jax.devices()[:devices]
    )
    axes = {3: (None, None, "data"), 2: (None, "data"), 1: ()}
    place = lambda x: jax.device_put(
        x, NamedSharding(mesh, PartitionSpec(*axes[x.ndim]))
    )
    params = jax.tree.map(place, layered.parameters(2))
    workspace = allocated(params, True)
    moved = jax.device_put(MOVES["pickle"](workspace), jax.devices()[0])
    tx = po.paged_adamw(1e-3)
    back = po.place_state(tx, moved, params)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(workspace), strict=True):
        assert jax.typeof(a).memory_space == jax.typeof(b).memory_space
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_a_key_of_ones_own_is_found():
    params = layered.parameters(2)
    tx, workspace = po.paged_adamw(1e-3), allocated(params, True)
    named = {"blocks" if name == "layers" else name: x for name, x in params.items()}
    moved = MOVES["pickle"](workspace)
    assert kinds(po.place_state(tx, moved, named)) == kinds(workspace)


@pytest.mark.parametrize(
    ("tx", "other"),
    [
        (po.paged_adamw(1e-3), po.paged_lion(1e-3)),
        (optax.adamw(1e-3), optax.lion(1e-3)),
        (optax.inject_hyperparams(po.paged_adam)(1e-3), po.paged_adam(1e-3)),
        (optax.masked(po.paged_adam(1e-3), lambda _: True), po.paged_adam(1e-3)),
        (
            optax.chain(optax.clip(1.0), po.paged_adam(1e-3)),
            po.paged_adam(1e-3, master_dtype="float32"),
        ),
        (optax.sgd(0.1), po.paged_sgd(0.1, momentum=0.9)),
        (po.apply_if_finite(po.paged_adam(1e-3), 2), po.paged_adam(1e-3)),
    ],
    ids=["lion", "plain", "injected", "masked", "masters", "sgd", "finite"],
)
def test_a_state_of_another_transformation(tx, other):
    """`finish` and the step say so, whatever Optax would have made of it."""
    params = layered.parameters(2)
    workspace, step = allocated(params, True), layerwise(tx)
    state = other.init(params)
    for call in (
        lambda: step.finish(params, state, workspace),
        lambda: step(params, state, workspace, layered.batch()),
    ):
        with pytest.raises(ValueError, match=r"state.*(tx\.init made|this wrapper)"):
            call()
