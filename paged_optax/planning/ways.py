"""Bytes of the ways to train: one `Footprint` each."""

import dataclasses
from collections.abc import Iterator

from paged_optax.backend.memory import nbytes
from paged_optax.planning.activations import ActivationBytes, Layers
from paged_optax.planning.footprints import LAYERWISE, Footprint
from paged_optax.planning.page_plan import PagePlan


@dataclasses.dataclass(frozen=True)
class Ways:
    """A model and the plans of its moments."""

    parameters: int  # bytes
    resident: PagePlan  # all moments on the device
    exact: PagePlan  # moments on the host, without a codec
    coded_plan: PagePlan  # in the codec, if there is one
    codec: str  # after a comma; empty without a codec
    rate: float  # bytes a second over the link, in one direction
    layers: Layers | None  # None: no step can be layerwise
    activations: ActivationBytes | None  # None: not counted

    def rows(self) -> Iterator[Footprint]:
        """All ways, the most ordinary first."""
        yield self._ordinary("resident", self.resident)
        # Moments are on the host between steps, and all on the device in the update.
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
            on_host = self._with_weights_on_host(way, self.layers)
            yield on_host
            if self.layers.rest:
                yield self._with_all_on_host(on_host, way, self.layers)

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
        """Adds the activations to a row; in the update they are freed.

        `at_head` and `in_layers` are the other bytes on the device in the loss and in
        the layers' backward pass. With `waits` the gradients of the loss stay on the
        device until the end of the backward pass.
        """
        if self.activations is None:
            return row
        held = self.activations
        layer = held.layer + held.scores + held.waiting * waits
        peak = held.saved + max(at_head + held.head, in_layers + layer)
        return dataclasses.replace(row, activations=max(0, peak - row.device))

    def _ordinary(self, way: str, plan: PagePlan, **other: int | float) -> Footprint:
        row = self._footprint(way, self.parameters, plan, **other)
        # Moments on the host stay there until the update. The stacked gradients are
        # allocated at the start of the layers' backward pass.
        at_head = row.parameters + plan.device_bytes
        return self._counted(row, at_head, at_head + row.gradients)

    def _moments_of(self, size: int) -> int:
        return self.resident.device_bytes * size // max(1, self.parameters)

    def _layerwise(self, layers: Layers) -> Footprint:
        # A layer's moments are transferred while its gradients are computed, in float32
        # or in the parameters' dtype.
        scratch = layers.largest + self._moments_of(layers.largest)
        row = self._footprint(
            f"{LAYERWISE}{self.codec}",
            layers.largest + layers.rest,
            self.coded_plan,
            scratch=scratch,
            link_seconds=self.coded_plan.link_bytes / self.rate,
        )
        at_head = row.parameters + row.moments + layers.largest
        return self._counted(row, at_head, at_head + scratch, waits=True)

    def _with_weights_on_host(self, way: Footprint, layers: Layers) -> Footprint:
        """The same with the layers' weights on the host.

        Each layer's weights are read in the forward and the backward pass, and written.
        """
        stacks = way.parameters - layers.rest
        row = dataclasses.replace(
            way,
            way=f"{way.way}, weights on host",
            parameters=layers.rest + layers.largest,
            host=way.host + stacks,
            # The layers are stacked before the moments are allocated.
            arrays=(*(layers.count * nbytes(x) for _, x in layers.one), *way.arrays),
            link_seconds=way.link_seconds + 3 * stacks / self.rate,
            moved=way.moved + 3 * stacks,
            activations=0,
        )
        at_head = row.parameters + row.moments + layers.largest
        # The last layer's forward pass is outside the loop of the others. XLA reuses it
        # in the backward pass and keeps its intermediates, beside the layer's moments.
        early = way.scratch - layers.largest
        early += 0 if self.activations is None else self.activations.forward
        return self._counted(row, at_head + early, at_head + way.scratch, waits=True)

    def _with_all_on_host(
        self, weights_on_host: Footprint, way: Footprint, layers: Layers
    ) -> Footprint:
        """The same with all parameters on the host.

        A parameter outside the layers is read twice for the passes, as a tied embedding
        is, and once for its update, and written. The largest one's gradient waits on
        the host. In its update the device holds that parameter, the update and its
        pages, beside the workspace.
        """
        one, other = layers.largest, layers.largest_of_rest
        # The sum of parameter and update has sixteen parts, two of them in flight.
        pages = min(self.coded_plan.scratch_bytes, self._moments_of(other))
        in_update = other, one + other, pages + other // 8
        parameters, gradients, scratch = max(
            (one, one, way.scratch), in_update, key=sum
        )
        moved = 4 * layers.rest + 2 * other
        rest = (nbytes(x) for _, x in layers.others)
        row = dataclasses.replace(
            weights_on_host,
            way=f"{way.way}, all on host",
            parameters=parameters,
            gradients=gradients,
            scratch=scratch,
            host=weights_on_host.host + layers.rest + other,
            arrays=(*rest, *weights_on_host.arrays, other),
            link_seconds=weights_on_host.link_seconds + moved / self.rate,
            moved=weights_on_host.moved + moved,
            activations=0,
        )
        # The head's gradient is copied to the host before the layers' backward pass.
        layer = row.moments + one
        return self._counted(row, layer + other, layer + one + way.scratch)
