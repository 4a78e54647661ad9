"""Parameters that are not the layers', and wait in host memory.

Prologue, epilogue, the prologue's gradients and the update each fetch them, and give
them up. Their gradients wait on the host too while those of the layers are made.
"""

from typing import TypeVar

import jax
from jax import Array, lax
from jaxtyping import Int, PyTree

from paged_optax.backend.memory import DEVICE, HOST, on_host

# Parts of a parameter that is changed in place.
_PARTS = 16

Tree = TypeVar("Tree", bound=PyTree)
Behind = TypeVar("Behind", bound=PyTree)


def on_device(x: Array) -> Array:
    """An array, fetched if it is on the host."""
    return jax.device_put(x, DEVICE) if on_host(x) else x


def fetched(tree: Tree, behind: Behind) -> tuple[Tree, Behind]:
    """A tree on the device, fetched when something else has been computed.

    Without that XLA takes all fetches of one array for one, and keeps what it fetched.

    Args:
      tree: The tree.
      behind: What is computed first.

    Returns:
      The tree, and `behind`.
    """
    leaves, structure = jax.tree.flatten(tree)
    hosted = [x for x in leaves if on_host(x)]
    if not hosted:
        return tree, behind
    hosted, behind = lax.optimization_barrier((hosted, behind))
    here = iter([on_device(x) for x in hosted])
    leaves = [next(here) if on_host(x) else x for x in leaves]
    return structure.unflatten(leaves), behind


def returned(tree: Tree, like: PyTree) -> Tree:
    """A tree of which those leaves go to the host that are there in another one."""
    return jax.tree.map(
        lambda x, old: (
            jax.device_put(x, HOST) if on_host(old) and not on_host(x) else x
        ),
        tree,
        like,
    )


def added(x: Array, update: Array) -> Array:
    """`x + update` in the update's place: XLA:GPU takes a third buffer for the sum.

    Args:
      x: A parameter that was fetched.
      update: Its update.
    """
    rows = x.shape[0] if x.ndim else 1
    parts = max(n for n in range(1, _PARTS + 1) if rows % n == 0)
    if parts == 1 or update.dtype != x.dtype:
        return (x + update).astype(x.dtype)
    size = rows // parts

    def body(i: Int[Array, ""], update: Array) -> Array:
        part = lambda x: lax.dynamic_slice_in_dim(x, i * size, size)
        new = part(x) + part(update)
        return lax.dynamic_update_slice_in_dim(update, new, i * size, 0)

    return lax.fori_loop(0, parts, body, update)
