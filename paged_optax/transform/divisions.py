"""How parameters were divided, when they were last seen on each mesh."""

import dataclasses
from typing import TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from paged_optax.engine.shards import Shards

#: A parameter: its path and its shape.
Key: TypeAlias = tuple[str, tuple[int, ...]]

#: The axes of a mesh, and their sizes. The types of traced arrays name no more of it.
Axes: TypeAlias = tuple[tuple[str, int], ...]


def axes_of(mesh: Mesh | AbstractMesh | None) -> Axes:
    """The axes of a mesh, and their sizes; none without a mesh."""
    return () if mesh is None else tuple(mesh.shape.items())


class Divisions:
    """How parameters were divided, when they were last seen on each mesh.

    Over automatic axes the type of a traced array names its mesh, by its axes and their
    sizes, and does not say how the array is divided. So what was seen on a mesh is
    followed on a mesh of these axes alone, whichever its devices: no state goes back to
    a mesh that it has left.
    """

    def __init__(self) -> None:
        self._seen: dict[Key, dict[Axes, Shards | None]] = {}

    def keep(self, key: Key, shards: Shards | None) -> None:
        """Keeps how a parameter is divided over a mesh, in place of what was there."""
        seen = self._seen.setdefault(key, {})
        before = seen.pop(axes_of(shards and shards.mesh), None)
        # A mesh that names its devices says more than one that does not.
        if before and shards and before.axes == shards.axes:
            shards = shards if isinstance(shards.mesh, Mesh) else before
        seen[axes_of(shards and shards.mesh)] = shards

    def kept(self, key: Key, mesh: Mesh | AbstractMesh) -> Shards | None:
        """What was kept of a mesh of these axes, on the mesh that it was seen on."""
        return self._seen.get(key, {}).get(axes_of(mesh))

    def on(self, key: Key, mesh: Mesh | AbstractMesh | None) -> Shards | None:
        """How a parameter was divided over this mesh.

        Args:
          key: The parameter.
          mesh: The mesh that the parameter, or what is like it, is on. None if that is
            not known: then it is where it was seen last.
        """
        around = jax.sharding.get_abstract_mesh()
        if AxisType.Manual in around.axis_types:
            return None  # what is seen is a part
        if mesh is not None:
            shards = self.kept(key, mesh)
            if shards is None or {*mesh.axis_types} != {AxisType.Auto}:
                return shards
            return dataclasses.replace(shards, mesh=mesh)
        last = next(reversed(self._seen.get(key, {}).values()), None)
        if last is None or isinstance(last.mesh, Mesh):
            return last
        return last if axes_of(around) == axes_of(last.mesh) else None

    def assumed(self, key: Key, mesh: Mesh | AbstractMesh | None) -> Shards | None:
        """How it is divided over a mesh of the same axes in other sizes: likewise."""
        for before in reversed(self._seen.get(key, {}).values()):
            if mesh and before and {*before.mesh.axis_names} == {*mesh.axis_names}:
                return Shards.of(NamedSharding(mesh, before.spec), key[1])
        return None

    def elsewhere(
        self, key: Key, mesh: Mesh | AbstractMesh
    ) -> Mesh | AbstractMesh | None:
        """Another mesh that a parameter was divided over, if it was not on this one."""
        seen = self._seen.get(key, {})
        if axes_of(mesh) in seen:
            return None
        divided = (
            x for x in reversed(seen.values()) if x and max(x.divisions, default=1) > 1
        )
        return next((x.mesh for x in divided), None)

    def __contains__(self, key: Key) -> bool:
        return key in self._seen
