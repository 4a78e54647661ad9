"""Several real processes, each with its own devices and its own part of the moments."""

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

from helpers import process

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = pathlib.Path(process.__file__)
STEPS = 4

#: As what the processes compile.
pytestmark = pytest.mark.optimized


def launch(processes, folder, last, killed=()):
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
            *(sys.executable, SCRIPT, number, processes),
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
