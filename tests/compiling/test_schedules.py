"""Programs whose transfers overlap with products on any GPU."""

import os
import pathlib
import re
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

import paged_optax as po
from paged_optax.backend import compiler_options
from paged_optax.backend.compiler_options import (
    NO_GRAPHS,
    NO_OVERLAP,
    SCHEDULED,
    overlap_options,
)
from paged_optax.compiling.donations import local_device
from paged_optax.compiling.jit_step import compile_overlapping
from paged_optax.compiling.memory_report import device_total

GIB = 2**30

jit_module = sys.modules[compile_overlapping.__module__]


def gpu_of(capability, limit=None):
    """What JAX says of a GPU, as far as it is asked."""
    stats = None if limit is None else {"bytes_limit": limit}
    return types.SimpleNamespace(
        platform="gpu", compute_capability=capability, memory_stats=lambda: stats
    )


class Jit:
    """Notes with which options it is compiled; a program is what it was given."""

    def __init__(self, fails=""):
        self.fails, self.compiled = fails, []

    def __call__(self, **options):
        if options and self.fails:
            raise jax.errors.JaxRuntimeError(f"{self.fails}\nmore")
        self.compiled.append(options)
        return types.SimpleNamespace(options=options), options


def options_of(jit, device):
    """The options of the program, which are those of the function that calls it."""
    jitted, program = compile_overlapping(jit, device)
    assert jitted.options is program
    return program


@pytest.fixture
def needs(monkeypatch):
    """Each program takes 12 GiB."""
    monkeypatch.setattr(jit_module, "device_total", lambda compiled: 12 * GIB)
    monkeypatch.delenv("XLA_FLAGS")


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.9", "9.0", "10.0", "12.0"])
def test_options_are_given(capability, needs):
    """No graphs on any GPU, and the scheduler where XLA has it not by default."""
    wanted = {**NO_GRAPHS, **({} if capability == "9.0" else SCHEDULED)}
    jit = Jit()
    assert options_of(jit, gpu_of(capability, 12 * GIB)) == wanted
    assert jit.compiled == [wanted]
    assert options_of(Jit(), gpu_of(capability)) == wanted


@pytest.mark.parametrize("device", [jax.devices()[0], None], ids=["CPU", "no device"])
def test_no_options_are_needed(device, needs):
    assert options_of(Jit(), device) == {}


BOTH = {**NO_GRAPHS, **SCHEDULED}
SCHEDULER, SLOP = SCHEDULED


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        (f"--{SCHEDULER}=false", NO_GRAPHS),
        (f"--{SLOP}=95", {**NO_GRAPHS, SCHEDULER: True}),
        ("--xla_gpu_enable_command_buffer=fusion", SCHEDULED),
        ("--xla_gpu_command_buffer_scheduling_mode=CONCURRENT", SCHEDULED),
        ("--xla_gpu_command_buffer_unroll_loops=true", BOTH),
        (f"--xla_dump_to=/tmp/xla_gpu_enable_command_buffer/{SCHEDULER}", BOTH),
    ],
)
def test_what_the_user_says_stays(flags, left, needs, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert overlap_options(gpu_of("8.9")) == left


def test_too_large_for_the_device(needs):
    """The program without the scheduler is taken, and it is said why."""
    jit = Jit()
    with pytest.warns(UserWarning, match=r"12.0 GiB of the device, and JAX has 11.0"):
        assert options_of(jit, gpu_of("7.5", 11 * GIB)) == NO_GRAPHS
    assert jit.compiled == [BOTH, NO_GRAPHS]
    # A Hopper's program is the same with the option and without.
    assert options_of(Jit(), gpu_of("9.0", 11 * GIB)) == NO_GRAPHS


@pytest.mark.parametrize("capability", ["8.9", "9.0"])
def test_a_device_that_is_not_here(capability, needs):
    """It does not say what it has: another process's, or one to compile for."""

    def refuse():
        raise jax.errors.JaxRuntimeError("only supported for addressable devices")

    device = gpu_of(capability)
    device.memory_stats = refuse
    assert options_of(Jit(), device).items() >= NO_GRAPHS.items()


def test_a_device_of_this_process_is_asked(monkeypatch):
    processes = (types.SimpleNamespace(process_index=n) for n in range(3))
    places = [types.SimpleNamespace(device_set=[device]) for device in processes]
    for here in (2, 0):
        monkeypatch.setattr(jax, "process_index", lambda here=here: here)
        assert local_device(places).process_index == here
    assert local_device(places[1:2]).process_index == 1  # none is


def test_the_text_is_not_read_to_know_what_a_program_takes():
    """It has no text here."""
    compiled = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((64, 64))).compile()
    without = types.SimpleNamespace(memory_analysis=compiled.memory_analysis)
    wanted = po.memory_report(compiled).device_total
    assert device_total(without) == wanted > 0


