"""What XLA:GPU's runtime does in one call, as often as the program says."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import paged_optax as po
from helpers import aot
from helpers.programs import square, updating
from helpers.runtime_counts import RuntimeCounts

PAGES, ROWS, COLUMNS = 8, 256, 1024
PAGE = 4 * ROWS * COLUMNS


def counts(step, trips=()):
    """Of `step(x, pages, n, up, down)`, for an H200."""

    def build(mesh):
        device, host = aot.placements(mesh)
        args = (
            jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32, sharding=device),
            jax.ShapeDtypeStruct((PAGES, ROWS, COLUMNS), jnp.float32, sharding=host),
            jax.ShapeDtypeStruct((), jnp.int32, sharding=device),
        )
        up = lambda x: jax.device_put(x, device)
        down = lambda x: jax.device_put(x, host)
        whole = lambda x, pages, n: step(x, pages, n, up, down)
        placed = {"donate_argnums": (0, 1), "out_shardings": (device, host)}
        return jax.jit(whole, **placed), args

    return RuntimeCounts.of(aot.h200(build).hlo, trips)


def page(pages, i):
    return jax.lax.dynamic_index_in_dim(pages, i, keepdims=False)


def stream(turns):
    """One page up and down a turn."""

    def step(x, pages, n, up, down):
        def turn(i, carried):
            x, pages = carried
            x = x * 0.9 + up(page(pages, i))
            return x, jax.lax.dynamic_update_index_in_dim(pages, down(x), i, 0)

        return jax.lax.fori_loop(0, n if turns is None else turns, turn, (x, pages))

    return step


def computing(turns):
    """One kernel a turn, and one that counts."""

    def step(x, pages, n, up, down):
        return jax.lax.fori_loop(0, turns, lambda i, x: jnp.sin(x), x), pages

    return step


@pytest.mark.compiler
def test_a_page_a_turn():
    found = counts(stream(7))
    assert (found.transfers_up, found.transfers_down) == (7, 7)
    assert found.transfer_bytes == 2 * 7 * PAGE
    assert found.loop_turns == 7
    assert found.zero_copy_up == found.zero_copy_down == found.host_syncs == 0


@pytest.mark.compiler
def test_loops_without_a_stated_count():
    """One turn, or those that are given; and the host asks once more than it turns."""
    once, five = counts(stream(None)), counts(stream(None), trips=[5])
    assert (once.host_syncs, five.host_syncs) == (2, 6)
    # No count, no address: kernels move the pages.
    assert (once.zero_copy_up, once.zero_copy_down) == (1, 1)
    assert (five.zero_copy_up, five.zero_copy_down) == (5, 5)
    assert five.zero_copy_bytes == 5 * once.zero_copy_bytes == 2 * 5 * PAGE
    assert once.transfers_up == once.transfers_down == once.loop_turns == 0
    # Each turn has the page's kernel, one that counts, and the condition's.
    assert five.kernels - once.kernels >= 4 * 3


@pytest.mark.compiler
def test_a_condition():
    """The larger branch is counted, and one wait."""

    def step(x, pages, n, up, down):
        either = lambda turns: lambda x: computing(turns)(x, pages, n, up, down)[0]
        return jax.lax.cond(n > 3, either(5), either(3), x), pages

    found = counts(step)
    assert found.host_syncs == 1
    assert found.loop_turns == 5
    assert 2 * 5 <= found.kernels < 2 * (5 + 3)


@pytest.mark.compiler
def test_a_constant_index_takes_a_kernel():
    read = counts(lambda x, pages, n, up, down: (x + up(page(pages, 3)), pages))
    assert (read.zero_copy_up, read.zero_copy_down) == (1, 0)
    assert read.zero_copy_bytes == PAGE
    write = counts(
        lambda x, pages, n, up, down: (
            x + 1,
            jax.lax.dynamic_update_index_in_dim(pages, down(x), 5, 0),
        )
    )
    assert (write.zero_copy_up, write.zero_copy_down) == (0, 1)
    assert write.zero_copy_bytes == PAGE
    assert read.transfer_bytes == write.transfer_bytes == 0


@pytest.mark.compiler
def test_columns_take_kernels():
    """A slice that is not contiguous."""

    def step(x, pages, n, up, down):
        def turn(i, x):
            some = jax.lax.dynamic_slice(pages, (0, 0, 128 * i), (1, ROWS, 128))
            return x * 0.9 + jnp.tile(up(some)[0], (1, COLUMNS // 128))

        return jax.lax.fori_loop(0, 7, turn, x), pages

    found = counts(step)
    assert (found.zero_copy_up, found.transfers_up) == (7, 0)
    assert found.zero_copy_bytes == 7 * PAGE * 128 // COLUMNS


@pytest.mark.compiler
def test_whole_arrays_are_copied_by_the_engine():
    found = counts(lambda x, pages, n, up, down: (x, down(up(pages) * 2)))
    assert (found.transfers_up, found.transfers_down) == (1, 1)
    assert found.transfer_bytes == 2 * PAGES * PAGE


@pytest.mark.compiler
def test_an_update_moves_the_bytes_of_its_plan():
    """And the host waits twice at each gate of the program, if it has any."""
    tx, params = po.paged_adamw(1e-3), square(3)
    report = aot.h200(updating(tx, params))
    found = RuntimeCounts.of(report.hlo)
    moved = found.transfer_bytes + found.zero_copy_bytes
    assert moved == po.plan(tx, params).link_bytes
    loops = [line for line in report.hlo.splitlines() if " while(" in line]
    gates = [line for line in loops if "known_trip_count" not in line]
    assert found.host_syncs == 2 * len(gates)


WRITTEN = """HloModule written, is_scheduled=true

