"""The step model: each overhead is added as often as counted, and queues are kept."""

import dataclasses
import math

import pytest

from helpers import step_model
from helpers.hlo import Computations
from helpers.runtime_counts import RuntimeCounts
from helpers.step_model import Machine, Overheads

#: Gates, counted loops, a condition, and what is waited for as soon as it is started.
NESTED = """HloModule nested, is_scheduled=true

%fused (a: f32[64,128]) -> f32[64,128] {
  ROOT %a = f32[64,128]{1,0} parameter(0)
}

%asked (b: (s32[])) -> pred[] {
  %b = (s32[]) parameter(0)
  ROOT %c = pred[] fusion(%b), kind=kLoop, calls=%fused
}

%gate (d: (s32[])) -> (s32[]) {
  %d = (s32[]) parameter(0)
  ROOT %e = (s32[]) while(%d), condition=%asked, body=%turn, config={"known_trip_count":{"n":"9"}}
}

%turn (f: (s32[])) -> (s32[]) {
  %f = (s32[]) parameter(0)
  %g = (f32[25]{0}, f32[25]{0:S(5)}, u32[]) copy-start(%f)
  %h = f32[25]{0} copy-done(%g)
  %i = f32[64,128]{1,0} fusion(%h), kind=kLoop, calls=%fused
  %j = (f32[25]{0:S(5)}, f32[25]{0}, u32[]) copy-start(%i)
  %k = f32[25]{0:S(5)} copy-done(%j)
  ROOT %l = (s32[]) tuple(%f)
}

%once (m: (s32[])) -> (s32[]) {
  %m = (s32[]) parameter(0)
  ROOT %n = (s32[]) while(%m), condition=%asked, body=%gate
}

ENTRY %main (o: (s32[])) -> (s32[]) {
  %o = (s32[]) parameter(0)
  %p = (s32[]) while(%o), condition=%asked, body=%once, config={"known_trip_count":{"n":"5"}}
  ROOT %q = (s32[]) conditional(%p), branch_computations={%once}
}
"""  # noqa: E501

#: 100 bytes up and 100 down at once, and as many copied on the device.
AT_ONCE = """HloModule at_once, is_scheduled=true

ENTRY %main (a: f32[25], b: f32[25]) -> f32[25] {
  %a = f32[25]{0:S(5)} parameter(0)
  %b = f32[25]{0} parameter(1)
  %up = (f32[25]{0}, f32[25]{0:S(5)}, u32[]) copy-start(%a)
  %down = (f32[25]{0:S(5)}, f32[25]{0}, u32[]) copy-start(%b)
  %slice = (f32[25]{0}, f32[25]{0}, u32[]) copy-start(%b)
  %c = f32[25]{0} copy-done(%up)
  %d = f32[25]{0:S(5)} copy-done(%down)
  %e = f32[25]{0} copy-done(%slice)
  ROOT %f = (f32[25]{0}, f32[25]{0:S(5)}, f32[25]{0}) tuple(%c, %d, %e)
}
"""
LINK = Machine(link=100.0)


def seconds(hlo, machine=LINK, in_turn=None, **overheads):
    over = Overheads(**overheads)
    return step_model.cost(hlo, machine, overheads=over, in_turn=in_turn).seconds


@pytest.mark.parametrize(
    ("overhead", "count"),
    [("gap", "kernels"), ("kernel", "kernels"), ("sync", "host_syncs")]
    + [("graph", "loop_turns"), ("copy", "transfers_up"), ("copy", "transfers_down")],
)
def test_an_overhead_is_added_as_often_as_is_counted(overhead, count):
    """Where nothing runs beside anything else."""
    counted = dataclasses.asdict(RuntimeCounts.of(NESTED))[count]
    ways = 2 if overhead == "copy" else 1  # as many up as down
    added = seconds(NESTED, **{overhead: 1.0}) - seconds(NESTED)
    assert math.isclose(added, ways * counted)
    assert counted > 0


