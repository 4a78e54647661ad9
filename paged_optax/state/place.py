"""Putting a state back where it belongs."""

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, SingleDeviceSharding
from jaxtyping import PyTree

from paged_optax.backend.text import key_names
from paged_optax.backend.types import (
    ArrayOrShape,
    Described,
    Transformation,
    is_committed,
)
from paged_optax.backend.variables import as_pure, unflatten_like
from paged_optax.codecs import is_codes_field
from paged_optax.state.abstract import abstract_state

_BLOCKS = (
    ", divided as they were, or into shards of whole blocks: a codec's blocks end with"
    " a shard"
)


def place_state(tx: Transformation, state: PyTree, params: PyTree) -> PyTree:
    """A state whose arrays are where `tx.init(params)` would put them.

    A restore, pickle, `jax.device_put` or `out_shardings` without a memory kind bring
    moments to the device. Orbax, restoring into concrete arrays, leaves them on the
    host with the type of device memory, so that JAX takes them for what they are not.
    This puts both right. Arrays that are right already are handed through. If the
    parameters are on another mesh now, the state goes there.

    Args:
      tx: The transformation.
      state: Its state, wherever its arrays are: also NumPy arrays, the state of an
        `nnx.Optimizer`, or the nested dicts of a restore without a target. Shapes, as
        of `nnx.eval_shape`, get the sharding that a restore into them needs. A
        `GradientWorkspace` is put back likewise, but not the dict that a restore
        without a target makes of one: give the restore a target, which is
        `abstract_state(workspace, params)`.
      params: The parameters, or their `ShapeDtypeStruct`s.

    Returns:
      The state. It keeps its containers where they are those of `tx.init(params)`, or
      Flax's variables in them; else it has those of `tx.init(params)`.

    Raises:
      ValueError: If it is not a state of `tx` for these parameters.

    Example:
      >>> import jax, jax.numpy as jnp, pickle, paged_optax as po
      >>> params = {"w": jnp.ones((512, 512))}
      >>> tx = po.paged_adamw(1e-3)
      >>> state = pickle.loads(pickle.dumps(tx.init(params)))
      >>> po.is_device_resident(state, "w")
      True
      >>> po.is_device_resident(po.place_state(tx, state, params), "w")
      False
    """
    target = abstract_state(state if isinstance(state, Described) else tx, params)
    found, wanted = _by_name(state), _by_name(target)
    for name in wanted:
        # Before containers named the codec, the field of codes was called so.
        before = (*name[:-1], "codes")
        if name not in found and before in found and is_codes_field(name[-1]):
            found[name] = found.pop(before)
    for name in [*wanted, *found]:
        here, there = _describe(found.get(name)), _describe(wanted.get(name))
        if here != there:
            beside = (x for x in wanted if x[:-1] == name[:-1])
            coded = any(is_codes_field(x[-1]) for x in beside)
            raise ValueError(
                f"state: {'/'.join(name)!r} is {here}, and a state of tx for these"
                f" parameters has {there}: pass the transformation, and the"
                f" parameters, that the state was made with{_BLOCKS if coded else ''}."
            )
    placed = [_placed(found[name], place) for name, place in wanted.items()]
    same = jax.tree.structure(as_pure(state)) == jax.tree.structure(as_pure(target))
    return unflatten_like(state if same else target, placed)


def _by_name(state: PyTree) -> dict[tuple[str, ...], PyTree[ArrayOrShape]]:
    """A state's arrays by the names of their keys, whatever the containers."""
    flat = jax.tree_util.tree_flatten_with_path(as_pure(state))[0]
    return {key_names(path): x for path, x in flat}


def _describe(x: ArrayOrShape | None) -> str:
    return "missing" if x is None else f"{x.dtype}{list(np.shape(x))}"


def _placed(
    x: ArrayOrShape, place: jax.ShapeDtypeStruct
) -> Array | jax.ShapeDtypeStruct:
    if isinstance(x, jax.ShapeDtypeStruct):
        return place
    kind, sharding = place.sharding.memory_kind, place.sharding
    assert kind is not None
    if is_committed(x) and x.sharding.memory_kind == kind:
        same = x.sharding.is_equivalent_to(sharding, x.ndim)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            # In a jit the type of an array names its mesh, and the update follows it.
            same = same and getattr(x.sharding, "mesh", None) == sharding.mesh
        if same and jax.typeof(x).memory_space == jax.typeof(place).memory_space:
            return x
    if isinstance(x, Array) and x.sharding.device_set != sharding.device_set:
        # JAX moves no array to other devices and to another memory at once (0.12.0.1).
        x = jax.device_put(x, x.sharding.with_memory_kind(kind))
    # The first move gives the array the type of its memory, the second its place.
    moved = jax.device_put(x, sharding)
    if isinstance(sharding, NamedSharding) and not sharding.mesh.axis_names:
        # What a step returns, beside parameters of one device.
        (device,) = sharding.device_set
        moved = jax.device_put(moved, SingleDeviceSharding(device, memory_kind=kind))
    return moved