def test_compilations_that_fail(needs):
    """They are tried again without options that are unknown, else not."""
    with pytest.warns(UserWarning, match="compiled without: No such compile option"):
        assert options_of(Jit("No such compile option: 'x'"), gpu_of("8.9")) == {}
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        options_of(Jit("RESOURCE_EXHAUSTED: Out of memory"), gpu_of("9.0"))


@pytest.fixture
def asked(monkeypatch):
    """For which devices options are asked for."""
    asked = []
    monkeypatch.setattr(jit_module, "overlap_options", lambda x: asked.append(x) or {})
    return asked


@pytest.mark.parametrize("space", ["Device", "Host"])
def test_jit_step_compiles_so(space, asked):
    """With the device's options if there are transfers."""
    x = jax.device_put(jnp.ones(3), jax.memory.Space[space])
    step = po.jit_step(lambda x: x, x, donate_argnums=0)
    assert asked == [jax.devices()[0] if space == "Host" else None]
    assert step(x).tolist() == [1, 1, 1]


def test_transfers_within_a_step_count(asked):
    """Those of what is neither an argument nor a result."""

    def turn(x, _):
        there = jax.device_put(x, jax.memory.Space.Host)
        return 1 + jax.device_put(there, jax.memory.Space.Device), None

    step = po.jit_step(lambda x: jax.lax.scan(turn, x, length=3)[0], jnp.ones(3))
    assert asked == [jax.devices()[0]]
    assert step(jnp.ones(3)).tolist() == [4, 4, 4]


GRAPHS = """
import glob, sys
from helpers import aot
from helpers.programs import square, updating
import paged_optax as po

report = aot.h200(updating(po.paged_adamw(1e-3), square(2)), options={options})
(path,) = glob.glob(sys.argv[1] + "/*thunk_sequence.txt")
(later,) = glob.glob(sys.argv[1] + "/*thunk_passes.txt") or [path]
print("kCommandBuffer" in open(later).read(), report.device_total)
"""


@pytest.mark.compiler
def test_options_make_no_graphs(tmp_path):
    """By the runtime's own list of what it does; with the same bytes."""
    found = []
    for name, options in {"without": dict(NO_GRAPHS), "with": {}}.items():
        flags = f"{os.environ['XLA_FLAGS']} --xla_dump_to={tmp_path / name}"
        code = GRAPHS.format(options=options)
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / name)],
            env=os.environ | {"XLA_FLAGS": flags},
            cwd=pathlib.Path(__file__).parents[1],
            capture_output=True,
            text=True,
        )
        assert not done.returncode, done.stderr
        found.append(done.stdout.split())
    assert found == [["False", found[0][1]], ["True", found[0][1]]]


# -- programs that others compile ---------------------------------------------------


LAYERS = {"layers": {"w": jnp.full((3, 64, 64), 0.01)}}


def on_a_gpu(monkeypatch, capability):
    found = lambda device: capability
    monkeypatch.setattr(compiler_options, "compute_capability", found)


