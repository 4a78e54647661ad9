"""One parameter's state: in, out, steps, residency.

Parameters are named by path: `"blocks/0/attn/q/kernel"`, or JAX's key path. A path that
leads to a group of parameters names all of them; functions of one parameter take it
where the group has one member (Flax's `.../kernel/value`).

Everything is read off the state itself: its structure says which leaf is whose moment,
its arrays' memory kinds say where each lives.
"""

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Int

from paged_optax.codecs import Quantized
from paged_optax.donation import paired
from paged_optax.memory import (
    DEVICE,
    HOST,
    PINNED_HOST,
    bytes_a_device,
    memory_kinds,
    nbytes,
    on_host,
)
from paged_optax.plan import parameter_of, recorded
from paged_optax.sharding import (
    explicitly_typed,
    refuse_uneven,
    typed_by_memory,
)
from paged_optax.variables import bare, like

#: A path string, or a JAX key path.
Path = str | tuple[Any, ...]

#: What `optax.inject_hyperparams` keeps beside moments: trees of settings.
_SETTINGS = ("hyperparams", "hyperparams_states")

#: Fields of the parameters' structure that no parameter's update reads and writes: the
#: accumulators of `optax.MultiSteps` stay on the device.
_NO_MOMENTS = (*_SETTINGS, "acc_grads")


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One leaf of a state.

    Attributes:
      node: The path of the Optax state it belongs to.
      field: The name of its field there: `"mu"`, `"count"`.
      parameter: The path of its parameter; `""` where it is not in a tree of them.
      value: The array.
    """

    node: str
    field: str
    parameter: str
    value: Any

    @property
    def is_moment(self) -> bool:
        if isinstance(self.value, Quantized):
            return True
        if self.field in _NO_MOMENTS:
            return False
        if not jnp.issubdtype(self.value.dtype, jnp.inexact):
            return False
        return bool(self.parameter) or self.value.ndim > 0

    @property
    def is_count(self) -> bool:
        if isinstance(self.value, Quantized) or self.field in _SETTINGS:
            return False
        return self.value.ndim == 0 and jnp.issubdtype(self.value.dtype, jnp.integer)

    @property
    def place(self) -> tuple[str, str]:
        """What holds it, and its like of every other parameter."""
        return self.node, self.field


def page_in(state: optax.OptState, path: Path) -> dict[str, Array]:
    """One parameter's moments, on the device.

    The state stays as it is: the result is a copy.

    Args:
      state: A state, with a paged transformation's anywhere inside.
      path: The parameter.

    Returns:
      Its moments in device memory, by name. The name is that of Optax's field (`"mu"`,
      `"nu"`, `"trace"`), with the path to it where two fields have one name. A moment
      that a codec stores in blocks is a `codecs.Quantized`; four codes of a byte are
      one word there, and `codecs.unarranged(codec, moment)` takes them apart.

    Raises:
      ValueError: If the state has no such parameter; the message has close names.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> params = {"block": {"kernel": jnp.ones((512, 512))}}
      >>> state = po.paged_adamw(1e-3).init(params)
      >>> moments = po.page_in(state, "block/kernel")
      >>> sorted(moments), moments["mu"].shape
      (['mu', 'nu'], (512, 512))
    """
    moments = {
        name: jax.device_put(leaf.value, DEVICE)
        for name, (_, leaf) in _moments_of(state, path).items()
    }
    return paired(moments)


def page_out(
    state: optax.OptState, path: Path, moments: Mapping[str, Array]
) -> optax.OptState:
    """A state with one parameter's moments replaced, and in host memory.

    Args:
      state: A state; it stays as it is.
      path: The parameter.
      moments: Its new moments, by the names of `page_in`, of the old ones' shapes and
        dtypes. They go beside the parameter, on the device or the shards of the old
        ones.

    Returns:
      The new state. It shares every other array with the old one. What is never paged
      stays on the device: the trace of an `optax.trace` beside `paged(...)`.

    Raises:
      ValueError: If the state has no such parameter, or the moments are not its.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> state = po.paged_adamw(1e-3).init({"w": jnp.ones((512, 512))})
      >>> moments = po.page_in(state, "w")
      >>> state = po.page_out(state, "w", moments | {"mu": moments["mu"] + 1.0})
      >>> float(po.page_in(state, "w")["mu"][0, 0]), po.is_device_resident(state, "w")
      (1.0, False)
    """
    known = _moments_of(state, path)
    if set(moments) != set(known):
        raise ValueError(
            f"moments={sorted(moments)}: parameter {_name(path)!r} has the moments"
            f" {sorted(known)}: pass those, as page_in gives them."
        )
    found = leaves_of(state)
    leaves, unpaged = [leaf.value for leaf in found], _unpaged(found)
    for name, (position, leaf) in known.items():
        given, held = _describe(moments[name]), _describe(leaf.value)
        if given != held:
            raise ValueError(
                f"moments[{name!r}] is {given}, and the state of parameter"
                f" {_name(path)!r} holds {held}: pass moments as page_in gives them."
            )
        put = functools.partial(_put_beside, host=leaf.place not in unpaged)
        leaves[position] = jax.tree.map(put, moments[name], leaf.value)
    return like(state, paired(leaves))


def init_param(
    tx: optax.GradientTransformation,
    state: optax.OptState,
    params: optax.Params,
    path: Path,
) -> optax.OptState:
    """A state with the moments of a parameter that joins, or starts again.

    Only the new parameter's moments are allocated.

    Args:
      tx: The transformation.
      state: Its state, for the parameters without the new one, or with it.
      params: The parameters with the new one.
      path: The new parameter, or a group of them (an adapter).

    Returns:
      The state that `tx` needs for `params`: all others' moments and counts are those
      of `state`.

    Raises:
      ValueError: If `params` has no such parameter, or others that the state lacks.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> params = {"old": jnp.ones((512, 512))}
      >>> tx = po.paged_adamw(1e-3)
      >>> state = tx.init(params)
      >>> params["new"] = jnp.ones((512, 256))
      >>> state = po.init_param(tx, state, params, "new")
      >>> po.page_in(state, "new")["mu"].shape
      (512, 256)
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(params)
    names = [_name(key_path) for key_path, _ in flat]
    joins = set(_select(path, names, "params"))
    # All others empty: their moments cost nothing, and are not used.
    alone = [
        x if name in joins else jnp.zeros((0, *x.shape[1:]), x.dtype)
        for name, (_, x) in zip(names, flat, strict=True)
    ]
    made = tx.init(jax.tree.unflatten(structure, alone))
    placed = [leaf.value for leaf in leaves_of(abstract_state(tx, params))]
    known = leaves_of(state)
    old = {(*leaf.place, leaf.parameter): leaf.value for leaf in known}
    wanted = leaves_of(made)
    leaves = []
    for leaf, place in zip(wanted, placed, strict=True):
        key = (*leaf.place, leaf.parameter)
        if leaf.parameter in joins and leaf.field not in _SETTINGS:
            leaves.append(jax.tree.map(_placed, leaf.value, place))
        elif key in old:
            leaves.append(old[key])
        else:
            raise ValueError(
                f"the state has no {leaf.field} of parameter {leaf.parameter!r} either:"
                f" name it too, by a path that leads to it and to {_name(path)!r}, or"
                " add one after the other."
            )
    # Where nothing joins, the state keeps its containers: `nnx.Optimizer` has its own.
    same = [(*x.place, x.parameter) for x in wanted] == list(old)
    keeps = same and len(old) == len(known)
    return like(state if keeps else made, paired(leaves))


