"""What of a state is on the device, and what should be."""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.flax_variables import unflatten_like
from paged_optax.backend.memory import (
    bytes_per_device,
    kind_of,
    nbytes,
    on_host,
)
from paged_optax.backend.text import path_name
from paged_optax.backend.types import (
    KeyPath,
    Path,
    Transformation,
    holds_moments,
    is_traced,
)
from paged_optax.backend.validation import brief, check_transformation
from paged_optax.state.leaves import (
    SETTINGS,
    Parameters,
    StateLeaf,
    arrays_at,
    is_quantized,
    moments_within,
    state_fields,
    state_leaves_of,
    unpaged_places,
)
from paged_optax.transform.planned_moments import recorded
from paged_optax.transform.state_layout import too_small


def is_device_resident(state: PyTree, path: Path) -> bool:
    """Whether all moments of a parameter, or of a group, are in device memory.

    Args:
      state: A state.
      path: The parameter, or a group.

    Returns:
      Whether no moment is in host memory.

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
    """How many parameters have all their moments in device memory.

    Args:
      state: A state.

    Returns:
      The number of parameters.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> params = {"small": jnp.ones(8), "large": jnp.ones((512, 512))}
      >>> po.device_resident_count(po.paged_adamw(1e-3).init(params))
      1
    """
    state_leaves = [leaf for leaf in state_leaves_of(state) if leaf.is_moment]
    paged = {leaf.parameter for leaf in state_leaves if on_host(leaf.value)}
    return len({leaf.parameter for leaf in state_leaves} - paged)


def device_bytes(state: PyTree, path: Path | None = None) -> int:
    """Bytes of a state in device memory.

    Args:
      state: A state.
      path: The parameter, or group, whose moments to count; None: every array.

    Returns:
      Bytes, of all devices together where arrays are sharded.

    Raises:
      ValueError: If the state has no such parameter.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> state = po.paged_adamw(1e-3).init({"w": jnp.ones((512, 512))})
      >>> po.device_bytes(state, "w"), po.device_bytes(state)  # the step count
      (0, 4)
    """
    return sum(nbytes(x) for x in arrays_at(state, path) if not on_host(x))


def host_bytes(state: PyTree, path: Path | None = None) -> int:
    """Bytes of a state in host memory.

    Args:
      state: A state.
      path: The parameter, or group, whose moments to count; None: every array.

    Returns:
      Bytes, of all hosts together where arrays are sharded.

    Raises:
      ValueError: If the state has no such parameter.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> state = po.paged_adamw(1e-3).init({"w": jnp.ones((512, 512))})
      >>> po.host_bytes(state, "w") == 2 * 512 * 512 * 4
      True
    """
    return sum(nbytes(x) for x in arrays_at(state, path) if on_host(x))


def rebalance(
    tx: Transformation,
    state: PyTree,
    recent_paths: Iterable[Path],
) -> PyTree:
    """Keeps the most recently used parameters' moments on the device.

    For steps that update some parameters only (`active=`): experts, adapters, sampled
    layers. From the last of `recent_paths` backwards, moments stay on the device, or
    are fetched, as long as they fit `device_budget`; the first that does not fit ends
    the run, and all older ones are in host memory afterwards. A parameter larger than
    the whole budget is passed over. So the result follows from the list and the budget
    alone, also after a restart; for parameters of equal size it is what a least
    recently used cache keeps.

    Evictions come first, and one array moves at a time, so that no more than the budget
    is ever on the device. `state` is consumed: arrays that move are deleted there.

    Where a moment lives is part of its type: an update compiles again for each new set
    of residents.

    Args:
      tx: The transformation, for its `device_budget`: of each device, where moments are
        divided over several. Several paged transformations share the sum of their
        budgets.
      state: Its state.
      recent_paths: Parameters, or groups, in the order of their use, the most recent
        last. Of several mentions the last counts.

    Returns:
      The state, bit for bit the same, its arrays where they belong.

    Raises:
      ValueError: If a path is unknown, or if called inside `jit`.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> experts = {name: jnp.ones((512, 512)) for name in ("a", "b", "c")}
      >>> tx = po.paged_adamw(1e-3, device_budget="4MiB")  # room for two
      >>> state = po.rebalance(tx, tx.init(experts), ["a", "b", "c"])
      >>> [po.is_device_resident(state, name) for name in experts]
      [False, True, True]
    """
    check_transformation("tx", tx)
    if isinstance(recent_paths, str) or not isinstance(recent_paths, Iterable):
        raise TypeError(
            f"recent_paths={brief(recent_paths)} is not a list of paths: pass one, also"
            " of a single parameter."
        )
    state_leaves = state_leaves_of(state, shapes=False)
    # Where a moment lives is part of its type, and a trace cannot change it.
    if is_traced(state):
        raise ValueError(
            "rebalance moves arrays and cannot be traced: call it outside jit, between"
            " steps."
        )
    budget, smallest = _budget(tx, state, state_leaves)
    unpaged = unpaged_places(state_leaves)
    tiny = too_small(
        [bytes_per_device(x.value) if x.is_moment else None for x in state_leaves],
        [x.value for x in state_leaves],
        [x.parameter for x in state_leaves],
        smallest,
    )
    movable = [
        not is_tiny and x.place not in unpaged
        for x, is_tiny in zip(state_leaves, tiny, strict=True)
    ]
    sizes: dict[KeyPath, int] = {}
    for leaf, moves in zip(state_leaves, movable, strict=True):
        if leaf.is_moment:
            size = bytes_per_device(leaf.value) if moves else 0
            sizes[leaf.parameter] = sizes.get(leaf.parameter, 0) + size
    known = Parameters(sizes, "the state")
    used = [name for path in recent_paths for name in known.named_by(path)]
    stays = set(sizes) if budget is None else set()
    left = budget or 0
    for name in dict.fromkeys(reversed(used)):
        if budget is not None and sizes[name] <= budget:
            if sizes[name] > left:
                break  # all older ones go, as a least recently used cache has it
            left -= sizes[name]
            stays.add(name)
    values = [leaf.value for leaf in state_leaves]
    # Evictions come first: no more than the budget is ever on the device.
    for to_host in (True, False):
        for position, leaf in enumerate(state_leaves):
            belongs_on_host = leaf.parameter not in stays
            moves = movable[position] and belongs_on_host != on_host(leaf.value)
            if moves and belongs_on_host == to_host:
                move = functools.partial(moved_to, kind=kind_of(to_host))
                values[position] = jax.tree.map(move, leaf.value)
    return unflatten_like(state, values)


def moved_to(x: Array, kind: str) -> Array:
    """An array moved to a memory, the old one gone before this returns."""
    if x.sharding.memory_kind == kind:
        return x
    sharding = x.sharding.with_memory_kind(kind)
    # One array moves at a time, so that no more than the budget is on the device.
    moved = jax.block_until_ready(jax.device_put(x, sharding))
    x.delete()
    return moved


def _budget(
    tx: Transformation, state: PyTree, state_leaves: list[StateLeaf]
) -> tuple[int | None, int]:
    """The device budget of a transformation, and the smallest moment it pages."""
    params = _parameters_like(state)
    moments = sum(
        bytes_per_device(x.value)
        for x in state_leaves
        if x.is_moment and not on_host(x.value)
    )
    budgets, smallest = {}, []
    for number, (configuration, _) in enumerate(recorded(tx, params)):
        # If several transformations have "auto", the free memory is counted once.
        key = "auto" if configuration.device_budget == "auto" else number
        parameters = sum(map(nbytes, jax.tree.leaves(params)))
        budgets[key] = configuration.budget(parameters, moments)
        smallest.append(configuration.min_paged_size)
    if None in budgets.values():
        return None, 0
    return sum(budgets.values()), min(smallest)


def _parameters_like(state: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
    """A tree of the parameters' structure, made of what a state holds for them."""
    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    is_leaf = lambda x: is_masked(x) or is_quantized(x)
    trees = [
        field
        for path, field in state_fields(state)
        if path_name(path[-1:]) not in SETTINGS
        and any(holds_moments(x.dtype) for x in jax.tree.leaves(field))
    ]
    merged = max(
        trees, key=lambda tree: len(jax.tree.leaves(tree, is_leaf=is_leaf)), default={}
    )
    structure = jax.tree.structure(merged, is_leaf=is_leaf)
    for tree in trees:
        # Each label of optax.partition has moments for its own parameters alone.
        if jax.tree.structure(tree, is_leaf=is_leaf) == structure:
            merged = jax.tree.map(
                lambda first, second: second if is_masked(first) else first,
                merged,
                tree,
                is_leaf=is_leaf,
            )
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jax.tree.leaves(x)[0].shape, jnp.float32),
        merged,
        is_leaf=is_quantized,
    )
