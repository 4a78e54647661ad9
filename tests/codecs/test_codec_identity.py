"""A state says what stored it: no restore reads codes as another codec's."""

import copy
import pickle

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import paged_optax as po
from helpers import layered
from helpers.checkpoints import flax_bytes, flax_dict, manager, pytree, standard
from helpers.coded import ALL_PAGED
from helpers.reference import arrays, kinds
from paged_optax.codecs import DynamicInt8, Quantized

# A restore that Orbax refuses leaves its loops to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("collected"),
]

RATE = 1e-2
CODECS = {
    "float32": None,
    "bfloat16": "bfloat16",
    "int8": "dynamic_int8",
    "int8 to zero": {
        "mu": "dynamic_int8",
        "nu": DynamicInt8(signed=False, rounds_to_zero=True),
    },
    "int8 signed": DynamicInt8(signed=True),
    "float8": "float8_e4m3",
    "int4": "dynamic_int4",
    "int8 mu": {"mu": "dynamic_int8"},
}


def pickled(directory, saved, target):
    """Pickle, as NumPy arrays, which become the state as they are."""
    del directory, target
    return pickle.loads(pickle.dumps(jax.device_get(saved)))


WAYS = [standard, manager, pytree, flax_bytes, flax_dict, pickled]


def adamw(codec):
    return po.paged_adamw(RATE, codec=codec, **ALL_PAGED)


def begun(codec, shape):
    """Parameters, gradients and a state after three steps."""
    params = arrays(shapes={"w": shape})
    gradients = jax.tree.map(jnp.sin, params)
    tx = adamw(codec)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(3):
        _, state = update(gradients, state, params)
    return params, gradients, state


@pytest.mark.filterwarnings("ignore:.* moments .* are in device memory")
@pytest.mark.quick("int8 mu-standard-(64", "float8-flax_bytes")
@pytest.mark.parametrize(
    ("way", "shape"),
    [
        (way, shape)
        for way in WAYS
        for shape in ((64, 128), (65, 67))
        if shape == (65, 67) or way in (standard, pickled)
    ],
    ids=lambda x: str(x) if isinstance(x, tuple) else x.__name__,
)
@pytest.mark.parametrize("saved", CODECS)
def test_another_codecs_checkpoint(tmp_path, saved, way, shape):
    """It is refused, or leads to the update that the saved state leads to."""
    params, gradients, state = begun(CODECS[saved], shape)
    own = np.asarray(adamw(CODECS[saved]).update(gradients, state, params)[0]["w"])
    for read in CODECS.keys() - {saved}:
        tx = adamw(CODECS[read])
        (folder := tmp_path / read).mkdir()
        try:
            restored = way(folder, state, po.abstract_state(tx, params))
            found = tx.update(gradients, restored, params)[0]["w"]
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # Flax has no message of its own for a dict in an array's place
        np.testing.assert_allclose(np.asarray(found), own, rtol=0, atol=1e-3)


SHAPES = [((300, 300), (75, 1200)), ((130, 40), (131, 40)), ((5, 64, 64), (320, 64))]


@pytest.mark.quick("(300, 300)")
@pytest.mark.parametrize("codec", ["dynamic_int8", "float8_e4m3", "dynamic_int4"])
@pytest.mark.parametrize("way", [None, standard, flax_bytes, pickled])
@pytest.mark.parametrize(("saved", "read"), SHAPES, ids=str)
def test_another_shapes_state(tmp_path, saved, read, way, codec):
    """Moments of other shapes may be stored in arrays of the same shapes."""
    tx = adamw(codec)
    for here, there in ((saved, read), (read, saved)):
        state, params = tx.init({"w": jnp.ones(here)}), {"w": jnp.ones(there)}
        (folder := tmp_path / str(here)).mkdir()
        with pytest.raises((ValueError, KeyError)):
            if way is not None:
                state = way(folder, state, po.abstract_state(tx, params))
            tx.update(params, state, params)


