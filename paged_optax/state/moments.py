"""One parameter's moments: out of a state, into it, and new ones; master weights."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, PyTree

from paged_optax.backend.flax_variables import as_pure, unflatten_like
from paged_optax.backend.memory import (
    DEVICE,
    HOST,
    donate_within_memory,
    kind_of,
    on_host,
)
from paged_optax.backend.text import dtype_and_shape, key_names, path_name
from paged_optax.backend.types import (
    KeyPath,
    Path,
    Transformation,
    is_committed,
    is_traced,
)
from paged_optax.backend.validation import brief, check_arrays, check_transformation
from paged_optax.codecs import Quantized
from paged_optax.state.leaves import (
    SETTINGS,
    LeafKey,
    Parameters,
    StateLeaf,
    moments_at,
    state_leaves_of,
    unpaged_places,
)
from paged_optax.state.residency import moved_to
from paged_optax.state.restore import abstract_state
from paged_optax.transform.precision import current_master, wider
from paged_optax.transform.remainders import master_of


def page_in(state: PyTree, path: Path) -> dict[str, PyTree[Array]]:
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
    check_arrays("state", state, shapes=False)
    moments = {
        name: jax.device_put(leaf.value, DEVICE)
        for name, (_, leaf) in moments_at(state, path).items()
    }
    return donate_within_memory(moments)


def page_out(
    state: PyTree, path: Path, moments: Mapping[str, PyTree[ArrayLike]]
) -> PyTree:
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
    known = moments_at(state, path)
    if not isinstance(moments, Mapping):
        raise TypeError(
            f"moments={brief(moments)} is not a mapping: pass moments as page_in gives"
            " them."
        )
    if set(moments) != set(known):
        raise ValueError(
            f"moments={sorted(moments)}: parameter {path_name(path)!r} has the moments"
            f" {sorted(known)}: pass those, as page_in gives them."
        )
    state_leaves = state_leaves_of(state)
    values = [leaf.value for leaf in state_leaves]
    unpaged = unpaged_places(state_leaves)
    for name, (position, leaf) in known.items():
        new = moments[name]
        if not _alike(new, leaf.value):
            raise ValueError(
                f"moments[{name!r}] is {_describe(new)}, and the state of parameter"
                f" {path_name(path)!r} holds {_describe(leaf.value)}: pass moments as"
                " page_in gives them."
            )
        # What nothing pages stays on the device, as the trace beside `paged(...)`.
        put = functools.partial(_put_like, host=leaf.place not in unpaged)
        new = unflatten_like(leaf.value, new)
        values[position] = jax.tree.map(put, new, leaf.value)
    return unflatten_like(state, donate_within_memory(values))


def init_param(
    tx: Transformation,
    state: PyTree,
    params: PyTree,
    path: Path,
) -> PyTree:
    """A state with the moments of a parameter that joins, or starts again.

    Only the new parameter's moments are allocated. Small moments on the device stay
    there, though with the new ones they may be enough to be paged: `place_state` then
    puts them on the host.

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
    check_transformation("tx", tx)
    check_arrays("params", params)
    flat, structure = jax.tree_util.tree_flatten_with_path(params)
    joins = set(Parameters([key for key, _ in flat], "params").named_by(path))
    # All others empty: their moments cost nothing, and are not used.
    parameters = [
        x if key in joins else jnp.zeros((0, *x.shape[1:]), x.dtype) for key, x in flat
    ]
    # Together with others of its shape, a small moment may be worth its transfers.
    target = abstract_state(tx, params)
    initial = tx.init(jax.tree.unflatten(structure, parameters))
    # In Flax's variables or not, a moment is the same.
    initial, known, wanted = (
        state_leaves_of(as_pure(x)) for x in (initial, state, target)
    )
    new = {leaf.key: leaf.value for leaf in initial if leaf.field not in SETTINGS}
    old = {leaf.key: leaf.value for leaf in known}
    pure = jax.tree_util.tree_flatten_with_path(as_pure(params))[0]
    names = {
        key_names(pure_key)
        for (pure_key, _), (key, _) in zip(pure, flat, strict=True)
        if key in joins
    }
    values = list[PyTree]()
    for leaf in wanted:
        if key_names(leaf.parameter) in names and leaf.key in new:
            values.append(jax.tree.map(_in_memory_of, new[leaf.key], leaf.value))
        else:
            values.append(_old_value(old, leaf, path))
    # If nothing joins, the state keeps its containers: `nnx.Optimizer` has others.
    same = [leaf.key for leaf in wanted] == list(old)
    keeps = same and jax.tree.structure(values) == jax.tree.structure([*old.values()])
    return unflatten_like(state if keeps else target, donate_within_memory(values))


