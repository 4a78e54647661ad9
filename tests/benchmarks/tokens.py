"""Tokens a second of training steps of whole decoders: measured, or by the step model.

A micro-batch has 4,096 tokens, 8 sequences of 512, in bfloat16. Attention is the
examples', the head `po.linear_cross_entropy`. The gradients of several micro-batches
are added in device memory. Operations are those that training needs: six a parameter
and token in products, and attention's; those computed again for the backward pass do
not count. MFU is their rate over the products' in the card's data sheet.
"""

import dataclasses
import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import shares
from jax import lax

import paged_optax as po
from helpers import aot, step_model
from helpers.decoder import LLAMA3_8B, QWEN3_4B
from helpers.programs import ordinary_step, placed, shardings
from helpers.real_decoder import Config, batch_of, by_hand, saved, stacked_shapes
from helpers.runtime_counts import RuntimeCounts
from paged_optax.planning.cards import CARDS, card_name

SECTION = "tokens"
LEARNING_RATE = 1e-5
_FAST: dict[str, Any] = {"flash": True, "fused": True}
#: The sizes of a model, and sequences and tokens of a micro-batch.
MODELS: dict[str, tuple[Config, tuple[int, int]]] = {
    "Llama-3-8B": (Config.of(LLAMA3_8B, normed=False, **_FAST), (8, 512)),
    "Qwen3-4B": (Config.of(QWEN3_4B, **_FAST), (8, 512)),
    "small": (Config(128, 256, 4, 2, 3, 512, head=32, **_FAST), (2, 16)),
}
#: Micro-batches of a step.
COUNTS = (1, 16, 128)


@dataclasses.dataclass(frozen=True)
class Way:
    """How a step trains.

    Attributes:
      make: Makes the transformation.
      layerwise: Whether it is `layerwise_step`, or `jax.grad` of each micro-batch.
      on_host: Whether the layers' weights are in host memory.
      saves: Whether products' results are saved for the backward pass.
      settings: Further arguments of `make`.
    """

    make: Callable[..., Any] = po.paged_adamw_8bit
    layerwise: bool = True
    on_host: bool = False
    saves: bool = False
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_RESIDENT = {"device_budget": None}
RESIDENT, LAYERWISE = "jax.grad, 8 bits, resident", "layerwise, 8 bits"
SAVED = ", products saved"
WAYS = {
    RESIDENT: Way(layerwise=False, settings=_RESIDENT),
    LAYERWISE: Way(),
    RESIDENT + SAVED: Way(layerwise=False, saves=True, settings=_RESIDENT),
    LAYERWISE + SAVED: Way(saves=True),
    "layerwise, 8 bits, weights on host": Way(on_host=True),
    "jax.grad, 8 bits, paged": Way(layerwise=False),
    "layerwise, bfloat16 moments": Way(po.paged_adamw),
    "layerwise, 8 bits, remainders": Way(settings={"master_remainders": True}),
    "layerwise, 8 bits, remainders in 8 bits": Way(
        settings={"master_remainders": "int8"}
    ),
}


@dataclasses.dataclass(frozen=True)
class Training:
    """A step of one way, of so many micro-batches."""

    model: str
    way: str
    count: int

    @property
    def config(self) -> Config:
        config = MODELS[self.model][0]
        chunk = config.vocabulary if WAYS[self.way].saves else None
        return dataclasses.replace(config, chunk=chunk)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.count * math.prod(MODELS[self.model][1])

    @functools.cached_property
    def tx(self) -> Any:
        way = WAYS[self.way]
        return way.make(LEARNING_RATE, **way.settings)

    @functools.cached_property
    def parts(self) -> po.LayerwiseModel:
        """The decoder; of a layer its input is saved, and products' results or not."""
        parts, saves = by_hand(self.config), WAYS[self.way].saves
        policy = saved if saves else None
        return dataclasses.replace(
            parts, layer=jax.checkpoint(parts.layer, policy=policy, prevent_cse=False)
        )

    def step(self) -> Callable[..., Any]:
        """Of what `carried` gives, and a batch."""
        way = WAYS[self.way]
        if way.layerwise:
            how = {"accumulate": self.count > 1, "recompute": not way.saves}
            parts = self.parts if way.saves else by_hand(self.config)
            return po.layerwise_step(parts, self.tx, **how)
        if self.count == 1:
            return ordinary_step(self.parts.loss, self.tx)
        return ordinary_step(self.parts.loss, self.tx, added_up)

    def carried(self, params: Any) -> tuple[Any, ...]:
        """Of the parameters, or their shapes: all that a step is given, and returns."""
        way = WAYS[self.way]
        if way.on_host:
            params = params | {"layers": po.offload(params["layers"])}
        state = self.parts.init(self.tx, params)
        if not way.layerwise:
            return params, state
        room = {"device_dtype": "bfloat16"} if self.count > 1 else {}
        return params, state, self.parts.workspace(params, **room)

    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        size = MODELS[self.model][1]
        return batch_of(size if self.count == 1 else (self.count, *size))

    def operations(self) -> float:
        """Of a step: products, and attention's scores, of which half are masked."""
        config, (_, length) = self.config, MODELS[self.model][1]
        shapes = stacked_shapes(config)
        matrices = [*jax.tree.leaves(shapes["layers"]), *shapes["rest"].values()]
        size = sum(math.prod(x.shape) for x in matrices)
        if not config.tied:  # an embedding is read, not multiplied
            size -= config.vocabulary * config.width
        scores = config.layers * config.heads * config.head * length
        return 6.0 * (size + scores) * self.tokens

    def row(self, card: str | None, seconds: float, **figures: Any) -> dict[str, Any]:
        """Its figures, of what a step takes."""
        rate = self.operations() / seconds
        peak = 1e12 * CARDS[card].products("bfloat16") if card else math.nan
        return {
            "section": SECTION,
            "name": f"{self.model}: {self.way}, {self.count} x 4,096",
            "model": self.model,
            "way": self.way,
            "micro_batches": self.count,
            "card": card,
            "tokens": self.tokens,
            "seconds": seconds,
            "tokens_per_second": self.tokens / seconds,
            "teraflops": rate / 1e12,
            "mfu": rate / peak if card else None,
            **figures,
        }


