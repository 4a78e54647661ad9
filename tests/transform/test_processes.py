"""Two real processes that disagree; those that agree are in scripts/test_faults.py."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from helpers import disagreeing

ROOT = pathlib.Path(__file__).parents[2]

#: As what the processes compile.
pytestmark = pytest.mark.optimized


def launch(folder):
    """Runs two processes, of two devices each, to their ends."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    logs, running = [folder / f"process{i}.log" for i in range(2)], []
    for number, log in enumerate(logs):
        words = (disagreeing.__file__, number, 2, port, folder)
        with log.open("w") as output:
            running.append(
                subprocess.Popen(
                    [sys.executable, *map(str, words)],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        statuses = [process.wait(240) for process in running]
    finally:
        for process in running:
            process.kill()
    assert statuses == [0, 0], "\n\n".join(x.read_text() for x in logs)


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
    launch(tmp_path)
    found = [json.loads((tmp_path / f"found{i}.json").read_text()) for i in (0, 1)]
    absent = "process 1 has not come to it within 2 seconds"
    assert absent in found[0].pop("who comes")
    assert found[1].pop("who comes") is None
    assert found[0] == found[1]
    assert [*found[0]] == [*DISAGREEMENTS]
    for way, words in DISAGREEMENTS.items():
        said = found[0][way]
        assert said is None if words is None else words in said, (way, said)
