"""JAX's key paths as text: as code in messages, as names where users write them."""

import jax

from paged_optax.backend.types import KeyPath

#: A path string, or a JAX key path.
Path = str | KeyPath


def keystr(path: KeyPath) -> str:
    """A key path as Python would write it.

    Example:
      >>> keystr((jax.tree_util.DictKey("block"), jax.tree_util.SequenceKey(0)))
      "['block'][0]"
    """
    return jax.tree_util.keystr(path)


def slashed(path: KeyPath) -> str:
    """A key path as a name.

    Example:
      >>> slashed((jax.tree_util.DictKey("block"), jax.tree_util.SequenceKey(0)))
      'block/0'
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def name_of(path: Path) -> str:
    """The name of what a path leads to.

    Example:
      >>> name_of("/block/0"), name_of((jax.tree_util.DictKey("block"),))
      ('block/0', 'block')
    """
    if isinstance(path, str):
        return path.strip("/")
    if not isinstance(path, tuple):
        raise TypeError(
            f"path={path!r} is no path: pass one such as 'blocks/0/kernel', or JAX's"
            " keys."
        )
    return slashed(path)