def added_up(loss: Any, params: Any, batch: Any) -> tuple[Any, Any]:
    """The mean loss of micro-batches and its gradients, one after the other."""
    each = jax.value_and_grad(loss)

    def add(total: Any, one: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, each(params, one)), None

    zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
    total, _ = lax.scan(add, zeros, batch)
    count = len(jax.tree.leaves(batch)[0])
    return jax.tree.map(lambda x: x / count, total)


def measure(
    model: str, way: str, count: int, steps: int, traced: bool = False
) -> dict[str, Any]:
    """Times steps in this process, which runs nothing else.

    Args:
      model: A key of `MODELS`.
      way: A key of `WAYS`.
      count: Micro-batches of a step.
      steps: How many are timed, after two that are not; of many micro-batches, none.
      traced: Whether a profile of one more step is read.

    Returns:
      The row: seconds, tokens a second, bytes, losses; beside it the step model's, for
      a card that it knows.
    """
    training = Training(model, way, count)
    params = jax.jit(lambda: _filled(stacked_shapes(training.config)))()
    carried = list(jax.block_until_ready(training.carried(params)))
    del params
    shape = training.batch()["tokens"].shape
    draw = jax.random.randint(jax.random.key(1), shape, 0, training.config.vocabulary)
    batch = {"tokens": draw, "targets": jnp.roll(draw, -1, -1)}
    began = time.perf_counter()
    donated = tuple(range(len(carried)))
    compiled = po.jit_step(training.step(), *carried, batch, donate_argnums=donated)
    report = po.memory_report(compiled.compile(*carried, batch))
    compile_seconds = time.perf_counter() - began
    seconds, losses = [], []
    first = 2 if count < 16 else 0
    for _ in range(first + steps):
        before = time.perf_counter()
        *carried[:], last = jax.block_until_ready(compiled(*carried, batch))
        seconds.append(time.perf_counter() - before)
        losses.append(float(getattr(last, "loss", last)))
    timed = seconds[first:]
    stats = jax.devices()[0].memory_stats() or {}
    card = card_name(jax.devices()[0].device_kind)
    row = training.row(
        card,
        statistics.median(timed),
        seconds_range=[min(timed), max(timed)],
        compile_seconds=compile_seconds,
        losses=losses,
        peak_device_bytes=stats.get("peak_bytes_in_use"),
        device_bytes=report.device_total,
        host_bytes=report.host_total,
        source="measured",
    )
    if card:
        row["predicted"] = _by_model(training, report, card)
    if traced:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(compiled(*carried, batch))
            row["shares"] = shares.by_trace(folder, report.hlo)
    return row


def modelled(model: str, way: str, count: int, card: str = "h200") -> dict[str, Any]:
    """The same row by the step model, of a program compiled for a card."""
    training = Training(model, way, count)

    def build(mesh: Any) -> tuple[Any, tuple[Any, ...]]:
        device, host = aot.placements(mesh)
        shapes = placed(stacked_shapes(training.config), device)
        away = lambda x: x.sharding.memory_kind == host.memory_kind
        put = lambda x: placed(x, host if away(x) else device)
        args = jax.tree.map(put, training.carried(shapes))
        jitted = jax.jit(
            training.step(),
            donate_argnums=tuple(range(len(args))),
            keep_unused=True,
            out_shardings=(*shardings(args), device),
        )
        return jitted, (*args, placed(training.batch(), device))

    with aot.with_cudnn():
        report = aot.h200(build, card=card, options=aot.options_on(card))
    found = _by_model(training, report, card)
    return training.row(
        card,
        found.pop("seconds"),
        device_bytes=report.device_total,
        host_bytes=report.host_total,
        rematerialized=report.hlo.count(".remat"),
        source=f"step model, jax {jax.__version__}",
        **found,
    )


def _by_model(training: Training, report: po.MemoryReport, card: str) -> dict[str, Any]:
    """What the step model says of a program: seconds with low overheads, and shares."""
    machine, layers = step_model.machine_of(card), training.config.layers
    low, high = step_model.between(report.hlo, machine, layers)
    least = step_model.cost(report.hlo, machine, layers)
    return {
        "seconds": low,
        "seconds_range": [low, high],
        "seconds_without_overheads": least.seconds,
        "shares": shares.by_model(report.hlo, machine, layers),
        "counts": dataclasses.asdict(RuntimeCounts.of(report.hlo)),
    }


def _filled(shapes: Any) -> Any:
    """Weights of a decoder that has not learned: norms of one, and small products."""
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(shapes))))

    def fill(path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
        key = next(keys)
        if "norm" in jax.tree_util.keystr(path):
            return jnp.ones(x.shape, x.dtype)
        return 0.02 * jax.random.normal(key, x.shape, x.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)
