"""What processes say to each other, played by threads. Real ones: test_processes.py."""

import collections
import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import paged_optax as po
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


def test_what_one_process_alone_has(everywhere):
    errors, _ = everywhere(says(a=1, b=1), says(a=1))
    assert "b is 1 in process 0, absent in process 1" in errors[1]


def test_many_differences_are_counted(everywhere):
    names = "abcdef"
    errors, _ = everywhere(
        says(**dict.fromkeys(names, 1)), says(**dict.fromkeys(names, 2))
    )
    assert "c is 1" in errors[0] and "d is 1" not in errors[0]
    assert "and 3 more" in errors[0]


def test_processes_that_do_different_things(everywhere):
    other = lambda: processes.compare("init", {})
    errors, _ = everywhere(says(a=1), other)
    assert "the call is update in process 0, init in process 1" in errors[0]


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
    client = jax._src.lib._jax.DistributedRuntimeClient
    for name in (
        "key_value_set",
        "key_value_dir_get",
        "blocking_key_value_get",
        "wait_at_barrier",
    ):
        assert callable(getattr(client, name))


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
