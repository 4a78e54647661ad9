"""How ZeRO and FSDP divide parameters."""

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from paged_optax.backend.given import refuse_no_arrays, refuse_no_mesh
from paged_optax.backend.types import ArrayOrShape
from paged_optax.engine.shards import spec_of_axes


def fully_sharded(
    params: PyTree[ArrayOrShape], mesh: Mesh | AbstractMesh
) -> PyTree[NamedSharding]:
    """Divides every parameter over all devices of a mesh, as ZeRO and FSDP do.

    Each axis of the mesh, one after the other, cuts the longest dimension that is left
    of a parameter and that it divides evenly. Where there is none, it replicates.

    Args:
      params: The parameters, or their `ShapeDtypeStruct`s.
      mesh: The devices.

    Returns:
      A `NamedSharding` for each parameter.

    Raises:
      TypeError: If `mesh` is no mesh, or `params` no tree of arrays.

    Example:
      >>> import jax, jax.numpy as jnp, paged_optax as po
      >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
      >>> params = {"w": jnp.ones((512, 2048)), "b": jnp.ones(3)}
      >>> found = po.fully_sharded(params, mesh)
      >>> found["w"].spec, found["b"].spec
      (P(None, 'data'), P())

    References:
      Rajbhandari et al., `ZeRO <https://arxiv.org/abs/1910.02054>`_, 2020.
    """
    refuse_no_mesh("mesh", mesh)
    refuse_no_arrays("params", params)

    def divide(x: ArrayOrShape) -> NamedSharding:
        axes: list[tuple[str, ...]] = [()] * len(x.shape)
        left = list(x.shape)
        for name, size in mesh.shape.items():
            longest = max(
                ((n, -i) for i, n in enumerate(left) if n % size == 0), default=None
            )
            if longest is not None:
                i = -longest[1]
                axes[i], left[i] = (*axes[i], name), left[i] // size
        return NamedSharding(mesh, spec_of_axes(axes))

    return jax.tree.map(divide, params)
