"""States that are restored: described without allocating, and put in place."""

import functools

import jax
from jax import Array
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from jaxtyping import PyTree

from paged_optax.backend.flax_variables import (
    as_pure,
    optimizer_shardings,
    unflatten_like,
)
from paged_optax.backend.memory import memory_kind, replicated_sharding, typed_by_memory
from paged_optax.backend.text import dtype_and_shape, key_names
from paged_optax.backend.types import (
    ArrayOrShape,
    Described,
    Transformation,
    is_committed,
)
from paged_optax.backend.validation import check_arrays, check_transformation
from paged_optax.codecs.identity import is_codes_field
from paged_optax.engine.shards import Shards
from paged_optax.state.leaves import is_quantized
from paged_optax.transform.context import Visitor, within
from paged_optax.transform.parameter_shardings import check_even
from paged_optax.transform.planned_moments import explicitly_typed
from paged_optax.transform.trees import leaf_paths, parameter_of


def abstract_state(
    tx: Transformation | Described, params: PyTree
) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns shapes, dtypes and placements of the state that `tx.init` would create.

    Allocates nothing. An Orbax restore with this target reads a checkpoint directly
    into host memory. Without a target, or with a target from `jax.eval_shape`, the
    whole state is restored to the device.

    If the parameters have shardings, `tx` remembers them in place of the shardings that
    `tx.init` saw: `update` needs them in a `jax.jit` over automatic axes. Functions
    already traced keep the earlier ones. A transformation that is rebuilt at each call,
    as `optax.inject_hyperparams` rebuilds its inner one, remembers nothing: `jit_step`
    passes them to its `update`, and `jax.jit` warns. The metadata `optimizer_sharding`
    of Flax's variables determines the sharding of their moments.

    Args:
      tx: The transformation; or a `GradientWorkspace`, or its `ShapeDtypeStruct`s, to
        describe the workspace.
      params: The parameters, or their `ShapeDtypeStruct`s.

    Returns:
      The state with `jax.ShapeDtypeStruct` leaves, each with a memory kind.

    Raises:
      ValueError: If a sharding does not divide its parameter evenly.

    Example:
      >>> import jax, jax.numpy as jnp, paged_optax as po
      >>> params = {"w": jnp.ones((512, 512))}
      >>> target = po.abstract_state(po.paged_adamw(1e-3), params)
      >>> target[0].mu["w"].sharding.memory_kind
      'pinned_host'

      `flax.serialization` restores NumPy arrays, which are then put in place:

      >>> import flax
      >>> state = po.paged_adamw(1e-3).init(params)
      >>> saved = flax.serialization.to_bytes(state)
      >>> state = flax.serialization.from_bytes(target, saved)
      >>> state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, target))
      >>> state[0].mu["w"].sharding.memory_kind
      'pinned_host'
    """
    if isinstance(tx, Described):
        check_arrays("params", params)
        return tx.abstract(params)
    check_transformation("tx", tx)
    check_arrays("params", params)
    check_even(params)
    params = _on_meshes(params)
    # A trace with the mesh, so that `update` knows the shardings of a restored state.
    visitor = Visitor(mesh=_find_mesh(params))
    with within(visitor=visitor), explicitly_typed(params) as shapes:
        # A new function each time: JAX would not trace the same one twice.
        closed, shapes = jax.make_jaxpr(lambda p: tx.init(p), return_shape=True)(shapes)
    stored_paths, stored = leaf_paths(as_pure(shapes), is_quantized)
    paths, likes = leaf_paths(as_pure(params))
    param_indices = parameter_of(stored_paths, paths)
    # A count committed to one device could not meet parameters on others.
    default = replicated_sharding(likes) or SingleDeviceSharding(jax.devices()[0])
    avals = iter(closed.out_avals)

    def place(x: jax.ShapeDtypeStruct, index: int | None) -> jax.ShapeDtypeStruct:
        sharding, aval = default, next(avals)
        if isinstance(default, NamedSharding) and default.mesh.size > 1:
            sharding = NamedSharding(default.mesh, aval.sharding.spec)
        elif index is not None and likes[index].shape == x.shape:
            sharding = getattr(likes[index], "sharding", None) or default
        sharding = sharding.with_memory_kind(memory_kind(aval))
        return _with_sharding(x, typed_by_memory(sharding))

    placed = [
        jax.tree.map(functools.partial(place, index=index), x)
        for x, index in zip(stored, param_indices, strict=True)
    ]
    return unflatten_like(shapes, placed)


def state_shardings(
    tx: Transformation, params: PyTree, shardings: PyTree[Sharding]
) -> PyTree[Sharding]:
    """Returns the sharding of each array of the state, from its parameter's sharding.

    For trainers that pass `in_shardings` and `out_shardings` for the whole state. JAX
    takes a sharding without a memory kind as device memory, so that moments would be
    moved to the device.

    Args:
      tx: The transformation.
      params: The parameters, or their `ShapeDtypeStruct`s.
      shardings: A sharding for each parameter, or for a prefix of their tree.

    Returns:
      The shardings of `tx.init(params)`, in its structure, each with a memory kind.

    Raises:
      ValueError: If `shardings` has another structure, or a sharding does not divide
        its parameter evenly.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, paged_optax as po
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
      >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
      >>> shardings = {"w": NamedSharding(mesh, PartitionSpec("data"))}
      >>> params = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
      >>> tx = po.paged_adamw(1e-3)
      >>> state = po.state_shardings(tx, params, shardings)
      >>> state[0].mu["w"].spec[0], state[0].mu["w"].memory_kind
      ('data', 'pinned_host')
      >>> init = jax.jit(tx.init, in_shardings=(shardings,), out_shardings=state)
      >>> init({"w": jnp.ones((512, 512))})[0].mu["w"].sharding.memory_kind
      'pinned_host'
    """
    check_arrays("params", params)
    full = jax.tree.broadcast(shardings, params)
    sharded = jax.tree.map(_with_sharding, params, full)
    return jax.tree.map(lambda x: x.sharding, abstract_state(tx, sharded))


def _with_sharding(x: ArrayOrShape, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _find_mesh(params: PyTree) -> Mesh | None:
    """Returns the mesh that all parameters are on, or None."""
    shardings = [
        getattr(x, "sharding", None)
        if is_committed(x) or isinstance(x, jax.ShapeDtypeStruct)
        else None
        for x in jax.tree.leaves(params)
    ]
    meshes = {getattr(x and typed_by_memory(x), "mesh", None) for x in shardings}
    mesh = meshes.pop() if len(meshes) == 1 else None
    return mesh if isinstance(mesh, Mesh) else None


def _on_meshes(params: PyTree) -> PyTree:
    """Replicates parameters without a sharding over the mesh of their moments."""
    leaves = [
        _with_sharding(x, NamedSharding(sharding.mesh, PartitionSpec()))
        if sharding is not None and Shards.of_array(x) is None
        else x
        for x, sharding in zip(
            jax.tree.leaves(params), optimizer_shardings(params), strict=True
        )
    ]
    return unflatten_like(params, leaves)


def place_state(tx: Transformation, state: PyTree, params: PyTree) -> PyTree:
    """Places a state's arrays where `tx.init(params)` would create them.

    A restore, `pickle`, `jax.device_put` or `out_shardings` without a memory kind bring
    moments to the device. Orbax, restoring into concrete arrays, leaves them on the
    host with the type of device memory. Both are corrected; arrays in place are
    returned as they are. If the parameters are on another mesh, the state is moved to
    that mesh.

    Args:
      tx: The transformation.
      state: Its state, wherever its arrays are: also NumPy arrays, the state of an
        `nnx.Optimizer`, or the nested dicts of a restore without a target. Shapes, as
        of `nnx.eval_shape`, get the shardings to restore into. A `GradientWorkspace` is
        placed too, but not the dict that a restore without a target makes of one: pass
        `abstract_state(workspace, params)` as the target.
      params: The parameters, or their `ShapeDtypeStruct`s.

    Returns:
      The state. It keeps its containers if `tx.init(params)` has the same, with or
      without Flax's variables; otherwise it gets the containers of `tx.init(params)`.

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
    return placed_as(target, state)