def get_step(state: optax.OptState, path: Path) -> Int[Array, ""]:
    """How many steps one parameter has had.

    Args:
      state: A state.
      path: The parameter.

    Returns:
      Its own count with `per_parameter_steps=True`, else the count it shares.

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
    leaves = leaves_of(state)
    parameter = _single(path, leaves)
    count = step_of(leaves, parameter)
    if count is None:
        raise ValueError(
            f"the state of parameter {parameter!r} counts no steps: its transformation"
            " has no use for them."
        )
    return count


def step_of(leaves: Iterable[_Leaf], parameter: str) -> Int[Array, ""] | None:
    """The step count of a parameter: its own, or the one it shares, or None."""
    counts = [leaf for leaf in leaves if leaf.is_count]
    own = [leaf for leaf in counts if leaf.parameter == parameter != ""]
    if own:
        return own[0].value
    nodes = _nodes(leaves, parameter)
    shared = [
        leaf
        for leaf in counts
        if not leaf.parameter and (leaf.node in nodes or leaf.field == "count")
    ]
    if shared:
        # The count beside its moments, or that of a schedule of the same chain: each
        # label of optax.partition has its own.
        best = lambda x: (x.node in nodes, _nearness(x.node, nodes))
        return max(shared, key=best).value
    return None


def served_by(leaves: Iterable[_Leaf], count: _Leaf) -> set[str]:
    """The parameters whose steps a count counts: its own, or those of its label."""
    if count.parameter:
        return {count.parameter}
    near = {
        parameter: _nearness(count.node, _nodes(leaves, parameter))
        for parameter in {leaf.parameter for leaf in leaves if leaf.is_moment}
    }
    return {x for x, distance in near.items() if distance == max(near.values())}


def _nodes(leaves: Iterable[_Leaf], parameter: str) -> set[str]:
    """What holds a parameter's moments."""
    return {x.node for x in leaves if x.is_moment and x.parameter == parameter}


