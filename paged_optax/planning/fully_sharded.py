"""How ZeRO and FSDP divide parameters."""

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from paged_optax.backend.types import ArrayOrShape
from paged_optax.backend.validation import brief, check_arrays, check_mesh
from paged_optax.engine.shards import spec_of_axes
from paged_optax.planning.layers import stacks_under


def fully_sharded(
    params: PyTree[ArrayOrShape], mesh: Mesh | AbstractMesh, layers: str = "layers"
) -> PyTree[NamedSharding]:
    """Divides every parameter over all devices of a mesh, as ZeRO and FSDP do.

    Each axis of the mesh, one after the other, cuts the longest dimension that is left
    of a parameter and that it divides evenly. Where there is none, it replicates. The
    axis that layers are stacked on stays whole, for a scan or `layerwise_step` takes
    one layer at a time, and would gather all of them.

    Args:
      params: The parameters, or their `ShapeDtypeStruct`s.
      mesh: The devices.
      layers: The key under which layers are stacked on the leading axis, as in
        `layerwise_step` and `what_fits`. What is under it is taken for stacks if all of
        it begins with one length, of at most 1000 layers. Another key: none are stacks.

    Returns:
      A `NamedSharding` for each parameter.

    Raises:
      TypeError: If `mesh` is no mesh, `params` no tree of arrays, or `layers` no text.

    Example:
      >>> import jax, jax.numpy as jnp, paged_optax as po
      >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
      >>> params = {"w": jnp.ones((512, 2048)), "b": jnp.ones(3)}
      >>> found = po.fully_sharded(params, mesh)
      >>> found["w"].spec, found["b"].spec
      (P(None, 'data'), P())
      >>> stacked = {"layers": {"w": jnp.ones((64, 32, 16))}}
      >>> po.fully_sharded(stacked, mesh)["layers"]["w"].spec
      P(None, 'data')

    References:
      Rajbhandari et al., `ZeRO <https://arxiv.org/abs/1910.02054>`_, 2020.
    """
    check_mesh("mesh", mesh)
    check_arrays("params", params)
    if not isinstance(layers, str):
        raise TypeError(f"layers={brief(layers)} is not a key, such as 'layers'.")

    def divide(x: ArrayOrShape, stacked: bool) -> NamedSharding:
        axes: list[tuple[str, ...]] = [()] * len(x.shape)
        left, first = list(x.shape), int(stacked)
        for name, size in mesh.shape.items():
            longest = max(
                ((n, -i) for i, n in enumerate(left) if i >= first and n % size == 0),
                default=None,
            )
            if longest is not None:
                i = -longest[1]
                axes[i], left[i] = (*axes[i], name), left[i] // size
        return NamedSharding(mesh, spec_of_axes(axes))

    leaves, structure = jax.tree.flatten(params)
    inside = stacks_under(params, layers)
    return structure.unflatten([divide(x, n in inside) for n, x in enumerate(leaves)])
