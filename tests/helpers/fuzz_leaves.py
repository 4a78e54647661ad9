"""The leaves of a state of random transformations, as they are stored and as seen."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged_optax.codecs import Codec, Quantized, arranged
from paged_optax.state.leaves import is_quantized
from paged_optax.transform.codec_rules import check, choose
from paged_optax.transform.trees import parameter_of


@functools.cache
def coder(codec: Codec, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Encodes and decodes; what is compiled serves every recipe."""
    return jax.jit(codec.encode), jax.jit(lambda stored: codec.decode(stored, shape))


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a state."""

    shape: tuple[int, ...]  # its shape
    codec: Codec | None  # what stores it, or None
    param_index: int | None  # the number of its parameter, or None

    def is_active(self, gates: Sequence[bool]) -> bool:
        """Whether its parameter is; of none, whether any is."""
        return any(gates) if self.param_index is None else gates[self.param_index]

    def encode(self, x: Any) -> Any:
        return x if self.codec is None else coder(self.codec, self.shape)[0](x)

    def decode(self, stored: Any) -> Any:
        """The leaf on one device, as the transformation sees it."""
        stored = jax.tree.map(on_one_device, unnamed(stored))
        codec = self.codec
        return stored if codec is None else coder(codec, self.shape)[1](stored)


def on_one_device(x: Array) -> Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jnp.asarray(np.asarray(x))


def leaves_of(codec: Any, init: Callable[[Any], Any], params: Any) -> list[Leaf]:
    """The leaves of a transformation's state, in order."""
    state = jax.eval_shape(init, params)
    flat = jax.tree_util.tree_leaves_with_path(state)
    paths, avals = [path for path, _ in flat], [x for _, x in flat]
    own = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    param_indices = parameter_of(paths, own)
    codecs, _ = choose(check(codec), state, params, param_indices)
    return [
        Leaf(x.shape, codec and arranged(codec, x.shape), param_index)
        for x, codec, param_index in zip(avals, codecs, param_indices, strict=True)
    ]


def each(method: Callable[..., Any], leaves: Sequence[Leaf], *states: Any) -> Any:
    """Applies a method to each leaf of states."""
    flat = [jax.tree.leaves(state, is_leaf=is_quantized) for state in states]
    structure = jax.tree.structure(states[0], is_leaf=is_quantized)
    changed = [method(*found) for found in zip(leaves, *flat, strict=True)]
    return jax.tree.unflatten(structure, changed)


def unnamed(state: Any) -> Any:
    """A state whose structure does not name what stored its moments."""
    plain = lambda x: Quantized(*x) if is_quantized(x) else x
    return jax.tree.map(plain, state, is_leaf=is_quantized)
