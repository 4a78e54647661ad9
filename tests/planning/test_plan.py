"""`plan`: what it says is what there is."""

import re
import types

import jax
import jax.numpy as jnp
import optax
import pytest

import paged_optax as po
from helpers.exact import scale_by_value
from helpers.reference import SMALL_PAGES
from helpers.small import DEVICE, HOST, TX, small
from paged_optax.backend.platforms import GPU_NEEDS_RAW_INDEX

TRANSFORMATIONS = {
    "adam": lambda: TX,
    "budget": lambda: po.paged_adam(1e-2, device_budget="32KiB", min_paged_size=0),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), TX),
    "masked": lambda: optax.masked(TX, {"a": True, "b": False}),
    "partition": lambda: optax.partition(
        {"x": TX, "y": po.paged_lion(1e-2, **SMALL_PAGES)}, {"a": "x", "b": "y"}
    ),
    "inject": lambda: optax.inject_hyperparams(
        lambda learning_rate: po.paged_adam(learning_rate, **SMALL_PAGES)
    )(learning_rate=1e-2),
    "whole leaves": lambda: po.paged_lamb(1e-2, **SMALL_PAGES),
    "flatten": lambda: optax.flatten(TX),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_plan_totals_are_those_of_the_state(name):
    tx, params = TRANSFORMATIONS[name](), small()
    plan = po.plan(tx, params)
    moments = [x for x in jax.tree.leaves(tx.init(params)) if x.ndim]
    on = {
        kind: sum(x.nbytes for x in moments if x.sharding.memory_kind == kind)
        for kind in (HOST, DEVICE)
    }
    counts = sum(x.bytes for x in plan.moments if not x.shape)
    assert plan.host_bytes == on[HOST] > 0
    assert plan.device_bytes == on[DEVICE] + counts
    assert plan.link_bytes == 2 * on[HOST]
    assert on[HOST] / 25e9 < plan.link_seconds <= plan.link_bytes / 25e9
    assert 0 < plan.scratch_bytes <= 4 * on[HOST]
    saved = [*jax.tree.leaves(params), *moments]
    assert plan.save_bytes == counts + sum(x.nbytes for x in saved)
    for x in plan.moments:
        if x.on_host:
            assert x.page_bytes * (x.pages - 1) < x.bytes <= x.page_bytes * x.pages


def test_plan_twice_and_after_init_of_shapes():
    params = small()
    first = po.plan(TX, params)
    jax.eval_shape(TX.init, params)
    assert po.plan(TX, params) == first
    shapes = jax.eval_shape(lambda: params)
    assert po.plan(TX, shapes) == first
    assert "moments on the host" in str(first)


def test_plan_prints_every_group_and_the_totals():
    params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    params |= {f"v{i}": jax.ShapeDtypeStruct((1024,), jnp.bfloat16) for i in range(3)}
    plan = po.plan(
        po.paged_adamw(1e-3, page_size="8MiB"), params, link_gigabytes_per_second=50
    )
    lines = str(plan).splitlines()
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
    assert cells[0] == ["moments", "shape", "dtype", "where", "pages", "bytes"]
    assert ["[0].mu['w'] +1", "4096x4096", "float32", "host", "16 x 4.0 MiB"] in [
        row[:5] for row in cells
    ]
    small = ["[0].mu['v0'] +5", "1024", "bfloat16", "device", "small", "12.0 KiB"]
    assert small in cells
    assert ["moments on the host", "128.0 MiB"] in cells
    assert ["over the link a step", "256.0 MiB"] in cells
    assert any(row[0] == "seconds a step at 50 GB/s" for row in cells)
    # Of two moments of 16 pages. On an H200 one of 4 MiB takes 89 us, and 22 more.
    assert plan.latency_seconds == pytest.approx(22e-6 * 32)
    assert ["and of the pages' latency, up to", "0.000704"] in cells
    pages = 32 if GPU_NEEDS_RAW_INDEX else 17  # in turn, or both ways at once
    assert plan.link_seconds == pytest.approx(pages * 2**23 / 50e9)
    assert plan.scratch_bytes == 4 * 4 * 2**20


