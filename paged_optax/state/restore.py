"""The state that `init` would make: described for a restore, and put back in place."""

import re
from collections.abc import Collection, Mapping, Sequence

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
from paged_optax.backend.memory import (
    memory_kind,
    replicated_sharding,
    typed_by_memory,
)
from paged_optax.backend.text import dtype_and_shape, key_names, keystr
from paged_optax.backend.types import (
    ArrayOrShape,
    Described,
    Transformation,
    is_committed,
)
from paged_optax.backend.validation import brief, check_arrays, check_transformation
from paged_optax.codecs import is_codes_field
from paged_optax.engine.shards import Shards
from paged_optax.state.leaves import is_quantized
from paged_optax.transform.context import Visitor, within
from paged_optax.transform.parameter_shardings import refuse_uneven
from paged_optax.transform.planned_moments import explicitly_typed
from paged_optax.transform.trees import parameter_of


def abstract_state(
    tx: Transformation | Described, params: PyTree
) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes, dtypes and placements of the state that `tx.init(params)` would make.

    Allocates nothing. Given to Orbax as the target of a restore, it brings a checkpoint
    into host memory without a detour over the device. A restore without a target, or
    with that of `jax.eval_shape`, puts the whole state on the device.

    Where the parameters say how they are divided over devices, `tx` remembers it in
    place of what `tx.init` saw: in a `jax.jit` over automatic axes `update` needs to
    know, and a function that is traced already still has what was there before. What is
    made anew at each call, as by `optax.inject_hyperparams` around `paged`, remembers
    nothing: `jit_step` tells its `update`, and a `jax.jit` warns. If the
    parameters are Flax's variables with metadata `optimizer_sharding`, moments are
    divided by that.

    Args:
      tx: The transformation. Of a `GradientWorkspace`, or of its `ShapeDtypeStruct`s,
        in its place, the workspace is described.
      params: The parameters, or their `ShapeDtypeStruct`s, in Flax's variables or
        without.

    Returns:
      The state's tree of `jax.ShapeDtypeStruct`, each with its memory kind stated.

    Raises:
      ValueError: If a sharding does not divide its parameter evenly.

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
    if isinstance(tx, Described):
        check_arrays("params", params)
        return tx.abstract(params)
    check_transformation("tx", tx)
    check_arrays("params", params)
    refuse_uneven(params)
    of_moments = optimizer_shardings(params)
    params = _on_meshes(params, of_moments)
    # So `update` knows the parameters' shardings of a state that is restored.
    visitor = Visitor(mesh=_mesh_of(params))
    with within(visitor=visitor), explicitly_typed(params) as shapes:
        # A new function each time: JAX would not run one again that it has traced.
        closed, shapes = jax.make_jaxpr(lambda p: tx.init(p), return_shape=True)(shapes)
    stored = jax.tree_util.tree_flatten_with_path(
        as_pure(shapes), is_leaf=is_quantized
    )[0]
    parameters = jax.tree_util.tree_flatten_with_path(as_pure(params))[0]
    owners = parameter_of([p for p, _ in stored], [p for p, _ in parameters])
    # Committed to one device, a count could not meet parameters that are elsewhere.
    default = replicated_sharding(x for _, x in parameters) or SingleDeviceSharding(
        jax.devices()[0]
    )
    avals = iter(closed.out_avals)

    def place(
        x: jax.ShapeDtypeStruct, parameter: ArrayOrShape | None
    ) -> jax.ShapeDtypeStruct:
        sharding, aval = default, next(avals)
        typed = None
        if isinstance(default, NamedSharding) and default.mesh.size > 1:
            typed = NamedSharding(default.mesh, aval.sharding.spec)
        if parameter is not None and parameter.shape == x.shape:
            sharding = getattr(parameter, "sharding", None) or default
            shards, traced = Shards.of(sharding, x.shape), Shards.of(typed, x.shape)
            if shards and traced and shards.axes != traced.axes:
                sharding = traced.sharding  # as an `init` was told before
        elif typed is not None:
            sharding = typed
        sharding = typed_by_memory(sharding.with_memory_kind(memory_kind(aval)))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    likes = [
        x
        if sharding is None
        else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for (_, x), sharding in zip(parameters, of_moments, strict=True)
    ]
    placed = []
    for (_, x), owner in zip(stored, owners, strict=True):
        parameter = None if owner is None else likes[owner]
        placed.append(jax.tree.map(lambda x, p=parameter: place(x, p), x))
    return unflatten_like(shapes, placed)


