"""`what_fits`: ways to train a model, and the memory that each of them takes."""

import dataclasses
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence

import jax
import optax
from jax.typing import DTypeLike

from paged_optax.backend.given import refuse_no_arrays, refuse_no_rate, shown
from paged_optax.backend.memory import device_share, nbytes
from paged_optax.backend.sizes import parse_bytes
from paged_optax.planning.footprints import Footprint, Footprints
from paged_optax.planning.free_paging import free_from
from paged_optax.planning.layers import Layers, find_layers
from paged_optax.planning.page_plan import PagePlan, plan
from paged_optax.transform.codec_rules import Rule
from paged_optax.transform.paged import paged

_LAYERWISE = "layerwise"


def what_fits(
    params: optax.Params,
    inner: optax.GradientTransformation | None = None,
    *,
    device_memory: int | str,
    codec: Rule | Mapping[str, Rule] = None,
    master_dtype: DTypeLike | None = None,
    master_remainders: bool = False,
    page_size: int | str = "16MiB",
    link_gigabytes_per_second: float = 25.0,
    teraflops: float | None = None,
    layers: str = "layers",
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
    (`tests/test_fit.py`).

    Args:
      params: The parameters, or their `ShapeDtypeStruct`s: `model_shapes("8B")`.
      inner: What to page; None: `optax.adamw`.
      device_memory: Bytes of the device's memory, as in `"24GiB"`. What fits is counted
        against what JAX takes of it: on a GPU three quarters, unless
        `XLA_PYTHON_CLIENT_MEM_FRACTION` says otherwise.
      codec: How moments are stored, as in `paged`; None: as Optax has them.
      master_dtype: As in `paged`: a copy of the parameters, beside the moments.
      master_remainders: As in `paged`: 16 bits of each parameter's copy.
      page_size: As in `paged`.
      link_gigabytes_per_second: The rate of the link between host and device in one
        direction, in 10^9 bytes a second.
      teraflops: The rate of matrix products that training reaches, in 10^12 operations
        a second. Then a note says from how many tokens a step the link costs no time.
      layers: The key under which the layers' parameters are stacked on the leading
        axis. Layers by number, as in `layers_0` or `model.layers.0`, are found too.

    Returns:
      A sequence of `Footprint`s. It prints as tables.

    Raises:
      ValueError: If an argument is not usable.
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
    """
    limit = _limit(device_memory)
    refuse_no_arrays("params", params)
    if not isinstance(layers, str):
        raise TypeError(f"layers={shown(layers)} is not a key, such as 'layers'.")
    refuse_no_rate("link_gigabytes_per_second", link_gigabytes_per_second)
    if teraflops is not None:
        refuse_no_rate("teraflops", teraflops)
    inner = optax.adamw(1e-3) if inner is None else inner
    parameters = nbytes(params)

    def planned(
        codec: Rule | Mapping[str, Rule] = None, device_budget: str | None = "0B"
    ) -> PagePlan:
        tx = paged(
            inner,
            page_size=page_size,
            master_dtype=master_dtype,
            master_remainders=master_remainders,
            codec=codec,
            device_budget=device_budget,
        )
        with warnings.catch_warnings():
            # Of the host pool, of which the table says as much.
            warnings.filterwarnings("ignore", "the moments need", UserWarning)
            return plan(tx, params, link_gigabytes_per_second=link_gigabytes_per_second)

    footprint = functools.partial(_footprint, parameters)
    rate = link_gigabytes_per_second * 1e9
    resident, exact = planned(device_budget=None), planned()
    rows = [
        footprint("resident", parameters, resident),
        # Moments live on the host as if paged, and all come to the device at once.
        footprint(
            "whole tree offloaded",
            parameters,
            exact,
            moments=resident.device_bytes,
            scratch=0,
            link_seconds=exact.link_bytes / rate,
        ),
        footprint("paged", parameters, exact),
    ]
    coded, name = exact, ""
    if codec is not None:
        coded, name = planned(codec=codec), f", {_name(codec)}"
        rows.append(footprint(f"paged{name}", parameters, coded))
    found = find_layers(params, layers)
    by_element = all(x.elementwise for x in exact.moments if x.shape)
    if found is not None and by_element:
        way = _layerwise(f"{_LAYERWISE}{name}", parameters, found, resident, coded)
        way = dataclasses.replace(way, link_seconds=coded.link_bytes / rate)
        rows += [way, _with_weights_on_host(way, found, rate)]
        if found.rest:
            rows.append(_with_all_on_host(rows[-1], way, found, resident, coded, rate))
    remarks = tuple(_remarks(codec is not None, found, by_element, layers))
    if teraflops is not None:
        values = sum(x.size for x in jax.tree.leaves(params))
        remarks += tuple(_free(rows, values, rate, teraflops))
    return Footprints(
        tuple(rows), limit, device_share(), link_gigabytes_per_second, remarks
    )


def _limit(device_memory: int | str) -> int:
    """Bytes of the device's memory."""
    limit = parse_bytes("device_memory", device_memory)
    if limit == 0:
        raise ValueError(
            f"device_memory={device_memory!r} is nothing: pass a device's memory, such"
            " as '24GiB'."
        )
    return limit


def _name(codec: Rule | Mapping[str, Rule]) -> str:
    """A codec in a word; of several each."""
    rules = codec.values() if isinstance(codec, Mapping) else [codec]
    names = [x if isinstance(x, str) else type(x).__name__ for x in rules if x]
    return " and ".join(dict.fromkeys(names)) or "no codec"


def _remarks(
    coded: bool, found: Layers | None, by_element: bool, key: str
) -> Iterator[str]:
    """What is particular to a model and a transformation."""
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
    elif found is None:
        yield (
            "Nothing is layerwise: that takes layers that are alike, stacked on the"
            f" leading axis under the key {key!r}, as nnx.vmap, nnx.scan and Linen's"
            " nn.scan stack them, or numbered by name. There are none here."
        )
    elif found.numbered:
        yield (
            f"Layers are numbered here, from {found.numbered!r} on: split_layers takes"
            " a loss of them as it is."
        )


def _free(
    rows: Sequence[Footprint], parameters: int, rate: float, teraflops: float
) -> Iterator[str]:
    """From how many tokens a step each layerwise way takes no time on the link."""
    for row in rows:
        if row.way.startswith(_LAYERWISE):
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


def _footprint(
    parameters: int, way: str, gradients: int, plan: PagePlan, **other: int | float
) -> Footprint:
    """What a way takes by its plan; `other` replaces single figures."""
    found = Footprint(
        way,
        parameters,
        gradients,
        plan.device_bytes,
        plan.scratch_bytes,
        plan.host_bytes,
        plan.link_seconds,
    )
    return dataclasses.replace(found, **other)


def _layerwise(
    way: str, parameters: int, layers: Layers, resident: PagePlan, coded: PagePlan
) -> Footprint:
    """What a layerwise step takes."""
    # The layer's moments travel while its gradients are computed, in float32 or the
    # parameters' dtype.
    moments = _moments_of(layers.largest, parameters, resident)
    gradients, scratch = layers.largest + layers.rest, layers.largest + moments
    return _footprint(parameters, way, gradients, coded, scratch=scratch)


def _moments_of(size: int, parameters: int, resident: PagePlan) -> int:
    """Bytes of the moments of so many bytes of the parameters, as Optax has them."""
    return resident.device_bytes * size // max(1, parameters)


def _with_weights_on_host(way: Footprint, layers: Layers, rate: float) -> Footprint:
    """The same way, the layers' weights on the host too.

    Each layer's weights are read for its forward and for its backward pass, and
    written.

    Args:
      way: The way with all weights on the device.
      layers: The layers.
      rate: Bytes a second over the link.
    """
    stacks = way.parameters - layers.rest
    return dataclasses.replace(
        way,
        way=f"{way.way}, weights on host",
        parameters=layers.rest + layers.largest,
        host=way.host + stacks,
        link_seconds=way.link_seconds + 3 * stacks / rate,
    )


def _with_all_on_host(
    layers_there: Footprint,
    way: Footprint,
    layers: Layers,
    resident: PagePlan,
    coded: PagePlan,
    rate: float,
) -> Footprint:
    """The same way, what is beside the layers on the host too.

    Each parameter is read twice for the passes, as a tied embedding is, and for its
    update, and written. The largest one's gradient waits on the host. At its update the
    device has that parameter, the update and its pages, beside the workspace.

    Args:
      layers_there: The way with the layers' weights on the host.
      way: The way with all weights on the device.
      layers: The layers.
      resident: The plan of moments on the device.
      coded: The plan of the way's.
      rate: Bytes a second over the link.
    """
    one, other = layers.largest, layers.largest_of_rest
    moments = _moments_of(other, way.parameters, resident)
    # The sum of parameter and update is made in sixteen parts, two of them at a time.
    at_rest = other, one + other, min(coded.scratch_bytes, moments) + other // 8
    parameters, gradients, scratch = max((one, one, way.scratch), at_rest, key=sum)
    return dataclasses.replace(
        layers_there,
        way=f"{way.way}, all on host",
        parameters=parameters,
        gradients=gradients,
        scratch=scratch,
        host=layers_there.host + layers.rest + other,
        link_seconds=layers_there.link_seconds + (4 * layers.rest + 2 * other) / rate,
    )
