"""Shardings of the parameters, from all sources."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from paged_optax.backend.text import keystr
from paged_optax.backend.types import ArrayOrShape, KeyPath, axis_types, is_traced
from paged_optax.backend.user_warnings import warn_user
from paged_optax.engine.shards import Shards
from paged_optax.transform.context import current, sharding_in_type
from paged_optax.transform.trees import Parameter

#: A parameter: its path and its shape.
PathAndShape = tuple[str, tuple[int, ...]]

#: The axes of a mesh, and their sizes: all that types of traced arrays name of it.
Axes = tuple[tuple[str, int], ...]

#: Divided parameters of the last `init` or `abstract_state` of any transformation, and
#: the mesh's axes, for transformations that each call rebuilds. Only a warning depends
#: on it, and no program.
_divided: set[tuple[PathAndShape, Axes]] = set()


def axes_of(mesh: Mesh | AbstractMesh | None) -> Axes:
    """Returns the axes of a mesh, and their sizes; none without a mesh."""
    return () if mesh is None else tuple(mesh.shape.items())


class Divisions:
    """The most recent sharding of parameters on each mesh.

    Over automatic axes the type of a traced array has the axes and sizes of its mesh,
    but no sharding. A sharding seen on a mesh applies to meshes of the same axes and
    sizes, on any devices: no state returns to a mesh that it has left.
    """

    def __init__(self) -> None:
        self._seen: dict[PathAndShape, dict[Axes, Shards | None]] = {}

    def keep(self, key: PathAndShape, shards: Shards | None) -> None:
        """Replaces the sharding of a parameter on a mesh."""
        seen = self._seen.setdefault(key, {})
        before = seen.pop(axes_of(shards and shards.mesh), None)
        # A mesh with devices has more information than an abstract one.
        if before and shards and before.axes == shards.axes:
            shards = shards if isinstance(shards.mesh, Mesh) else before
        seen[axes_of(shards and shards.mesh)] = shards

    def recall(self, key: PathAndShape, mesh: Mesh | AbstractMesh) -> Shards | None:
        """Returns the sharding on a mesh of these axes, on the mesh it was seen on."""
        return self._seen.get(key, {}).get(axes_of(mesh))

    def on(self, key: PathAndShape, mesh: Mesh | AbstractMesh | None) -> Shards | None:
        """Returns the sharding of a parameter on a mesh.

        Without a mesh, it is the sharding seen last.
        """
        around = jax.sharding.get_abstract_mesh()
        if AxisType.Manual in around.axis_types:
            return None  # the arrays are parts
        if mesh is not None:
            shards = self.recall(key, mesh)
            if shards is None or {*mesh.axis_types} != {AxisType.Auto}:
                return shards
            return dataclasses.replace(shards, mesh=mesh)
        last = next(reversed(self._seen.get(key, {}).values()), None)
        if last is None or isinstance(last.mesh, Mesh):
            return last
        return last if axes_of(around) == axes_of(last.mesh) else None

    def assumed(
        self, key: PathAndShape, mesh: Mesh | AbstractMesh | None
    ) -> Shards | None:
        """Returns the sharding by a mesh of the same axes in other sizes."""
        for before in reversed(self._seen.get(key, {}).values()):
            if mesh and before and {*before.mesh.axis_names} == {*mesh.axis_names}:
                return Shards.of(NamedSharding(mesh, before.spec), key[1])
        return None

    def elsewhere(
        self, key: PathAndShape, mesh: Mesh | AbstractMesh
    ) -> Mesh | AbstractMesh | None:
        """Returns another mesh that divided a parameter, if it was not on this one."""
        seen = self._seen.get(key, {})
        if axes_of(mesh) in seen:
            return None
        divided = (
            x for x in reversed(seen.values()) if x and max(x.divisions, default=1) > 1
        )
        return next((x.mesh for x in divided), None)

    def __contains__(self, key: PathAndShape) -> bool:
        return key in self._seen


def refuse_uneven(params: PyTree) -> None:
    """Raises if parameters have shardings that no array could have.

    Raises:
      ValueError: If the sharding of a parameter does not divide it evenly.
    """
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            continue
        try:
            sharding.shard_shape(x.shape)
        except ValueError as error:
            raise _uneven("params", sharding, path, x.shape) from error


def _uneven(
    argument: str, sharding: NamedSharding, path: KeyPath, shape: tuple[int, ...]
) -> ValueError:
    return ValueError(
        f"{argument} has {sharding.spec} over the mesh {dict(sharding.mesh.shape)} for"
        f" parameter {keystr(path)} of shape {shape}, which it does not divide evenly:"
        " leave that axis whole."
    )


def _conflict(
    what: str, shape: tuple[int, ...], now: Shards | None, before: Shards | None
) -> ValueError:
    divided = lambda x: (
        f"divided by {x.spec} over the mesh {dict(x.mesh.shape)}" if x else "undivided"
    )
    return ValueError(
        f"{what} of shape {shape} is {divided(now)}, and was {divided(before)} at an"
        " earlier init of this transformation: in a jax.jit one could not be told from"
        " the other. Build one transformation for each, or say which it is, by"
        " paged(..., shardings=...)."
    )


class ParameterShardings:
    """Shardings of a paged transformation's parameters.

    The first source wins:

    1. Flax's metadata of moments, if these are not divided as their parameters.
    2. The type of an array on a mesh of explicit axes.
    3. The argument `shardings`.
    4. The sharding of a concrete array: of the update, or of an earlier `init` or
       `abstract_state` for a parameter of this path and shape on a mesh of these axes.
    5. The sharding of an argument of `jit_step`, or Flax's metadata of a traced
       parameter.
    6. A concrete array seen on a mesh of these axes in other sizes.

    In a `jit` over automatic axes the type of an array has its mesh, but no sharding.

    Args:
      shardings: A pytree of `NamedSharding` or `PartitionSpec` of the parameters'
        structure, or a prefix of it; None for nothing.
    """

    def __init__(self, shardings: PyTree = None):
        is_leaf = lambda x: isinstance(x, (NamedSharding, PartitionSpec)) or x is None
        flat = jax.tree_util.tree_flatten_with_path(shardings, is_leaf=is_leaf)[0]
        self.argument = {tuple(path): x for path, x in flat if x is not None}
        for path, x in self.argument.items():
            if not isinstance(x, (NamedSharding, PartitionSpec)):
                raise ValueError(
                    f"shardings{keystr(path)}={x!r} is neither a NamedSharding nor a"
                    " PartitionSpec."
                )
        self.seen = Divisions()
        self.metadata = Divisions()
        self._warned: set[Axes] = set()

    def of_arrays(
        self,
        paths: Sequence[KeyPath],
        leaves: Sequence[Parameter],
        moments_of: Sequence[NamedSharding | None],
    ) -> dict[PathAndShape, Shards | None]:
        """Returns the shardings of concrete parameters, for `init` to remember.

        Includes traced parameters with known shardings, and the types of parameters in
        `abstract_state`: a state is restored for them, and they replace earlier ones.

        Raises:
          ValueError: If a parameter of `init` had another sharding before, on a mesh of
            the same axes.
        """
        seen: dict[PathAndShape, Shards | None] = {}
        visitor = current().visitor
        mesh = visitor and visitor.mesh
        for path, x, moments in zip(paths, leaves, moments_of, strict=True):
            if self.argument or moments is not None:
                continue  # these win
            if not is_traced(x):
                sharding = x.sharding
            elif mesh is not None:
                sharding = NamedSharding(mesh, jax.typeof(x).sharding.spec)
            elif (sharding := current().shardings.get(id(x))) is None:
                continue  # a tracer has no sharding
            key = keystr(path), x.shape
            shards = Shards.of(sharding, x.shape)
            if is_traced(x) and shards is None and key not in self.seen:
                continue
            seen[key] = shards
            before = self.seen.recall(key, shards.mesh) if shards else None
            if _typed(shards) or _typed(before):
                continue  # types have the shardings in nearly every update
            same = before is None or shards is None or shards.axes == before.axes
            if not same and visitor is None:
                raise _conflict(f"parameter {key[0]}", x.shape, shards, before)
        return seen

    def warn_of_unknown(self, path: KeyPath, x: ArrayOrShape) -> None:
        """Warns, once, of a divided parameter whose sharding an update cannot read."""
        mesh, key = jax.typeof(x).sharding.mesh, (keystr(path), x.shape)
        if mesh.size == 1 or mesh.empty or AxisType.Manual in mesh.axis_types:
            return
        if (other := self.seen.elsewhere(key, mesh)) is not None:
            if axes_of(mesh) not in self._warned:
                self._warned.add(axes_of(mesh))
                warn_user(
                    f"nothing in this jax.jit says how {key[0]} of shape {x.shape} is"
                    f" divided over the mesh {dict(mesh.shape)}, so that XLA gathers"
                    " its moments from all devices. It was divided over the mesh"
                    f" {dict(other.shape)} when tx last saw it: move the state by"
                    " paged_optax.place_state(tx, state, params), before the step is"
                    " traced."
                )
            return
        if (key, axes_of(mesh)) not in _divided:
            return
        _divided.clear()
        warn_user(
            f"shardings=None, and nothing else in this jax.jit says how {keystr(path)}"
            f" of shape {x.shape} is divided over the mesh {dict(mesh.shape)}, so that"
            " XLA gathers its moments from all devices. A transformation forgets what"
            " its init saw if each call makes it anew, as optax.inject_hyperparams"
            " around paged(...) does. Compile the step by jit_step, whose arguments"
            " tell, if no jax.sharding.auto_axes hides it; put inject_hyperparams"
            " inside paged(...); or pass paged(..., shardings=...)."
        )

    def of_metadata(
        self,
        paths: Sequence[KeyPath],
        leaves: Sequence[Parameter],
        metadata: Sequence[NamedSharding | None],
    ) -> tuple[NamedSharding | None, ...]:
        """Returns the shardings of moments by Flax's metadata; None: as parameters.

        Raises:
          ValueError: If such a sharding does not fit its parameter, or an earlier
            `init` had another one.
        """
        shardings = []
        for path, x, sharding in zip(paths, leaves, metadata, strict=True):
            key, mesh = (keystr(path), x.shape), _mesh_of([x])
            if sharding is not None:
                mesh = sharding.mesh
            before = self.metadata.on(key, mesh)
            if sharding is None or sharding.mesh.size == 1:
                sharding = None
                # A tracer has no sharding; an array's moments are divided as it is.
                before = before or (
                    self.metadata.assumed(key, mesh) if is_traced(x) else None
                )
                shards = before if is_traced(x) else Shards.of_array(x)
            else:
                fits = len(sharding.spec) <= len(x.shape)
                shards = Shards.of(sharding, x.shape) if fits else None
                if shards is None:
                    raise _uneven("optimizer_sharding", sharding, path, x.shape)
            same = before is None or (shards is not None and shards.axes == before.axes)
            if not same and current().visitor is None:
                what = f"what is kept of parameter {keystr(path)}"
                raise _conflict(what, x.shape, shards, before)
            known = sharding or (before and before.sharding)
            shardings.append(known and _on_axes_of(x, known))
        return tuple(shardings)

    def remember(
        self,
        paths: Sequence[KeyPath],
        leaves: Sequence[Parameter],
        moments_of: Sequence[NamedSharding | None],
        seen: Mapping[PathAndShape, Shards | None],
    ) -> None:
        """Remembers the results of `of_metadata` and `of_arrays`."""
        for key, shards in seen.items():
            self.seen.keep(key, shards)
            if shards is not None:
                one = key, axes_of(shards.mesh)
                _divided.discard(one)
                if max(shards.divisions, default=1) > 1:
                    _divided.add(one)
        visitor = current().visitor
        for path, x, sharding in zip(paths, leaves, moments_of, strict=True):
            if sharding is not None and visitor and visitor.mesh is not None:
                sharding = NamedSharding(visitor.mesh, sharding.spec)
            if (shards := Shards.of(sharding, x.shape)) is None:
                continue
            # A visitor may run on a fictitious abstract mesh.
            if isinstance(shards.mesh, Mesh) or visitor is None:
                self.metadata.keep((keystr(path), x.shape), shards)

    def find(self, path: KeyPath, *arrays: ArrayOrShape) -> Shards | None:
        """Returns the shards of a parameter, by arrays of its shape; the first wins.

        Raises:
          ValueError: If the argument's sharding does not fit its parameter.
        """
        shape, mesh = arrays[0].shape, _mesh_of(arrays)
        key = keystr(path), shape
        known = self.metadata.on(key, mesh) or self.metadata.assumed(key, mesh)
        if known is not None:
            return known
        for x in arrays:
            sharding = sharding_in_type(x)
            types = axis_types(sharding)
            if AxisType.Manual in types:
                return None
            # For axes of several types, another source may have more.
            if types == {AxisType.Explicit}:
                mesh = getattr(getattr(x, "sharding", None), "mesh", sharding.mesh)
                return Shards.of(NamedSharding(mesh, sharding.spec), shape)
        if self.argument:
            return self._of_argument(path, shape)
        concrete = [x for x in arrays if not is_traced(x)]
        of_arrays = map(Shards.of_array, concrete)
        if concrete:
            return next((shards for shards in of_arrays if shards is not None), None)
        arguments = (Shards.of(current().shardings.get(id(x)), shape) for x in arrays)
        if (seen := self.seen.on(key, mesh)) is not None and not _typed(seen):
            return seen
        return next(filter(None, arguments), None) or self.seen.assumed(key, mesh)

    def _of_argument(self, path: KeyPath, shape: tuple[int, ...]) -> Shards | None:
        ends = (tuple(path[:n]) for n in range(len(path), -1, -1))
        asked = next((self.argument[end] for end in ends if end in self.argument), None)
        if asked is None:
            raise ValueError(
                f"shardings has nothing for parameter {keystr(path)}: give it the"
                " parameters' structure, or a prefix of it; PartitionSpec() where a"
                " parameter is replicated."
            )
        if isinstance(asked, PartitionSpec):
            mesh = jax.sharding.get_abstract_mesh()
            if mesh.empty:
                raise ValueError(
                    f"shardings has {asked} for parameter {keystr(path)}, and there is"
                    " no mesh around: pass NamedSharding(mesh, spec), or enter"
                    " jax.set_mesh(mesh)."
                )
            asked = NamedSharding(mesh, asked)
        shards = Shards.of(asked, shape) if len(asked.spec) <= len(shape) else None
        if shards is None and asked.mesh.size > 1:
            raise _uneven("shardings", asked, path, shape)
        return shards


def _typed(shards: Shards | None) -> bool:
    """Returns whether the types of such arrays have their shardings."""
    return shards is not None and set(shards.mesh.axis_types) == {AxisType.Explicit}


def _mesh_of(arrays: Sequence[ArrayOrShape]) -> Mesh | AbstractMesh | None:
    """Returns the mesh of the first array that has one, or None."""
    for x in arrays:
        for sharding in (getattr(x, "sharding", None), jax.typeof(x).sharding):
            if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names:
                return sharding.mesh
    return None


def _on_axes_of(x: Parameter, sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding on the explicit axes of a traced parameter's type."""
    mesh = jax.typeof(x).sharding.mesh if is_traced(x) else sharding.mesh
    explicit = AxisType.Explicit in getattr(mesh, "axis_types", ())
    return NamedSharding(mesh, sharding.spec) if explicit else sharding
