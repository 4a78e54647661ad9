"""The parameters of a model, each layer's by itself or all layers' stacked."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from paged_optax.backend.memory import HOST, nbytes, on_host
from paged_optax.backend.text import keystr, parse_bytes
from paged_optax.backend.types import KeyPath, PyTreeDef, is_traced
from paged_optax.backend.validation import brief, check_arrays
from paged_optax.layerwise.slices import put
from paged_optax.layerwise.stacks import Shaped, away, offload
from paged_optax.splitting.find import Names


@dataclasses.dataclass(frozen=True)
class Stack:
    """Where the parameters of all layers are that are stacked together.

    Attributes:
      leaves: The number of each layer's leaf; of one leaf if it is stacked already.
      axis: The axis of that one leaf that is the layers'; None: each has its own leaf.
    """

    leaves: tuple[int, ...]
    axis: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Stacking:
    """How a tree of parameters is stacked, and taken apart again.

    Attributes:
      argument: What users call the tree.
      structure: The tree's structure.
      paths: The path of each leaf.
      shapes: The shape of each leaf.
      layers: The stacks, by name.
      rest: The other leaves, by name.
    """

    argument: str
    structure: PyTreeDef
    paths: tuple[KeyPath, ...]
    shapes: tuple[tuple[int, ...], ...]
    layers: Mapping[Names, Stack]
    rest: Mapping[Names, int]

    def stacked(
        self, tree: PyTree, *, on_host: bool | Literal["all"], min_size: int | str
    ) -> dict[str, PyTree]:
        """The tree with the layers' leaves stacked; see `SplitModel.stack`."""
        if on_host not in (False, True, "all"):
            raise ValueError(
                f"on_host={brief(on_host)}: True puts the layers on the host, 'all' the"
                " other parameters too."
            )
        leaves, smallest = self._leaves(tree), parse_bytes("min_size", min_size)
        layers: dict[Names, Shaped] = {}
        for name, stack in self.layers.items():
            chosen = [leaves[n] for n in stack.leaves]
            # Given up as they are stacked: the caller may have given them up too.
            if on_host:
                layers[name] = _away(chosen, stack.axis, min_size)
            else:
                layers[name] = _together(chosen, stack.axis)
        rest = {name: _read(leaves[n]) for name, n in self.rest.items()}
        if on_host == "all":
            rest = {
                name: x if nbytes(x) < smallest else away(x) for name, x in rest.items()
            }
        return {"layers": nested(layers), "rest": nested(rest)}

    def unstacked(self, stacked: PyTree) -> PyTree:
        """The tree as it was, of what is stacked."""
        leaves: list[Shaped | None] = [None] * len(self.paths)
        layers = unnested(stacked, [("layers", *names) for names in self.layers])
        for stack, x in zip(self.layers.values(), layers, strict=True):
            each = _apart(x, len(stack.leaves), stack.axis)
            for n, part in zip(stack.leaves, each, strict=True):
                leaves[n] = part
        rest = unnested(stacked, [("rest", *names) for names in self.rest])
        for n, x in zip(self.rest.values(), rest, strict=True):
            leaves[n] = x
        return jax.tree.unflatten(self.structure, leaves)

    def _leaves(self, tree: PyTree) -> list[Shaped]:
        check_arrays(self.argument, tree)
        flat, structure = jax.tree.flatten(tree)
        if structure != self.structure:
            _refuse_other_tree(self.argument, tree, self.paths)
        for path, x, shape in zip(self.paths, flat, self.shapes, strict=True):
            if tuple(x.shape) != shape:
                raise ValueError(
                    f"{self.argument}{keystr(path)} has shape {tuple(x.shape)}, and"
                    f" split_layers was given {shape}: split the model again."
                )
        return flat


def _refuse_other_tree(
    argument: str, tree: PyTree, known: Sequence[KeyPath]
) -> NoReturn:
    """Names a leaf that one of two trees of different structures has alone."""
    names = lambda paths: dict.fromkeys(map(keystr, paths))
    given = names(path for path, _ in jax.tree_util.tree_leaves_with_path(tree))
    wanted = names(known)
    lacks = next((name for name in wanted if name not in given), None)
    other = next((name for name in given if name not in wanted), None)
    differs = [
        f"has no {lacks}" if lacks else "",
        f"has {other}, which that had not" if other else "",
    ]
    raise ValueError(
        f"{argument} is no tree like that which split_layers was given: it"
        f" {' and '.join(filter(None, differs)) or 'has other containers'}. Pass a tree"
        " that the loss takes, as model.unstack returns it, or split it again."
    )


