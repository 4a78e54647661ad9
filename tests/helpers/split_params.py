"""The parameters and the batches of a random model."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from helpers.split_blocks import BLOCKS, RANK, Shapes
from helpers.split_ops import Sizes
from helpers.split_plain import Recipe, whole
from helpers.split_trees import TREES, Named


def letter(number: int) -> str:
    """Names that are no numbers."""
    return "abcdefghijklmnop"[number]


class Parameters:
    """The sizes of a recipe's model, its parameters, and its batches.

    Args:
      recipe: The recipe.
    """

    def __init__(self, recipe: Recipe):
        self.recipe = recipe = whole(recipe)
        self.tree = TREES[recipe["container"]]
        self.sizes = Sizes(*recipe["sizes"], layers=len(recipe["kinds"]))
        self.used = {name for block in recipe["blocks"] for name, _ in block["ops"]} | {
            name for *_, name in recipe["changes"]
        }
        self.pairs = self.tree.axis is not None and recipe["scan"]["body"] == 2
        #: Python's numbers and numpy's, as a model has them in its configuration.
        random = np.random.default_rng(self.sizes.layers)
        shape = self.sizes.layers, self.sizes.width
        self.table = random.uniform(0.5, 1.5, shape).astype(np.float32)

    # Parameters

    def layer_shapes(self, number: int) -> Shapes:
        """The shapes of a layer's weights, by name."""
        unlike, sizes = self.unlike(number), self.sizes
        if unlike == "wider":
            sizes = sizes._replace(hidden=sizes.hidden + 2)
        shapes: Shapes = {}
        for b, block in enumerate(self.recipe["blocks"]):
            for k, (name, _) in enumerate(block["ops"]):
                if name in BLOCKS:
                    own = BLOCKS[name].shapes(sizes)
                    shapes |= {f"{self.prefix(b, k)}{x}": own[x] for x in own}
        square = sizes.width, sizes.width
        if unlike == "extra":
            shapes["extra/w"] = square
        if self.recipe["hybrid"] and self.recipe["kinds"][number]:
            shapes["odd/w"] = square
        if self.recipe["unused"]:
            shapes["unused"] = (3,)
        return shapes

    def few(self) -> bool:
        """Whether there are fewer than two layers that are alike."""
        pairs = self.pairs or self.recipe["hybrid"]
        return (self.sizes.layers - len(self.recipe["unlike"])) // (1 + pairs) < 2

    def prefix(self, block: int, op: int) -> str:
        """What the names of the weights of an equation begin with."""
        if self.recipe["digits"]:
            return f"part_{block}/op_{op}/"
        return f"{letter(block)}{letter(op)}/"

    def unlike(self, number: int) -> str | None:
        """How the first or the last layer is unlike the others, if it is."""
        which = {0: "first", self.sizes.layers - 1: "last"}.get(number)
        return self.recipe["unlike"].get(which)

    def rest_shapes(self) -> Shapes:
        """Those of the rest."""
        s, recipe = self.sizes, self.recipe
        square = s.width, s.width
        shapes: Shapes = {"embed": (s.words, s.width)}
        if not recipe["tied"]:
            shapes["head"] = s.width, s.words
        if recipe["norm"]:
            shapes["norm"] = (s.width,)
        if recipe["positions"]:
            shapes["positions"] = s.time, s.width
        if recipe["unused"]:
            shapes["unused"] = (4,)
        if {"encoder", "attention, of encoder"} & self.used:
            shapes |= {"encoder/0": square, "encoder/1": square}
        if "shared" in self.used:
            shapes["shared"] = square
        if "inputs" in self.used:
            shapes["inputs"] = s.words, s.layers * s.width
        if "mixed" in recipe["kept"]:
            shapes["mixing"] = (s.layers,)
        if "concatenated" in recipe["kept"]:
            shapes["wide"] = s.layers * s.width, s.width
        return shapes

    def params(self, seed: int) -> tuple[Any, Any]:
        """The trained parameters, and the frozen ones or None."""
        random = np.random.default_rng(seed)
        layers = [
            self._values(random, self.layer_shapes(n)) for n in range(self.sizes.layers)
        ]
        parts = [self._parted(random, x) for x in layers]
        values = self._values(random, self.rest_shapes())
        rest = values, {}
        if self.recipe["frozen"]:
            stays = lambda name: name in ("head", "norm", "wide")
            trained = {name: x for name, x in values.items() if stays(name)}
            rest = trained, {name: x for name, x in values.items() if not stays(name)}
        packed = [self._packed([x[n] for x in parts], rest[n]) for n in range(2)]
        return packed[0], packed[1] if self.recipe["frozen"] else None

    def _values(self, random: np.random.Generator, shapes: Shapes) -> Named:
        def value(name: str, shape: tuple[int, ...]) -> Array:
            scale = 0.7 / math.sqrt(shape[-2]) if len(shape) > 1 else 0.1
            scale = 1.0 if name == "embed" else scale
            wide = self.recipe["dtype"] == "mixed" and len(shape) < 2
            dtype = "float32" if wide else self.recipe["dtype"]
            dtype = "bfloat16" if dtype == "mixed" else dtype
            return jnp.asarray(scale * random.normal(size=shape), dtype)

        return {name: value(name, shape) for name, shape in shapes.items()}

    def _parted(self, random: np.random.Generator, layer: Named) -> tuple[Named, Named]:
        """What is trained of a layer, and what is frozen."""
        how = self.recipe["frozen"]
        if how is None:
            return layer, {}
        if how == "half":
            names = [*layer]
            return {x: layer[x] for x in names[::2]}, {x: layer[x] for x in names[1::2]}
        trained, frozen = {}, dict(layer)
        for name, x in layer.items():
            if x.ndim < 2:
                continue
            before, (rows, columns) = x.shape[:-2], x.shape[-2:]
            shapes = {"_a": (*before, rows, RANK), "_b": (*before, RANK, columns)}
            made = self._values(random, {name + end: s for end, s in shapes.items()})
            trained |= made
            if how == "int8":
                scale = jnp.max(jnp.abs(x), -2, keepdims=True) / 127
                frozen[name] = jnp.round(x / scale).astype(jnp.int8)
                frozen[name + "_scale"] = scale.astype(jnp.float32)
        return trained, frozen

    def _packed(self, layers: Sequence[Named], rest: Named) -> Any:
        if self.pairs:
            layers = [
                {f"first/{x}": y for x, y in a.items()}
                | {f"second/{x}": y for x, y in b.items()}
                for a, b in zip(layers[::2], layers[1::2], strict=True)
            ]
        return self.tree.pack(layers, rest)

    # Batches

    def batch(self, seed: int) -> Any:
        """Tokens, what they are to be, which of them count, and a key."""
        s, random = self.sizes, np.random.default_rng(seed)
        shape = (2, s.batch, s.time) if self.recipe["accumulate"] else (s.batch, s.time)
        tokens = random.integers(0, s.words, shape)
        valid = random.random(shape) < 0.8
        valid[..., 0] = True
        make = jax.random.PRNGKey if self.recipe["raw key"] else jax.random.key
        key = make(seed)
        made = {
            "tokens": jnp.asarray(tokens, jnp.int32),
            "targets": jnp.asarray(np.roll(tokens, -1, -1), jnp.int32),
            "valid": jnp.asarray(valid),
            "key": jax.random.split(key) if self.recipe["accumulate"] else key,
        }
        if self.recipe["then"] in ("array", "number"):
            scales = 0.7 + 0.1 * random.random(shape[:-2])
            made["scale"] = jnp.asarray(scales, jnp.float32)
        return tuple(made.values()) if self.recipe["batch"] == "tuple" else made
