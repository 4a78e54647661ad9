"""Updates of some parameters as programs: traced, compiled, for accelerators."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import aot, programs
from helpers.activity import adam, chosen, on_the_device, small
from helpers.gates import bound_of, loop_around
from helpers.hlo import Computations
from helpers.reference import SMALL_PAGES
from helpers.small import counting

EVERY_PATTERN = list(itertools.product((0, 1), repeat=3))


def test_new_flags_are_no_new_program():
    """Whichever parameters are active: traced flags are one program."""
    inner, traces = counting(optax.adam(1e-2))
    tx = po.paged(inner, **SMALL_PAGES)
    params = small()
    state = jax.jit(tx.init)(params)
    update = jax.jit(lambda s, active: tx.update(params, s, params, active=active)[1])
    for gates in EVERY_PATTERN:
        state = update(state, on_the_device(chosen(gates)))
    assert len(traces) == 1
    assert update._cache_size() == 1


def test_new_flags_are_no_new_program_eager(caplog):
    tx, params = po.paged_adam(1e-2, **SMALL_PAGES), small()
    state = tx.init(params)

    def step(gates):
        active = on_the_device(chosen(gates))
        return tx.update(params, state, params, active=active)

    step((0, 0, 0))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for gates in EVERY_PATTERN:
            step(gates)
    assert not [x for x in caplog.messages if re.match("Compiling|Finished XLA", x)]


def test_one_program_for_each_static_pattern(caplog):
    tx, params = po.paged_adam(1e-2, **SMALL_PAGES), small()
    state = tx.init(params)
    patterns = [(1, 0, 0), (0, 1, 0), (1, 0, 0), (0, 1, 0), (1, 1, 1), (1, 0, 0)]
    compiled = lambda: len([x for x in caplog.messages if x.startswith("Compiling")])
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for pattern in patterns:
            active = chosen(pattern)
            _, state = tx.update(params, state, params, active=active)
        assert compiled() == len(set(patterns)) == 3
        tx.update(params, state, params)  # all of them, said in another way
    assert compiled() == 3


def loops(tx, active):
    params = small()
    jaxpr = jax.make_jaxpr(lambda g, s: tx.update(g, s, params, active=active))(
        params, tx.init(params)
    )
    found, stack = [], [jaxpr.jaxpr]
    while stack:
        for eqn in stack.pop().eqns:
            if eqn.primitive.name == "while":
                found.append({x.aval.shape for x in eqn.invars})
                continue
            for value in jax.tree.leaves(list(eqn.params.values())):
                inner = getattr(value, "jaxpr", value)
                stack += [inner] if hasattr(inner, "eqns") else []
    return found


def test_a_leaf_that_is_off_is_not_in_the_program():
    """Known when traced: no loop, and no transfer, of the leaf."""
    everything = loops(adam(), True)
    assert {shape for shapes in everything for shape in shapes} >= {(70, 128), (300,)}
    others = [shapes for shapes in everything if (70, 128) not in shapes]
    for off in (False, np.bool_(False)):
        some = loops(adam(), {"w": off, "v": True, "s": True})
        assert some == others
        assert not any((70, 128) in shapes for shapes in some)
        assert loops(adam(), off) == []


# -- compiled for accelerators --------------------------------------------------

#: Whole pages, a smaller last page, and a leaf that is one page.
COMPILED = {"even": (1024, 1024), "odd": (305, 1024), "single": (256, 1024)}


def gated(tx, params, static=None):
    """`updating` with a traced flag for each parameter; `static` overrides some."""
    static = static or {}

    def build(mesh):
        device, _ = aot.placements(mesh)
        gradients, state = (
            programs.on_device(mesh, params),
            programs.state_on(mesh, tx, params),
        )
        flags = {
            name: jax.ShapeDtypeStruct((), jnp.bool_, sharding=device)
            for name in params
            if name not in static
        }

        def update(flags, gradients, state, params):
            return tx.update(gradients, state, params, active=flags | static)

        jitted = jax.jit(
            update,
            donate_argnums=(1, 2),
            out_shardings=(programs.shardings(gradients), programs.shardings(state)),
        )
        return jitted, (flags, gradients, state, gradients)

    return build


def host_transfers(program):
    """The computation of each transfer to or from host memory."""
    return [
        name
        for name, inside in program.instructions.items()
        for x in inside
        if x.started and program.on_host(x)
    ]


def flag_above(program, computation):
    """The Boolean argument that bounds the outermost loop around a computation."""
    bound = bound_of(program, loop_around(program, computation)).values()
    (flag,) = (x for x in bound if x.operation == "parameter")
    assert "pred[]" in flag.types
    assert {x.operation for x in bound} <= _SAME_FLAG, bound
    return flag.name


#: Operations that leave a flag what it was.
_SAME_FLAG = {"parameter", "convert", "copy", "fusion", "bitcast", "copy-done"}


@pytest.mark.compiler
@programs.COMPILERS
def test_a_flag_is_the_trip_count_of_all_that_travels(compile_for):
    """Every transfer is in a loop from 0 to a parameter's own flag: 0 moves no byte."""
    params = programs.leaf_shapes(COMPILED)
    report = compile_for(gated(po.paged_adamw(1e-3, page_size="1MiB"), params))
    programs.assert_in_place(report)
    program = Computations(report.hlo)
    found = [flag_above(program, name) for name in host_transfers(program)]
    count = {
        flag: sum(f"__{flag}__" in name or f"_{flag}_" in name for name in found)
        for flag in params
    }
    # mu and nu, in and out; the odd leaf has a last page beside a loop's on a TPU, and
    # beside one full page on a GPU.
    loop = programs.transfers(compile_for)
    odd = (loop if compile_for is aot.v5e else 4) + 4
    assert count == {"even": loop, "odd": odd, "single": 4}
    assert len(found) == sum(count.values())
    assert not re.search(r"S\(5\)\S* copy\(", report.hlo)


