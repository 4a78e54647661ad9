"""The bytes of each way to train: one `Footprint` for each."""

import dataclasses
import functools
import json
import warnings
from collections.abc import Iterator, Mapping

import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import parse_bytes
from paged_optax.engine.pages import DEFAULT_PAGE_SIZE
from paged_optax.planning.footprints import LAYERWISE, Footprint
from paged_optax.planning.layers import ActivationBytes, Layers
from paged_optax.planning.page_plan import PagePlan, plan
from paged_optax.transform.codec_rules import Rule
from paged_optax.transform.paged import paged

CodecRules = Rule | Mapping[str, Rule]


@dataclasses.dataclass(frozen=True)
class Paging:
    """Arguments of `paged` that are one for all ways to train, and the link.

    Attributes:
      inner: What to page.
      page_size: As in `paged`.
      master_dtype: As in `paged`.
      master_remainders: As in `paged`.
      link: Its rate in one direction, in 10^9 bytes a second.
    """

    inner: optax.GradientTransformation
    page_size: int | str
    master_dtype: DTypeLike | None
    master_remainders: bool
    link: float

    def planned(
        self, params: PyTree, codec: CodecRules = None, device_budget: str | None = "0B"
    ) -> PagePlan:
        """The plan with this codec and budget."""
        tx = paged(
            self.inner,
            page_size=self.page_size,
            master_dtype=self.master_dtype,
            master_remainders=self.master_remainders,
            codec=codec,
            device_budget=device_budget,
        )
        with warnings.catch_warnings():
            # The warning of the host pool: the notes of the table say as much.
            warnings.filterwarnings("ignore", "the moments need", UserWarning)
            return plan(tx, params, link_gigabytes_per_second=self.link)

    def arguments(self, codec: CodecRules) -> str:
        """The arguments of `paged` after the transformation, as code.

        A codec that has no name is the variable `codec`.
        """
        texts = []
        size, read = self.page_size, functools.partial(parse_bytes, "page_size")
        if read(size) != read(DEFAULT_PAGE_SIZE):
            size = json.dumps(size) if isinstance(size, str) else int(size)
            texts += [f"page_size={size}"]
        if self.master_dtype is not None:
            texts += [f'master_dtype="{np.dtype(self.master_dtype)}"']
        if self.master_remainders:
            texts += ["master_remainders=True"]
        if codec is not None:
            texts += [f'codec="{codec}"' if isinstance(codec, str) else "codec=codec"]
        return ", ".join(texts)


@dataclasses.dataclass(frozen=True)
class Ways:
    """A model and its moments, from which all ways follow.

    Attributes:
      parameters: Bytes of all parameters.
      resident: The plan with all moments on the device.
      exact: The plan with moments on the host, as Optax has them.
      coded_plan: The plan with moments on the host, in a codec; `exact` if there is
        none.
      codec: The codec's name, after a comma; empty if there is none.
      rate: Bytes a second over the link, in one direction.
      layers: The layers; None if there are none, or no step may go by layers.
      activations: What a step's batch takes, or None: it is not counted.
    """

    parameters: int
    resident: PagePlan
    exact: PagePlan
    coded_plan: PagePlan
    codec: str
    rate: float
    layers: Layers | None
    activations: ActivationBytes | None

    def rows(self) -> Iterator[Footprint]:
        """All ways, the most ordinary first."""
        yield self._ordinary("resident", self.resident)
        # Moments live on the host as if paged, and all come to the device at once.
        yield self._ordinary(
            "whole tree offloaded",
            self.exact,
            moments=self.resident.device_bytes,
            scratch=0,
            link_seconds=self.exact.link_bytes / self.rate,
        )
        yield self._ordinary("paged", self.exact)
        if self.codec:
            yield self._ordinary(f"paged{self.codec}", self.coded_plan)
        if self.layers is not None:
            way = self._layerwise(self.layers)
            yield way
            there = self._with_weights_on_host(way, self.layers)
            yield there
            if self.layers.rest:
                yield self._with_all_on_host(there, way, self.layers)

    def _footprint(
        self, way: str, gradients: int, plan: PagePlan, **other: int | float
    ) -> Footprint:
        row = Footprint(
            way,
            self.parameters,
            gradients,
            plan.device_bytes,
            plan.scratch_bytes,
            plan.host_bytes,
            plan.link_seconds,
            moved=plan.link_bytes,
            arrays=plan.arrays_on_host,
        )
        return dataclasses.replace(row, **other)

    def _counted(
        self, row: Footprint, at_head: int, in_layers: int, waits: bool = False
    ) -> Footprint:
        """A way with what activations add to its peak.

        Args:
          row: The way without them. At the update they are gone.
          at_head: Other bytes on the device when the loss is differentiated.
          in_layers: Other bytes on the device in the layers' backward pass.
          waits: Whether the loss's gradients stay on the device until that has ended.
        """
        if self.activations is None:
            return row
        held = self.activations
        layer = held.layer + held.scores + held.waiting * waits
        peak = held.saved + max(at_head + held.head, in_layers + layer)
        return dataclasses.replace(row, activations=max(0, peak - row.device))

    def _ordinary(self, way: str, plan: PagePlan, **other: int | float) -> Footprint:
        row = self._footprint(way, self.parameters, plan, **other)
        # Moments that are on the host stay there until the update. The gradients'
        # stacks are made when the layers' backward pass begins.
        there = row.parameters + plan.device_bytes
        return self._counted(row, there, there + row.gradients)

    def _layerwise(self, layers: Layers) -> Footprint:
        # The layer's moments travel while its gradients are computed, in float32 or the
        # parameters' dtype.
        scratch = layers.largest + self._moments_of(layers.largest)
        row = self._footprint(
            f"{LAYERWISE}{self.codec}",
            layers.largest + layers.rest,
            self.coded_plan,
            scratch=scratch,
            link_seconds=self.coded_plan.link_bytes / self.rate,
        )
        there = row.parameters + row.moments + layers.largest
        return self._counted(row, there, there + scratch, waits=True)

    def _moments_of(self, size: int) -> int:
        return self.resident.device_bytes * size // max(1, self.parameters)

    def _with_weights_on_host(self, way: Footprint, layers: Layers) -> Footprint:
        """The same way, the layers' weights on the host too.

        Each layer's weights are read for its forward and for its backward pass, and
        written.
        """
        stacks = way.parameters - layers.rest
        # They are stacked before moments are made.
        arrays = *(layers.count * nbytes(x) for _, x in layers.one), *way.arrays
        row = dataclasses.replace(
            way,
            way=f"{way.way}, weights on host",
            parameters=layers.rest + layers.largest,
            host=way.host + stacks,
            arrays=arrays,
            link_seconds=way.link_seconds + 3 * stacks / self.rate,
            moved=way.moved + 3 * stacks,
            activations=0,
        )
        there = row.parameters + row.moments + layers.largest
        # The last layer's forward pass stands before the loss, apart from the loop over
        # the others. XLA takes it for the backward pass too, and so keeps what it made;
        # the layer's moments are already there.
        early = way.scratch - layers.largest
        early += 0 if self.activations is None else self.activations.forward
        return self._counted(row, there + early, there + way.scratch, waits=True)

    def _with_all_on_host(
        self, layers_there: Footprint, way: Footprint, layers: Layers
    ) -> Footprint:
        """The same way, the parameters of no layer on the host too.

        Each parameter is read twice for the passes, as a tied embedding is, and for its
        update, and written. The largest one's gradient waits on the host. At its update
        the device has that parameter, the update and its pages, beside the workspace.
        """
        one, other = layers.largest, layers.largest_of_rest
        moments = self._moments_of(other)
        # The sum of parameter and update is made in sixteen parts, two of them at a
        # time.
        pages = min(self.coded_plan.scratch_bytes, moments)
        at_rest = other, one + other, pages + other // 8
        parameters, gradients, scratch = max((one, one, way.scratch), at_rest, key=sum)
        moved = 4 * layers.rest + 2 * other
        row = dataclasses.replace(
            layers_there,
            way=f"{way.way}, all on host",
            parameters=parameters,
            gradients=gradients,
            scratch=scratch,
            host=layers_there.host + layers.rest + other,
            arrays=(
                *(nbytes(x) for _, x in layers.others),
                *layers_there.arrays,
                other,
            ),
            link_seconds=layers_there.link_seconds + moved / self.rate,
            moved=layers_there.moved + moved,
            activations=0,
        )
        # The head's gradient goes to the host at once, so that nothing waits for it.
        there = row.moments + one
        return self._counted(row, there + other, there + one + way.scratch)