def _nearness(node: str, nodes: Iterable[str]) -> int:
    return max(_common(node, other) for other in nodes)


def increment_step(state: optax.OptState, path: Path) -> optax.OptState:
    """A state in which one parameter has had one step more.

    Args:
      state: A state with `per_parameter_steps=True`; it stays as it is.
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
    leaves = leaves_of(state)
    parameter = _single(path, leaves)
    nodes = {leaf.node for leaf in leaves if leaf.is_moment}
    own = [
        leaf.is_count
        and leaf.parameter == parameter
        # A single array has every count to itself, but for those of wrappers around.
        and (parameter or not any(_is_above(leaf.node, node) for node in nodes))
        for leaf in leaves
    ]
    if not any(own):
        raise ValueError(
            f"parameter {parameter!r} has no step count of its own: the state has one"
            " count for all parameters, or none. Build the transformation with"
            " per_parameter_steps=True."
        )
    values = [
        optax.safe_increment(leaf.value) if yes else leaf.value
        for leaf, yes in zip(leaves, own, strict=True)
    ]
    return like(state, paired(values))


def is_device_resident(state: optax.OptState, path: Path) -> bool:
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
    leaves = [leaf for leaf in leaves_of(state) if leaf.is_moment]
    inside = set(_select(path, [leaf.parameter for leaf in leaves], "the state"))
    return not any(on_host(x.value) for x in leaves if x.parameter in inside)


def device_resident_count(state: optax.OptState) -> int:
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
    leaves = [leaf for leaf in leaves_of(state) if leaf.is_moment]
    paged = {leaf.parameter for leaf in leaves if on_host(leaf.value)}
    return len({leaf.parameter for leaf in leaves} - paged)


def device_bytes(state: optax.OptState, path: Path | None = None) -> int:
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
    return sum(nbytes(x) for x in _arrays_of(state, path) if not on_host(x))


def host_bytes(state: optax.OptState, path: Path | None = None) -> int:
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
    return sum(nbytes(x) for x in _arrays_of(state, path) if on_host(x))


def rebalance(
    tx: optax.GradientTransformation,
    state: optax.OptState,
    recent_paths: Iterable[Path],
) -> optax.OptState:
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
    leaves = leaves_of(state)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(state)):
        raise ValueError(
            "rebalance moves arrays and cannot be traced: call it outside jit, between"
            " steps."
        )
    budget, smallest = _budget(tx, state, leaves)
    unpaged = _unpaged(leaves)
    movable = [
        x.is_moment and bytes_a_device(x.value) >= smallest and x.place not in unpaged
        for x in leaves
    ]
    sizes: dict[str, int] = {}
    for leaf, moves in zip(leaves, movable, strict=True):
        if leaf.is_moment:
            size = bytes_a_device(leaf.value) if moves else 0
            sizes[leaf.parameter] = sizes.get(leaf.parameter, 0) + size
    used = [name for path in recent_paths for name in _select(path, sizes, "the state")]
    stays = set(sizes) if budget is None else set()
    left = budget or 0
    for name in dict.fromkeys(reversed(used)):
        if budget is not None and sizes[name] <= budget:
            if sizes[name] > left:
                break
            left -= sizes[name]
            stays.add(name)
    values = [leaf.value for leaf in leaves]
    for to_host in (True, False):
        for position, leaf in enumerate(leaves):
            belongs_on_host = leaf.parameter not in stays
            moves = movable[position] and belongs_on_host != on_host(leaf.value)
            if moves and belongs_on_host == to_host:
                kind = PINNED_HOST if to_host else memory_kinds()[0]
                move = functools.partial(_moved, kind=kind)
                values[position] = jax.tree.map(move, leaf.value)
    return like(state, values)


def abstract_state(
    tx: optax.GradientTransformation, params: optax.Params
) -> optax.OptState:
    """Shapes, dtypes and placements of the state that `tx.init(params)` would make.

    Allocates nothing. Given to Orbax as the target of a restore, it brings a checkpoint
    into host memory without a detour over the device. A restore without a target, or
    with that of `jax.eval_shape`, puts the whole state on the device.

    Args:
      tx: The transformation.
      params: The parameters, or their `ShapeDtypeStruct`s.

    Returns:
      The state's tree of `jax.ShapeDtypeStruct`, each with its memory kind stated.

    Raises:
      ValueError: If a parameter's sharding does not divide it evenly.

    Example:
      >>> import jax, jax.numpy as jnp, paged_optax as po
      >>> params = {"w": jnp.ones((512, 512))}
      >>> target = po.abstract_state(po.paged_adamw(1e-3), params)
      >>> target[0].mu["w"].sharding.memory_kind
      'pinned_host'

      What `flax.serialization` reads is NumPy arrays; this puts them in place:

      >>> import flax
      >>> state = po.paged_adamw(1e-3).init(params)
      >>> saved = flax.serialization.to_bytes(state)
      >>> state = flax.serialization.from_bytes(target, saved)
      >>> state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, target))
      >>> state[0].mu["w"].sharding.memory_kind
      'pinned_host'
    """
    refuse_uneven(params)
    with explicitly_typed(params) as shapes:
        # A new function each time: JAX would not run one again that it has traced.
        closed, shapes = jax.make_jaxpr(lambda p: tx.init(p), return_shape=True)(shapes)
    stored = jax.tree_util.tree_flatten_with_path(bare(shapes), is_leaf=is_quantized)[0]
    parameters = jax.tree_util.tree_flatten_with_path(bare(params))[0]
    owners = parameter_of([p for p, _ in stored], [p for p, _ in parameters])
    default = _beside(x for _, x in parameters)
    avals = iter(closed.out_avals)

    def place(x: Any, parameter: Any) -> jax.ShapeDtypeStruct:
        sharding, aval = default, next(avals)
        if parameter is not None and parameter.shape == x.shape:
            sharding = getattr(parameter, "sharding", None) or default
        elif isinstance(default, NamedSharding) and default.mesh.size > 1:
            sharding = NamedSharding(default.mesh, aval.sharding.spec)
        kind = PINNED_HOST if on_host(aval) else memory_kinds()[0]
        sharding = typed_by_memory(sharding.with_memory_kind(kind))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    placed = []
    for (_, x), owner in zip(stored, owners, strict=True):
        parameter = None if owner is None else parameters[owner][1]
        placed.append(jax.tree.map(lambda x, p=parameter: place(x, p), x))
    return like(shapes, placed)


def _name(path: Path) -> str:
    if isinstance(path, str):
        return path.strip("/")
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_state(node: Any) -> bool:
    """Whether a node is an Optax state, or a container of such.

    Optax's states are named tuples called `...State`; what they hold in their fields is
    trees of the parameters' structure, which may be of any type.
    """
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node).__name__.endswith("State")
    if isinstance(node, (tuple, list)):
        return any(map(_is_state, node))
    return isinstance(node, dict) and any(map(_is_state, node.values()))


def _holds_states(node: Any, key: Any) -> bool:
    """Whether a child of a state may be a state itself.

    Optax says so in the field's name (`inner_state`, `fast_state`). All others are
    trees of parameters, which may have a name that ends in `State` too.
    """
    optax_own = type(node).__module__.partition(".")[0] in ("optax", "paged_optax")
    return not (optax_own and hasattr(node, "_fields")) or "state" in key.name


def is_quantized(node: Any) -> bool:
    """Whether a node of a state is one moment, stored in several arrays."""
    return isinstance(node, Quantized)


def _fields(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """The fields of all Optax states inside: paths, and what they hold."""
    if not _is_state(node):
        yield path, node
        return
    for key_path, child in jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node
    )[0]:
        if _holds_states(node, *key_path):
            yield from _fields(child, (*path, *key_path))
        else:
            yield (*path, *key_path), child


def leaves_of(state: Any) -> list[_Leaf]:
    """The leaves of a state, in order, each with its place."""
    return [
        _Leaf(
            _name(path[:-1]),
            _name(path[-1:]),
            "" if _is_count_variable(key_path, value) else _name(key_path),
            bare(value),
        )
        for path, field in _fields(state)
        for key_path, value in _flat(field)
    ]


def _flat(field: Any) -> list[tuple[Any, Any]]:
    """A field's moments and arrays, each with its path, that of its variable."""
    flat = jax.tree_util.tree_flatten_with_path(field, is_leaf=is_quantized)[0]
    boxed = lambda x: (
        is_quantized(x) and jax.tree.structure(x) != jax.tree.structure(bare(x))
    )
    value = jax.tree_util.GetAttrKey("value")
    return [((*path, value) if boxed(x) else path, x) for path, x in flat]


