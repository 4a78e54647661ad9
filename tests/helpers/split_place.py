"""Where a random layer is, and what it sees besides its input."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Sizes(NamedTuple):
    """Of a random model: axes of its batch and of its weights."""

    batch: int
    time: int
    width: int
    hidden: int
    words: int
    layers: int


@dataclasses.dataclass
class Place:
    """Where a layer is, and what it sees besides its input.

    Attributes:
      sizes: The model's.
      number: The layer's number: a Python int, or traced within a scan.
      kind: Which of two kinds the layer is of, 0 or 1.
      mask: How attention is masked.
      rotary: Where rotary tables are made: "before" the layers, in "each", or None.
      key: The layer's own key, from which its dropout and noise are drawn.
      seen: What all layers see, by name.
      rows: What a scan gives each layer of the stacks in `seen`, by name.
      count: What is counted from layer to layer, or None.
    """

    sizes: Sizes
    number: int | Array
    kind: int
    mask: str
    rotary: str | None
    key: Array
    seen: Mapping[str, Any]
    rows: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    count: Array | None = None
    _keys: int = 0

    def new_key(self) -> Array:
        """Another one each time."""
        self._keys += 1
        return jax.random.fold_in(self.key, self._keys)

    def row(self, name: str) -> Array | np.ndarray:
        """This layer's part of a stack."""
        if name in self.rows:
            return self.rows[name]
        stack = self.seen[name]
        return (
            stack[self.number]
            if isinstance(self.number, int)
            else (jnp.asarray(stack)[self.number])
        )

    def count_of_tokens(self) -> Array:
        """An integer of the batch, or what is counted from layer to layer."""
        if self.count is not None:
            return self.count
        return jnp.sum(self.seen["tokens"] % 2)

    def allowed(self, local: bool) -> Array | np.ndarray:
        """Which keys each query may see, [1 or batch, time, time]."""
        time = self.sizes.time
        if self.mask == "before":
            return self.seen["local" if local else "causal"]
        if self.mask == "each":
            return _causal(time, 2 if local else time)
        if self.mask == "numpy":
            return np.asarray(np.tril(np.ones((1, time, time), bool), 0 - local))
        if self.mask == "window by layer":
            return _causal(time, 1 + self.number % 3 + 2 * (not local))
        assert self.mask == "padding"
        return _causal(time, 2 if local else time) & self.seen["valid"][:, None]

    def tables(self) -> tuple[Array, Array] | None:
        """Rotary cosines and sines, [time, 1]."""
        if self.rotary == "each":
            return rotary(self.sizes.time)
        return self.seen["rotary"] if self.rotary == "before" else None


def _causal(time: int, window: int | Array) -> Array:
    behind = jnp.arange(time)[:, None] - jnp.arange(time)
    return ((behind >= 0) & (behind < window))[None]


def prepared(time: int) -> dict[str, Array]:
    """Masks that are made before the layers."""
    return {"causal": _causal(time, time), "local": _causal(time, 2)}


def rotary(time: int) -> tuple[Array, Array]:
    """Cosines and sines, [time, 1]."""
    angles = jnp.arange(time, dtype=jnp.float32)[:, None] * np.float32(0.3)
    return jnp.cos(angles), jnp.sin(angles)
