"""Shardings of the parameters and of their moments.

The first source wins:

1. The type of an array on a mesh of explicit axes.
2. The argument `shardings`.
3. A concrete array of the update, an argument of `jit_step`, or Flax's metadata of a
   traced parameter.
4. A parameter of this path and shape of an earlier `init` or `abstract_state`, on a
   mesh of these axes in any sizes; of equal sizes if there is one.

In a `jit` over automatic axes the type of an array has its mesh, but no sharding. If
Flax's metadata divides moments apart from their parameter, it comes first.
"""

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from paged_optax.backend.text import keystr
from paged_optax.backend.types import (
    ArrayOrShape,
    KeyPath,
    axis_types,
    is_explicit,
    is_traced,
)
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


def check_even(params: PyTree) -> None:
    """Raises if the sharding of a parameter does not divide it evenly."""
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding):
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


class ParameterShardings:
    """Shardings of a paged transformation's parameters.

    A sharding seen on a mesh applies to meshes of the same axes and sizes, on any
    devices: no state returns to a mesh that it has left. `shardings` is `paged`'s.
    """

    def __init__(self, shardings: PyTree = None):
        is_leaf = lambda x: isinstance(x, (NamedSharding, PartitionSpec)) or x is None
        flat = jax.tree_util.tree_flatten_with_path(shardings, is_leaf=is_leaf)[0]
        self.argument = {tuple(path): x for path, x in flat if x is not None}
        # On each mesh, the most recent last.
        self._seen: dict[PathAndShape, dict[Axes, Shards | None]] = {}
        # Parameters whose moments Flax's metadata divides apart from them.
        self._apart: set[PathAndShape] = set()
        self._warned: set[Axes] = set()

    def see(
        self,
        path: KeyPath,
        x: Parameter,
        metadata: NamedSharding | None,
        *,
        remember: bool,
    ) -> NamedSharding | None:
        """Returns the sharding of moments that are divided apart from their parameter.

        The types of parameters in `abstract_state` replace what was seen before: a
        state is restored for them. Raises if a parameter had another sharding before,
        on a mesh of the same axes.
        """
        key, visitor = (keystr(path), x.shape), current().visitor
        before = self._recall(key, _find_mesh([x])) if key in self._apart else None
        apart = True
        if metadata is not None and metadata.mesh.size > 1:
            shards = Shards.create(metadata, x.shape)
            if shards is None:
                raise _uneven("optimizer_sharding", metadata, path, x.shape)
        elif before:
            shards = before  # `update` passes parameters without their variables
        else:
            sharding, apart = getattr(x, "sharding", None), False
            if is_traced(x):
                sharding = current().shardings.get(id(x))
                if visitor and visitor.mesh is not None:
                    spec = jax.typeof(x).sharding.spec
                    sharding = NamedSharding(visitor.mesh, spec)
            shards = Shards.create(sharding, x.shape)
            known = shards is not None or key in self._seen
            if self.argument or sharding is None or (is_traced(x) and not known):
                return None
        kept, axes = shards, axes_of(shards and shards.mesh)
        before = self._seen.get(key, {}).get(axes)
        if visitor is None and before and shards and shards.axes != before.axes:
            # Explicit types have the shardings in nearly every update.
            if apart or not (_typed(shards) or _typed(before)):
                now, then = (
                    f"{x.spec} over the mesh {dict(x.mesh.shape)}"
                    for x in (shards, before)
                )
                raise ValueError(
                    f"parameter {key[0]} of shape {x.shape} is divided by {now}, and"
                    f" was divided by {then} at an earlier init of this transformation:"
                    " in a jax.jit one could not be told from the other. Build one"
                    " transformation for each, or say which it is, by paged(...,"
                    " shardings=...)."
                )
        if apart and shards and visitor:
            mesh = shards.mesh if visitor.mesh is None else visitor.mesh
            kept = dataclasses.replace(shards, mesh=mesh)
            remember = remember and isinstance(mesh, Mesh)  # not a fictitious mesh
        if remember:
            self._remember(key, kept, apart)
        if shards is None or not apart:
            return None
        explicit = jax.typeof(x).sharding
        # On explicit axes a traced parameter's type has the mesh.
        on_axes = is_traced(x) and is_explicit(explicit)
        return NamedSharding(explicit.mesh if on_axes else shards.mesh, shards.spec)

    def _remember(self, key: PathAndShape, shards: Shards | None, apart: bool) -> None:
        by_mesh, axes = self._seen.setdefault(key, {}), axes_of(shards and shards.mesh)
        before = by_mesh.pop(axes, None)
        if before and shards and before.axes == shards.axes:
            # A mesh with devices has more information than an abstract one.
            shards = shards if isinstance(shards.mesh, Mesh) else before
        by_mesh[axes] = shards
        (self._apart.add if apart else self._apart.discard)(key)
        _divided.discard((key, axes))
        if shards and not apart and max(shards.divisions, default=1) > 1:
            _divided.add((key, axes))

    def find(
        self, path: KeyPath, *arrays: ArrayOrShape, moments: bool = True
    ) -> Shards | None:
        """Returns the shards of a parameter, by arrays of its shape; the first wins.

        Metadata that divides moments apart counts only if `moments` is true.
        """
        shape = arrays[0].shape
        key = keystr(path), shape
        seen, apart = self._recall(key, _find_mesh(arrays)), key in self._apart
        if moments and apart and seen:
            return seen
        for x in arrays:
            sharding = sharding_in_type(x)
            types = axis_types(sharding)
            if AxisType.Manual in types:
                return None
            # For axes of several types, another source may have more.
            if types == {AxisType.Explicit}:
                mesh = getattr(getattr(x, "sharding", None), "mesh", sharding.mesh)
                return Shards.create(NamedSharding(mesh, sharding.spec), shape)
        if self.argument:
            return self._of_argument(path, shape)
        concrete = [x for x in arrays if not is_traced(x)]
        if concrete:
            return next(filter(None, map(Shards.of_array, concrete)), None)
        args = [Shards.create(current().shardings.get(id(x)), shape) for x in arrays]
        if seen and (apart or _typed(seen)):
            seen = None
        return next(filter(None, (*args, seen)), None)

    def _recall(
        self, key: PathAndShape, mesh: Mesh | AbstractMesh | None
    ) -> Shards | None:
        """Returns the division seen on a mesh, or on one of its axes in other sizes.

        Without a mesh it is the most recent one.
        """
        around = jax.sharding.get_abstract_mesh()
        by_mesh = self._seen.get(key, {})
        if AxisType.Manual in around.axis_types:
            return None  # the arrays are parts
        if mesh is None:
            axes, last = next(reversed(by_mesh.items()), ((), None))
            known = last and (isinstance(last.mesh, Mesh) or axes == axes_of(around))
            return last if known else None
        if seen := by_mesh.get(axes_of(mesh)):
            automatic = {*mesh.axis_types} == {AxisType.Auto}
            return dataclasses.replace(seen, mesh=mesh) if automatic else seen
        for seen in reversed(by_mesh.values()):
            if seen and {*seen.mesh.axis_names} == {*mesh.axis_names}:
                return Shards.create(NamedSharding(mesh, seen.spec), key[1])
        return None

    def _of_argument(self, path: KeyPath, shape: tuple[int, ...]) -> Shards | None:
        ends = (tuple(path[:n]) for n in range(len(path), -1, -1))
        requested = next(
            (self.argument[end] for end in ends if end in self.argument), None
        )
        if requested is None:
            raise ValueError(
                f"shardings has nothing for parameter {keystr(path)}: give it the"
                " parameters' structure, or a prefix of it; PartitionSpec() where a"
                " parameter is replicated."
            )
        if isinstance(requested, PartitionSpec):
            mesh = jax.sharding.get_abstract_mesh()
            if mesh.empty:
                raise ValueError(
                    f"shardings has {requested} for parameter {keystr(path)}, and there"
                    " is no mesh around: pass NamedSharding(mesh, spec), or enter"
                    " jax.set_mesh(mesh)."
                )
            requested = NamedSharding(mesh, requested)
        shards = Shards.create(requested, shape)
        if shards is None and requested.mesh.size > 1:
            raise _uneven("shardings", requested, path, shape)
        return shards

    def warn_of_unknown(self, path: KeyPath, x: ArrayOrShape) -> None:
        """Warns, once, of a divided parameter whose sharding an update cannot read."""
        mesh, key = jax.typeof(x).sharding.mesh, (keystr(path), x.shape)
        if mesh.size == 1 or mesh.empty or AxisType.Manual in mesh.axis_types:
            return
        axes, by_mesh = axes_of(mesh), self._seen.get(key, {})
        elsewhere = [
            x.mesh for x in by_mesh.values() if x and max(x.divisions, default=1) > 1
        ]
        unknown = (
            f"in this jax.jit says how {key[0]} of shape {x.shape} is divided over the"
            f" mesh {dict(mesh.shape)}, so that XLA gathers its moments from all"
            " devices."
        )
        if axes not in by_mesh and elsewhere:
            if axes not in self._warned:
                self._warned.add(axes)
                warn_user(
                    f"nothing {unknown} It was divided over the mesh"
                    f" {dict(elsewhere[-1].shape)} when tx last saw it: move the state"
                    " by paged_optax.place_state(tx, state, params), before the step is"
                    " traced."
                )
        elif (key, axes) in _divided:
            _divided.clear()
            warn_user(
                f"shardings=None, and nothing else {unknown} A transformation forgets"
                " what its init saw if each call makes it anew, as"
                " optax.inject_hyperparams around paged(...) does. Compile the step by"
                " jit_step, whose arguments tell, if no jax.sharding.auto_axes hides"
                " it; put inject_hyperparams inside paged(...); or pass"
                " paged(..., shardings=...)."
            )


def _typed(shards: Shards) -> bool:
    """Returns whether the types of such arrays have their shardings."""
    return set(shards.mesh.axis_types) == {AxisType.Explicit}


def _find_mesh(arrays: Sequence[ArrayOrShape]) -> Mesh | AbstractMesh | None:
    """Returns the mesh of the first array that has one, or None."""
    for x in arrays:
        for sharding in (getattr(x, "sharding", None), jax.typeof(x).sharding):
            if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names:
                return sharding.mesh
    return None