def _is_count_variable(key_path: tuple[Any, ...], value: Any) -> bool:
    """Whether a field is a count in a variable, as in Flax's `nnx.Optimizer`."""
    alone = key_path == (jax.tree_util.GetAttrKey("value"),)
    return alone and jnp.issubdtype(value.dtype, jnp.integer)


def _select(path: Path, known: Iterable[str], where: str) -> list[str]:
    """The parameters that a path names: one, or a group."""
    wanted, known = _name(path), list(dict.fromkeys(known))
    found = [
        name
        for name in known
        if name == wanted or not wanted or name.startswith(f"{wanted}/")
    ]
    if not found:
        close = difflib.get_close_matches(wanted, known, n=3, cutoff=0.3) or known[:3]
        raise ValueError(
            f"path={wanted!r}: {where} has no such parameter. Close names:"
            f" {', '.join(map(repr, close)) or 'none, it has no parameters'}."
        )
    return found


def _single(path: Path, leaves: Iterable[_Leaf]) -> str:
    names = [leaf.parameter for leaf in leaves if leaf.is_moment]
    found = _select(path, names, "the state")
    if len(found) > 1:
        raise ValueError(
            f"path={_name(path)!r} leads to {len(found)} parameters"
            f" ({', '.join(map(repr, found[:3]))}, ...): name one."
        )
    return found[0]


