"""The bytes of each way to train: one `Footprint` for each."""

import dataclasses
from collections.abc import Iterator

from paged_optax.backend.memory import nbytes
from paged_optax.planning.activations import Activations
from paged_optax.planning.footprints import LAYERWISE, Footprint
from paged_optax.planning.layers import Layers
from paged_optax.planning.page_plan import PagePlan


@dataclasses.dataclass(frozen=True)
class Ways:
    """A model and its moments, from which all ways follow.

    Attributes:
      parameters: Bytes of all parameters.
      resident: The plan with all moments on the device.
      exact: The plan with moments on the host, as Optax has them.
      coded: The plan with moments on the host, in a codec; `exact` if there is none.
      codec: The codec's name, after a comma; empty if there is none.
      rate: Bytes a second over the link, in one direction.
      layers: The layers; None if there are none, or no step may go by layers.
      activations: What a step's batch takes, or None: it is not counted.
    """

    parameters: int
    resident: PagePlan
    exact: PagePlan
    coded: PagePlan
    codec: str
    rate: float
    layers: Layers | None
    activations: Activations | None

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
            yield self._ordinary(f"paged{self.codec}", self.coded)
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
        """What a way takes by its plan; `other` replaces single figures."""
        found = Footprint(
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
        return dataclasses.replace(found, **other)

    def _counted(
        self, row: Footprint, at_head: int, in_layers: int, waits: bool = False
    ) -> Footprint:
        """A way with what activations add to its peak.

        Args:
          row: The way without them. At the update they are gone.
          at_head: What is there, beside activations, when the loss is differentiated.
          in_layers: The same in the layers' backward pass.
          waits: Whether what the loss leaves waits on the device for the end of that.
        """
        if self.activations is None:
            return row
        found = self.activations
        layer = found.layer + found.scores + found.waiting * waits
        peak = found.saved + max(at_head + found.head, in_layers + layer)
        return dataclasses.replace(row, activations=max(0, peak - row.device))

    def _ordinary(self, way: str, plan: PagePlan, **other: int | float) -> Footprint:
        """A way with the gradients of all parameters."""
        row = self._footprint(way, self.parameters, plan, **other)
        # Moments that are on the host stay there until the update. The gradients'
        # stacks are made when the layers' backward pass begins.
        there = row.parameters + plan.device_bytes
        return self._counted(row, there, there + row.gradients)

    def _layerwise(self, layers: Layers) -> Footprint:
        """What a layerwise step takes."""
        # The layer's moments travel while its gradients are computed, in float32 or the
        # parameters' dtype.
        scratch = layers.largest + self._moments_of(layers.largest)
        row = self._footprint(
            f"{LAYERWISE}{self.codec}",
            layers.largest + layers.rest,
            self.coded,
            scratch=scratch,
            link_seconds=self.coded.link_bytes / self.rate,
        )
        there = row.parameters + row.moments + layers.largest
        return self._counted(row, there, there + scratch, waits=True)

    def _moments_of(self, size: int) -> int:
        """Bytes of the moments of so many bytes of parameters, as Optax has them."""
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
        """The same way, what is beside the layers on the host too.

        Each parameter is read twice for the passes, as a tied embedding is, and for its
        update, and written. The largest one's gradient waits on the host. At its update
        the device has that parameter, the update and its pages, beside the workspace.
        """
        one, other = layers.largest, layers.largest_of_rest
        moments = self._moments_of(other)
        # The sum of parameter and update is made in sixteen parts, two of them at a
        # time.
        pages = min(self.coded.scratch_bytes, moments)
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
                *(nbytes(x) for _, x in layers.beside),
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