@pytest.mark.quick("h200")
@pytest.mark.compiler
@programs.COMPILERS
def test_flags_cost_no_scratch(compile_for):
    """Gated leaves are in place as others are, and one at a time."""
    params = programs.leaf_shapes({f"leaf{i}": (4096, 1024) for i in range(6)})
    tx = po.paged_adamw(1e-3, page_size="1MiB", per_parameter_steps=True)
    report, plain = (
        compile_for(gated(tx, params)),
        compile_for(programs.updating(tx, params)),
    )
    programs.assert_in_place(report)
    assert report.host_arguments == plain.host_arguments == 2 * 6 * 16 * programs.MIB
    assert report.device_temp <= plain.device_temp + programs.MIB


@pytest.mark.compiler
@pytest.mark.parametrize("page_size", ["1MiB", "4MiB"])
def test_addresses_under_flags(page_size):
    """Every transfer of the H200 program covers exactly its page."""
    shape, leaves = (4096, 1024), 3
    params = programs.leaf_shapes({f"leaf{i}": shape for i in range(leaves)})
    report = aot.h200(gated(po.paged_adamw(1e-3, page_size=page_size), params))
    programs.assert_addresses(report, shape, int(page_size[0]) * programs.MIB, leaves)


@pytest.mark.compiler
@programs.COMPILERS
def test_what_is_off_is_compiled_away(compile_for):
    """A leaf off when traced: its moments are handed through, and nothing travels."""
    params = programs.leaf_shapes(COMPILED)
    tx = po.paged_adamw(1e-3, page_size="1MiB")
    report = compile_for(gated(tx, params, {"odd": False, "even": True}))
    nothing = compile_for(gated(tx, params, dict.fromkeys(params, False)))
    loop = programs.transfers(compile_for)
    assert len(host_transfers(Computations(report.hlo))) == loop + 4
    for found, count in ((report, loop + 4), (nothing, 0)):
        assert found.transfers == count
        assert found.host_temp == 0
        assert found.host_aliased == found.host_outputs
