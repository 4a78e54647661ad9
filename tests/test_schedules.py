"""Programs whose transfers overlap with products on any GPU."""

import types
import warnings

import jax
import jax.numpy as jnp
import pytest

import paged_optax as po
from paged_optax.compiling import schedules
from paged_optax.compiling.schedules import OVERLAPPING, compile_overlapping

GIB = 2**30


def gpu(capability, limit=None):
    """What JAX says of a GPU, as far as it is asked."""
    stats = None if limit is None else {"bytes_limit": limit}
    return types.SimpleNamespace(
        platform="gpu", compute_capability=capability, memory_stats=lambda: stats
    )


class Lowered:
    """Notes with which options it is compiled; `Compiled` is what it was given."""

    def __init__(self, knows=True):
        self.knows, self.compiled = knows, []

    def compile(self, options=None):
        if options and not self.knows:
            raise jax.errors.JaxRuntimeError("No such compile option: 'x'\nmore")
        self.compiled.append(options)
        return options


@pytest.fixture
def needs(monkeypatch):
    """Each program takes 12 GiB."""
    found = types.SimpleNamespace(device_total=12 * GIB)
    monkeypatch.setattr(schedules, "memory_report", lambda compiled: found)
    monkeypatch.delenv("XLA_FLAGS")


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.9", "10.0", "12.0"])
def test_options_are_given(capability, needs):
    lowered = Lowered()
    assert compile_overlapping(lowered, gpu(capability, 12 * GIB)) == dict(OVERLAPPING)
    assert lowered.compiled == [dict(OVERLAPPING)]
    assert compile_overlapping(Lowered(), gpu(capability)) == dict(OVERLAPPING)


@pytest.mark.parametrize("device", [gpu("9.0", 1), jax.devices()[0]], ids=["H100", ""])
def test_no_options_are_needed(device, needs):
    lowered = Lowered()
    assert compile_overlapping(lowered, device) is None
    assert lowered.compiled == [None]


def test_what_the_user_says_stays(needs, monkeypatch):
    flag = "--xla_gpu_enable_latency_hiding_scheduler=false"
    monkeypatch.setenv("XLA_FLAGS", flag)
    assert compile_overlapping(Lowered(), gpu("8.9", 1)) is None


def test_too_large_for_the_device(needs):
    """The program without options is taken, and it is said why."""
    lowered = Lowered()
    with pytest.warns(UserWarning, match=r"12.0 GiB of the device, and JAX has 11.0"):
        assert compile_overlapping(lowered, gpu("7.5", 11 * GIB)) is None
    assert lowered.compiled == [dict(OVERLAPPING), None]


def test_unknown_options(needs):
    with pytest.warns(UserWarning, match="compiled without: No such compile option"):
        assert compile_overlapping(Lowered(knows=False), gpu("8.9")) is None


def test_jit_step_compiles_so(monkeypatch):
    """A step on a GPU that needs options is compiled with them."""
    asked = []
    monkeypatch.setattr(schedules, "needs_options", asked.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = po.jit_step(lambda x: x + 1, jnp.ones(3), donate_argnums=0)
    assert asked == [jax.devices()[0]]
    assert step(jnp.ones(3)).tolist() == [2, 2, 2]
