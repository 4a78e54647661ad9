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

    resident: PagePlan  # all moments on the device
    exact: PagePlan  # moments on the host, without a codec
    coded: PagePlan  # in the codec, if there is one
    codec: str  # after a comma; empty without a codec
    layers: Layers | None  # None: no step can be layerwise
    activations: ActivationBytes | None  # None: not counted
    adapters: PagePlan | None = None  # of LoRA; None: has no rows
    devices: int = 1  # that divide the model

    def rows(self) -> Iterator[Footprint]:
        """All ways, the most ordinary first."""
        yield self._ordinary("resident", self.resident)
        # Moments are on the host between steps, and all on the device in the update.
        yield self._ordinary(
            "whole tree offloaded",
            self.exact,
            moments=self.resident.device_bytes,
            scratch=0,
            link_seconds=self._seconds(self.exact.link_bytes),
        )
        yield self._ordinary("paged", self.exact)
        if self.codec:
            yield self._ordinary(f"paged{self.codec}", self.coded)
        if self.layers is not None:
            yield from self._by_layers(self.layers)
            if self.adapters is not None:
                yield from self._by_adapters(self.layers, self.adapters)

    def _seconds(self, moved: int) -> float:
        return moved / (self.exact.link_gigabytes_per_second * 1e9)

    def _part(self, size: int) -> int:
        """Bytes on each device of what all devices divide."""
        return -(-size // self.devices)

    def _whole(self, size: int) -> int:
        """Bytes that each of several devices gathers."""
        return size * (self.devices > 1)

    def _footprint(self, way: str, plan: PagePlan, **fields: int | float) -> Footprint:
        """A row of an ordinary step with these moments, apart from other fields."""
        weights = self._part(self.exact.parameter_bytes)
        sizes = weights, weights, plan.device_bytes, plan.scratch_bytes
        arrays = plan.arrays_on_host * self.devices
        row = Footprint(way, *sizes, plan.link_seconds, plan.link_bytes, arrays=arrays)
        return dataclasses.replace(row, **fields)

    def _counted(
        self, row: Footprint, at_head: int, in_layers: int, waits: bool = False
    ) -> Footprint:
        """Adds the activations to a row; in the update they are freed.

        `at_head` and `in_layers` are the other bytes on the device in the loss and in
        the layers' backward pass. With `waits` the gradients of the loss stay on the
        device until the end of the backward pass.
        """
        if (retained := self.activations) is None:
            return row
        layer = retained.layer + retained.scores + retained.waiting * waits
        peak = retained.saved + max(at_head + retained.head, in_layers + layer)
        return dataclasses.replace(row, activations=max(0, peak - row.device))

    def _ordinary(self, way: str, plan: PagePlan, **fields: int | float) -> Footprint:
        row = self._footprint(way, plan, **fields)
        # Moments on the host stay there until the update. The stacked gradients are
        # allocated at the start of the layers' backward pass.
        at_head = row.parameters + plan.device_bytes
        if self.layers is not None:  # weights and gradients of one layer are gathered
            scratch = row.scratch + self._whole(2 * self.layers.largest)
            row = dataclasses.replace(row, scratch=scratch)
            at_head += self._whole(max(self.layers.outside, default=0))
        return self._counted(row, at_head, at_head + row.gradients)

    def _moment_bytes(self, size: int) -> int:
        return self.resident.device_bytes * size // max(1, self.exact.parameter_bytes)

    def _by_layers(self, layers: Layers) -> Iterator[Footprint]:
        """Weights on the device, of the layers on the host, and all on the host."""
        one, outside = layers.largest, layers.outside
        rest, other = sum(outside), max(outside, default=0)
        # A layer's moments are transferred while its gradients are computed, in float32
        # or in the parameters' dtype.
        moments = self._moment_bytes(one)
        scratch = one + moments
        row = self._footprint(
            f"{LAYERWISE}{self.codec}",
            self.coded,
            gradients=one + self._part(rest),
            scratch=scratch,
            link_seconds=self._seconds(self.coded.link_bytes),
        )
        # Several devices gather a layer, and the head or the embedding.
        beside = row.moments + one + self._whole(other)
        at_head = row.parameters + beside
        yield self._counted(row, at_head, at_head + scratch, waits=True)

        # Each layer's weights are read in the forward and the backward pass, and
        # written. The layers are stacked before the moments are allocated.
        row = self._moving(
            row,
            3 * self._part(layers.count * one),
            way=f"{LAYERWISE}{self.codec}, weights on host",
            parameters=self._part(rest) + one,
            arrays=(*(layers.count * nbytes(x) for _, x in layers.one), *row.arrays),
        )
        at_head = row.parameters + beside
        # The last layer's forward pass is outside the loop of the others. XLA reuses it
        # in the backward pass and keeps its intermediates, beside the layer's moments.
        forward = self.activations.forward if self.activations else 0
        early = at_head + moments + forward
        yield self._counted(row, early, at_head + scratch, waits=True)
        if not rest:
            return

        # A parameter outside the layers is read twice for the passes, as a tied
        # embedding is, and once for its update, and written. The largest one's gradient
        # waits on the host. In its update the device holds that parameter, the update
        # and its pages, beside the workspace. The sum of parameter and update has
        # sixteen parts, two of them in flight.
        pages = min(self.coded.scratch_bytes, self._moment_bytes(other))
        in_update = other, one + other, pages + other // 8
        parameters, gradients, maximum = max((one, one, scratch), in_update, key=sum)
        row = self._moving(
            row,
            self._part(4 * rest + 2 * other),
            way=f"{LAYERWISE}{self.codec}, all on host",
            parameters=parameters,
            gradients=gradients,
            scratch=maximum,
            arrays=(*outside, *row.arrays, other),
        )
        # The head's gradient is copied to the host before the layers' backward pass.
        layer = row.moments + one
        yield self._counted(row, layer + other, layer + one + scratch)

    def _by_adapters(self, layers: Layers, plan: PagePlan) -> Iterator[Footprint]:
        """LoRA and QLoRA with their weights on the device, and of layers on the host.

        QLoRA's matrices have four bits a value, and 32 for each block of 64.
        """
        full, rest = layers.largest, sum(layers.outside)
        matrices = [x for _, x in layers.one if len(x.shape) > 1]
        coded = full - nbytes(matrices) + sum(x.size for x in matrices) * 9 // 16
        trained = 4 * plan.parameters
        for name, one, unpacked in (("LoRA", full, 0), ("QLoRA", coded, full)):
            stacks = layers.count * one
            row = self._footprint(
                f"{LAYERWISE} {name}",
                plan,
                parameters=self._part(stacks + rest + trained),
                gradients=trained // layers.count,
                scratch=plan.scratch_bytes + one + unpacked,
            )
            on_host = self._moving(
                row,
                2 * self._part(stacks),  # for the forward and the backward pass
                way=f"{row.way}, weights on host",
                parameters=self._part(rest + trained) + one,
                arrays=(stacks, *row.arrays),
            )
            for way in (row, on_host):
                at_head = way.parameters + self._whole(rest)
                yield self._counted(way, at_head, at_head + way.gradients + way.scratch)

    def _moving(self, row: Footprint, moved: int, **fields: object) -> Footprint:
        """A row that transfers more bytes."""
        seconds = row.link_seconds + self._seconds(moved)
        moved += row.moved
        return dataclasses.replace(row, moved=moved, link_seconds=seconds, **fields)
