"""One layer of a random model."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from helpers.split_blocks import BLOCKS, Weights
from helpers.split_ops import OPS, Place
from helpers.split_params import Parameters
from helpers.split_trees import Named

Carry = dict[str, Any]

#: How a block's result is kept of order one.
ENDS: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "softsign": jax.nn.soft_sign,
    "sin": jnp.sin,
    "rms": lambda x: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-1),
}

_policies = jax.checkpoint_policies

#: What a block, or a layer, is traced within.
WRAPS: dict[str | None, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    None: lambda f: f,
    "checkpoint": jax.checkpoint,
    "checkpoint, CSE": functools.partial(jax.checkpoint, prevent_cse=False),
    "checkpoint of dots": functools.partial(
        jax.checkpoint, policy=_policies.dots_saveable
    ),
    "checkpoint of names": functools.partial(
        jax.checkpoint, policy=_policies.save_only_these_names("kept")
    ),
    "jit": jax.jit,
    "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "checkpoint of jit": lambda f: jax.checkpoint(jax.jit(f)),
    "named scope": lambda f: jax.named_scope("layer")(f),
}


class Layer(Parameters):
    """What a recipe's model does in each layer."""

    def _place(
        self, carry: Carry, number: Any, kind: int, seen: Any, rows: Any
    ) -> tuple[Carry, Place]:
        how, key = self.recipe["keys"], seen["key"]
        if how == "split":
            following, key = jax.random.split(carry["key"])
            carry = carry | {"key": following}
        place = Place(
            self.sizes,
            number,
            kind,
            self.recipe["mask"],
            self.recipe["rotary"],
            key,
            seen,
            rows,
            carry.get("count"),
        )
        if how == "before":
            place.key = place.row("keys")
        elif how == "folded":
            place.key = jax.random.fold_in(key, number)
        elif how == "constant":
            place.key = jax.random.fold_in(jax.random.key(3), number)
        return carry, place

    def layer(
        self, values: Named, carry: Carry, number: Any, kind: int, seen: Any, rows: Any
    ) -> tuple[Carry, Carry]:
        """The next layer's input, and what is kept of this one."""
        carry, at = self._place(carry, number, kind, seen, rows)
        dtype = jnp.bfloat16 if self.recipe["cast"] == "in layer" else None
        weights, x = Weights(values, dtype=dtype), carry["x"]
        if self.recipe["refused"] == "effect":
            jax.debug.print("{}", jnp.mean(x))
        for b in range(len(self.recipe["blocks"])):
            x = self._block(b, weights, x, at)
        for name in ("extra/w", "odd/w"):
            if name in values:
                x = x + 0.2 * jnp.tanh(weights.product(x, name))
        z = carry.get("z")
        if self.recipe["second"] == "small":
            z = jnp.tanh(z + jnp.mean(x, 1))
            x = x + 0.1 * z[:, None]
        elif self.recipe["second"] == "full":
            z = 0.5 * z + 0.1 * x
            x = x + 0.2 * jnp.tanh(z)
        elif self.recipe["second"] == "swapped":
            x, z = 0.7 * z + 0.3 * x, x
        carry = carry | {"x": x} | ({} if z is None else {"z": z})
        balance = jnp.mean(jnp.square(x.astype(jnp.float32)))
        if self.recipe["counted"]:
            carry["count"] = carry["count"] + jnp.sum(seen["tokens"] % (1 + number))
        if self.recipe["router"] == "first":
            first = "router" not in carry
            carry["router"] = balance if first else carry["router"] + balance
        elif self.recipe["router"] == "zero":
            carry["router"] = carry["router"] + balance
        return carry, self._kept(x, balance)

    def _kept(self, x: Array, balance: Array) -> Carry:
        kept: Carry = {}
        names = set(self.recipe["kept"])
        if self.recipe["router"] == "sum" or names & {"stacked", "average", "metric"}:
            kept["balance"] = balance
        if "concatenated" in names:
            kept["pooled"] = jnp.mean(x, 1)
        if names & {"mixed", "one"}:
            kept["hidden"] = x
        return kept

    def _block(self, b: int, weights: Weights, x: Array, at: Place) -> Array:
        block = self.recipe["blocks"][b]

        def run(x: Array) -> Array:
            made = [x, x]
            for k, (name, ago) in enumerate(block["ops"]):
                if at.kind:
                    changes = self.recipe["changes"]
                    name = next((n for *where, n in changes if where == [b, k]), name)
                last, other = made[-1], made[max(-1 - ago, -len(made))]
                if name in BLOCKS:
                    own = weights.of(self.prefix(b, k))
                    result = BLOCKS[name].apply(own, last, other, at)
                else:
                    result = OPS[name](last, other, at)
                made.append(result.astype(x.dtype))
            end = ENDS[block["end"]](made[-1])
            return x + 0.4 * end if block["residual"] else end

        return WRAPS[block["wrap"]](run)(x)
