"""Training beside bitsandbytes' protocol, and its states, there and back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import reference
from helpers.coded import ALL_PAGED, SHAPES, in_bytes, trained
from paged_optax.codecs import DynamicInt8


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("optimizer", "reference_of"),
    [(po.paged_adamw_8bit, optax.adamw), (po.paged_lion_8bit, optax.lion)],
)
def test_bitsandbytes_protocol(optimizer, reference_of, dtype):
    """bitsandbytes' own test of its 8-bit optimizers, with its tolerances.

    50 steps beside the 32-bit optimizer; after each, its moments and parameters are
    set to those of the 8-bit one, so that every step is compared alone.
    """
    random = np.random.default_rng(0)
    shape = (1024, 256)
    draw = lambda scale: jnp.asarray(random.normal(size=shape) * scale, dtype)
    lr = 1e-3 if reference_of is optax.adamw else 1e-4
    tx, plain = optimizer(lr, page_size="64KiB"), reference_of(lr)
    params = {"w": draw(0.1)}
    state = tx.init(params)
    in_float32 = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    plain_state = plain.init(in_float32(params))
    update, plain_update = jax.jit(tx.update), jax.jit(plain.update)
    errors, relative = [], []
    signed = {"mu": True, "nu": False}
    for _ in range(50):
        gradients = {"w": draw(0.01)}
        updates, state = update(gradients, state, params)
        full = in_float32(params)
        plain_updates, plain_state = plain_update(
            in_float32(gradients), plain_state, full
        )
        params = optax.apply_updates(params, updates)
        full = optax.apply_updates(full, plain_updates)
        moments = {
            name: DynamicInt8(signed[name]).decode(in_bytes(x), shape)
            for name, x in po.page_in(state, "w").items()
        }
        for name, decoded in moments.items():
            exact = optax.tree.get(plain_state, name)["w"]
            close = np.isclose(exact, decoded, atol=3e-3, rtol=1e-3)
            assert (~close).sum() < 20, name
        error = np.abs(np.asarray(full["w"]) - np.asarray(in_float32(params)["w"]))
        errors.append(error.mean())
        relative.append((error / (np.abs(np.asarray(full["w"])) + 1e-9)).mean())
        plain_state = optax.tree.set(
            plain_state, **{name: {"w": x} for name, x in moments.items()}
        )
    bf16 = dtype == jnp.bfloat16
    if reference_of is optax.adamw:
        assert np.mean(errors) < (1.7e-4 if bf16 else 6e-5)
        assert np.mean(relative) < (1.6e-3 if bf16 else 6e-4)


def test_bitsandbytes_state():
    """A state goes to bitsandbytes' layout and comes back bit for bit."""
    tx = po.paged_adamw_8bit(1e-2, **ALL_PAGED)
    _, state = trained(tx)
    entries = po.to_bitsandbytes(state)
    assert entries["even"]["state1"].dtype == np.uint8
    assert entries["even"]["absmax2"].shape == (640 * 512 // 256,)
    assert entries["even"]["step"] == 3
    blank = tx.init(reference.arrays(jnp.float32, 0, SHAPES))
    again = po.from_bitsandbytes(blank, entries)
    reference.assert_equal(again, state)
    assert reference.kinds(again) == reference.kinds(state)
    for field, name in (("absmax2", "even"), ("state2", "small")):
        kept = entries[name][field]
        entries[name][field] = np.resize(np.float32([np.nan, -1]), kept.shape)
        with pytest.raises(ValueError, match=f"'{field}' of .* '{name}' holds -1.0"):
            po.from_bitsandbytes(blank, entries)
        entries[name][field] = kept.copy()
        for broken in (np.nan, np.inf):
            entries[name][field].flat[-1] = broken
            words = f"'{field}' of .* '{name}' holds {broken}, 1 of .* saved earlier"
            with pytest.raises(ValueError, match=words):
                po.from_bitsandbytes(blank, entries)
        entries[name][field] = kept


def test_every_count_of_ademamix_comes_back():
    """Also that of its schedules, so that the next update is the same."""
    alpha = optax.linear_schedule(0.0, 6.0, 9)
    tx = po.paged_ademamix_8bit(1e-2, alpha=alpha, **ALL_PAGED)
    params, state = trained(tx, steps=2)
    again = po.from_bitsandbytes(tx.init(params), po.to_bitsandbytes(state))
    reference.assert_equal(again, state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["per_parameter_steps", "partition", "chain"])
def test_bitsandbytes_has_the_steps_of_each_parameter(kind):
    """As many as its updates, there and back; those of schedules come along."""
    params = {"a": jnp.ones((64, 64)), "b": jnp.ones((64, 128))}
    rate = optax.linear_schedule(1e-2, 0.0, 9)
    one = functools.partial(po.paged_adamw_8bit, rate, **ALL_PAGED)
    tx = optax.chain(optax.clip(1.0), one(per_parameter_steps=kind != "chain"))
    if kind == "partition":
        tx = optax.partition({"a": one(), "b": one()}, {"a": "a", "b": "b"})
    alone = kind != "chain"
    state, update = tx.init(params), jax.jit(tx.update)
    for number in range(3):
        new = update(params, state, params)[1]
        if kind == "per_parameter_steps":
            active = {"a": True, "b": number == 0}
            new = tx.update(params, state, params, active=active)[1]
        elif kind == "partition" and number:
            new = new._replace(
                inner_states=new.inner_states | {"b": state.inner_states["b"]}
            )
        state = new
    entries = po.to_bitsandbytes(state)
    assert {name: entry["step"] for name, entry in entries.items()} == {
        "a": 3,
        "b": 1 if alone else 3,
    }
    again = po.from_bitsandbytes(tx.init(params), entries)
    counts = lambda tree: [
        int(x) for x in jax.tree.leaves(tree) if x.dtype == "int32" and not x.ndim
    ]
    assert (
        counts(again)
        == counts(state)
        == (
            2 * [3, 1]
            if kind == "per_parameter_steps"
            else [3, 3, 1, 1]
            if alone
            else [3, 3]
        )
    )


@pytest.mark.parametrize("optimizer", [po.paged_lion_8bit, po.paged_adamw_8bit])
def test_memory_of_what_is_given_is_free_again(optimizer):
    """It may be that of tensors that are trained on. JAX reads arrays when it likes."""
    params = {"w": jnp.ones((512, 1024))}
    tx = optimizer(1e-3, **ALL_PAGED)
    _, state = tx.update(params, tx.init(params), params)
    entry = po.to_bitsandbytes(state)["w"]
    fresh = tx.init(params)
    for _ in range(5):
        given = jax.tree.map(aligned, entry)
        found = po.from_bitsandbytes(fresh, {"w": given})
        for x in given.values():
            if isinstance(x, np.ndarray):
                x.fill(0)
        reference.assert_equal(found, state)


def aligned(x):
    """A copy in memory that JAX takes as it is, as that of a tensor is."""
    if not isinstance(x, np.ndarray):
        return x
    memory = np.empty(x.nbytes + 64, np.uint8)
    first = -memory.ctypes.data % 64
    copy = memory[first : first + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy
