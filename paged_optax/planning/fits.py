"""`what_fits`: ways to train a model, and the memory that each of them takes."""

import collections
import dataclasses
import functools
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import overload

import jax
import optax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from paged_optax.backend.key_paths import slashed
from paged_optax.backend.memory import host_pool_bytes, host_pool_gigabytes, nbytes
from paged_optax.backend.sizes import parse_bytes, readable_bytes
from paged_optax.backend.text_table import table
from paged_optax.planning.page_plan import PagePlan, plan
from paged_optax.transform.codec_rules import Rule
from paged_optax.transform.paged import paged


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What one way to train takes, in bytes; activations come on top.

    Attributes:
      way: Its name.
      parameters: Parameters, on the device.
      gradients: Gradients alive at once, on the device.
      moments: Most of the moments that are on the device at once.
      scratch: Pages in flight, or the moments and the updates of one layer.
      host: Moments in host memory.
      link_seconds: Seconds a step of transfers.
    """

    way: str
    parameters: int
    gradients: int
    moments: int
    scratch: int
    host: int
    link_seconds: float

    @property
    def device(self) -> int:
        """Bytes on the device, all together."""
        return self.parameters + self.gradients + self.moments + self.scratch


@dataclasses.dataclass(frozen=True)
class Footprints(Sequence[Footprint]):
    """Ways to train a model, the most ordinary first. Prints as a table.

    Attributes:
      rows: The ways.
      device_memory: Bytes of the device's memory.
      link_gigabytes_per_second: The stated rate of the link, each way, in 10^9 bytes.
    """

    rows: tuple[Footprint, ...]
    device_memory: int
    link_gigabytes_per_second: float

    @overload
    def __getitem__(self, index: int) -> Footprint: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Footprint]: ...

    def __getitem__(self, index: int | slice) -> Footprint | Sequence[Footprint]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fitting(self) -> tuple[Footprint, ...]:
        """The ways that leave something of the device for activations."""
        return tuple(row for row in self.rows if row.device < self.device_memory)

    def cells(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Titles and rows of the table, in the unit that suits the device."""
        unit, scale = ("GiB", 30) if self.device_memory >= 2**30 else ("MiB", 20)
        number = lambda size: f"{size / 2**scale:.1f}"
        sizes = ("parameters", "gradients", "moments", "scratch", "device", "host")
        rows = []
        for row in self.rows:
            left = self.device_memory - row.device
            rows.append(
                (
                    row.way,
                    *(number(getattr(row, size)) for size in sizes),
                    f"{row.link_seconds:.2g}",
                    f"yes, {number(left)} left"
                    if left > 0
                    else f"no, {number(-left)} over",
                )
            )
        fits = f"fits {number(self.device_memory)} {unit}"
        return (f"way, in {unit}", *sizes, "link s", fits), rows

    def notes(self) -> list[str]:
        """What to know when reading the table."""
        rate = f"{self.link_gigabytes_per_second:g} GB/s"
        notes = [
            "What is left is for activations, which are not counted.",
            "XLA takes three quarters of a GPU, unless XLA_PYTHON_CLIENT_MEM_FRACTION"
            " says otherwise.",
            "Scratch: pages in flight, or one layer's moments and updates.",
            f"Link: seconds a step at {rate} each way.",
        ]
        if not any(row.way == _LAYERWISE for row in self.rows):
            notes.append(
                "No layers are stacked or numbered here: nothing is layerwise."
            )
        pool, most = host_pool_bytes(), max(row.host for row in self.rows)
        if most > pool:
            needed = host_pool_gigabytes(most)
            notes.append(
                f"XLA's pool on a GPU hands out {readable_bytes(pool)} of host memory:"
                f" set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={needed} for all of these."
            )
        return notes

    def __str__(self) -> str:
        return "\n".join((table(*self.cells()), "", *self.notes()))


_LAYERWISE = "layerwise"


def what_fits(
    params: optax.Params,
    inner: optax.GradientTransformation | None = None,
    *,
    device_memory: int | str,
    codec: Rule | Mapping[str, Rule] = "dynamic_int8",
    master_dtype: DTypeLike | None = None,
    page_size: int | str = "16MiB",
    link_gigabytes_per_second: float = 25.0,
    layers: str = "layers",
) -> Footprints:
    """Compares ways to train a model by the memory they take.

    All have the parameters and one kind of gradients on the device:

    | way | gradients | moments on the device | scratch |
    | --- | --- | --- | --- |
    | resident | of all parameters | all | |
    | whole tree offloaded | of all parameters | all, while they are updated | |
    | paged, with `codec` and without | of all parameters | small ones | pages |
    | layerwise, with `codec` | of one layer, and the rest | small ones | one layer's |

    "One layer's" are its moments and its updates. A last row has the layers' weights on
    the host too.

    Bytes of moments, of pages and of the link are `plan`'s. The sums are bounds: XLA's
    own buffer assignment for an H200 is at most 3% above those of paged and layerwise,
    5% above the resident one, and up to a quarter above that of the whole tree
    (`tests/test_fit.py`).

    Args:
      params: The parameters, or their `ShapeDtypeStruct`s: `model_shapes("8B")`.
      inner: What to page; None: `optax.adamw`.
      device_memory: Bytes of the device's memory, as in `"24GiB"`. XLA takes three
        quarters of a GPU unless `XLA_PYTHON_CLIENT_MEM_FRACTION` says otherwise.
      codec: How moments are stored in the last two ways, as in `paged`.
      master_dtype: As in `paged`: a copy of the parameters, beside the moments.
      page_size: As in `paged`.
      link_gigabytes_per_second: The rate of the link between host and device in one
        direction, in 10^9 bytes a second.
      layers: The key under which the layers' parameters are stacked on the leading
        axis. Layers by number, as in `layers_0` or `model.layers.0`, are found too.

    Returns:
      A sequence of `Footprint`s. It prints as a table.

    Raises:
      ValueError: If an argument is not usable.

    Example:
      >>> import paged_optax as po
      >>> ways = po.what_fits(po.model_shapes("8B"), device_memory="24GiB")
      >>> [way.way for way in ways.fitting]
      ['layerwise', 'layerwise, weights on host']
    """
    limit = parse_bytes("device_memory", device_memory)
    inner = optax.adamw(1e-3) if inner is None else inner
    parameters = nbytes(params)

    def planned(
        codec: Rule | Mapping[str, Rule] = None, device_budget: str | None = "0B"
    ) -> PagePlan:
        tx = paged(
            inner,
            page_size=page_size,
            master_dtype=master_dtype,
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
    name = codec if isinstance(codec, str) else "codec"
    coded = exact
    if codec is not None:
        coded = planned(codec=codec)
        rows.append(footprint(f"paged, {name}", parameters, coded))
    if (one := _largest_layer(params, layers)) is not None:
        layer, rest = one
        # The layer's moments travel while its gradients are computed, in float32 or
        # the parameters' dtype.
        moments = resident.device_bytes * layer // max(1, parameters)
        scratch = layer + moments
        way = footprint(
            _LAYERWISE,
            layer + rest,
            coded,
            scratch=scratch,
            link_seconds=coded.link_bytes / rate,
        )
        rows += [way, _with_weights_on_host(way, layer, rest, rate)]
    return Footprints(tuple(rows), limit, link_gigabytes_per_second)


def _footprint(
    parameters: int, way: str, gradients: int, plan: PagePlan, **other: int | float
) -> Footprint:
    """What a way takes by its plan, but for what is said otherwise."""
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


def _with_weights_on_host(
    way: Footprint, layer: int, rest: int, rate: float
) -> Footprint:
    """The same way, the layers' weights on the host too.

    Each layer's weights are read for its forward and for its backward pass, and
    written.

    Args:
      way: The way with all weights on the device.
      layer: Bytes of one layer's weights.
      rest: Bytes of all others.
      rate: Bytes a second over the link.
    """
    stacks = way.parameters - rest
    return dataclasses.replace(
        way,
        way=f"{way.way}, weights on host",
        parameters=rest + layer,
        host=way.host + stacks,
        link_seconds=way.link_seconds + 3 * stacks / rate,
    )


def _largest_layer(params: PyTree, stacked: str) -> tuple[int, int] | None:
    """Bytes of the largest layer's parameters, and of all that is no layer's."""
    leaves = [
        (slashed(path), x) for path, x in jax.tree_util.tree_leaves_with_path(params)
    ]
    total = nbytes(params)
    inside = [x for path, x in leaves if stacked in path.split("/")]
    lengths = {x.shape[:1] for x in inside}
    if len(lengths) == 1 and lengths != {()}:
        ((length,),) = lengths
        return nbytes(inside) // max(1, length), total - nbytes(inside)
    families: dict[str, collections.Counter[str]] = {}
    for path, x in leaves:
        if match := re.match(r"(\D+)(\d+)", path) or re.match(r"()(\d+)/", path):
            family = families.setdefault(match[1], collections.Counter())
            family[match[2]] += nbytes(x)
    several = [family for family in families.values() if len(family) > 1]
    if not several:
        return None
    most = max(several, key=lambda family: sum(family.values()))
    return max(most.values()), total - sum(most.values())
