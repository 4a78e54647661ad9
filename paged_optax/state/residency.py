"""Bytes and residency of moments, and moves between memories."""

import collections
import functools
import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.flax_variables import unflatten_like
from paged_optax.backend.memory import (
    bytes_per_device,
    default_memory_kind,
    nbytes,
    on_host,
)
from paged_optax.backend.text import path_name
from paged_optax.backend.types import (
    ArrayOrShape,
    KeyPath,
    Path,
    Transformation,
    holds_moments,
    is_traced,
)
from paged_optax.backend.validation import check_arrays, check_transformation
from paged_optax.state.leaves import (
    SETTINGS,
    StateLeaf,
    is_quantized,
    moments_within,
    pageable,
    parameters_of,
    state_fields,
    state_leaves_of,
)
from paged_optax.transform.planned_moments import recorded
from paged_optax.transform.state_layout import too_small


def is_device_resident(state: PyTree, path: Path) -> bool:
    """Returns whether all moments of a parameter, or group, are in device memory.

    Args:
      state: An optimizer state.
      path: The parameter, or a group.

    Raises:
      ValueError: If the state has no such parameter.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> params = {"small": jnp.ones(8), "large": jnp.ones((512, 512))}
      >>> state = po.paged_adamw(1e-3).init(params)
      >>> [po.is_device_resident(state, name) for name in ("small", "large")]
      [True, False]
    """
    return not any(on_host(leaf.value) for leaf in moments_within(state, path))


def device_resident_count(state: PyTree) -> int:
    """Returns the number of parameters with all their moments in device memory.

    Args:
      state: An optimizer state.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> params = {"small": jnp.ones(8), "large": jnp.ones((512, 512))}
      >>> po.device_resident_count(po.paged_adamw(1e-3).init(params))
      1
    """
    moments = [leaf for leaf in state_leaves_of(state) if leaf.is_moment]
    paged = {leaf.parameter for leaf in moments if on_host(leaf.value)}
    return len({leaf.parameter for leaf in moments} - paged)


def device_bytes(state: PyTree, path: Path | None = None) -> int:
    """Returns the bytes of a state in device memory.

    Args:
      state: An optimizer state.
      path: The parameter, or group, whose moments to count; None: the whole state.

    Returns:
      Bytes, summed over devices where arrays are sharded.

    Raises:
      ValueError: If the state has no such parameter.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> state = po.paged_adamw(1e-3).init({"w": jnp.ones((512, 512))})
      >>> po.device_bytes(state, "w"), po.device_bytes(state)  # the step count
      (0, 4)
    """
    return sum(nbytes(x) for x in _arrays_at(state, path) if not on_host(x))


def host_bytes(state: PyTree, path: Path | None = None) -> int:
    """Returns the bytes of a state in host memory.

    Args:
      state: An optimizer state.
      path: The parameter, or group, whose moments to count; None: the whole state.

    Returns:
      Bytes, summed over hosts where arrays are sharded.

    Raises:
      ValueError: If the state has no such parameter.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> state = po.paged_adamw(1e-3).init({"w": jnp.ones((512, 512))})
      >>> po.host_bytes(state, "w") == 2 * 512 * 512 * 4
      True
    """
    return sum(nbytes(x) for x in _arrays_at(state, path) if on_host(x))


def _arrays_at(state: PyTree, path: Path | None) -> list[ArrayOrShape]:
    check_arrays("state", state)
    if path is None:
        return jax.tree.leaves(state)
    return jax.tree.leaves([leaf.value for leaf in moments_within(state, path)])


