"""Trees of arrays over meshes."""

import jax
from jax.sharding import NamedSharding


def divided(tree, mesh, specs):
    return {
        name: jax.device_put(x, NamedSharding(mesh, specs[name]))
        for name, x in tree.items()
    }
