"""The self-check passes on a sound backend and refuses a corrupting one."""

import jax
import jax.numpy as jnp
import pytest

import paged_optax as po
from paged_optax.backend import memory
from paged_optax.engine import backend_check, loop
from paged_optax.engine import pages as page_types
from paged_optax.engine.buffers import PagedBuffer
from paged_optax.engine.loop import Loop
from paged_optax.engine.sharing import MomentFormat, cut


@pytest.fixture(autouse=True)
def forget():
    backend_check.run_check.cache_clear()
    yield
    backend_check.run_check.cache_clear()


def test_it_covers_full_pages_and_a_smaller_one():
    pages = cut((89, 128), (MomentFormat(4),), 16 * 128 * 4).gpu
    assert (pages.size, pages.count, 89 % pages.size) == (15, 6, 14)


def test_a_sound_backend_passes_eager_and_while_tracing():
    backend_check.run_check("cpu")
    backend_check.run_check.cache_clear()
    jax.jit(lambda x: (backend_check.run_check("cpu"), x)[1])(1.0)


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


# -- what it is for --------------------------------------------------------------


def in_turn(monkeypatch):
    """Each page is read, computed and written before the next one."""


def both_ways_on_a_gpu(monkeypatch):
    """The next page is read while one is written; the last is computed apart."""
    monkeypatch.setattr(page_types, "GPU_FETCHES_AHEAD", True)
    in_turn = Loop._in_turn
    as_it_says = lambda self, *args: (Loop._duplex if self.duplex else in_turn)(
        self, *args
    )
    monkeypatch.setattr(Loop, "_in_turn", as_it_says)


def both_ways_on_a_tpu(monkeypatch):
    """The same in pages of whole tiles, which one loop computes."""
    choose = lambda *x, default=None, **ways: ways.get("tpu", default)(*x)
    monkeypatch.setattr(jax.lax, "platform_dependent", choose)


@pytest.fixture(params=[in_turn, both_ways_on_a_gpu, both_ways_on_a_tpu])
def schedule(request, monkeypatch):
    request.param(monkeypatch)
    jax.clear_caches()
    yield request.param
    monkeypatch.undo()
    jax.clear_caches()


def shifted(ways, count, unit):
    """Transfers at a place that is some rows, or pages, from their own."""

    def break_it(monkeypatch):
        for way in ways:
            right = getattr(PagedBuffer, way)

            def wrong(part, x, *others, right=right):
                *page, at = others
                rows = count * (part.pages.size if unit == "page" else 1)
                there = at._replace(
                    start=at.start + rows, first_unit=at.first_unit + rows
                )
                return right(part, x, *page, there if part.streamed else at)

            monkeypatch.setattr(PagedBuffer, way, wrong)

    return break_it


def exchanged(monkeypatch):
    """Reads go where writes should, and writes where reads should."""
    right = loop.exchange
    monkeypatch.setattr(
        loop,
        "exchange",
        lambda arrays, exchanged, current, results, at, ahead, *rest: right(
            arrays, exchanged, current, results, ahead, at, *rest
        ),
    )
    # In turn both are at one place: there each moment is read where the other's are.
    fetch = Loop._fetch

    def others(self, at, current, *rest):
        theirs = dict(zip(self.exchanged, reversed(self.exchanged), strict=True))
        swapped = {p: current[other] for p, other in theirs.items()}
        return fetch(self, at, current | swapped, *rest)

    monkeypatch.setattr(Loop, "_fetch", others)


MUTATIONS = {
    f"{' and '.join(ways)}s {count:+} {unit}": shifted(ways, count, unit)
    for ways in (["read"], ["write"], ["read", "write"])
    for count in (1, -1)
    for unit in ("page", "row")
} | {"reads and writes exchanged": exchanged}


def test_it_goes_the_way_it_says(schedule, monkeypatch):
    """Sound schedules pass; both ways are taken where they are meant to be."""
    calls = []
    right = loop.exchange
    counted = lambda *args: (calls.append(None), right(*args))[1]
    monkeypatch.setattr(loop, "exchange", counted)
    backend_check.run_check("cpu")
    assert bool(calls) == (schedule is not in_turn)


@pytest.mark.quick("gpu-reads +1 row", "in_turn-reads and writes exchanged")
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_wrong_addresses_are_refused(schedule, mutation, monkeypatch):
    """By a page or by a row, of reads, of writes, or of both; and the two exchanged."""
    MUTATIONS[mutation](monkeypatch)
    # JAX refuses a place before the first row that is known when traced.
    said = "corrupts pages on cpu: rows|Index -[0-9]+ is out of bounds"
    with pytest.raises((backend_check.BackendError, ValueError), match=said):
        backend_check.run_check("cpu")


def test_it_compiles_with_the_options_of_jit_step(monkeypatch):
    """Under the optimization level O1 pages are wrong without these."""
    compiled = []
    options = {"xla_cpu_enable_fast_math": False}
    monkeypatch.setattr(backend_check, "addressing_options", lambda device: options)
    right = jax.jit
    record = lambda f, **kwargs: (compiled.append(kwargs), right(f, **kwargs))[1]
    monkeypatch.setattr(backend_check.jax, "jit", record)
    backend_check.run_check("gpu")
    ours = [x for x in compiled if "compiler_options" in x]
    assert ours == [{"compiler_options": options}] * 3