def rebalance(
    tx: Transformation, state: PyTree, recent_paths: Iterable[Path] | str
) -> PyTree:
    """Keeps the most recently used parameters' moments on the device.

    For steps that update some parameters only (`active=`): experts, adapters, sampled
    layers. The moments of the most recent parameters stay on the device, or are
    fetched, until one does not fit `device_budget`; all older ones are moved to the
    host. A parameter larger than the whole budget is skipped. The result depends on the
    list and the budget alone, also after a restart. For parameters of equal size it
    equals a least recently used cache.

    Evictions happen first, one array at a time, so that device memory never exceeds the
    budget. `state` is consumed: the arrays that move are deleted from it.

    An update compiles again for each set of residents, because an array's memory is
    part of its type.

    Args:
      tx: The transformation, for its `device_budget`, in bytes of each device. The
        budgets of several paged transformations are added.
      state: Its state.
      recent_paths: Parameters, or groups, from the least to the most recently used; a
        string is one of them. A repeated path counts where it is last.

    Returns:
      The state with the same values, and its arrays moved.

    Raises:
      ValueError: If a path is unknown, or inside `jit`.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> experts = {name: jnp.ones((512, 512)) for name in ("a", "b", "c")}
      >>> tx = po.paged_adamw(1e-3, device_budget="4MiB")  # room for two
      >>> state = po.rebalance(tx, tx.init(experts), ["a", "b", "c"])
      >>> [po.is_device_resident(state, name) for name in experts]
      [False, True, True]
    """
    check_transformation("tx", tx)
    state_leaves = state_leaves_of(state, shapes=False)
    if is_traced(state):
        raise ValueError(
            "rebalance moves arrays and cannot be traced: call it outside jit, between"
            " steps."
        )
    budget, smallest = _budget(tx, state, state_leaves)
    values = [leaf.value for leaf in state_leaves]
    sizes = [bytes_per_device(x.value) if x.is_moment else None for x in state_leaves]
    tiny = too_small(sizes, values, [x.parameter for x in state_leaves], smallest)
    movable = [
        moves and not stays
        for moves, stays in zip(pageable(state_leaves), tiny, strict=True)
    ]
    totals = collections.Counter[KeyPath]()
    for leaf, size, moves in zip(state_leaves, sizes, movable, strict=True):
        if size is not None:
            totals[leaf.parameter] += size * moves
    used = [recent_paths] if isinstance(recent_paths, str) else recent_paths
    groups = map(parameters_of(state_leaves).group, used)
    recent = dict.fromkeys(reversed([path for group in groups for path in group]))
    residents = set(totals)
    if budget is not None:
        fitting = [x for x in recent if totals[x] <= budget]
        sums = itertools.accumulate(totals[x] for x in fitting)
        residents = {x for x, size in zip(fitting, sums, strict=True) if size <= budget}
    for to_host in (True, False):
        move = functools.partial(_moved_to, kind=default_memory_kind(to_host))
        for index, leaf in enumerate(state_leaves):
            if movable[index] and (leaf.parameter in residents) != to_host:
                values[index] = jax.tree.map(move, leaf.value)
    return unflatten_like(state, values)


def _moved_to(x: Array, kind: str) -> Array:
    """Moves an array to a memory; the old one is deleted before this returns."""
    if x.sharding.memory_kind == kind:
        return x
    sharding = x.sharding.with_memory_kind(kind)
    moved = jax.block_until_ready(jax.device_put(x, sharding))
    x.delete()
    return moved


def _budget(
    tx: Transformation, state: PyTree, state_leaves: list[StateLeaf]
) -> tuple[int | None, int]:
    """Returns the device budget, and the size of the smallest moment that is paged."""
    params = _parameters_like(state)
    parameters = sum(map(nbytes, jax.tree.leaves(params)))
    moments = sum(
        bytes_per_device(x.value)
        for x in state_leaves
        if x.is_moment and not on_host(x.value)
    )
    configurations = [x.paged for x in recorded(tx, params)]
    # Several transformations with "auto" share the free memory.
    budgets = {
        "auto" if x.device_budget == "auto" else i: x.budget(parameters, moments)
        for i, x in enumerate(configurations)
    }
    bounded = [x for x in budgets.values() if x is not None]
    if len(bounded) < len(budgets):
        return None, 0
    return sum(bounded), min(x.min_paged_size for x in configurations)


def _parameters_like(state: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns a tree of the parameters' structure, from the moments of a state."""
    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    is_leaf = lambda x: is_masked(x) or is_quantized(x)
    trees = [
        field
        for path, field in state_fields(state)
        if path_name(path[-1:]) not in SETTINGS
        and any(holds_moments(x.dtype) for x in jax.tree.leaves(field))
    ]
    count = lambda tree: len(jax.tree.leaves(tree, is_leaf=is_leaf))
    merged = max(trees, key=count, default={})
    structure = jax.tree.structure(merged, is_leaf=is_leaf)
    merge = lambda first, second: second if is_masked(first) else first
    for tree in trees:
        # Each label of `optax.partition` has moments of some of the parameters.
        if jax.tree.structure(tree, is_leaf=is_leaf) == structure:
            merged = jax.tree.map(merge, merged, tree, is_leaf=is_leaf)
    shape = lambda x: jax.ShapeDtypeStruct(jax.tree.leaves(x)[0].shape, jnp.float32)
    return jax.tree.map(shape, merged, is_leaf=is_quantized)