def _moments_of(state: Any, path: Path) -> dict[str, tuple[int, _Leaf]]:
    """One parameter's moments by name, with their positions in the state."""
    leaves = leaves_of(state)
    parameter = _single(path, leaves)
    own = [
        (position, leaf)
        for position, leaf in enumerate(leaves)
        if leaf.is_moment and leaf.parameter == parameter
    ]
    fields = [leaf.field for _, leaf in own]
    return {
        leaf.field if fields.count(leaf.field) == 1 else f"{leaf.node}/{leaf.field}": (
            position,
            leaf,
        )
        for position, leaf in own
    }


def _arrays_of(state: Any, path: Path | None) -> list[Any]:
    if path is None:
        return jax.tree.leaves(state)
    leaves = [leaf for leaf in leaves_of(state) if leaf.is_moment]
    inside = set(_select(path, [leaf.parameter for leaf in leaves], "the state"))
    return jax.tree.leaves([x.value for x in leaves if x.parameter in inside])


def _unpaged(leaves: Iterable[_Leaf]) -> set[tuple[str, str]]:
    """Fields that nothing pages, such as that of an `optax.trace` beside `paged(...)`.

    Moments of a parameter move together, so a field without a single moment on the
    host, although other moments of its parameters are there, is not paged.
    """
    moments = [leaf for leaf in leaves if leaf.is_moment]
    paged = {leaf.place for leaf in moments if on_host(leaf.value)}
    away = {leaf.parameter for leaf in moments if on_host(leaf.value)}
    return {leaf.place for leaf in moments if leaf.parameter in away} - paged


