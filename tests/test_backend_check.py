"""The self-check passes on a sound backend and refuses a corrupting one."""

import jax
import jax.numpy as jnp
import pytest

import paged_optax as po
from paged_optax.backend import memory
from paged_optax.engine import backend_check
from paged_optax.engine.page_size import Storage, cut


@pytest.fixture(autouse=True)
def forget():
    backend_check.run_check.cache_clear()
    yield
    backend_check.run_check.cache_clear()


def test_it_covers_full_pages_and_a_smaller_one():
    pages = cut((89, 128), (Storage(4),), 16 * 128 * 4).rows
    assert (pages.size, pages.count, 89 % pages.size) == (15, 6, 14)


def test_a_sound_backend_passes_eager_and_while_tracing():
    backend_check.run_check("cpu")
    backend_check.run_check.cache_clear()
    jax.jit(lambda x: (backend_check.run_check("cpu"), x)[1])(1.0)


def test_a_corrupting_backend_is_refused(monkeypatch):
    """A page that lands a row too far, as XLA:GPU of jax 0.10.2 can place it."""
    right = backend_check.stream

    def wrong(*args, **kwargs):
        ((update, mu, nu),) = right(*args, **kwargs)
        return [(update, mu.at[16:32].set(mu[17:33]), nu)]

    monkeypatch.setattr(backend_check, "stream", wrong)
    message = r"jax \S+ corrupts pages on gpu: rows \[16, 17.*moment.*0\.11\.2"
    with pytest.raises(backend_check.BackendError, match=message):
        backend_check.run_check("gpu")


def test_it_runs_once_on_accelerators_and_can_be_switched_off(monkeypatch):
    calls = []
    monkeypatch.setattr(backend_check, "run_check", calls.append)
    backend_check.check_backend()
    assert calls == []  # the CPU has no link to distrust
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    backend_check.check_backend()
    assert calls == ["gpu"]
    monkeypatch.setenv("PAGED_OPTAX_SELF_CHECK", "0")
    backend_check.check_backend()
    assert calls == ["gpu"]


def test_it_does_not_run_where_nothing_can_be_paged(monkeypatch):
    """`auto` on a backend without pinned host memory keeps the moments there."""
    monkeypatch.setattr(memory, "memory_kinds", lambda: ("device",))
    calls = []
    monkeypatch.setattr(
        "paged_optax.transform.init.check_backend", lambda: calls.append(1)
    )
    state = po.paged_adamw(1e-3, host_memory_kind="auto", min_paged_size=0).init(
        jnp.ones((64, 64))
    )
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"device"}
    assert calls == []