def nested(leaves: Mapping[Names, Shaped]) -> dict[str, PyTree]:
    """Nested dicts of the names' parts."""
    tree: dict[str, PyTree] = {}
    for names, x in leaves.items():
        at = tree
        for name in names[:-1]:
            at = at.setdefault(name, {})
        at[names[-1]] = x
    return tree


def unnested(tree: PyTree, names: Iterable[Names]) -> list[PyTree]:
    """The leaves of nested dicts, by their names."""
    found = []
    for parts in names:
        at = tree
        for part in parts:
            if not isinstance(at, Mapping) or part not in at:
                raise ValueError(
                    f"the parameters have no {'/'.join(parts)!r}: pass the tree that"
                    " model.stack returned, or a step."
                )
            at = at[part]
        found.append(at)
    return found


def _away(leaves: Sequence[Shaped], axis: int | None, min_size: int | str) -> Shaped:
    """Leaves of all layers on one leading axis, in host memory if they are large.

    What NumPy reads goes there layer by layer: never is a second stack in memory.
    """
    first = leaves[0]
    kind = jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype)
    given = any(isinstance(x, Array | jax.ShapeDtypeStruct) for x in leaves)
    if given or axis is not None or not on_host(offload([kind], min_size)):
        return offload([_together(leaves, axis)], min_size)[0]
    stack = away(np.zeros(kind.shape, kind.dtype))
    write = jax.jit(put, donate_argnums=0)
    for n, x in enumerate(leaves):
        stack = jax.block_until_ready(write(stack, np.asarray(x)[None], n))
    return stack


def _read(x: Shaped) -> Shaped:
    """An array, where something is given that NumPy makes one of."""
    known = Array, np.ndarray, jax.ShapeDtypeStruct
    return x if isinstance(x, known) else np.asarray(x)


def _together(leaves: Sequence[Shaped], axis: int | None) -> Shaped:
    """Leaves of all layers on one leading axis."""
    first = leaves[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        make = lambda *xs: (
            jnp.stack(xs) if axis is None else jnp.moveaxis(xs[0], axis, 0)
        )
        made = jax.eval_shape(make, *leaves)
        sharding = _sharding(first, axis)
        return jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=sharding)
    if not any(isinstance(x, Array) for x in leaves):
        if axis is not None:
            return np.moveaxis(np.asarray(first), axis, 0)
        made = np.empty((len(leaves), *first.shape), first.dtype)
        for n, x in enumerate(leaves):
            made[n] = np.asarray(x)  # one at a time: some are read as they are used
        return made
    if axis == 0:
        return first
    if any(on_host(x) for x in leaves):
        return jax.device_put(
            _together([np.asarray(x) for x in leaves], axis), _sharding(first, axis)
        )
    make = lambda *xs: jnp.stack(xs) if axis is None else jnp.moveaxis(xs[0], axis, 0)
    return jax.jit(make, out_shardings=_sharding(first, axis))(*leaves)


def _sharding(x: Shaped, axis: int | None) -> jax.sharding.Sharding | None:
    """How a stack is divided whose layers are divided like this one."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = (*sharding.spec, *[None] * (len(x.shape) - len(sharding.spec)))
    spec = (
        (None, *spec) if axis is None else (spec[axis], *spec[:axis], *spec[axis + 1 :])
    )
    return sharding.update(spec=PartitionSpec(*spec))


def _apart(x: Shaped, count: int, axis: int | None) -> list[Shaped]:
    """The leaves of a stack."""
    if isinstance(x, jax.ShapeDtypeStruct):
        make = lambda x: x[0] if axis is None else jnp.moveaxis(x, 0, axis)
        made = jax.eval_shape(make, x)
        return [jax.ShapeDtypeStruct(made.shape, made.dtype)] * count
    if axis is not None:
        return [x if axis == 0 else jnp.moveaxis(x, 0, axis)]
    if not isinstance(x, np.ndarray) and on_host(x) and not is_traced(x):
        values = np.asarray(x)
        return [jax.device_put(values[n], HOST) for n in range(count)]
    return [x[n] for n in range(count)]