def placed_as(target: PyTree[jax.ShapeDtypeStruct], state: PyTree) -> PyTree:
    """Places a state's arrays as `target` states; see `place_state`."""
    check_arrays("state", state)
    targets = _by_name(target)
    # A restore without a target makes `{"value": array}` of one of Flax's variables.
    arrays = {
        name[:-1] if name[-1:] == ("value",) and name not in targets else name: x
        for name, x in _by_name(state).items()
    }
    for name in targets:
        before = (*name[:-1], "codes")  # as saved before containers named the codec
        if name not in arrays and before in arrays and is_codes_field(name[-1]):
            arrays[name] = arrays.pop(before)
    for name in [*targets, *arrays]:
        array, place = (
            dtype_and_shape(x[name]) if name in x else None for x in (arrays, targets)
        )
        if array != place:
            raise ValueError(
                f"state: {'/'.join(name)!r} is {array or 'missing'}, and a state of tx"
                f" for these parameters has {place or 'none'}: pass the transformation,"
                " with its codec, and the parameters, divided as they were, that the"
                " state was made with; of a checkpoint, the part that is the state. For"
                " a state of stacked layers, which model.stack_state makes of an"
                " ordinary step's, and model.unstack_state undoes, call"
                " model.place_state. To change the codec, begin with new moments,"
                " tx.init(params)."
            )
    placed = map(_placed, (arrays[name] for name in targets), jax.tree.leaves(target))
    same = jax.tree.structure(as_pure(state)) == jax.tree.structure(as_pure(target))
    return unflatten_like(state if same else target, [*placed])


def _by_name(state: PyTree) -> dict[tuple[str, ...], ArrayOrShape]:
    flat, _ = jax.tree_util.tree_flatten_with_path(as_pure(state))
    return {key_names(path): x for path, x in flat}


def _placed(
    x: ArrayOrShape, place: jax.ShapeDtypeStruct
) -> Array | jax.ShapeDtypeStruct:
    if isinstance(x, jax.ShapeDtypeStruct):
        return place
    sharding, kind = place.sharding, memory_kind(place)
    on_mesh = isinstance(sharding, NamedSharding) and sharding.mesh.size > 1
    if (
        is_committed(x)
        and x.sharding.memory_kind == kind
        and x.sharding.is_equivalent_to(sharding, x.ndim)
        # Inside a `jit` an array's type names its mesh, which `update` reads.
        and not (on_mesh and getattr(x.sharding, "mesh", None) != sharding.mesh)
        and jax.typeof(x).memory_space == jax.typeof(place).memory_space
    ):
        return x
    if isinstance(x, Array) and x.sharding.device_set != sharding.device_set:
        # JAX moves no array to other devices and to another memory at once (0.12.0.1).
        x = jax.device_put(x, x.sharding.with_memory_kind(kind))
    # The first move gives the array the type of its memory, the second its sharding.
    moved = jax.device_put(x, sharding)
    if isinstance(sharding, NamedSharding) and not sharding.mesh.axis_names:
        # The sharding of a step's results if the parameters are on one device.
        (device,) = sharding.device_set
        moved = jax.device_put(moved, SingleDeviceSharding(device, memory_kind=kind))
    return moved