def test_from_how_many_tokens_on_paging_costs_no_time():
    """Six operations a value and token, of the backward pass, take as long."""
    params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    tx = po.paged_adamw(1e-3)
    plan = po.plan(tx, params, link_gigabytes_per_second=50.0, teraflops=500.0)
    # Where the directions take turns, both count.
    both = all(x.bidirectional for x in plan.moments if x.on_host)
    seconds = (1 if both else 2) * plan.host_bytes / 50e9
    least = 6 * 4096**2 * (plan.free_from - 1)
    assert least < 500e12 * seconds <= least + 6 * 4096**2
    assert f"{plan.free_from:,}" in str(plan)
    silent = po.plan(tx, params)
    assert silent.free_from is None and "free" not in str(silent)


def test_plan_needs_the_extra_arguments_of_update():
    tx = po.paged(scale_by_value(), **SMALL_PAGES)
    plan = po.plan(tx, small(), extra_args={"value": 1.0})
    assert plan.host_bytes == 2**14 + 70 * 128 * 4


@pytest.mark.parametrize(("devices", "hosts"), [(8, 1), (16, 2)])
def test_a_host_saves_what_its_devices_hold(devices, hosts):
    tx, params = po.paged_adamw(1e-3), {"w": jax.ShapeDtypeStruct((4096, 4096), "f4")}
    mesh = jax.sharding.AbstractMesh((devices,), ("data",))
    whole = po.plan(tx, params).save_bytes
    assert whole == pytest.approx(3 * 4 * 2**24, rel=1e-6)
    saved = po.plan(tx, params, mesh=mesh).save_bytes
    assert saved == pytest.approx(whole / hosts, rel=1e-6)


def test_link_and_memory_are_those_of_this_machines_card(monkeypatch):
    tx, params = po.paged_adamw(1e-3), {"w": jax.ShapeDtypeStruct((512, 512), "f4")}
    note = "Device and host are one memory here, and their bytes add up"
    rate = lambda **how: po.plan(tx, params, **how).link_gigabytes_per_second
    card = types.SimpleNamespace(device_kind="Tesla T4")
    assert rate() == 25
    assert note not in str(po.plan(tx, params))
    assert note in str(po.plan(tx, params, unified_memory=True))
    monkeypatch.setattr(jax, "local_devices", lambda: [card])
    assert rate() == 16
    assert rate(link_gigabytes_per_second=12) == 12
    card.device_kind = "NVIDIA GB10"
    assert note in str(po.plan(tx, params))


def test_plan_warns_where_the_host_pool_is_too_small(monkeypatch):
    name = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    params = {"w": jax.ShapeDtypeStruct((1 << 20, 1 << 13), jnp.float32)}  # 32 GiB
    tx = po.paged_adamw(1e-3)
    monkeypatch.delenv(name, raising=False)
    # 64 GiB of moments, which are not allocated, in a pool of 64: no warning.
    assert po.plan(tx, params).host_bytes == 2**36
    params["v"] = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    with pytest.warns(UserWarning, match=name) as warned:
        po.plan(tx, params)
    (asked,) = re.findall(rf"{name}=(\d+)", str(warned[0].message))
    monkeypatch.setenv(name, asked)
    po.plan(tx, params)
    monkeypatch.setenv(name, "1")
    with pytest.warns(UserWarning, match="1.0 GiB"):
        po.plan(tx, params)


def test_arrays_too_small_for_their_codec():
    """They are named, with their bytes, as `init` stores them."""
    params = {"a": jnp.ones((64, 32)), "b": jnp.ones(10)}
    tx = po.paged_adamw_8bit(1e-3)
    stored = jax.tree.leaves(tx.init(params))
    assert {x.dtype for x in stored if x.ndim} == {jnp.dtype("float32")}
    note = "fewer than 4,096 values: 4 of 5 arrays, 16.1 KiB."
    assert note in str(po.plan(tx, params))
    fits = po.what_fits(params, device_memory="1GiB", codec="dynamic_int8")
    assert note in " ".join(str(fits).split())
    larger = params | {"c": jnp.ones((64, 64))}
    assert "4 of 7 arrays" in str(po.plan(tx, larger))
    one = po.paged_adamw(1e-3, codec={"mu": "bfloat16"})
    assert "2 of 7 arrays" in str(po.plan(one, larger))
    for plain in (po.paged_adamw(1e-3), po.paged_adamw(1e-3, codec={"c": "bfloat16"})):
        assert "4,096" not in str(po.plan(plain, larger))
