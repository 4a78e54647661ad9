"""`what_fits`: ways to train a model, and the memory that each of them takes."""

from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from paged_optax.backend.memory import device_share, nbytes, platform
from paged_optax.backend.text import parse_bytes
from paged_optax.backend.validation import brief, check_arrays, check_bool, check_count
from paged_optax.engine.pages import DEFAULT_PAGE_SIZE
from paged_optax.planning.card_rates import (
    CARDS,
    Card,
    Rates,
    find_card,
    free_from,
    operations,
)
from paged_optax.planning.footprints import Footprint, Footprints
from paged_optax.planning.layers import (
    ActivationBytes,
    Layers,
    Sizes,
    Workload,
    find_layers,
    sizes_of,
)
from paged_optax.planning.ways import Paging, Ways
from paged_optax.transform.codec_rules import Rule

#: The learning rate of the code that is printed, as in the guides.
RATE = "3e-4"


def what_fits(
    params: optax.Params,
    inner: optax.GradientTransformation | None = None,
    *,
    device_memory: int | str | None = None,
    card: str | Card | None = None,
    batch: int | None = None,
    length: int | None = None,
    codec: Rule | Mapping[str, Rule] = None,
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

    All have the parameters and one kind of gradients on the device:

    | way | gradients | moments on the device | scratch |
    | --- | --- | --- | --- |
    | resident | of all parameters | all | |
    | whole tree offloaded | of all parameters | all, while they are updated | |
    | paged | of all parameters | small ones | pages |
    | layerwise | of one layer, and the rest | small ones | one layer's |

    "One layer's" are its moments and its updates. Two more rows have the layers'
    weights on the host too, and all: `model.stack(params, on_host="all")`. With `codec`
    there are two rows for paged, without it and with it. Layerwise rows have it too.
    The names of rows say so.

    Bytes of moments, of pages and of the link are `plan`'s. The sums are bounds: XLA's
    own buffer assignment for an H200 is at most 3% above those of paged and layerwise,
    5% above the resident one, and up to a quarter above that of the whole tree
    (`tests/planning/test_fit.py`).

    With `batch` and `length` activations are counted too, of decoders whose layers are
    each a `jax.checkpoint` (`paged_optax.planning.layers` has the formulas). Of 42
    programs for an H200, of five models, the sum is within 7.1% of XLA's own bytes
    (`tests/planning/test_activations.py` bounds it). Of a mixture of experts all are
    counted for each token: of two layers of Qwen3-30B-A3B the sum is within 9%. The
    last lines are the fastest way that fits, and its code. If the rate of products is
    known, a step's seconds are a range. At best transfers overlap with products, at 60%
    of a card's stated TFLOP/s, and go both ways at once. At worst products reach 30%,
    and transfers overlap with nothing. The update's own computation is not counted.

    On a GPU the last note is what XLA's pool pins of the host's memory for this way,
    and the limit that keeps it near what is needed.

    Args:
      params: The parameters, or their `ShapeDtypeStruct`s: `model_shapes("8B")`.
      inner: What to page; None: `optax.adamw`.
      device_memory: Bytes of the device's memory, as in `"24GiB"`; None: the card's.
        What fits is counted against what JAX takes of it: on a GPU three quarters,
        unless `XLA_PYTHON_CLIENT_MEM_FRACTION` says otherwise.
      card: The name of a card, such as `"rtx4090"`: its memory as CUDA shows it, and
        its maker's figures for link and products, where no argument states them; or a
        `Card`. `paged_optax.planning.card_rates` has both.
      batch: Sequences of a step; None: activations are not counted.
      length: Tokens of each of them.
      codec: How moments are stored, as in `paged`; None: as Optax has them.
      master_dtype: As in `paged`: a copy of the parameters, beside the moments.
      master_remainders: As in `paged`: 16 bits of each parameter's copy.
      page_size: As in `paged`.
      link_gigabytes_per_second: The rate of the link between host and device in one
        direction, in 10^9 bytes a second; None: the card's, or 25.
      teraflops: The rate of matrix products that training reaches, in 10^12 operations
        a second; None: from 30% to 60% of the card's. Then a note says from how many
        tokens a step the link costs no time.
      layers: The key under which the layers' parameters are stacked on the leading
        axis. Layers by number, as in `layers_0` or `model.layers.0`, are found too.
      heads: Heads of attention; None: as the matrix of queries shows, with 128 values
        each where it does not.
      score_blocks: In how many blocks of queries attention scores are computed, one
        after the other. A kernel that never holds them, such as cuDNN's, is many.
      fused_head: Whether the loss takes `linear_cross_entropy`, which holds one chunk
        of the logits.

    Returns:
      A sequence of `Footprint`s. It prints as tables.

    Raises:
      ValueError: If an argument is not usable, or there is no such card; it names the
        nearest.
      TypeError: If `params` is no tree of arrays, the rate no number, or
        `layers` no text.

    Example:
      >>> import paged_optax as po
      >>> ways = po.what_fits(po.model_shapes("8B"), device_memory="24GiB")
      >>> [way.way for way in ways.fitting]
      ['layerwise, weights on host', 'layerwise, all on host']
      >>> ways = po.what_fits(po.model_shapes("8B"), device_memory="32GiB")
      >>> [way.way for way in ways.fitting]
      ['layerwise', 'layerwise, weights on host', 'layerwise, all on host']

      Activations, and the way to choose:

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
    # Products are in the dtype of the matrices, of which the largest leaf is one.
    leaves = jax.tree.leaves(params)
    dtype = max(leaves, key=lambda x: x.size).dtype if leaves else jnp.float32
    rates = Rates.of(link_gigabytes_per_second, teraflops, stated, dtype)
    workload = _workload(batch, length, heads, score_blocks, fused_head)
    paging = Paging(
        optax.adamw(float(RATE)) if inner is None else inner,
        page_size,
        master_dtype,
        master_remainders,
        rates.link,
    )
    values = sum(x.size for x in leaves)
    exact, alike = paging.planned(params), find_layers(params, layers)
    by_element = all(x.elementwise for x in exact.moments if x.shape)
    remarks = [*_remarks(codec is not None, alike, by_element, layers)]
    if stated is not None and stated.advice and dtype == jnp.bfloat16:
        remarks += [stated.advice]
    held, work = None, 0
    if workload is not None:
        sizes, assumed = _sizes(alike, workload)
        held = ActivationBytes.of(sizes, workload)
        work = operations(values, sizes, workload)
        remarks += filter(None, (assumed, sizes.of_experts(workload)))
    coded = exact if codec is None else paging.planned(params, codec)
    if coded.host_bytes == exact.host_bytes and coded.uncoded:
        remarks += [coded.uncoded]
    ways = Ways(
        nbytes(params),
        paging.planned(params, device_budget=None),
        exact,
        coded,
        "" if codec is None else f", {_name(codec)}",
        rates.link * 1e9,
        alike if by_element else None,
        held,
    )
    rows = [rates.timed(row, work) if work else row for row in ways.rows()]
    if rates.teraflops is not None:
        remarks += _free(rows, values, rates.link * 1e9, rates.teraflops[1])
    return Footprints(
        tuple(rows),
        limit,
        1.0 if stated is not None and not stated.gpu else device_share(),
        rates.link,
        tuple(remarks),
        workload,
        held,
        f"optax.adamw({RATE})" if inner is None else "inner",
        paging.arguments(codec),
        gpu=platform() != "tpu" if stated is None else stated.gpu,
        host_memory=None if stated is None else stated.host_memory,
    )


def _limit(device_memory: int | str | None, card: Card | None) -> int:
    if device_memory is None:
        if card is None:
            raise ValueError(
                f"device_memory=None: pass a device's memory, such as '24GiB', or card="
                f" with one of {', '.join(CARDS)}."
            )
        device_memory = card.memory
    limit = parse_bytes("device_memory", device_memory)
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
        refined = {"heads": heads, "fused_head": fused_head or None}
        refined["score_blocks"] = None if score_blocks == 1 else score_blocks
        for name, value in refined.items():
            if value is not None:
                raise ValueError(
                    f"{name}={brief(value)} is without batch and length, and changes"
                    " nothing: pass both, such as batch=4 and length=2048."
                )
        return None
    if length is None or batch is None:
        raise ValueError(
            f"batch={brief(batch)} is without length: pass the tokens of a sequence,"
            " such as length=2048."
            if length is None
            else f"length={brief(length)} is without batch: pass the sequences of a"
            " step, such as batch=4."
        )
    counts = {"batch": batch, "length": length, "score_blocks": score_blocks}
    for name, count in (counts if heads is None else counts | {"heads": heads}).items():
        check_count(name, count, 1)
    check_bool("fused_head", fused_head)
    if score_blocks > length:
        raise ValueError(
            f"score_blocks={score_blocks} is more than length={length}, the queries of"
            f" a sequence: pass at most {length}."
        )
    # Products of NumPy's numbers would overflow.
    heads = None if heads is None else int(heads)
    return Workload(int(batch), int(length), heads, int(score_blocks), fused_head)


def _sizes(alike: Layers | None, workload: Workload) -> tuple[Sizes, str]:
    if alike is None:
        raise ValueError(
            f"batch={workload.batch}: activations are counted by layers that are alike,"
            " and params has none. Leave batch and length out."
        )
    sizes, assumed = sizes_of(alike, workload.heads)
    if sizes.query % (workload.heads or 1):
        raise ValueError(
            f"heads={workload.heads} does not divide a token's queries, which have"
            f" {sizes.query} values: pass the model's number of heads."
        )
    return sizes, assumed


def _name(codec: Rule | Mapping[str, Rule]) -> str:
    rules = codec.values() if isinstance(codec, Mapping) else [codec]
    names = [x if isinstance(x, str) else type(x).__name__ for x in rules if x]
    return " and ".join(dict.fromkeys(names)) or "no codec"


def _remarks(
    coded: bool, alike: Layers | None, by_element: bool, key: str
) -> Iterator[str]:
    if not coded:
        yield (
            "Moments are stored as Optax stores them. A codec, such as dynamic_int8,"
            " takes less of the host and of the link."
        )
    if not by_element:
        yield (
            "Nothing is layerwise: that takes an optimizer that works element by"
            " element, such as adamw, lion or sgd."
        )
    elif alike is None:
        yield (
            "Nothing is layerwise: that takes layers that are alike, stacked on the"
            f" leading axis under the key {key!r}, as nnx.vmap, nnx.scan and Linen's"
            " nn.scan stack them, or numbered by name. There are none here."
        )
    elif alike.numbered:
        yield (
            f"Layers are numbered here, from {alike.numbered!r} on: split_layers takes"
            " a loss of them as it is."
        )


def _free(
    rows: Sequence[Footprint], parameters: int, rate: float, teraflops: float
) -> Iterator[str]:
    for row in rows:
        if row.by_layers:
            moved = int(row.link_seconds * rate)
            tokens = free_from(
                parameters,
                moved,
                moved,
                up_gigabytes_per_second=rate / 1e9,
                teraflops=teraflops,
            )
            yield (
                f"{row.way}: the link is free from {tokens:,} tokens a step on, at"
                f" {teraflops:g} TFLOP/s."
            )
