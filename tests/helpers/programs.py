"""Updates of real sizes, as programs for the accelerator compilers."""

import collections
import math

import jax
import jax.numpy as jnp
import optax
import pytest

from helpers import aot
from paged_optax.backend.memory import on_host
from paged_optax.backend.platforms import GPU_FETCHES_AHEAD, GPU_NEEDS_RAW_INDEX
from paged_optax.engine.sharing import MomentFormat, cut
from paged_optax.transform.context import TYPES, within

MIB = 2**20
COMPILERS = pytest.mark.parametrize("compile_for", [aot.h200, aot.v5e])
#: What needs pages that are read while others are written, or layers beside others.
BOTH_WAYS = pytest.mark.skipif(
    GPU_NEEDS_RAW_INDEX, reason="before jax 0.11.2 XLA:GPU takes pages in turn"
)
AHEAD = pytest.mark.skipif(
    not GPU_FETCHES_AHEAD,
    reason="this XLA:GPU needs a layer's own index, so that all goes in turn",
)


def leaf_shapes(tree):
    shape = lambda x: jax.ShapeDtypeStruct(x, jnp.float32)
    return jax.tree.map(shape, tree, is_leaf=lambda x: isinstance(x, tuple))


def bfloat16(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), tree)


def square(leaves, shape=(4096, 4096)):
    return leaf_shapes({f"leaf{i:03}": shape for i in range(leaves)})


def llama(layers=32, hidden=4096, inner=14336, grouped=1024, vocabulary=128256):
    """The 291 parameter shapes of Llama-3-8B."""
    layer = {"q": (hidden, hidden), "o": (hidden, hidden), "down": (inner, hidden)}
    layer |= dict.fromkeys(("k", "v"), (hidden, grouped))
    layer |= dict.fromkeys(("gate", "up"), (hidden, inner))
    layer |= dict.fromkeys(("norm1", "norm2"), (hidden,))
    outer = {"embed": (vocabulary, hidden), "head": (hidden, vocabulary)}
    outer |= {f"layer{i:02}": dict(layer) for i in range(layers)}
    return leaf_shapes(outer | {"norm": (hidden,)})


def placed(tree, sharding):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


def placed_by_type(tree, avals, mesh):
    """Each leaf on the device or on the host, as its type says."""
    device, host = aot.placements(mesh)
    leaves, structure = jax.tree.flatten(tree)
    places = [host if on_host(aval) else device for aval in avals]
    return structure.unflatten(map(placed, leaves, places))


def state_on(mesh, tx, params):
    """Abstract state, each leaf where `init` puts it."""
    with within(visitor=TYPES):
        closed, state = jax.make_jaxpr(tx.init, return_shape=True)(params)
    return placed_by_type(state, closed.out_avals, mesh)


def on_device(mesh, tree):
    return placed(tree, aot.placements(mesh)[0])


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def updating(tx, params):
    """`tx.update` with donated gradients and state, for a compiler."""

    def build(mesh):
        gradients, state = on_device(mesh, params), state_on(mesh, tx, params)
        jitted = jax.jit(
            lambda gradients, state, params: tx.update(gradients, state, params),
            donate_argnums=(0, 1),
            out_shardings=(shardings(gradients), shardings(state)),
        )
        return jitted, (gradients, state, gradients)

    return build


def ordinary_step(loss, tx, differentiated=None):
    """The step that Optax's users write: all gradients are there at once.

    `differentiated(loss, params, batch)` is used for `jax.value_and_grad` if given.
    """

    def step(params, state, batch):
        of = differentiated or (lambda loss, *given: jax.value_and_grad(loss)(*given))
        value, gradients = of(loss, params, batch)
        with jax.named_scope("optimizer"):
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

    return step


def layerwise(mesh, run, model, tx, params, batch, **room):
    """A layerwise step of placed parameters, everything donated, and its arguments."""
    device, _ = aot.placements(mesh)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    workspace = model.workspace(params, **room)
    state = state_on(mesh, tx, shapes)
    if model.layer_tree is not None:
        state = model.init(tx, shapes)
        state = placed_by_type(state, jax.tree.leaves(state), mesh)
    args = params, state, workspace, placed(batch, device)
    # A step leaves everything where it was; to trace it once more takes minutes.
    places = (*shardings(args[:3]), device)
    jitted = jax.jit(
        run, donate_argnums=(0, 1, 2), keep_unused=True, out_shardings=places
    )
    return jitted, args


def transfers(compile_for):
    """Transfers in the program of two moments of many pages: in turn four."""
    if compile_for is aot.v5e:
        return 6  # first pages are read ahead of the loop
    return 4 if GPU_NEEDS_RAW_INDEX else 8  # and last ones are written after it


def whole_tree(inner):
    """What offloading usually means: all moments in, one update, all moments out."""

    def update(gradients, state, params):
        state = jax.device_put(state, jax.memory.Space.Device)
        updates, state = inner.update(gradients, state, params)
        return updates, jax.device_put(state, jax.memory.Space.Host)

    init = lambda params: jax.device_put(inner.init(params), jax.memory.Space.Host)
    return optax.GradientTransformation(init, update)


def assert_in_place(report):
    """Gradients and moments are overwritten, nothing is copied on the host."""
    assert report.host_temp == 0
    assert report.host_aliased == report.host_outputs == report.host_arguments
    # XLA counts the table of output pointers among the outputs: 8 bytes each.
    assert 0 <= report.device_outputs - report.device_aliased < 2**16


def assert_addresses(report, shape, page_size, leaves):
    """Each transfer of an H200's update of leaves by Adam covers exactly its page."""
    pages = cut(shape, (MomentFormat(4),), page_size).gpu
    page_bytes, found = 4 * pages.entries, aot.descriptors(report.hlo)
    first = 0 if GPU_NEEDS_RAW_INDEX else page_bytes  # a page is read ahead
    assert {(kind, start, step) for kind, _, start, step in found} == {
        ("read", first, page_bytes),
        ("write", 0, page_bytes),
        *aot.ends(pages, page_bytes),
    }
    by_kind = collections.Counter()
    for (kind, sizes, _, step), count in found.items():
        by_kind[kind] += count
        assert kind == "write" or 4 * math.prod(map(int, sizes.split(","))) == step
    each = 2 * (1 if GPU_NEEDS_RAW_INDEX else 2) * leaves
    assert by_kind == {"read": each, "write": each}