@pytest.mark.parametrize("shape", [(64, 128), (65, 67)], ids=str)
def test_a_state_of_before(shape):
    """Containers that do not name the codec are read, kept and trained on."""
    params, gradients, state = begun("dynamic_int8", shape)
    unnamed = jax.tree.map(
        lambda x: Quantized(*x) if isinstance(x, Quantized) else x,
        state,
        is_leaf=lambda x: isinstance(x, Quantized),
    )
    assert jax.tree.structure(unnamed) != jax.tree.structure(state)
    tx = adamw("dynamic_int8")
    wanted = tx.update(gradients, state, params)
    found = jax.jit(tx.update)(gradients, unnamed, params)
    assert jax.tree.structure(found[1]) == jax.tree.structure(unnamed)
    # Placed, it says how to read it, as what is read without a target does.
    placed = [
        po.place_state(tx, old, params)
        for old in (unnamed, flax.serialization.to_state_dict(unnamed))
    ]
    for one in (found[1], *placed):
        kept = po.page_out(one, "w", po.page_in(one, "w"))
        for other in (po.init_param(tx, kept, params, "w"), kept):
            assert kinds(other) == kinds(state)
    for one in placed:
        assert jax.tree.structure(one) == jax.tree.structure(state)
        again = tx.update(gradients, one, params)
        for x, y, z in zip(*map(jax.tree.leaves, (found, again, wanted)), strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(z))
            np.testing.assert_array_equal(np.asarray(y), np.asarray(z))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_have_the_same_structure(copied):
    """The structure is compared by the class, of which there is one for a name."""
    _, _, state = begun("dynamic_int8", (64, 128))
    for one in (copied(state), pickle.loads(pickle.dumps(state))):
        assert jax.tree.structure(one) == jax.tree.structure(state)
        structure = pickle.loads(pickle.dumps(jax.tree.structure(one)))
        assert structure == jax.tree.structure(state)
    stored = state[0].nu["w"]
    assert stored._fields == ("codes_dynamic_int8_unsigned_4x1", "scales")
    assert stored.codes is stored[0]
    assert stored.scales is stored[1]


def test_an_nnx_optimizers_state_names_its_codec(tmp_path):
    """Its containers are Flax's own, with the same names."""

    def optimizer(codec):
        model = nnx.Linear(64, 128, use_bias=False, rngs=nnx.Rngs(0))
        made = nnx.Optimizer(model, adamw(codec), wrt=nnx.Param)
        gradients = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
        made.update(model, gradients)
        return model, made, gradients

    _, saved, _ = optimizer("dynamic_int8")
    for codec in (DynamicInt8(signed=True), "float8_e4m3"):
        model, other, gradients = optimizer(codec)
        with pytest.raises(ValueError):
            standard(tmp_path, nnx.state(saved), nnx.state(other))
        other.opt_state = saved.opt_state
        with pytest.raises(ValueError, match="codes_dynamic_int8"):
            other.update(model, gradients)
        (tmp_path / "standard").rename(tmp_path / str(codec))


@pytest.mark.quick("True")
@pytest.mark.parametrize("deferred", [False, True])
def test_a_layerwise_step_keeps_the_names(deferred):
    """Its state has the structure that it was given."""
    params, tx = layered.parameters(2), adamw("dynamic_int8")
    how = {"host_dtype": "float32", "rest": True} if deferred else {}
    workspace = layered.MODEL.workspace(params, **how)
    step = layered.layerwise(tx, max_norm=1.0 if deferred else None)
    given = params, tx.init(params), workspace, layered.batch()
    found = jax.eval_shape(step, *given)
    assert jax.tree.structure(found[1]) == jax.tree.structure(given[1])


@pytest.mark.parametrize(
    ("shape", "spec", "same"),
    [
        ((46, 100), ("d",), False),
        ((64, 64), ("d",), True),
        ((46, 100), (None, "d"), False),
    ],
    ids=str,
)
def test_parts_of_two_devices(shape, spec, same):
    """Blocks end where parts meet. The arrays may have the same shapes as without."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    divided = NamedSharding(mesh, PartitionSpec(*spec))
    params, gradients, state = begun("dynamic_int8", shape)
    wanted = np.asarray(adamw("dynamic_int8").update(gradients, state, params)[0]["w"])
    params, gradients = jax.device_put((params, gradients), divided)
    tx = adamw("dynamic_int8")
    named = [x._fields for x in (state[0].mu["w"], tx.init(params)[0].mu["w"])]
    assert (named[0] == named[1]) == same
    if not same:
        with pytest.raises(ValueError, match="_in_.*divided as these are"):
            tx.update(gradients, state, params)
        return
    state = po.place_state(tx, jax.device_get(state), params)
    found = tx.update(gradients, state, params)[0]["w"]
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-6)
