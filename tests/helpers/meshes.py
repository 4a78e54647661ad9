"""Trees of arrays over meshes."""

import jax
from jax.sharding import NamedSharding


def divided(tree, mesh, specs):
    return {
        name: jax.device_put(x, NamedSharding(mesh, specs[name]))
        for name, x in tree.items()
    }


def mesh_of(axis_type):
    return jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
