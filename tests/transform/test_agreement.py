"""Processes that disagree, as threads and real; others: scripts/test_faults.py."""

import collections
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import paged_optax as po
from helpers import disagreeing
from paged_optax.backend import processes


class Store:
    """A coordinator's values, for threads."""

    def __init__(self, count):
        self.values, self.count, self.waiting = {}, count, threading.Condition()
        self.arrived = collections.Counter()

    def key_value_set(self, key, value):
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout_in_ms):
        return self.values[key]

    def key_value_dir_get(self, key):
        return [x for x in self.values.items() if x[0].startswith(f"{key}/")]

    def wait_at_barrier(self, key, timeout_in_ms):
        with self.waiting:
            self.arrived[key] += 1
            self.waiting.notify_all()
            if not self.waiting.wait_for(
                lambda: self.arrived[key] == self.count, 1e-3 * timeout_in_ms
            ):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out")


@pytest.fixture
def everywhere(monkeypatch):
    """Calls a function in each of several processes; the errors that they get."""
    here = threading.local()

    class Counts:
        def __next__(self):
            here.count = getattr(here, "count", -1) + 1
            return here.count

    class Agreed:
        """What was compared, of each process."""

        def __contains__(self, said):
            return said in getattr(here, "said", ())

        def add(self, said):
            here.said = (*getattr(here, "said", ()), said)

    def call(*functions):
        store, errors = Store(len(functions)), [None] * len(functions)
        monkeypatch.setattr(processes, "store_of_processes", lambda: store)
        monkeypatch.setattr(jax, "process_count", lambda: len(functions))

        def run(number):
            here.number = number
            try:
                functions[number]()
            except ValueError as error:
                errors[number] = str(error)

        threads = [
            threading.Thread(target=run, args=(i,)) for i in range(len(functions))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors, store

    monkeypatch.setattr(jax, "process_index", lambda: here.number)
    monkeypatch.setattr(processes, "_numbers", Counts())
    monkeypatch.setattr(processes, "_agreed", Agreed())
    monkeypatch.setattr(processes, "PATIENCE", 20.0)
    return call


def says(**values):
    said = {name: {"": str(value)} for name, value in values.items()}
    return lambda: processes.compare("update", said)


def test_all_agree(everywhere):
    assert everywhere(*[says(a=1, b=2)] * 4)[0] == [None] * 4


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_all_are_told_of_one_that_differs(everywhere, odd):
    calls = [says(a=2 if i == odd else 1) for i in range(4)]
    errors, _ = everywhere(*calls)
    assert len(set(errors)) == 1
    there, here, who = (2, 1, 1) if odd == 0 else (1, 2, odd)
    assert f"a is {there} in process 0, {here} in process {who}" in errors[0]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (says(a=1, b=1), says(a=1), ["b is 1 in process 0, absent in process 1"]),
        (
            *(says(**dict.fromkeys("abcdef", value)) for value in (1, 2)),
            ["c is 1", "and 3 more"],
        ),
        (
            says(a=1),
            lambda: processes.compare("init", {}),
            ["the call is update in process 0, init in process 1"],
        ),
    ],
    ids=["absent", "many", "calls"],
)
def test_what_differs_is_named(everywhere, first, second, words):
    """Of many differences three, and how many more there are."""
    for error in everywhere(first, second)[0]:
        assert all(word in error for word in words)
        assert "d is 1" not in error


@pytest.mark.parametrize("absent", [0, 1])
def test_nobody_waits_for_ever(everywhere, monkeypatch, absent):
    monkeypatch.setattr(processes, "PATIENCE", 0.2)
    calls = [says(a=1)] * 3
    calls[absent] = lambda: None
    errors, _ = everywhere(*calls)
    assert errors.pop(absent) is None
    for error in errors:
        assert f"process {absent} has not come to it within 0 seconds" in error


def test_once(everywhere):
    """A trace is repeated in one process alone, and nobody waits."""

    def repeated():
        for _ in range(3):
            says(a=1)()

    errors, store = everywhere(repeated, says(a=1))
    assert errors == [None, None]
    assert len(store.arrived) == 1


def test_one_process_compares_nothing(monkeypatch):
    def fail(*_, **__):
        raise AssertionError

    monkeypatch.setattr(processes, "store_of_processes", fail)
    tx, params = po.paged_adamw(1e-3, min_paged_size=0), {"w": jnp.ones((64, 64))}
    tx.update(params, tx.init(params), params)
    assert not processes.spans_processes(params)


def test_the_coordinator_is_where_jax_has_it():
    """It has no public name; without one, nothing is compared."""
    from jax._src import distributed

    assert hasattr(distributed.global_state, "client")
    names = "key_value_set key_value_dir_get blocking_key_value_get wait_at_barrier"
    for name in names.split():
        assert callable(getattr(jax._src.lib._jax.DistributedRuntimeClient, name))


def test_an_interrupt_while_others_are_awaited(monkeypatch):
    """It ends the wait at once, and not when patience does."""
    monkeypatch.setattr(processes, "store_of_processes", lambda: Store(2))
    # A worker of xdist ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    begun = time.monotonic()
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            says(interrupted=1)()
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun < 100 < processes.PATIENCE


ROOT = pathlib.Path(__file__).parents[2]


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
@pytest.mark.optimized  # as what the processes compile
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
