"""The layers of a random model, one after another."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from helpers.split_layer import WRAPS, Carry, Layer
from helpers.split_trees import Named


@dataclasses.dataclass(frozen=True)
class Kept:
    """What layers keep, by name.

    Attributes:
      turns: Of each layer; or None.
      whole: Of all layers, stacked; or None.
    """

    turns: Sequence[Carry] | None
    whole: Carry | None = None

    def each(self, name: str) -> Sequence[Array] | Array:
        """Of each layer."""
        return [x[name] for x in self.turns] if self.whole is None else self.whole[name]

    def together(self, name: str) -> Array:
        """Stacked."""
        return jnp.stack(self.each(name)) if self.whole is None else self.whole[name]


class Loops(Layer):
    """How a recipe's model goes through its layers."""

    def looped(
        self, layers: Sequence[Named], carry: Carry, seen: Any
    ) -> tuple[Carry, Kept]:
        """By a loop of Python's."""
        kinds, refused = self.recipe["kinds"], self.recipe["refused"]
        order, kept = [*range(len(layers))], list[Carry]()
        if "back" in seen:
            order.reverse()
        if refused == "twice":
            order += order[: self.recipe["again"]]
        skips, sums, start = list[Array](), list[Array](), carry["x"]
        for turn, n in enumerate(order):
            values = layers[n]
            if refused == "neighbour":
                name, before = next(iter(values)), layers[n - 1]
                x = carry["x"]
                carry |= {"x": x * (1 + jnp.mean(before[name] * jnp.mean(x)))}
            if refused == "skips" and turn >= len(order) / 2:
                carry |= {"x": carry["x"] + 0.2 * skips.pop()}
            if refused == "side by side":
                carry |= {"x": start}
            run = WRAPS[self.recipe["wrap"]](
                lambda values, carry, n=n: self.layer(
                    values, carry, n, kinds[n], seen, {}
                )
            )
            carry, made = run(values, carry)
            if turn < len(layers):
                kept.append(made)
            if turn < len(order) / 2:
                skips.append(carry["x"])
            sums.append(carry["x"])
        if refused == "side by side":
            carry |= {"x": sum(sums) / len(sums)}
        return carry, Kept(kept)

    def scanned(self, stacks: Named, carry: Carry, seen: Any) -> tuple[Carry, Kept]:
        """By `lax.scan`."""
        recipe, how, axis = self.recipe, self.recipe["scan"], self.tree.axis
        if axis:
            stacks = {
                name: jnp.moveaxis(x, min(axis, x.ndim - 1), 0)
                for name, x in stacks.items()
            }
        if how["scaled"]:
            stacks = {
                name: 0.9 * x if jnp.issubdtype(x.dtype, jnp.floating) else x
                for name, x in stacks.items()
            }
        names = {"table"} | ({"inputs", "keys"} & {*seen})
        rows = {name: jnp.asarray(seen[name]) for name in names if how["rows"]}
        count = self.sizes.layers
        given = {"w": stacks, "rows": rows, "n": jnp.arange(count)}
        if self.pairs:
            pair = lambda x: x.reshape(count // 2, 2, *x.shape[1:])
            both = {"rows": given["rows"], "n": given["n"]}
            given |= jax.tree.map(pair, both)
        if not how["index"]:
            del given["n"]
            carry = carry | {"turn": jnp.zeros((), jnp.int32)}

        def body(carry: Carry, given: Any) -> tuple[Carry, list[Carry]]:
            kept = []
            for part in range(1 + self.pairs):
                values, rows, n = given["w"], given["rows"], given.get("n")
                if self.pairs:
                    start = ("first/", "second/")[part]
                    values = {
                        name.removeprefix(start): x
                        for name, x in values.items()
                        if name.startswith(start)
                    }
                    rows = {name: x[part] for name, x in rows.items()}
                    n = None if n is None else n[part]
                turn = None
                if n is None:
                    carry = dict(carry)
                    n = turn = carry.pop("turn")
                carry, made = self._either(values, carry, n, part, seen, rows)
                if turn is not None:
                    carry = carry | {"turn": turn + 1}
                kept.append(made)
            return carry, kept

        reverse = recipe["refused"] == "reverse" or "back" in seen
        step = WRAPS[recipe["wrap"]](body)
        scan = functools.partial(
            lax.scan, step, xs=given, reverse=reverse, unroll=how["unroll"]
        )
        carry, kept = scan(carry)
        if recipe["refused"] == "twice":
            carry, kept = scan(carry)
        if how["whole"] and not self.pairs:
            return carry, Kept(None, kept[0])
        each = lambda x, n: jax.tree.map(lambda x: x[n], x)
        by_turn = [each(x, n) for n in range(count // len(kept)) for x in kept]
        return carry, Kept(by_turn)

    def _either(
        self, values: Named, carry: Carry, n: Array, part: int, seen: Any, rows: Any
    ) -> tuple[Carry, Carry]:
        """A layer of the kind that its number says."""
        kinds = self.recipe["kinds"]
        own = kinds[part :: 1 + self.pairs]
        run = lambda kind, *given: self.layer(*given, n, kind, seen, rows)
        if len({*own}) == 1:
            return run(own[0], values, carry)
        chosen = jnp.asarray(kinds)[n] == 1
        branches = (functools.partial(run, kind) for kind in (1, 0))
        return lax.cond(chosen, *branches, values, carry)
