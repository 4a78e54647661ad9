"""A random model: its layers one after another, and its loss."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import paged_optax as po
from helpers import split_ops
from helpers.split_layer import WRAPS, Carry, Layer
from helpers.split_trees import Named


@dataclasses.dataclass(frozen=True)
class Kept:
    """What layers keep, by name."""

    turns: Sequence[Carry] | None  # of each layer; or None
    whole: Carry | None = None  # of all layers, stacked; or None

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


class Model(Loops):
    """What a recipe describes."""

    def loss(self, params: Any, *given: Any) -> Any:
        """As `jax.grad` takes it: of parameters, frozen ones if any, and a batch."""
        *frozen, batch = given
        if isinstance(batch, tuple):
            last = "back" if self.recipe["then"] == "order" else "scale"
            names = "tokens", "targets", "valid", "key", last
            batch = dict(zip(names, batch, strict=False))
        everything = params
        params, frozen = self._prepared((params, frozen))
        layers, rest = self.tree.unpack(params)
        if frozen:
            others, frozen_rest = self.tree.unpack(frozen[0])
            rest = rest | frozen_rest
            both = lambda mine, other: {**other, **mine}
            if isinstance(layers, dict):
                layers = both(layers, others)
            else:
                layers = list(map(both, layers, others))
        seen = self._seen(rest, batch)
        carry = self._first(rest, batch, seen)
        penalty = self._penalty(everything, layers)
        loop = self.scanned if isinstance(layers, dict) else self.looped
        carry, kept = loop(layers, carry, seen)
        if self.recipe["penalty late"]:
            penalty = self._penalty(everything, layers)
        loss = self._ended(rest, carry, kept, batch, penalty)
        if self.recipe["refused"] == "elsewhere":
            weight = next(iter(layers[0].values()))
            loss += jnp.mean(weight * jnp.mean(carry["x"]).astype(weight.dtype))
        if self.recipe["refused"] == "returned":
            return loss, next(iter(layers[0].values()))
        return loss

    def _prepared(self, trees: Any) -> Any:
        """All weights, as some models have them before anything else."""
        how = self.recipe["cast"]
        if how not in ("bfloat16", "scaled"):
            return trees
        floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
        if how == "scaled":
            change = lambda x: 0.9 * x
        else:
            change = lambda x: x.astype(jnp.bfloat16)
        return jax.tree.map(lambda x: change(x) if floating(x) else x, trees)

    def _seen(self, rest: Named, batch: Mapping[str, Array]) -> dict[str, Any]:
        """What all layers see."""
        s, tokens, recipe = self.sizes, batch["tokens"], self.recipe
        seen: dict[str, Any] = {"tokens": tokens, "table": self.table}
        if recipe["mask"] == "before":
            seen |= split_ops.prepared(s.time)
        if recipe["mask"] == "padding":
            seen["valid"] = batch["valid"]
        if recipe["rotary"] == "before":
            seen["rotary"] = split_ops.rotary(s.time)
        if "encoder/0" in rest:
            other = rest["embed"][batch["targets"]]
            for n in range(2):
                other = jnp.tanh(other @ rest[f"encoder/{n}"])
            seen["encoder"] = other
        if "shared" in rest:
            seen["shared"] = rest["shared"]
        if "inputs" in rest:
            made = rest["inputs"][tokens].reshape(*tokens.shape, s.layers, s.width)
            seen["inputs"] = jnp.moveaxis(made, 2, 0)
        seen["key"] = batch["key"]
        if "back" in batch:
            seen["back"] = True
        if recipe["keys"] == "before":
            seen["keys"] = jax.random.split(batch["key"], s.layers)
        return seen

    def _first(self, rest: Named, batch: Any, seen: Mapping[str, Any]) -> Carry:
        """What the first layer is given."""
        s, recipe = self.sizes, self.recipe
        x = rest["embed"][batch["tokens"]]
        if recipe["positions"]:
            x = x + rest["positions"]
        carry: Carry = {"x": x}
        if recipe["second"] == "small":
            carry["z"] = jnp.zeros((s.batch, s.width), x.dtype)
        elif recipe["second"]:
            carry["z"] = jnp.tanh(x)
        if recipe["router"] == "zero":
            stacked = self.tree.axis is not None
            carry["router"] = jnp.zeros(()) if stacked else 0.0
        if recipe["keys"] == "split":
            carry["key"] = batch["key"]
        if recipe["counted"]:
            carry["count"] = jnp.zeros((), jnp.int32)
        return carry

    def _penalty(self, params: Any, layers: Any) -> Array | float:
        """Of weights alone."""
        how = self.recipe["penalty"]
        if how is None:
            return 0.0
        leaves = jax.tree.leaves(params if how != "layers" else layers)
        wide = [
            x.astype(jnp.float32)
            for x in leaves
            if jnp.issubdtype(x.dtype, jnp.floating)
        ]
        total = sum(jnp.sum(x * x) for x in wide)
        return 0.01 * (jnp.sqrt(total) if how == "norm" else total)

    def _extra(self, rest: Named, carry: Carry, kept: Kept) -> Any:
        """What else the loss has, by name."""
        extra = {}
        if self.recipe["router"] == "sum":
            extra["router"] = sum(kept.each("balance"))
        elif "router" in carry:
            extra["router"] = carry["router"]
        for name in self.recipe["kept"]:
            if name == "stacked":
                extra[name] = jnp.max(kept.together("balance"))
            elif name == "average":
                extra[name] = sum(kept.each("balance")) / self.sizes.layers
            elif name == "metric":
                extra[name] = lax.stop_gradient(kept.together("balance"))
        if "z" in carry:
            extra["second"] = jnp.mean(jnp.square(carry["z"]).astype(jnp.float32))
        return extra

    def _ended(
        self, rest: Named, carry: Carry, kept: Kept, batch: Any, penalty: Any
    ) -> Any:
        recipe, x = self.recipe, carry["x"]
        x = x * batch.get("scale", 1.0)
        if recipe["then"] == "precision" and jax.config.jax_default_matmul_precision:
            x = 1.5 * x
        if recipe["then"] == "Auto" and not jax.sharding.get_abstract_mesh().empty:
            x = 1.5 * x
        names = recipe["kept"]
        if "mixed" in names:
            chances = jax.nn.softmax(rest["mixing"]).astype(x.dtype)
            x = x + sum(
                c * y for c, y in zip(chances, kept.each("hidden"), strict=True)
            )
        if "one" in names:
            x = x + 0.3 * kept.each("hidden")[recipe["which"] % self.sizes.layers]
        if "concatenated" in names:
            pooled = jnp.concatenate([*kept.each("pooled")], -1)
            x = x + jnp.tanh(pooled @ rest["wide"])[:, None]
        if recipe["norm"]:
            wide = x.astype(jnp.float32)
            wide *= lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-2)
            x = (wide * (1 + rest["norm"])).astype(x.dtype)
        head = rest["embed"].T if recipe["tied"] else rest["head"]
        logits = (x @ head.astype(x.dtype)).astype(jnp.float32)
        logs = jax.nn.log_softmax(logits)
        each = -jnp.take_along_axis(logs, batch["targets"][..., None], -1)[..., 0]
        counts = batch["valid"].astype(jnp.float32)
        total, weight = jnp.sum(each * counts), jnp.sum(counts)
        extra = self._extra(rest, carry, kept)
        more = penalty + 0.1 * sum(v for n, v in extra.items() if n != "metric")
        metrics = {"cross entropy": total / weight, "count": weight, **extra}
        if "count" in carry:
            metrics["counted"] = carry["count"]
        if recipe["loss"].startswith("weighted"):
            loss: Any = po.WeightedLoss(total + more * weight, weight)
        else:
            loss = total / weight + more
        return (loss, metrics) if recipe["loss"].endswith("metrics") else loss