def traced(compiled=jax.jit, tx=None):
    """Traces an update of moments on the host, by a function that is new each time."""
    tx = tx or po.paged_adamw(1e-3, min_paged_size=0)
    step = compiled(lambda gradients, state: tx.update(gradients, state, gradients))
    step(LAYERS, tx.init(LAYERS))


def traced_by_layers(compiled):
    model = po.LayerwiseModel(
        lambda rest, batch: (batch, None),
        lambda weights, x, context, i: (x @ weights["w"], None),
        lambda rest, x, kept, batch: jnp.mean(x),
    )
    tx = po.paged_adamw(1e-3, min_paged_size=0)
    workspace = po.GradientWorkspace.allocate(LAYERS["layers"])
    step = compiled(lambda *args: po.layerwise_step(model, tx)(*args))
    step(LAYERS, tx.init(LAYERS), workspace, jnp.ones((8, 64)))


def finished(compiled):
    tx = po.paged_adamw(1e-3, min_paged_size=0)
    workspace = po.GradientWorkspace.allocate(
        LAYERS["layers"], host_dtype="float32", rest={}
    )
    step = po.layerwise_step(po.LayerwiseModel(*[lambda *args: None] * 3), tx)
    compiled(lambda *args: step.finish(*args))(LAYERS, tx.init(LAYERS), workspace)


WAYS = [traced, traced_by_layers, finished]


@pytest.mark.parametrize("capability", [8.9, 9.0])
@pytest.mark.parametrize("way", WAYS)
def test_a_jit_of_ones_own_is_told(way, capability, monkeypatch):
    on_a_gpu(monkeypatch, capability)
    with pytest.warns(UserWarning, match=NO_OVERLAP):
        way(jax.jit)


def donating_nothing(step):
    """`jit_step`, whose other warning is not looked at here."""
    warnings.filterwarnings("ignore", "nothing is donated")
    return po.jit_step(step)


@pytest.mark.parametrize("compiled", [donating_nothing, lambda step: step])
@pytest.mark.parametrize("way", WAYS)
def test_others_are_not_told(way, compiled, monkeypatch):
    """`jit_step` gives XLA the options, and who compiles nothing needs none."""
    on_a_gpu(monkeypatch, 8.9)
    way(compiled)


@pytest.mark.parametrize("case", ["no GPU", "flags", "resident"])
def test_where_nothing_is_to_be_told(case, monkeypatch):
    on_a_gpu(monkeypatch, None if case == "no GPU" else 9.0)
    if case == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=fusion")
    resident = po.paged_adamw(1e-3, device_budget=None) if case == "resident" else None
    traced(jax.jit, resident)


def test_one_is_told_once(monkeypatch):
    """And not for each program."""
    on_a_gpu(monkeypatch, 8.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for way in [traced, *WAYS]:
            way(jax.jit)
    assert [str(x.message)[: len(NO_OVERLAP)] for x in caught] == [NO_OVERLAP]


def test_what_to_copy(monkeypatch):
    """Options and flags are those that `jit_step` gives; the filter silences it."""
    on_a_gpu(monkeypatch, 8.9)
    with pytest.warns(UserWarning, match=NO_OVERLAP) as caught:
        traced()
    text = str(caught[0].message)
    (options,) = re.findall(r"compiler_options=(\{.*?\})", text)
    assert eval(options) == {**NO_GRAPHS, **SCHEDULED}
    traced(lambda step: step)
    (flags,) = re.findall(r"XLA_FLAGS='(.*?)'", text)
    assert flags.split() == [
        "--xla_gpu_enable_command_buffer=",
        "--xla_gpu_enable_latency_hiding_scheduler=true",
        "--xla_gpu_memory_limit_slop_factor=1000",
    ]
    exec(re.findall(r"warnings\.filterwarnings\(.*?\)", text)[0])
    traced()
