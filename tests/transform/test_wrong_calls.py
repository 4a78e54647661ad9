"""Each row of wrong_calls.md: the call, the error it gets, and the error's words."""

import json
import pathlib
import re

import jax
import pytest

import paged_optax as po
from paged_optax.backend import processes
from paged_optax.engine import backend_check

PAGE = (pathlib.Path(__file__).parents[1] / "data" / "wrong_calls.md").read_text()
ROWS = re.findall(r"^\| `(.+)` \| `(\w+)` \| (.+) \|$", PAGE, re.M)
(SETUP,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_the_page_has_a_call_of_every_public_name():
    assert len(ROWS) == PAGE.count("\n| `") >= 200
    assert len({call for call, *_ in ROWS}) == len(ROWS)
    calls = "\n".join([SETUP, *(f"{call} po.{error}" for call, error, _ in ROWS)])
    missing = [x for x in po.__all__ if not re.search(rf"\bpo\.{x}\b", calls)]
    assert missing == []


@pytest.fixture(scope="module")
def scope():
    made = {}
    exec(SETUP, made)
    return made


@pytest.fixture
def on_a_sick_backend(monkeypatch):
    """Calls a function where a page lands a row too far."""
    right = backend_check.stream

    def wrong(*args, **kwargs):
        ((update, mu, nu),) = right(*args, **kwargs)
        mu = jax.device_put(mu, jax.memory.Space.Device)
        return [(update, mu.at[16:32].set(mu[17:33]), nu)]

    def call(function, *arguments):
        monkeypatch.setattr(backend_check, "stream", wrong)
        check = lambda: backend_check.run_check("gpu")
        monkeypatch.setattr("paged_optax.transform.init.check_backend", check)
        return function(*arguments)

    backend_check.run_check.cache_clear()
    yield call
    backend_check.run_check.cache_clear()


@pytest.fixture
def beside(monkeypatch):
    """Calls in the second of two processes; the first differs, or never comes."""
    values, right = {}, processes.compare

    class Store:
        def key_value_set(self, key, value):
            values[key.split("/", 2)[2]] = value

        def blocking_key_value_get(self, key, timeout_in_ms):
            return values[key.split("/", 2)[2]]

        def key_value_dir_get(self, key):
            return [x for x in values.items() if x[0].startswith(key.split("/", 2)[2])]

        def wait_at_barrier(self, key, timeout_in_ms):
            if "values/0" not in values:
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")

    def call(function, *arguments, comes):
        def compare(what, given, once):
            said = {
                name + path: x for name, xs in given.items() for path, x in xs.items()
            }
            first = {"the call": what, **said, "page_size": "1"}
            if comes:
                values["values/0"] = json.dumps(first)
                values["fingerprints/0"] = "another"
            right(what, given, once)

        with monkeypatch.context() as patched:
            patched.setattr(processes, "PATIENCE", 0.1)
            patched.setattr(processes, "store_of_processes", Store)
            patched.setattr(jax, "process_index", lambda: 1)
            patched.setattr(jax, "process_count", lambda: 2)
            module = "paged_optax.transform.init"
            patched.setattr(f"{module}.spans_processes", lambda tree: True)
            patched.setattr(f"{module}.compare", compare)
            return function(*arguments)

    return {
        "beside_other_pages": lambda f, x: call(f, x, comes=True),
        "beside_no_process": lambda f, x: call(f, x, comes=False),
    }


@pytest.mark.parametrize(("call", "error", "words"), ROWS, ids=[x[0] for x in ROWS])
def test_call(call, error, words, scope, on_a_sick_backend, beside):
    with pytest.raises(Exception) as caught:  # noqa: B017 its type is compared below
        eval(call, scope | {"on_a_sick_backend": on_a_sick_backend} | beside)
    pattern = re.escape(words).replace("…", ".*")
    assert type(caught.value).__name__ == error, caught.value
    assert re.match(pattern, str(caught.value), re.S), caught.value