@pytest.mark.parametrize(
    ("overheads", "wanted"),
    [
        ({}, 1.0),
        ({"one_way": 0.5}, 2.0),
        ({"zero_copy": 0.5}, 1.0),
        # The second way has half the link until the first is free.
        ({"bidirectional": 0.75}, 1.5),
        # One after the other.
        ({"bidirectional": 0.5}, 2.0),
    ],
)
def test_the_link(overheads, wanted):
    assert math.isclose(seconds(AT_ONCE, **overheads), wanted)


def test_kernels_over_the_link_have_their_own_rate():
    slice = "fusion-start(%a), calls=%read"
    read = "%read (x: f32[25]) -> f32[25] {\n  ROOT %x = f32[25]{0} parameter(0)\n}\n\n"
    hlo = AT_ONCE.replace("copy-start(%a)", slice).replace("ENTRY", read + "ENTRY")
    assert RuntimeCounts.of(hlo).zero_copy_up == 1
    assert math.isclose(seconds(hlo, zero_copy=0.5), 2.0)


@pytest.mark.parametrize(
    ("in_turn", "wanted"), [(None, 2.0), (4, 2.0), (3, 2.0), (2, 3.0), (1, 4.0)]
)
def test_streams(in_turn, wanted):
    """A slice that takes two seconds: with two streams, after one that takes one."""
    machine = Machine(link=100.0, memory=100.0)
    assert math.isclose(seconds(AT_ONCE, machine, in_turn, slices=2.0), wanted)


def test_streams_are_dealt_in_post_order():
    """What is used first comes first, after what it has to wait for."""
    assert step_model.dealt(Computations(AT_ONCE), None) == {}
    assert step_model.dealt(Computations(AT_ONCE), 2) == {
        "up": 0,
        "down": 1,
        "slice": 0,
    }
    other = AT_ONCE.replace("tuple(%c, %d, %e)", "tuple(%e, %d, %c)")
    assert step_model.dealt(Computations(other), 2) == {"slice": 0, "down": 1, "up": 0}
    # What nothing uses comes in the order of the program.
    other = AT_ONCE.replace("tuple(%c, %d, %e)", "tuple(%c)")
    assert step_model.dealt(Computations(other), 3) == {"down": 0, "slice": 1, "up": 2}
    after = "copy-start(%a), control-predecessors={%slice}"
    other = AT_ONCE.replace("copy-start(%a)", after)
    assert step_model.dealt(Computations(other), 2) == {"slice": 0, "up": 1, "down": 0}


def test_a_range():
    machine = Machine(link=1e6, memory=1e9, flops=1e12)
    low, high = step_model.between(NESTED, machine)
    assert step_model.cost(NESTED, machine).seconds < low < high


#: A product as XLA:GPU hands it to cuBLAS, as it does on a T4.
PRODUCT = """HloModule product, is_scheduled=true

ENTRY %main (a: f32[8,32], b: f32[32,4]) -> (f32[8,4], s8[64]) {
  %a = f32[8,32]{1,0} parameter(0)
  %b = f32[32,4]{1,0} parameter(1)
  ROOT %c = (f32[8,4]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", metadata={op_name="dot_general"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}
"""  # noqa: E501


def test_products_of_cublas():
    assert seconds(PRODUCT, Machine(link=1.0, flops=1.0)) == 2 * 8 * 32 * 4


def test_rates_of_a_card():
    """As large a part of its data sheet as of an H200's; a T4 has its float32 units."""
    assert step_model.machine_of("h200") == step_model.H200
    l4, t4 = map(step_model.machine_of, ("l4", "t4"))
    assert math.isclose(l4.link, step_model.H200.link / 2)
    assert math.isclose(l4.flops / step_model.H200.flops, 121 / 989.5)
    assert math.isclose(l4.memory / step_model.H200.memory, 0.3 / 4.8)
    assert math.isclose(t4.flops / step_model.H200.flops, 8.1 / 989.5)
