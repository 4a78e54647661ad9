"""XLA:GPU's collective pipeliner and transfers of host memory.

The optimization level O1 switches it on for these, and so does a flag. It then carries
the index of a slice in a tuple without its first value: the last page of an update is
written at row 1 (`byte_offset 16384, byte_stride 0` for 62914560), and the layers' loop
ends the compiler (`tuple_tree.h: Check failed`, in
`CollectivePipeliner::TransformLoopForward`). `test_xla_has_the_fault` is the smallest
program that shows it: an update of one matrix. If it fails, XLA is mended.
"""

import os
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

import paged_optax as po
from helpers import aot, decoder
from helpers.programs import square, updating
from paged_optax.backend import compiler_options
from paged_optax.backend.compiler_options import addressing_options
from paged_optax.backend.platforms import GPU_NEEDS_RAW_INDEX

GPU = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
PIPELINED = {
    # jax 0.10.2 takes the number that XLA gives the level.
    "O1": {"optimization_level": 19 if GPU_NEEDS_RAW_INDEX else "O1"},
    "flag": {"xla_gpu_enable_pipelined_host_offloading": True},
}
SMALL = {"min_paged_size": 0, "page_size": 4096}
PROGRAMS = {
    "float32": lambda: updating(po.paged_adamw(1e-3), square(1)),
    "8 bits": lambda: updating(po.paged_adamw_8bit(1e-3), square(1)),
    "Lion": lambda: updating(po.paged_lion(1e-3), square(2)),
    "step": lambda: decoder.ordinary(decoder.SMALL, po.paged_adamw(1e-3, **SMALL)),
}


@pytest.mark.compiler
@pytest.mark.parametrize("how", PIPELINED)
@pytest.mark.parametrize(
    "name", [*PROGRAMS][:-1] + [pytest.param("step", marks=pytest.mark.slow)]
)
def test_addresses_are_those_without(name, how):
    plain = aot.h200(PROGRAMS[name]())
    found = aot.h200(PROGRAMS[name](), options=PIPELINED[how] | addressing_options(GPU))
    assert aot.descriptors(found.hlo) == aot.descriptors(plain.hlo) != {}
    assert found.device_temp <= plain.device_temp


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("how", PIPELINED)
@pytest.mark.parametrize("on_host", [False, True], ids=["on device", "on host"])
def test_layers_compile(on_host, how):
    """Without the passes disabled the compiler ends the process."""
    script = (
        "import sys, types, jax; from tests.backend import test_pipelined as t;"
        f"t.compile_layers({on_host}, {PIPELINED[how]!r})"
    )
    folder = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    paths = os.pathsep.join((folder, os.path.join(folder, "tests")))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert not done.returncode, done.stderr[-2000:]


def compile_layers(on_host, options):
    build = decoder.layerwise(
        decoder.SMALL,
        po.paged_adamw(1e-3, **SMALL),
        size=(2, 16),
        weights_on_host=on_host,
    )
    plain = aot.h200(build)
    found = aot.h200(build, options=options | addressing_options(GPU))
    assert aot.descriptors(found.hlo) == aot.descriptors(plain.hlo) != {}


@pytest.mark.compiler
@pytest.mark.skipif(GPU_NEEDS_RAW_INDEX, reason="no page stands outside a loop there")
@pytest.mark.parametrize("how", PIPELINED)
def test_xla_has_the_fault(how):
    plain, found = (
        aot.descriptors(aot.h200(PROGRAMS["float32"](), options=options).hlo)
        for options in ({}, PIPELINED[how])
    )
    assert found != plain


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(jax, "local_devices", lambda: [GPU])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", compiler_options.NO_OVERLAP)
        yield monkeypatch


def look():
    x = jax.device_put(jnp.ones(3), jax.memory.Space.Host)
    # A new function, which JAX has not traced.
    jax.eval_shape(lambda x: compiler_options.warn_of_options(x), x)


def test_who_compiles_under_it_is_warned(on_gpu):
    look()
    words = r"collective-pipeliner-forward and collective-pipeliner-backward.*XLA_FLAGS"
    jax.config.update("jax_optimization_level", "O1")
    try:
        with pytest.warns(UserWarning, match=words):
            look()
    finally:
        jax.config.update("jax_optimization_level", "UNKNOWN")
    flag = "--xla_gpu_enable_pipelined_host_offloading"
    for value in ("", "=true"):
        on_gpu.setenv("XLA_FLAGS", flag + value)
        with pytest.warns(UserWarning, match=words):
            look()
    (passes,) = addressing_options(GPU).values()
    for flags in (f"{flag}=false", f"{flag} --xla_disable_hlo_passes=a,{passes}"):
        on_gpu.setenv("XLA_FLAGS", flags)
        look()


def test_the_passes_that_a_user_disables_stay(on_gpu):
    on_gpu.setenv(
        "XLA_FLAGS", "--xla_disable_hlo_passes=dce,collective-pipeliner-forward"
    )
    (passes,) = addressing_options(GPU).values()
    forward, backward = "collective-pipeliner-forward", "collective-pipeliner-backward"
    assert passes.split(",") == ["dce", forward, backward]
    assert addressing_options(jax.devices("cpu")[0]) == {}