def _common(first: str, second: str) -> int:
    """How many keys two nodes' paths have in common."""
    same = 0
    for one, other in zip(first.split("/"), second.split("/"), strict=False):
        if one != other:
            break
        same += 1
    return same


def _is_above(node: str, other: str) -> bool:
    """Whether a state holds another inside."""
    return node != other and (not node or other.startswith(f"{node}/"))


def _describe(moment: Any) -> str:
    """A moment's dtype and shape, for messages."""
    if isinstance(moment, Quantized):
        codes, scales = map(_describe, moment)
        return f"Quantized(codes={codes}, scales={scales})"
    aval = jax.typeof(moment)
    return f"{aval.dtype}{list(aval.shape)}"


def _put_beside(x: Any, old: Array, *, host: bool) -> Array:
    """A new value in the place of an old one; `host`: in host memory."""
    if not isinstance(old, Tracer) and old.committed:
        kind = PINNED_HOST if host else memory_kinds()[0]
        return jax.device_put(x, old.sharding.with_memory_kind(kind))
    return jax.device_put(x, HOST if host else DEVICE)


def _beside(parameters: Iterable[Any]) -> Any:
    """Where what belongs to no single parameter goes: whole, on all their devices.

    A count restored to one device alone is committed there, and no update could take
    it together with parameters that are elsewhere.
    """
    for parameter in parameters:
        sharding = getattr(parameter, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
        if isinstance(sharding, SingleDeviceSharding):
            return sharding
    return SingleDeviceSharding(jax.devices()[0])


def _moved(x: Array, kind: str) -> Array:
    """An array moved to a memory, the old one gone before this returns."""
    if x.sharding.memory_kind == kind:
        return x
    sharding = x.sharding.with_memory_kind(kind)
    moved = jax.block_until_ready(jax.device_put(x, sharding))
    x.delete()
    return moved


def _placed(x: Array, place: Any) -> Array:
    return _moved(x, place.sharding.memory_kind)


def _budget(
    tx: optax.GradientTransformation, state: Any, leaves: list[_Leaf]
) -> tuple[int | None, int]:
    """The device budget of a transformation, and the smallest moment it pages."""
    params = _parameters_like(state)
    moments = sum(
        bytes_a_device(x.value) for x in leaves if x.is_moment and not on_host(x.value)
    )
    budgets, smallest = {}, []
    for number, (configuration, _) in enumerate(recorded(tx, params)):
        # What the device has left it has left once, however many ask.
        key = "auto" if configuration.device_budget == "auto" else number
        parameters = sum(map(nbytes, jax.tree.leaves(params)))
        budgets[key] = configuration.budget(parameters, moments)
        smallest.append(configuration.min_paged_size)
    if None in budgets.values():
        return None, 0
    return sum(budgets.values()), min(smallest)


def _parameters_like(state: Any) -> Any:
    """A tree of the parameters' structure, made of what a state holds for them."""
    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    is_leaf = lambda x: is_masked(x) or is_quantized(x)
    trees = [
        field
        for path, field in _fields(state)
        if _name(path[-1:]) not in _SETTINGS
        and any(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(field))
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
