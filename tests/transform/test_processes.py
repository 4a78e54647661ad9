"""Several real processes, each with its own devices and its own part of the moments."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import pytest

from helpers import disagreeing, process

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = pathlib.Path(process.__file__)
STEPS = 4

#: As what the processes compile.
pytestmark = pytest.mark.optimized


def launch(processes, folder, last, killed=(), script=SCRIPT):
    """Starts the processes, of two devices each; returns their exit statuses.

    One that dies takes the others along: they could only wait for it.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    logs = [folder / f"process{i}.log" for i in range(processes)]
    running = []
    for number, log in enumerate(logs):
        command = [
            *(sys.executable, script, number, processes),
            *(port, folder, last, *killed),
        ]
        with log.open("w") as output:
            running.append(
                subprocess.Popen(
                    [str(word) for word in command],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    deadline = time.monotonic() + 240
    while any(p.poll() is None for p in running) and time.monotonic() < deadline:
        if any(p.poll() for p in running):
            break
        time.sleep(0.1)
    for p in running:
        if p.poll() is None:
            p.kill()
    statuses = [p.wait() for p in running]
    if not killed:
        assert statuses == [0] * processes, "\n\n".join(x.read_text() for x in logs)
    return statuses


@pytest.fixture(scope="module")
def straight():
    """Optax's own numbers, on one device, without a stop."""
    tx = optax.adamw(1e-2)
    params = process.values(0)
    state = tx.init(params)

    @jax.jit
    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(1, STEPS + 1):
        params, state = step(params, state, process.values(number))
    return len(params), jax.tree.leaves((params, state))


def check(folder, straight, first, devices):
    parameters, wanted = straight
    with np.load(folder / "result.npz") as found:
        assert found["first"] == first
        assert found["devices"] == devices
        assert found["on_host"] == 4  # the two matrices' moments
        for i, x in enumerate(wanted):
            ours = found[f"{i:02}"]
            if i < parameters:
                np.testing.assert_allclose(ours, x, rtol=0, atol=3e-7)
            else:
                np.testing.assert_array_equal(ours, x)


@pytest.mark.slow
def test_saved_by_four_and_restored_by_two(tmp_path, straight):
    launch(4, tmp_path, 2)
    launch(2, tmp_path, STEPS)
    check(tmp_path, straight, first=2, devices=4)


@pytest.mark.slow
def test_killed_and_resumed(tmp_path, straight):
    """One after the other is killed; both begin again at the last checkpoint."""
    assert launch(2, tmp_path, STEPS, killed=(1, 2))[1] == -9
    assert launch(2, tmp_path, STEPS, killed=(0, 4))[0] == -9
    launch(2, tmp_path, STEPS)
    check(tmp_path, straight, first=3, devices=4)


#: The words of the errors in both processes; None if they agree.
DISAGREEMENTS = {
    "nothing": None,
    "nothing again": None,
    "the page size": "page_size is 4096 in process 0, 8192 in process 1",
    "the budget": "device_budget is 1048576 in process 0, 2097152 in process 1",
    "the codec": "codec['mu'] is absent in process 0, 'bfloat16' in process 1",
    "the masters": "state.master['w'] is float32[64, 64] in process 0, absent in",
    "the rate": "constant -0.5 is absent in process 0, in the transformation in",
    "the sharding": "how they are divided, ['w'] is",
    "who called init": "how they are divided, ['w'] is",
    "by jit_step": "constant 0.75 is in the transformation in process 0, absent in",
    "layerwise, nothing": None,
    "layerwise, the norm": "max_norm is 1.0 in process 0, 2.0 in process 1",
    "layerwise, the page size": "page_size is 8192 in process 0, 16384 in process 1",
}


@pytest.mark.slow
def test_processes_that_disagree(tmp_path):
    """Each gets an error that names what differs; neither waits for the other."""
    launch(2, tmp_path, 0, script=pathlib.Path(disagreeing.__file__))
    found = [json.loads((tmp_path / f"found{i}.json").read_text()) for i in (0, 1)]
    absent = "process 1 has not come to it within 2 seconds"
    assert absent in found[0].pop("who comes")
    assert found[1].pop("who comes") is None
    assert found[0] == found[1]
    assert [*found[0]] == [*DISAGREEMENTS]
    for way, words in DISAGREEMENTS.items():
        said = found[0][way]
        assert said is None if words is None else words in said, (way, said)