def state_shardings(
    tx: Transformation, params: PyTree, shardings: PyTree[Sharding]
) -> PyTree[Sharding]:
    """Where each array of the state belongs, by its parameter's sharding.

    A trainer that compiles with `in_shardings` and `out_shardings` of its own names a
    place for the whole state, and JAX reads the absence of a memory kind as device
    memory. Put what this returns in such a tree, in the optimizer state's place. A
    moment is divided as its parameter is. What a codec stores in its place, of other
    shapes, is divided likewise.

    Args:
      tx: The transformation. It remembers the shardings, as in `abstract_state`.
      params: The parameters, or their `ShapeDtypeStruct`s, in Flax's boxes or without.
      shardings: The parameters' shardings, of the parameters' structure or a prefix of
        it: one for all, or one for each box.

    Returns:
      The shardings of `tx.init(params)`, of its structure, each with its memory kind
      stated.

    Raises:
      ValueError: If `shardings` has another structure, or a sharding does not divide
        its parameter evenly.
      TypeError: If `shardings` holds anything but shardings.

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
    for path, x in jax.tree_util.tree_flatten_with_path(shardings)[0]:
        if not isinstance(x, Sharding):
            raise TypeError(
                f"shardings{keystr(path)}={brief(x)} is not a sharding: pass"
                " NamedSharding(mesh, spec)."
            )
    try:
        each = jax.tree.broadcast(shardings, params)
    except ValueError as error:
        raise ValueError(
            "shardings has neither the structure of params nor that of a prefix of it:"
            f" {error}"
        ) from error
    divided = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        params,
        each,
    )
    return jax.tree.map(lambda x: x.sharding, abstract_state(tx, divided))


def _mesh_of(params: PyTree) -> Mesh | None:
    """The devices that all parameters are on; None if one of them does not say."""
    said = [
        getattr(x, "sharding", None)
        if is_committed(x) or isinstance(x, jax.ShapeDtypeStruct)
        else None
        for x in jax.tree.leaves(params)
    ]
    meshes = {getattr(x and typed_by_memory(x), "mesh", None) for x in said}
    mesh = meshes.pop() if len(meshes) == 1 else None
    return mesh if isinstance(mesh, Mesh) else None


def _on_meshes(params: PyTree, of_moments: Sequence[NamedSharding | None]) -> PyTree:
    """Parameters of which each is on the mesh of its moments, where Flax tells one."""
    leaves = [
        jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(sharding.mesh, PartitionSpec())
        )
        if sharding is not None and Shards.of_array(x) is None
        else x
        for x, sharding in zip(jax.tree.leaves(params), of_moments, strict=True)
    ]
    return unflatten_like(params, leaves)


# What follows the codec's name in the name of a field of codes.
_ARRANGEMENT = re.compile(r"(_unsigned)?(_\d+x\d+)?(_less_\d+)?(_in_[\dx]+)?$")


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
    check_arrays("state", state)
    places = _by_name(target)
    arrays = _by_name(state, places)
    for name in places:
        # Before containers named the codec, the field of codes was called so.
        before = (*name[:-1], "codes")
        if name not in arrays and before in arrays and is_codes_field(name[-1]):
            arrays[name] = arrays.pop(before)
    for name in [*places, *arrays]:
        shape, wanted = (
            dtype_and_shape(each[name]) if name in each else none
            for each, none in ((arrays, "missing"), (places, "none"))
        )
        if shape != wanted:
            _refuse_other_codec(name, arrays, places)
            way_out = (
                "pass the transformation, and the parameters, that the state was made"
                " with"
            )
            if any(x[:-1] == name[:-1] and is_codes_field(x[-1]) for x in places):
                way_out += (
                    ", divided as they were, or into shards of whole blocks: a codec's"
                    " blocks end with a shard"
                )
            for x in arrays if shape == "missing" else ():
                if x[-len(name) :] == name:
                    part = "/".join(x[: -len(name)])
                    way_out = f"it is under {part!r}, so pass this part of the state"
            raise ValueError(
                f"state: {'/'.join(name)!r} is {shape}, and a state of tx for these"
                f" parameters has {wanted}: {way_out}."
            )
    placed = [_placed(arrays[name], place) for name, place in places.items()]
    same = jax.tree.structure(as_pure(state)) == jax.tree.structure(as_pure(target))
    return unflatten_like(state if same else target, placed)


def _refuse_other_codec(
    name: tuple[str, ...],
    arrays: Mapping[tuple[str, ...], PyTree[ArrayOrShape]],
    places: Mapping[tuple[str, ...], PyTree[ArrayOrShape]],
) -> None:
    """Refuses a moment that a state stores otherwise than `tx` does."""
    moment = name[:-1] if is_codes_field(name[-1]) else name
    stored, wanted = (_storage(each, moment) for each in (arrays, places))
    plain = moment in arrays and moment in places
    if stored and wanted and stored != wanted and not plain:
        raise ValueError(
            f"state: moment {'/'.join(moment)!r} is stored as {stored}, and tx stores"
            f" it as {wanted}: pass the transformation with the codec that the state"
            " was made with; or begin with new moments, tx.init(params)."
        )


def _storage(
    arrays: Mapping[tuple[str, ...], PyTree[ArrayOrShape]], moment: tuple[str, ...]
) -> str:
    """A moment's dtype, or the name of its codec; empty if it is not there."""
    if moment in arrays:
        return str(arrays[moment].dtype)
    names = (x[-1] for x in arrays if x[:-1] == moment)
    field = next(filter(is_codes_field, names), "")
    return _ARRANGEMENT.sub("", field).removeprefix("codes_")


def _by_name(
    state: PyTree, known: Collection[tuple[str, ...]] = ()
) -> dict[tuple[str, ...], PyTree[ArrayOrShape]]:
    """A state's arrays by the names of their keys, whatever the containers."""
    flat = jax.tree_util.tree_flatten_with_path(as_pure(state))[0]
    # A restore without a target makes `{"value": array}` of one of Flax's variables. If
    # it is a parameter that is called so, its name is known.
    arrays = ((key_names(path), x) for path, x in flat)
    boxed = lambda name: name[-1:] == ("value",) and name not in known
    return {name[:-1] if known and boxed(name) else name: x for name, x in arrays}


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
