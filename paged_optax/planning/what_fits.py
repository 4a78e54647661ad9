"""`what_fits`: compares the memory and the seconds of ways to train a model."""

import dataclasses
import functools
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from paged_optax.backend.memory import device_share, nbytes, platform
from paged_optax.backend.text import parse_bytes
from paged_optax.backend.validation import brief, check_arrays, check_count
from paged_optax.engine.pages import DEFAULT_PAGE_SIZE
from paged_optax.planning.activations import (
    ActivationBytes,
    Layers,
    Sizes,
    Workload,
    find_layers,
    sizes_of,
)
from paged_optax.planning.cards import CARDS, Card, Rates, find_card, free_from
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
    card: str | Card | None = None,
    batch: int | None = None,
    length: int | None = None,
    codec: CodecRules = None,
    master_dtype: DTypeLike | None = None,
    master_remainders: bool = False,
    page_size: int | str = DEFAULT_PAGE_SIZE,
    link_gigabytes_per_second: float | None = None,
    teraflops: float | None = None,
    layers: str = "layers",
    heads: int | None = None,
    score_blocks: int = 1,
    fused_head: bool = False,
) -> Footprints:
    """Compares ways to train a model by the memory they take.

    All keep the parameters and one set of gradients on the device:

    | way | gradients | moments on the device | scratch |
    | --- | --- | --- | --- |
    | resident | of all parameters | all | |
    | whole tree offloaded | of all parameters | all, during the update | |
    | paged | of all parameters | small ones | pages |
    | layerwise | of one layer, and the rest | small ones | one layer's |

    Two more rows keep the layers' weights on the host, and all parameters:
    `model.stack(params, on_host="all")`. With `codec`, paged has a row without it and
    one with it, and all layerwise rows have it.

    XLA's buffer assignment for an H200 is at most 3% above the sums of paged and
    layerwise, 5% above the resident one, and up to a quarter above the whole tree's
    (`tests/planning/test_fit.py`).

    With `batch` and `length` activations are counted, for decoders whose layers are
    each a `jax.checkpoint` (formulas in `paged_optax.planning.activations`): within
    7.1% of XLA's bytes for 42 programs of five models on an H200, and within 9% for
    layers of experts. The last lines are the fastest way that fits, and its code.
    Seconds are a range: at best products reach 60% of a card's TFLOP/s and overlap with
    transfers in both directions, at worst 30% without overlap. The update's computation
    is not counted. On a GPU the last note is the host memory that XLA's pool allocates.

    Args:
      params: The parameters, or their `ShapeDtypeStruct`s: `model_shapes("8B")`.
      inner: The transformation to page; None: `optax.adamw`.
      device_memory: Device memory in bytes, such as `"24GiB"`; None: the card's. JAX
        allocates three quarters of a GPU, or `XLA_PYTHON_CLIENT_MEM_FRACTION`.
      card: A card's name, such as `"rtx4090"`, or a `Card`: default of the memory and
        the rates (`paged_optax.planning.cards`).
      batch: Sequences of a step; None: activations are not counted.
      length: Tokens of a sequence.
      codec: Codec of the moments, as in `paged`.
      master_dtype: As in `paged`.
      master_remainders: As in `paged`.
      page_size: As in `paged`.
      link_gigabytes_per_second: Link rate between host and device in one direction, in
        10^9 bytes a second; None: the card's, or 25.
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

    Returns:
      A sequence of `Footprint`s, which prints as tables.

    Raises:
      ValueError: If an argument is unusable or a card unknown; it names the nearest.
      TypeError: If `params` is no tree of arrays, the rate no number, or `layers` no
        text.

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
    stated = None if card is None else find_card(card)
    limit = _limit(device_memory, stated)
    check_arrays("params", params)
    if not isinstance(layers, str):
        raise TypeError(f"layers={brief(layers)} is not a key, such as 'layers'.")
    leaves = jax.tree.leaves(params)
    # Products have the dtype of the matrices, and the largest leaf is a matrix.
    dtype = max(leaves, key=lambda x: x.size).dtype if leaves else jnp.float32
    rates = Rates.of(link_gigabytes_per_second, teraflops, stated, dtype)
    workload = _workload(batch, length, heads, score_blocks, fused_head)
    planned = functools.partial(
        _planned,
        params,
        optax.adamw(float(RATE)) if inner is None else inner,
        rates.link,
        page_size=page_size,
        master_dtype=master_dtype,
        master_remainders=master_remainders,
    )
    exact, equal = planned(), find_layers(params, layers)
    elementwise = all(x.elementwise for x in exact.moments if x.shape)
    remarks = [*_remarks(codec is not None, equal, elementwise, layers)]
    if stated is not None and stated.advice and dtype == jnp.bfloat16:
        remarks += [stated.advice]
    values = sum(x.size for x in leaves)
    held, operations = None, 0
    if workload is not None:
        sizes, assumed = _sizes(equal, workload)
        held = ActivationBytes.of(sizes, workload)
        operations = sizes.operations(values, workload)
        remarks += filter(None, (assumed, sizes.expert_note(workload)))
    coded = exact if codec is None else planned(codec)
    if coded.host_bytes == exact.host_bytes and coded.uncoded:
        remarks += [coded.uncoded]
    ways = Ways(
        nbytes(params),
        planned(device_budget=None),
        exact,
        coded,
        "" if codec is None else f", {_name(codec)}",
        rates.link * 1e9,
        equal if elementwise else None,
        held,
    )
    rows = tuple(ways.rows())
    if operations:
        timed = lambda row: rates.seconds(operations, row.moved, row.by_layers)
        rows = tuple(dataclasses.replace(row, seconds=timed(row)) for row in rows)
    remarks += (_free(row, values, rates) for row in rows if row.by_layers)
    return Footprints(
        rows,
        limit,
        1.0 if stated is not None and not stated.gpu else device_share(),
        rates.link,
        tuple(filter(None, remarks)),
        workload,
        held,
        f"optax.adamw({RATE})" if inner is None else "inner",
        _code(codec, page_size, master_dtype, master_remainders),
        gpu=platform() != "tpu" if stated is None else stated.gpu,
        host_memory=None if stated is None else stated.host_memory,
    )


def _planned(
    params: PyTree,
    inner: optax.GradientTransformation,
    link: float,
    codec: CodecRules = None,
    **settings: Any,
) -> PagePlan:
    tx = paged(inner, codec=codec, **settings)
    with warnings.catch_warnings():
        # The notes of the tables have the same on the host's pool.
        warnings.filterwarnings("ignore", "the moments need", UserWarning)
        return plan(tx, params, link_gigabytes_per_second=link)


def _code(
    codec: CodecRules,
    page_size: int | str,
    master_dtype: DTypeLike | None,
    master_remainders: bool,
) -> str:
    """Arguments of `paged` as code. A codec without a name is the variable `codec`."""
    texts, read = [], functools.partial(parse_bytes, "page_size")
    if read(page_size) != read(DEFAULT_PAGE_SIZE):
        size = json.dumps(page_size) if isinstance(page_size, str) else int(page_size)
        texts += [f"page_size={size}"]
    if master_dtype is not None:
        texts += [f'master_dtype="{np.dtype(master_dtype)}"']
    if master_remainders:
        texts += ["master_remainders=True"]
    if codec is not None:
        texts += [f'codec="{codec}"' if isinstance(codec, str) else "codec=codec"]
    return ", ".join(texts)


def _limit(device_memory: int | str | None, card: Card | None) -> int:
    if device_memory is None and card is None:
        raise ValueError(
            f"device_memory=None: pass a device's memory, such as '24GiB', or card="
            f" with one of {', '.join(CARDS)}."
        )
    memory = card.memory if device_memory is None and card else device_memory
    limit = parse_bytes("device_memory", memory)
    if limit == 0:
        raise ValueError(
            f"device_memory={device_memory!r} is nothing: pass a device's memory, such"
            " as '24GiB'."
        )
    return limit


def _workload(
    batch: int | None,
    length: int | None,
    heads: int | None,
    score_blocks: int,
    fused_head: bool,
) -> Workload | None:
    if batch is None and length is None:
        unused = {"heads": heads, "fused_head": fused_head or None}
        unused["score_blocks"] = None if score_blocks == 1 else score_blocks
        for name, value in unused.items():
            if value is not None:
                raise ValueError(
                    f"{name}={brief(value)} is without batch and length, and changes"
                    " nothing: pass both, such as batch=4 and length=2048."
                )
        return None
    if length is None:
        raise ValueError(
            f"batch={brief(batch)} is without length: pass the tokens of a sequence,"
            " such as length=2048."
        )
    if batch is None:
        raise ValueError(
            f"length={brief(length)} is without batch: pass the sequences of a step,"
            " such as batch=4."
        )
    counts = {"batch": batch, "length": length, "score_blocks": score_blocks}
    for name, count in (counts if heads is None else counts | {"heads": heads}).items():
        check_count(name, count, 1)
    if score_blocks > length:
        raise ValueError(
            f"score_blocks={score_blocks} is more than length={length}, the queries of"
            f" a sequence: pass at most {length}."
        )
    # Products of NumPy's integers overflow.
    heads = None if heads is None else int(heads)
    return Workload(int(batch), int(length), heads, int(score_blocks), fused_head)


def _sizes(equal: Layers | None, workload: Workload) -> tuple[Sizes, str]:
    if equal is None:
        raise ValueError(
            f"batch={workload.batch}: activations are counted by layers that are alike,"
            " and params has none. Leave batch and length out."
        )
    sizes, assumed = sizes_of(equal, workload.heads)
    if sizes.query % (workload.heads or 1):
        raise ValueError(
            f"heads={workload.heads} does not divide a token's queries, which have"
            f" {sizes.query} values: pass the model's number of heads."
        )
    return sizes, assumed


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


def _free(row: Footprint, parameters: int, rates: Rates) -> str:
    if rates.teraflops is None:
        return ""
    moved, teraflops = int(row.link_seconds * rates.link * 1e9), rates.teraflops[1]
    tokens = free_from(
        parameters,
        moved,
        moved,
        up_gigabytes_per_second=rates.link,
        teraflops=teraflops,
    )
    return (
        f"{row.way}: the link is free from {tokens:,} tokens a step on, at"
        f" {teraflops:g} TFLOP/s."
    )