def _old_value(
    old: Mapping[LeafKey, PyTree[Array]], leaf: StateLeaf, path: Path
) -> PyTree[Array]:
    """What a state holds for a leaf of another one, for a parameter that is there."""
    if leaf.key not in old:
        raise ValueError(
            f"the state has no {leaf.field} of parameter {leaf.name!r}"
            f" either: name it too, by a path that leads to it and to"
            f" {path_name(path)!r}, or add one after the other."
        )
    value = old[leaf.key]
    if not _alike(value, leaf.value):
        raise ValueError(
            f"{leaf.field} of parameter {leaf.name!r} is {_describe(value)} in the"
            f" state, and {_describe(leaf.value)} in that of tx for these parameters:"
            " pass the transformation that the state was made with, and parameters"
            " of the same shapes."
        )
    return value


def _alike(one: PyTree, other: PyTree) -> bool:
    """Whether two moments are stored alike, if the containers of both say how."""
    if isinstance(one, Quantized) and isinstance(other, Quantized):
        said = {type(one), type(other)} - {Quantized}
        return len(said) < 2 and all(map(_alike, one, other))
    return _describe(one) == _describe(other)


def _describe(moment: PyTree) -> str:
    """A moment's dtype and shape, for messages."""
    if isinstance(moment, Quantized):
        codes, scales = map(_describe, moment)
        return f"{type(moment).__name__}(codes={codes}, scales={scales})"
    # A tracer is an instance of `Array`, and not of a union that has it.
    if not isinstance(moment, (ArrayLike, Array, jax.ShapeDtypeStruct)):
        return f"of type {type(moment).__name__}"
    return dtype_and_shape(jax.typeof(moment))


def _put_like(x: ArrayLike, old: Array, *, host: bool) -> Array:
    """A new value in the place of an old one; `host`: in host memory."""
    if is_committed(old):
        return jax.device_put(x, old.sharding.with_memory_kind(kind_of(host)))
    return jax.device_put(x, HOST if host else DEVICE)


def _in_memory_of(x: Array, place: jax.ShapeDtypeStruct) -> Array:
    if is_traced(x):
        return jax.device_put(x, HOST if on_host(place) else DEVICE)
    kind = place.sharding.memory_kind
    assert kind is not None
    return moved_to(x, kind)


#: Where a state keeps masters, or the halves of them that parameters lack, and what
#: gives the master of a parameter with either.
_OF_FIELD = {"master": current_master, "remainder": master_of}


def master_weights(
    params: optax.Params, state: optax.OptState
) -> PyTree[Float[Array, "..."]]:
    """The parameters in the precision in which they are trained.

    With `master_dtype` they are the copies that the state keeps; with
    `master_remainders` half of each is its parameter. Parameters in float32 that the
    state keeps nothing of are their own masters.

    Args:
      params: The parameters, as the last step left them.
      state: The state of the same step.

    Returns:
      A tree of the parameters' structure, on the device: 4 bytes a parameter. For
      some of them only, pass these: `{"embed": params["embed"]}`.

    Raises:
      ValueError: If the state keeps no master weights, or not of these parameters.

    Example:
      >>> import jax.numpy as jnp, optax, paged_optax as po
      >>> params = {"w": jnp.ones((512, 512), jnp.bfloat16)}
      >>> tx = po.paged(optax.sgd(1e-4), master_remainders=True)
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> params["w"][0, 0], po.master_weights(params, state)["w"][0, 0]
      (Array(1, dtype=bfloat16), Array(0.9999, dtype=float32))
    """
    check_arrays("params", params)
    fields = {
        (leaf.field, key_names(leaf.parameter)): leaf.value
        for leaf in state_leaves_of(as_pure(state), shapes=False)
    }

    def master(path: KeyPath, parameter: Array) -> Array:
        name = key_names(path)
        for field in _OF_FIELD:
            half = fields.get((field, name))
            if half is not None and half.shape == parameter.shape:
                # Arithmetic on a host array fails, or silently runs on the host.
                half = jax.device_put(half, jax.memory.Space.Device)
                return _OF_FIELD[field](parameter, half)
        if wider(parameter, jnp.float32) is parameter:
            return parameter
        known = [repr("/".join(name)) for field, name in fields if field in _OF_FIELD]
        if known:
            raise ValueError(
                f"params: the state keeps no master of {path_name(path)!r} of shape"
                f" {parameter.shape}, only of {', '.join(known[:3])}: pass the"
                " parameters that the state was made with, or some of them under their"
                " own paths."
            )
        raise ValueError(
            "the state keeps no master weights: make it with"
            " paged(..., master_remainders=True), or master_dtype='float32'."
        )

    masters = jax.tree_util.tree_map_with_path(master, as_pure(params))
    return unflatten_like(params, masters)
