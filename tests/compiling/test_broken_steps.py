"""Steps that fail: an error that says what is left, and the last checkpoint intact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import paged_optax as po
from helpers.apart import alone
from helpers.checkpoints import bits, target_of
from helpers.reference import kinds
from helpers.small import DEVICE, HOST, TX, small


class Source:
    """Data that a step reads on the host, until it fails."""

    def __init__(self):
        self.error = None

    def __call__(self, number):
        if self.error:
            raise self.error
        return np.float32(number)


def steps(source, values=0):
    """A step that reads from a source, and one that allocates as many values."""

    def step(params, state, number):
        scale = jax.pure_callback(source, jax.ShapeDtypeStruct((), jnp.float32), number)
        if values:
            # Sorted, so that XLA cannot do without them.
            wide = jnp.arange(values // 2**13, dtype=jnp.float32)[:, None]
            scale += jnp.sort(jnp.sin(wide * scale) + jnp.arange(2.0**13), axis=0)[7, 7]
        gradients = jax.tree.map(lambda x: x * scale, params)
        updates, state = TX.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def begun():
    params = small()
    return params, TX.init(params), jnp.float32(1)


@pytest.fixture
def saved(tmp_path):
    """Where two steps and a checkpoint are behind: what goes on, and what restores."""
    source = Source()
    params, state, one = begun()
    step = po.jit_step(steps(source), params, state, one, donate_argnums=(0, 1))
    for _ in range(2):
        params, state = step(params, state, one)
    target = target_of(TX, params)
    with ocp.CheckpointManager(tmp_path / "saved") as manager:
        manager.save(2, args=ocp.args.StandardSave((params, state)))
        manager.wait_until_finished()
        restore = functools.partial(
            manager.restore, 2, args=ocp.args.StandardRestore(target)
        )
        yield source, step, (params, state), restore


def notes_of(error):
    """Without JAX's, on the frames that a traceback leaves out."""
    notes = getattr(error, "__notes__", [])
    return [note for note in notes if "JAX has removed" not in note]


def is_gone(tree):
    return [x.is_deleted() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt])
def test_an_exception_inside_a_donated_step(saved, error):
    """Its message, what is gone, and that the last checkpoint goes on as if nothing."""
    source, step, carry, restore = saved
    wanted, one = bits(carry), jnp.float32(1)
    source.error = error("the data's disk is gone")
    with pytest.raises(BaseException, match="the data's disk is gone") as caught:
        jax.block_until_ready(step(*carry, one))
    (note,) = notes_of(caught.value)
    assert note.startswith("Donated and gone: argument 0, argument 1.")
    assert "restore the last checkpoint" in note
    assert all(is_gone(carry))
    # What is gone is no wrong number, but an error that says so again.
    with pytest.raises((RuntimeError, ValueError), match="deleted") as caught:
        step(*carry, one)
    assert "argument 0, argument 1" in notes_of(caught.value)[0]
    source.error = None
    params, state = restore()
    assert bits((params, state)) == wanted
    assert set(kinds(state)) == {HOST, DEVICE}
    ended = step(*step(params, state, one), one)
    params, state, _ = begun()
    for _ in range(4):
        params, state = step(params, state, one)
    assert bits(ended) == bits((params, state))


def test_nothing_is_gone_where_nothing_was_donated():
    source, (params, state, one) = Source(), begun()
    with pytest.warns(UserWarning, match="nothing is donated"):
        step = po.jit_step(steps(source), params, state, one)
    source.error = OSError("gone")
    with pytest.raises(Exception, match="gone") as caught:
        jax.block_until_ready(step(params, state, one))
    assert not notes_of(caught.value)
    assert not any(is_gone((params, state)))


def test_what_is_left_is_said_before_a_step_runs():
    """An interrupt before the program starts consumes nothing."""
    params, state, one = begun()
    step = po.jit_step(steps(Source()), params, state, one, donate_argnums=(0, 1))

    def interrupted(*values, **named):
        raise KeyboardInterrupt

    jitted, step._jitted = step._jitted, interrupted
    with pytest.raises(KeyboardInterrupt) as caught:
        step(params, state, one)
    assert "can be called with it again" in caught.value.__notes__[0]
    step._jitted = jitted
    step(params, state, one)


def test_a_device_out_of_memory(saved):
    """A step that needs 64 TiB of scratch: refused when it runs, in JAX's own words."""
    source, _, carry, restore = saved
    wanted, one = bits(carry), jnp.float32(1)
    step = po.jit_step(steps(source, 2**44), *carry, one, donate_argnums=(0, 1))
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        jax.block_until_ready(step(*carry, one))
    (note,) = notes_of(caught.value)
    assert ("Donated and gone" in note) == any(is_gone(carry))
    assert bits(restore()) == wanted


LIMITED = """
import resource
import jax, jax.numpy as jnp, numpy as np
import paged_optax as po
from helpers.checkpoints import bits

small = {"w": jnp.full((256, 512), 0.5)}
tx = po.paged_adamw(1e-3, page_size="64KiB", min_paged_size="1KiB")
step = jax.jit(tx.update)
_, state = step(small, tx.init(small), small)
before = bits((small, state))
params = {f"w{i}": jnp.full((1024, 1024), 0.5) for i in range(32)}
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
unlimited = resource.RLIM_INFINITY
resource.setrlimit(resource.RLIMIT_AS, (used + 150 * 2**20, unlimited))
try:
    FAILS
    raise SystemExit("nothing failed")
except Exception as error:
    print(type(error).__name__, error, *getattr(error, "__notes__", []))
assert bits((small, state)) == before
resource.setrlimit(resource.RLIMIT_AS, (unlimited, unlimited))
_, state = step(small, state, small)
print("and goes on:", int(state[0].count))
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["tx.init(params)", "jax.jit(tx.init)(params)"])
def test_host_memory_that_cannot_be_allocated(fails):
    """256 MiB of moments where 150 MiB are left: the process and what it has go on."""
    fails = f"made = jax.block_until_ready({fails})"
    printed = alone(LIMITED.replace("FAILS", fails))
    assert "RESOURCE_EXHAUSTED: Out of memory allocating" in printed
    assert "jit" in fails or "The moments take 256.0 MiB of host memory" in printed
    assert "and goes on: 2" in printed
