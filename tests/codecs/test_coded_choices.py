"""A codec for each moment: how it is chosen, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import reference
from helpers.coded import ALL_PAGED, in_bytes
from paged_optax.codecs import DynamicInt4, DynamicInt8, Float8E4M3, Quantized


def test_choice_by_moment_and_path():
    """The last rule that applies counts; keys are moments or parameter patterns."""
    params = {"embed": jnp.ones((64, 128)), "block": {"kernel": jnp.ones((64, 128))}}
    codec = {
        "mu": "bfloat16",
        "nu": "dynamic_int8",
        "embed": "float32",
        "block/*": {"mu": DynamicInt8()},
    }
    state = po.paged_adamw(1e-3, codec=codec).init(params)[0]
    assert state.mu["embed"].dtype == state.nu["embed"].dtype == jnp.float32
    assert isinstance(state.mu["block"]["kernel"], Quantized)
    assert isinstance(state.nu["block"]["kernel"], jax.Array)


def test_a_parameter_called_as_a_moment():
    """The key of a rule is the moment's name; rules by moment are for the parameter."""
    params = {"nu": jnp.ones((64, 128)), "w": jnp.ones((64, 128))}
    coded = lambda rules: {
        (moment, name)
        for moment in ("mu", "nu")
        for name, x in getattr(
            po.paged_adamw(1e-3, codec=rules).init(params)[0], moment
        ).items()
        if isinstance(x, Quantized)
    }
    assert coded({"nu": "dynamic_int8"}) == {("nu", "nu"), ("nu", "w")}
    assert coded({"nu": {"mu": "dynamic_int8"}}) == {("mu", "nu")}
    assert coded({"w": "dynamic_int8"}) == {("mu", "w"), ("nu", "w")}


def energies(decay=0.9):
    """A user's own transformation: `energy` averages squares, `drift` gradients."""

    def init(params):
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)
        return {"energy": zeros(), "drift": zeros()}

    def update(updates, state, params=None):
        del params
        mean = lambda old, new: decay * old + (1 - decay) * new
        energy = jax.tree.map(lambda e, g: mean(e, g * g), state["energy"], updates)
        drift = jax.tree.map(mean, state["drift"], updates)
        moved = jax.tree.map(lambda d, e: -d / (jnp.sqrt(e) + 1e-8), drift, energy)
        return moved, {"energy": energy, "drift": drift}

    return optax.GradientTransformation(init, update)


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec",
    [
        {"*": "dynamic_int8", "energy": DynamicInt8(signed=False)},
        {"*": {"drift": "dynamic_int8", "energy": DynamicInt8(signed=False)}},
    ],
    ids=["by moment", "by path and moment"],
)
def test_squares_of_ones_own(codec):
    """An unsigned codec for a moment of another name: by naming it."""
    params = {"w": jnp.ones((64, 128))}
    gradients = reference.arrays(jnp.float32, 1, {"w": (64, 128)})
    decoded = {}
    for name, rules in {"signed": "dynamic_int8", "unsigned": codec}.items():
        tx = po.paged(energies(), codec=rules, **ALL_PAGED)
        _, state = tx.update(gradients, tx.init(params), params)
        stored = state["energy"]["w"]
        stored = jax.device_put(stored, jax.memory.Space.Device)
        decoded[name] = DynamicInt8(name == "signed").decode(
            in_bytes(stored), (64, 128)
        )
    exact = 0.1 * np.asarray(gradients["w"]) ** 2
    error = {name: np.abs(x - exact).mean() for name, x in decoded.items()}
    assert error["unsigned"] < 0.7 * error["signed"]  # it has a bit more
    for rules in (DynamicInt8(signed=False), {"w": DynamicInt8(signed=False)}):
        with pytest.raises(ValueError, match=r"name it: codec=\{'(energy|drift)': "):
            po.paged(energies(), codec=rules).init(params)


@pytest.mark.quick("(64, 512)")
@pytest.mark.parametrize(
    ("stored", "read"),
    [
        (DynamicInt8(), DynamicInt8(signed=False)),
        (DynamicInt8(), Float8E4M3()),
        (DynamicInt8(signed=False), Float8E4M3()),
        (DynamicInt4(), DynamicInt4(signed=False)),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(8192,), (64, 512), (129, 65), (768, 1057)], ids=str)
def test_a_state_tells_what_stored_it(stored, read, shape):
    """Codes that mean other numbers are refused, either way, packed in words or not."""
    params = {"w": jnp.ones(shape)}
    build = lambda codec: po.paged(
        optax.scale_by_rms(), codec={"nu": codec}, **ALL_PAGED
    )
    for writer, reader in ((stored, read), (read, stored)):
        state = build(writer).init(params)
        with pytest.raises(ValueError, match="own init"):
            jax.eval_shape(build(reader).update, params, state, params)
        jax.eval_shape(build(writer).update, params, state, params)


@pytest.mark.parametrize("change", ["new", "gone"])
def test_a_leaf_too_many_or_too_few_is_named(change):
    """And no other, though a codec's moments are several arrays each."""
    params = {name: jnp.ones((64, 512)) for name in "abc"}
    tx = po.paged_adamw_8bit(1e-2, min_paged_size=0)
    state = tx.init(params)
    if change == "new":
        params["new"] = params["a"]
    else:
        params["gone"] = params.pop("b")
    with pytest.raises(ValueError, match=r"they differ at state\[0\].mu\['(new|b)'\]"):
        tx.update(params, state, params)
