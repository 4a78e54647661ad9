"""`what_fits`: compares the memory and the seconds of ways to train a model."""

import dataclasses
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from paged_optax.backend.memory import device_share, platform
from paged_optax.backend.text import parse_bytes
from paged_optax.backend.validation import brief, check_arrays, check_count
from paged_optax.engine.pages import DEFAULT_PAGE_SIZE
from paged_optax.planning.activations import (
    ActivationBytes,
    Layers,
    Workload,
    find_layers,
    get_sizes,
)
from paged_optax.planning.cards import CARDS, Card, find_card, free_from, machine_rate
from paged_optax.planning.footprints import Footprint, Footprints
from paged_optax.planning.page_plan import PagePlan, plan
from paged_optax.planning.ways import Ways
from paged_optax.transform.codec_rules import Rule
from paged_optax.transform.paged import paged

#: Learning rate of the printed code, as in the guides.
RATE = "3e-4"

CodecRules = Rule | Mapping[str, Rule]


def what_fits(
    params: optax.Params,
    inner: optax.GradientTransformation | None = None,
    *,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    devices: int = 1,
    rank: int | None = None,
    card: str | None = None,
    batch: int | None = None,
    length: int | None = None,
    codec: CodecRules = None,
    master_dtype: DTypeLike | None = None,
    master_remainders: bool | str = False,
    page_size: int | str = DEFAULT_PAGE_SIZE,
    link_gigabytes_per_second: int | float | None = None,
    teraflops: int | float | None = None,
    layers: str = "layers",
    heads: int | None = None,
    score_blocks: int = 1,
    fused_head: bool = False,
    unified_memory: bool | None = None,
) -> Footprints:
    """Compares ways to train a model by the memory they take.

    The ways, most ordinary first: moments resident on the device; the whole tree
    offloaded, and on the device during the update; paged; layerwise, with one layer's
    gradients; layerwise with the layers' weights on the host, and with all parameters
    there. With `codec`, paged has a row without it and one with it, and all layerwise
    rows have it. XLA's buffer assignment for an H200 is at most 3% above the sums of
    paged and layerwise, 5% above the resident one, and up to a quarter above the whole
    tree's (`tests/planning/test_fit.py`).

    With `batch` and `length` activations are counted, for decoders whose layers are
    each a `jax.checkpoint`: within 7.1% of XLA's bytes for 42 programs of five models
    on an H200, and within 9% for layers of experts. The last lines are the fastest way
    that fits, and its code. Seconds are a range: at best products reach 60% of a card's
    TFLOP/s and overlap with transfers in both directions, at worst 30% without overlap.
    The update's computation is not counted.

    Args:
      params: The parameters, or their `ShapeDtypeStruct`s: `model_shapes("8B")`.
      inner: The transformation to page; None: `optax.adamw`.
      device_memory: Device memory in bytes, such as `"24GiB"`; None: the card's. JAX
        allocates three quarters of a GPU, or `XLA_PYTHON_CLIENT_MEM_FRACTION`.
      host_memory: Host memory in bytes; None: it is not counted.
      devices: Devices of one host that divide parameters, moments and batch, as
        `fully_sharded` does. Each gathers one layer at a time.
      rank: Rank of adapters on the layers' matrices: adds rows of LoRA, and of QLoRA in
        NF4. They are never the way to choose.
      card: A card's name, such as `"rtx4090"`: default of the memory and the rates.
      batch: Sequences of a step; None: activations are not counted.
      length: Tokens of a sequence.
      codec: Codec of the moments, such as `"dynamic_int8"`, as in `paged`.
      master_dtype: Dtype of master weights, such as `"float32"`, as in `paged`.
      master_remainders: Master weights as remainders of bfloat16, of 2 bytes each, or 1
        byte with `"int8"`, as in `paged`.
      page_size: Bytes of a page, such as `"16MiB"`, as in `paged`.
      link_gigabytes_per_second: Link rate between host and device in one direction, in
        10^9 bytes a second (PCIe 3 x16: about 12; 4: 25; 5: 50). None: the card's, or
        25.
      teraflops: Rate of matrix products in training, in 10^12 operations a second;
        None: 30% to 60% of the card's. A note then states from how many tokens a step
        the link costs no time.
      layers: The key of the stacked layers. Numbered layers, as in `layers_0` or
        `model.layers.0`, are found without it.
      heads: Attention heads; None: read off the matrix of queries, of 128 values each
        if its shape does not show them.
      score_blocks: Blocks of queries whose attention scores are computed sequentially.
        A kernel that never materializes them, such as cuDNN's, has many.
      fused_head: True if the loss uses `linear_cross_entropy`.
      unified_memory: True if device and host are one memory, whose bytes add up, as on
        a GB10 (DGX Spark), Apple's GPUs, a CPU, or a GH200 in unified mode. None: the
        card's.

    Returns:
      A sequence of `Footprint`s, which prints as tables.

    Raises:
      ValueError: If an argument is unusable, or a card unknown.
      TypeError: If `params` is no tree of arrays, or the rate no number.

    Example:
      >>> import paged_optax as po
      >>> ways = po.what_fits(po.model_shapes("8B"), device_memory="24GiB")
      >>> [way.way for way in ways.fitting]
      ['layerwise, weights on host', 'layerwise, all on host']

      With activations, and the way to choose:

      >>> shapes = po.model_shapes("8B")
      >>> ways = po.what_fits(shapes, card="rtx4090", batch=4, length=512)
      >>> ways.choice.way, round(ways.choice.activations / 2**30, 1)
      ('layerwise, weights on host', 0.2)
    """
    machine = Card(0, gpu=platform() != "tpu") if card is None else find_card(card)
    if device_memory is None and card is None:
        raise ValueError(
            f"device_memory=None: pass a device's memory, such as '24GiB', or card="
            f" with one of {', '.join(CARDS)}."
        )
    check_arrays("params", params)
    leaves = jax.tree.leaves(params)
    # Products have the dtype of the matrices, and the largest leaf is a matrix.
    dtype = max(leaves, key=lambda x: x.size).dtype if leaves else jnp.float32
    advice = machine.advice if dtype == jnp.bfloat16 else ""
    share = device_share() if machine.gpu or card is None else 1.0
    stated: dict[str, Any] = {}
    if device_memory is not None:
        stated["memory"] = parse_bytes("device_memory", device_memory)
    if link_gigabytes_per_second is not None:
        link = machine_rate("link_gigabytes_per_second", link_gigabytes_per_second)
        stated |= {"link": link, "bidirectional": 2 * link}
    if teraflops is not None:
        rate = machine_rate("teraflops", teraflops)
        stated |= {"teraflops": rate, "bfloat16": None, "efficiency": (1.0, 1.0)}
    if unified_memory is not None:
        stated["unified_memory"] = unified_memory
    machine = dataclasses.replace(machine, **stated)
    counts = {"devices": devices, "rank": rank, "batch": batch, "length": length}
    counts |= {"heads": heads, "score_blocks": score_blocks}
    for name, count in counts.items():
        if count is not None:
            check_count(name, count, 1)
    workload = None
    if batch is not None and length is not None:
        if batch % devices:
            raise ValueError(
                f"batch={batch} cannot be divided over devices={devices}: pass a"
                " multiple."
            )
        blocks, part = int(score_blocks), int(batch) // devices
        workload = Workload(part, int(length), blocks, fused_head)
    elif batch is not None or length is not None:
        raise ValueError(
            f"batch={brief(batch)} and length={brief(length)}: pass both, the sequences"
            " of a step and the tokens of a sequence, or none."
        )
    transformation = optax.adamw(float(RATE)) if inner is None else inner
    mesh = jax.sharding.AbstractMesh((devices,), ("data",)) if devices > 1 else None
    paging: dict[str, Any] = {
        "page_size": page_size,
        "master_dtype": master_dtype,
        "master_remainders": master_remainders,
    }

    def planned(
        params: PyTree, codec: CodecRules = None, device_budget: int | None = 0
    ) -> PagePlan:
        tx = paged(transformation, device_budget=device_budget, codec=codec, **paging)
        with warnings.catch_warnings():
            # The notes of the tables have the same on the host's pool.
            warnings.filterwarnings("ignore", "the moments need", UserWarning)
            return plan(
                tx,
                params,
                link_gigabytes_per_second=machine.link,
                mesh=mesh,
                devices_per_host=devices,
            )

    exact, equal = planned(params), find_layers(params, layers)
    elementwise = all(x.elementwise for x in exact.moments if x.shape)
    messages = [*_remarks(codec is not None, equal, elementwise, layers), advice]
    values = sum(x.size for x in leaves)
    retained, operations = None, 0
    if workload is not None:
        if equal is None:
            raise ValueError(
                f"batch={batch}: activations are counted by layers that are alike, and"
                " params has none. Leave batch and length out."
            )
        sizes, assumed = get_sizes(equal, heads)
        retained = ActivationBytes.of(sizes, workload)
        operations = sizes.operations(values, workload)
        messages += [assumed]
    coded = exact if codec is None else planned(params, codec)
    if coded.host_bytes == exact.host_bytes:
        messages += [coded.uncoded]
    adapters = None
    if equal is not None and rank is not None:
        adapters = planned(_adapters(equal, rank), codec)
    ways = Ways(
        planned(params, device_budget=None),
        exact,
        coded,
        "" if codec is None else f", {_name(codec)}",
        equal if elementwise else None,
        retained,
        adapters,
        devices,
    )
    rows = tuple(ways.rows())
    products = machine.products(dtype)
    if operations and not math.isnan(products):
        timed = lambda row: _seconds(row, operations, products, machine)
        rows = tuple(dataclasses.replace(row, seconds=timed(row)) for row in rows)
    fastest = machine.efficiency[1] * products
    if not math.isnan(fastest):
        tokens = lambda row: free_from(values // devices, row.link_seconds, fastest)
        messages += [
            f"{row.way}: the link is free from {tokens(row):,} tokens a step on, at"
            f" {fastest:g} TFLOP/s."
            for row in rows
            if row.by_layers and not row.adapters
        ]
    host = math.inf
    if host_memory is not None:
        host = parse_bytes("host_memory", host_memory)
    return Footprints(
        rows,
        machine,
        share,
        tuple(filter(None, messages)),
        workload,
        retained,
        f"optax.adamw({RATE})" if inner is None else "inner",
        _code(codec, **paging),
        devices,
        host,
    )


def _seconds(
    row: Footprint, flops: int, teraflops: float, machine: Card
) -> tuple[float, float]:
    """Seconds of a step, at best and at worst.

    At best both directions transfer at the same time, and in layerwise steps beside
    products. At worst nothing overlaps.
    """
    rates = (share * teraflops for share in machine.efficiency)
    worst, best = (flops / 1e12 / rate for rate in rates)
    moved = row.moved / 1e9
    together = moved / machine.bidirectional
    lower = max(best, together) if row.by_layers else best + together
    return lower, worst + moved / machine.link


def _adapters(layers: Layers, rank: int) -> PyTree[jax.ShapeDtypeStruct]:
    """Stacked adapters of a layer's matrices, in float32."""
    stack = lambda *axes: jax.ShapeDtypeStruct((layers.count, *axes), jnp.float32)
    shapes = {name: x.shape for name, x in layers.one if len(x.shape) == 2}
    pairs = {n: (stack(rank, x[1]), stack(x[0], rank)) for n, x in shapes.items()}
    return {"layers": pairs}


def _code(
    codec: CodecRules,
    page_size: int | str,
    master_dtype: DTypeLike | None,
    master_remainders: bool | str,
) -> str:
    """Arguments of `paged` as code. A codec without a name is the variable `codec`."""
    text = lambda x: json.dumps(x) if isinstance(x, str) else str(x)
    args = {
        "page_size": page_size != DEFAULT_PAGE_SIZE and text(page_size),
        "master_dtype": master_dtype is not None and text(str(np.dtype(master_dtype))),
        "master_remainders": master_remainders and text(master_remainders),
        "codec": text(codec) if isinstance(codec, str) else codec and "codec",
    }
    return ", ".join(f"{name}={x}" for name, x in args.items() if x)


def _name(codec: CodecRules) -> str:
    rules = codec.values() if isinstance(codec, Mapping) else [codec]
    names = [x if isinstance(x, str) else type(x).__name__ for x in rules if x]
    return " and ".join(dict.fromkeys(names)) or "no codec"


def _remarks(
    coded: bool, equal: Layers | None, elementwise: bool, key: str
) -> Iterator[str]:
    if not coded:
        yield (
            "Moments are stored as Optax stores them. A codec, such as dynamic_int8,"
            " takes less of the host and of the link."
        )
    if not elementwise:
        yield (
            "Nothing is layerwise: that takes an optimizer that works element by"
            " element, such as adamw, lion or sgd."
        )
    elif equal is None:
        yield (
            "Nothing is layerwise: that takes layers that are alike, stacked on the"
            f" leading axis under the key {key!r}, as nnx.vmap, nnx.scan and Linen's"
            " nn.scan stack them, or numbered by name. There are none here."
        )
    elif equal.numbered:
        yield (
            f"Layers are numbered here, from {equal.numbered!r} on: split_layers takes"
            " a loss of them as it is."
        )
