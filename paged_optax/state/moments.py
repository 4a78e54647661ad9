"""Moments and step count of one parameter: read and edited; and master weights."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Int, PyTree

from paged_optax.backend.flax_variables import as_pure, unflatten_like
from paged_optax.backend.memory import (
    DEVICE,
    HOST,
    default_memory_kind,
    donate_within_memory,
    on_host,
)
from paged_optax.backend.text import dtype_and_shape, key_names, keystr, path_name
from paged_optax.backend.types import (
    KeyPath,
    Path,
    Transformation,
    is_committed,
)
from paged_optax.backend.validation import check_arrays, check_transformation
from paged_optax.codecs import Quantized
from paged_optax.state.leaves import (
    SETTINGS,
    LeafKey,
    Parameters,
    StateLeaf,
    pageable,
    parameters_of,
    read_step,
    state_leaves_of,
)
from paged_optax.state.restore import abstract_state
from paged_optax.transform.precision import wider
from paged_optax.transform.remainders import MASTERS
from paged_optax.transform.trees import leaf_paths


def page_in(state: PyTree, path: Path) -> dict[str, PyTree[Array]]:
    """Copies one parameter's moments to the device.

    Args:
      state: An optimizer state, with a paged transformation's anywhere inside.
      path: The parameter.

    Returns:
      Moments in device memory, keyed by Optax's field (`"mu"`, `"nu"`, `"trace"`), with
      the path to the field where two have the same name. A moment that a codec stores
      in blocks is a `codecs.Quantized`, with four 8-bit codes in a word;
      `codecs.unarranged(codec, moment)` unpacks them.

    Raises:
      ValueError: If the state has no such parameter; the message lists close names.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> params = {"block": {"kernel": jnp.ones((512, 512))}}
      >>> state = po.paged_adamw(1e-3).init(params)
      >>> moments = po.page_in(state, "block/kernel")
      >>> sorted(moments), moments["mu"].shape
      (['mu', 'nu'], (512, 512))
    """
    moments = _moments_at(state_leaves_of(state, shapes=False), path)
    values = {name: leaf.value for name, (_, leaf) in moments.items()}
    return donate_within_memory(jax.device_put(values, DEVICE))


def _moments_at(
    state_leaves: list[StateLeaf], path: Path
) -> dict[str, tuple[int, StateLeaf]]:
    """Returns one parameter's moments by name, with their positions in the state."""
    parameter = parameters_of(state_leaves).one(path)
    moments = [
        (index, leaf)
        for index, leaf in enumerate(state_leaves)
        if leaf.is_moment and leaf.parameter == parameter
    ]
    names = [leaf.field for _, leaf in moments]
    for spelled in (path_name, keystr):  # the shorter form where it is unique
        names = [
            name if names.count(name) == 1 else f"{spelled(leaf.node)}/{leaf.field}"
            for name, (_, leaf) in zip(names, moments, strict=True)
        ]
    return dict(zip(names, moments, strict=True))


def page_out(
    state: PyTree, path: Path, moments: Mapping[str, PyTree[ArrayLike]]
) -> PyTree:
    """Replaces one parameter's moments, and places them in host memory.

    Args:
      state: An optimizer state, unchanged.
      path: The parameter.
      moments: New moments, with the names, shapes and dtypes that `page_in` returns.
        They are placed on the devices, or shards, of the old ones.

    Returns:
      The new state, which shares all other arrays with the old one. Moments that are
      never paged stay on the device: the trace of an `optax.trace` outside `paged`.

    Raises:
      ValueError: If the state has no such parameter, or if the moments differ in name,
        shape, dtype or codec.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> state = po.paged_adamw(1e-3).init({"w": jnp.ones((512, 512))})
      >>> moments = po.page_in(state, "w")
      >>> state = po.page_out(state, "w", moments | {"mu": moments["mu"] + 1.0})
      >>> float(po.page_in(state, "w")["mu"][0, 0]), po.is_device_resident(state, "w")
      (1.0, False)
    """
    state_leaves = state_leaves_of(state)
    current, name = _moments_at(state_leaves, path), path_name(path)
    if set(moments) != set(current):
        raise ValueError(
            f"moments={sorted(moments)}: parameter {name!r} has the moments"
            f" {sorted(current)}: pass those, as page_in gives them."
        )
    values, paged = [leaf.value for leaf in state_leaves], pageable(state_leaves)
    for key, (index, leaf) in current.items():
        if not _stored_equally(moments[key], leaf.value):
            raise ValueError(
                f"moments[{key!r}] is {_describe(moments[key])}, and the state of"
                f" parameter {name!r} holds {_describe(leaf.value)}: pass moments as"
                " page_in gives them."
            )
        put = functools.partial(_put_like, host=paged[index])
        new = unflatten_like(leaf.value, moments[key])
        values[index] = jax.tree.map(put, new, leaf.value)
    return unflatten_like(state, donate_within_memory(values))


