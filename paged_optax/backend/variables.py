"""Flax NNX's variables: boxes around the arrays of a model and of its optimizer.

`nnx.Optimizer` gives `init` parameters in their variables, puts each array of the state
into one, and calls `update` with bare arrays. So everything is named, divided and
computed by bare arrays here, and gets its variables back at the end. Checked with Flax
0.12.8 and 0.12.12.
"""

import sys

import jax
from jaxtyping import PyTree


def bare(tree: PyTree) -> PyTree:
    """A tree without its variables, as `nnx.Optimizer` gives it to `update`."""
    nnx = sys.modules.get("flax.nnx")  # else nothing can be in a variable
    return tree if nnx is None else nnx.as_pure(tree)


def like(tree: PyTree, new: PyTree) -> PyTree:
    """A tree's containers and variables, with the leaves of a new one."""
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(new))


def settled(state: PyTree) -> PyTree:
    """A new state whose variables Flax leaves as they are, where they are.

    Flax makes one mapping of all that a variable holds, so what is stored in several
    arrays has a variable for each. And `nnx.Optimizer` moves what a variable with
    sharding metadata holds, to device memory, unless the variable says not to.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return state
    is_variable = lambda x: isinstance(x, nnx.Variable)

    def settle(x: PyTree) -> PyTree:
        if not is_variable(x):
            return x
        stays = {"eager_sharding": False} if x.has_metadata("out_sharding") else {}
        return jax.tree.map(lambda value: x.copy(value, **stays), x.get_raw_value())

    return jax.tree.map(settle, state, is_leaf=is_variable)
