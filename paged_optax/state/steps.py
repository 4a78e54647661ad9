"""Step counts of single parameters."""

from collections.abc import Iterable
from itertools import takewhile

import optax
from jax import Array
from jaxtyping import Int, PyTree

from paged_optax.backend.flax_variables import unflatten_like
from paged_optax.backend.memory import donate_within_memory
from paged_optax.backend.text import path_name
from paged_optax.backend.types import KeyPath, Path
from paged_optax.state.leaves import StateLeaf, parameters_of, state_leaves_of


def get_step(state: PyTree, path: Path) -> Int[Array, ""]:
    """Returns the number of steps that one parameter has taken.

    Args:
      state: An optimizer state.
      path: The parameter.

    Returns:
      The parameter's count with `per_parameter_steps=True`, else the shared one.

    Raises:
      ValueError: If the state has no such parameter, or counts no steps.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> params = {"a": jnp.ones((512, 512)), "b": jnp.ones((512, 512))}
      >>> tx = po.paged_adamw(1e-3, per_parameter_steps=True)
      >>> state = tx.init(params)
      >>> active = {"a": True, "b": False}
      >>> _, state = tx.update(params, state, params, active=active)
      >>> int(po.get_step(state, "a")), int(po.get_step(state, "b"))
      (1, 0)
    """
    state_leaves = state_leaves_of(state, shapes=False)
    parameter = parameters_of(state_leaves).one(path)
    count = read_step(state_leaves, parameter)
    if count is None:
        raise ValueError(
            f"the state of parameter {path_name(parameter)!r} counts no steps: its"
            " transformation has no use for them."
        )
    return count


def read_step(
    state_leaves: Iterable[StateLeaf], parameter: KeyPath
) -> Int[Array, ""] | None:
    """Returns the step count of a parameter, its own or a shared one, or None."""
    counts = [leaf for leaf in state_leaves if leaf.is_count]
    for leaf in counts:
        if leaf.parameter == parameter != ():
            return leaf.value
    nodes = _nodes(state_leaves, parameter)
    shared = [
        leaf
        for leaf in counts
        if not leaf.parameter and (leaf.node in nodes or leaf.field == "count")
    ]
    # The count in the moments' state, or a schedule's in the same chain: each label of
    # `optax.partition` has one.
    near = lambda leaf: (leaf.node in nodes, _nearness(leaf.node, nodes))
    return max(shared, key=near).value if shared else None


def counted_by(state_leaves: Iterable[StateLeaf], count: StateLeaf) -> set[KeyPath]:
    """Returns the parameters whose steps a count counts."""
    if count.parameter:
        return {count.parameter}
    near = {
        parameter: _nearness(count.node, _nodes(state_leaves, parameter))
        for parameter in {leaf.parameter for leaf in state_leaves if leaf.is_moment}
    }
    return {x for x, common in near.items() if common == max(near.values())}


def _nodes(state_leaves: Iterable[StateLeaf], parameter: KeyPath) -> set[KeyPath]:
    return {x.node for x in state_leaves if x.is_moment and x.parameter == parameter}


def _nearness(node: KeyPath, nodes: Iterable[KeyPath]) -> int:
    """Returns the length of the longest prefix that a path shares with any other."""
    equal = lambda keys: keys[0] == keys[1]
    common = (takewhile(equal, zip(node, x, strict=False)) for x in nodes)
    return max(len([*keys]) for keys in common)


def increment_step(state: PyTree, path: Path) -> PyTree:
    """Adds one to the step count of one parameter.

    Args:
      state: A state with `per_parameter_steps=True`, unchanged.
      path: The parameter.

    Returns:
      The new state.

    Raises:
      ValueError: If the state has no such parameter, or one count for all.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> tx = po.paged_adamw(1e-3, per_parameter_steps=True)
      >>> state = tx.init({"w": jnp.ones((512, 512))})
      >>> int(po.get_step(po.increment_step(state, "w"), "w"))
      1
    """
    state_leaves = state_leaves_of(state, shapes=False)
    parameter = parameters_of(state_leaves).one(path)
    nodes = {leaf.node for leaf in state_leaves if leaf.is_moment}
    increments = [
        leaf.is_count
        and leaf.parameter == parameter
        # Where the parameters are a single array, all counts are that array's, except
        # those of wrappers around the state with its moments.
        and (parameter or not any(_is_above(leaf.node, node) for node in nodes))
        for leaf in state_leaves
    ]
    if not any(increments):
        raise ValueError(
            f"parameter {path_name(parameter)!r} has no step count of its own: the"
            " state has one count for all parameters, or none. Build the transformation"
            " with per_parameter_steps=True."
        )
    values = [
        optax.safe_increment(leaf.value) if counts else leaf.value
        for leaf, counts in zip(state_leaves, increments, strict=True)
    ]
    return unflatten_like(state, donate_within_memory(values))


def _is_above(node: KeyPath, other: KeyPath) -> bool:
    return node != other and other[: len(node)] == node
