"""How ZeRO and FSDP divide parameters."""

from typing import Any

import jax
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
)

from paged_optax.engine.shards import spec_of_axes


def fully_sharded(params: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Divides every parameter over all devices of a mesh, as ZeRO and FSDP do.

    One axis of the mesh after the other cuts the longest dimension of what is left of
    a parameter, of those that it divides evenly; where there is none it replicates.

    Args:
      params: The parameters, or their `ShapeDtypeStruct`s.
      mesh: The devices.

    Returns:
      A `NamedSharding` for each parameter.

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

    def divide(x: Any) -> NamedSharding:
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