def init_param(tx: Transformation, state: PyTree, params: PyTree, path: Path) -> PyTree:
    """Adds a parameter's initial moments to a state, or resets them.

    Allocates only these moments. Small moments stay on the device even if, with the new
    ones, they reach `min_paged_size`; `place_state` pages them.

    Args:
      tx: The transformation.
      state: Its state, for the parameters with or without the new one.
      params: The parameters with the new one.
      path: The new parameter, or a group of them (an adapter).

    Returns:
      The state of `tx` for `params`, with the other parameters' moments and all counts
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
    paths, leaves = leaf_paths(as_pure(params))
    joins = set(Parameters(paths, "params").group(path))
    # All other parameters are empty: their moments take no memory, and are dropped.
    parameters = [
        x if key in joins else jnp.zeros((0, *x.shape[1:]), x.dtype)
        for key, x in zip(paths, leaves, strict=True)
    ]
    target = abstract_state(tx, params)
    initial = state_leaves_of(tx.init(unflatten_like(params, parameters)))
    new = {
        leaf.key: leaf.value
        for leaf in initial
        if leaf.parameter in joins and leaf.field not in SETTINGS
    }
    old = {leaf.key: leaf.value for leaf in state_leaves_of(state)}
    described = {leaf.key: leaf for leaf in state_leaves_of(target)}
    move = lambda x, place: _put_like(x, x, host=on_host(place))
    values = [
        jax.tree.map(move, new[key], leaf.value)
        if key in new
        else _old_value(old, leaf, path)
        for key, leaf in described.items()
    ]
    # Without new leaves the state keeps its containers, such as `nnx.Optimizer`'s.
    keeps = [*described] == [*old]
    keeps = keeps and jax.tree.structure(values) == jax.tree.structure([*old.values()])
    return unflatten_like(state if keeps else target, donate_within_memory(values))


def _old_value(
    old: Mapping[LeafKey, PyTree[Array]], leaf: StateLeaf, path: Path
) -> PyTree[Array]:
    if leaf.key not in old:
        raise ValueError(
            f"the state has no {leaf.field} of parameter {leaf.name!r} either: name it"
            f" too, by a path that leads to it and to {path_name(path)!r}, or add one"
            " after the other."
        )
    value = old[leaf.key]
    if not _stored_equally(value, leaf.value):
        raise ValueError(
            f"{leaf.field} of parameter {leaf.name!r} is {_describe(value)} in the"
            f" state, and {_describe(leaf.value)} in that of tx for these parameters:"
            " pass the transformation that the state was made with, and parameters"
            " of the same shapes."
        )
    return value


def _stored_equally(x: PyTree, y: PyTree) -> bool:
    if isinstance(x, Quantized) and isinstance(y, Quantized):
        # A plain `Quantized` does not name its codec.
        codecs = {type(x), type(y)} - {Quantized}
        return len(codecs) < 2 and all(map(_stored_equally, x, y))
    return _describe(x) == _describe(y)


def _describe(moment: PyTree) -> str:
    if isinstance(moment, Quantized):
        codes, scales = map(_describe, moment)
        return f"{type(moment).__name__}(codes={codes}, scales={scales})"
    # A tracer is an instance of `Array`, and not of a union that includes it.
    if not isinstance(moment, (ArrayLike, Array, jax.ShapeDtypeStruct)):
        return f"of type {type(moment).__name__}"
    return dtype_and_shape(jax.typeof(moment))


def _put_like(x: ArrayLike, old: Array, *, host: bool) -> Array:
    place, kind = HOST if host else DEVICE, default_memory_kind(host)
    if is_committed(old):
        place = old.sharding.with_memory_kind(kind)
    return jax.device_put(x, place)


def master_weights(
    params: optax.Params, state: optax.OptState
) -> PyTree[Float[Array, "..."]]:
    """Returns the parameters in the precision in which they are trained.

    With `master_dtype` these are the copies in the state. With `master_remainders` they
    are computed from the parameters and the remainders in the state. A float32
    parameter without either is its own master.

    Args:
      params: The parameters, as the last step returned them.
      state: The state of the same step.

    Returns:
      A tree like `params`, on the device: 4 bytes a parameter. For some parameters
      only, pass a part of the tree: `{"embed": params["embed"]}`.

    Raises:
      ValueError: If the state has no master weights, or not of these parameters.

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
    halves = {
        (leaf.field, key_names(leaf.parameter)): leaf.value
        for leaf in state_leaves_of(state, shapes=False)
        if leaf.field in MASTERS
    }

    def master(path: KeyPath, parameter: Array) -> Array:
        for field, compute in MASTERS.items():
            half = halves.get((field, key_names(path)))
            if half is not None and half.shape == parameter.shape:
                return compute(*jax.device_put((parameter, half), DEVICE))
        if wider(parameter, jnp.float32) is parameter:
            return parameter
        if not halves:
            raise ValueError(
                "the state keeps no master weights: make it with"
                " paged(..., master_remainders=True), or master_dtype='float32'."
            )
        names = ", ".join([repr("/".join(name)) for _, name in halves][:3])
        raise ValueError(
            f"params: the state keeps no master of {path_name(path)!r} of shape"
            f" {parameter.shape}, only of {names}: pass the parameters that the state"
            " was made with, or some of them under their own paths."
        )

    masters = jax.tree_util.tree_map_with_path(master, as_pure(params))
    return unflatten_like(params, masters)


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
    is_above = lambda node, x: node != x and x[: len(node)] == node
    counts = [
        index
        for index, leaf in enumerate(state_leaves)
        if leaf.is_count
        and leaf.parameter == parameter
        # Where the parameters are a single array, all counts are that array's, except
        # those of wrappers around the state with its moments.
        and (parameter or not any(is_above(leaf.node, node) for node in nodes))
    ]
    if not counts:
        raise ValueError(
            f"parameter {path_name(parameter)!r} has no step count of its own: the"
            " state has one count for all parameters, or none. Build the transformation"
            " with per_parameter_steps=True."
        )
    values = [leaf.value for leaf in state_leaves]
    for index in counts:
        values[index] = optax.safe_increment(values[index])
    return unflatten_like(state, donate_within_memory(values))