%fused (a: f32[64,128]) -> f32[64,128] {
  ROOT %a = f32[64,128]{1,0} parameter(0)
}

%sliced (b: f32[8,64,128]) -> f32[1,64,128] {
  %b = f32[8,64,128]{2,1,0} parameter(0)
  ROOT %c = f32[1,64,128]{2,1,0} dynamic-slice(%b), dynamic_slice_sizes={1,64,128}
}

%read (d: f32[8,64,128]) -> f32[64,128] {
  %d = f32[8,64,128]{2,1,0:S(5)} parameter(0)
  ROOT %e = f32[64,128]{1,0} dynamic-slice(%d), dynamic_slice_sizes={1,64,128}
}

%asked (f: (s32[])) -> pred[] {
  %f = (s32[]) parameter(0)
  ROOT %g = pred[] fusion(%f), kind=kLoop, calls=%fused
}

%gate (h: (s32[])) -> (s32[]) {
  %h = (s32[]) parameter(0)
  %i = (s32[]) while(%h), condition=%asked, body=%turn, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %j = (s32[]) while(%i), condition=%asked, body=%turn, backend_config={"known_trip_count":{"n":"6"}}
}

%turn (k: (s32[])) -> (s32[]) {
  %k = (s32[]) parameter(0)
  %l.remat = f32[64,128]{1,0} fusion(%k), kind=kLoop, calls=%fused
  %m = ((f32[8,64,128]{2,1,0}), f32[1,64,128]{2,1,0}, u32[]) fusion-start(%l.remat), calls=%sliced
  %n = f32[1,64,128]{2,1,0} fusion-done(%m)
  ROOT %o = (s32[]) tuple(%n)
}

%much (p: (s32[])) -> (s32[]) {
  %p = (s32[]) parameter(0)
  %q = f32[64,128]{1,0} fusion(%p), kind=kLoop, calls=%fused
  ROOT %r = f32[64,128]{1,0} fusion(%q), kind=kLoop, calls=%fused
}

%little (s: (s32[])) -> (s32[]) {
  ROOT %s = (s32[]) parameter(0)
}

ENTRY %main (t: f32[8,64,128], u: f32[64,128]) -> f32[64,128] {
  %t = f32[8,64,128]{2,1,0:S(5)} parameter(0)
  %u = f32[64,128]{1,0} parameter(1)
  %v = f32[64,128]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %w = (s32[]) while(%u), condition=%asked, body=%gate
  %x = (s32[]) conditional(%w), branch_computations={%much, %little}
  %y = (s32[]) call(%x), to_apply=%much
  %xx.remat2 = f32[8192]{0} bitcast(%u)
  %yy = f32[1,64,128]{2,1,0} fusion(%u), kind=kLoop, calls=%sliced
  %z = f32[64,128]{1,0} fusion(%t), kind=kLoop, calls=%read
  %aa = (f32[64,128]{1,0}, f32[64,128]{1,0}, u32[]) all-reduce-start(%z), to_apply=%fused
  %ab = f32[64,128]{1,0} all-reduce-done(%aa)
  %ac = f32[64,128]{1,0:S(5)} copy(%ab)
  %ad = f32[64,128]{1,0:S(5)} copy(%ac)
  ROOT %ae = f32[64,128]{1,0} copy(%ad)
}
"""  # noqa: E501


def test_copies_without_a_start():
    """A copy, and a slice at a stated address: nothing else runs meanwhile."""
    wanted = RuntimeCounts.of(WRITTEN)
    # The same copies begun ahead of what waits for them.
    ahead = WRITTEN
    for name, operand in [("ac", "ab"), ("ae", "ad")]:
        line = next(x for x in WRITTEN.splitlines() if f"%{name} =" in x)
        types = line.partition(" = ")[2].partition(" copy(")[0]
        other = "f32[64,128]{1,0}" if "S(5)" in types else "f32[64,128]{1,0:S(5)}"
        start = f"  %{name}s = ({types}, {other}, u32[]) copy-start(%{operand})"
        done = line.replace(f"copy(%{operand})", f"copy-done(%{name}s)")
        ahead = ahead.replace(line, f"{start}\n{done}")
    assert RuntimeCounts.of(ahead) == dataclasses.replace(wanted, sync_transfers=0)
    config = 'backend_config={"dynamic_slice_config":{"byte_stride":"4"}}'
    part = "dynamic-slice(%d), dynamic_slice_sizes={1,64,128}"
    stated = WRITTEN.replace(part, f"{part}, {config}")
    found = RuntimeCounts.of(stated)
    assert found.zero_copy_up == 0
    assert found.sync_transfers == wanted.sync_transfers + 1


def test_a_written_program():
    """Each line counts once where it runs once, and as often as its loops turn."""
    assert RuntimeCounts.of(WRITTEN) == RuntimeCounts(
        # Of turns; of a gate's condition; of the larger branch, and the same called; of
        # a slice and of a read that are waited for; and a collective.
        kernels=(4 + 6) + 2 + 2 + 2 + 1 + 1 + 1,
        host_syncs=2 + 1,
        loop_turns=4 + 6,
        transfers_up=1,
        transfers_down=1,
        sync_transfers=2,
        transfer_bytes=2 * 4 * 64 * 128,
        zero_copy_up=1,
        zero_copy_bytes=4 * 64 * 128,
        device_slices=4 + 6,
        host_copies=1,
        rematerialized=1,
    )
