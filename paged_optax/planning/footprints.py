"""Ways to train a model, as tables."""

import dataclasses
import functools
import textwrap
from collections.abc import Iterator, Sequence
from typing import overload

from paged_optax.backend.memory import host_pool_bytes, host_pool_gigabytes
from paged_optax.backend.sizes import readable_bytes
from paged_optax.backend.text_table import table

#: The largest share of a GPU that is worth a try: CUDA needs some of it.
_MOST = 0.95


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What one way to train takes, in bytes; activations come on top.

    Attributes:
      way: Its name, and the codec if one stores the moments.
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
      share: The share of it that JAX takes.
      link_gigabytes_per_second: The stated rate of the link, each way, in 10^9 bytes.
      remarks: What to know of this model and this transformation.
    """

    rows: tuple[Footprint, ...]
    device_memory: int
    share: float
    link_gigabytes_per_second: float
    remarks: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Footprint: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Footprint]: ...

    def __getitem__(self, index: int | slice) -> Footprint | Sequence[Footprint]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def available(self) -> int:
        """Bytes that JAX takes of the device."""
        return int(self.device_memory * self.share)

    @property
    def fitting(self) -> tuple[Footprint, ...]:
        """The ways that leave some of what JAX takes for activations."""
        return tuple(row for row in self.rows if row.device < self.available)

    def tables(self) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
        """Titles and rows of two tables: what fits, and what is on the device."""
        largest = max((max(row.device, row.host) for row in self.rows), default=0)
        unit, scale = ("GiB", 30) if largest >= 2**30 else ("MiB", 20)
        number = lambda size: f"{size / 2**scale:.1f}"
        sizes = ("parameters", "gradients", "moments", "scratch")
        fits, parts = [], []
        for row in self.rows:
            left = self.available - row.device
            link = f"{row.link_seconds:.2g}"
            yes = "yes" if left > 0 else "no"
            device, host = number(row.device), number(row.host)
            fits.append((row.way, device, host, link, yes, number(left)))
            parts.append((row.way, *(number(getattr(row, size)) for size in sizes)))
        way = f"way, in {unit}"
        return [
            ((way, "device", "host", "link s", "fits", "left"), fits),
            (("on the device", "weights", *sizes[1:]), parts),
        ]

    def notes(self) -> str:
        """What to know when reading the tables: a line or two each."""
        notes = [
            *self._what_jax_takes(),
            "What is left is for activations, which are not counted. Scratch is pages"
            " in flight, or one layer's moments and updates. Link: seconds a step at"
            f" {self.link_gigabytes_per_second:g} GB/s each way.",
            *self.remarks,
        ]
        pool = host_pool_bytes()
        most = max((row.host for row in self.rows), default=0)
        if most > pool:
            needed = host_pool_gigabytes(most)
            notes.append(
                f"XLA's pool on a GPU hands out {readable_bytes(pool)} of host memory:"
                f" set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={needed} for all of these."
            )
        # As wide as a terminal; names of variables stay whole.
        fill = functools.partial(textwrap.fill, width=80, break_long_words=False)
        return "\n".join(fill(note, break_on_hyphens=False) for note in notes)

    def _what_jax_takes(self) -> Iterator[str]:
        memory = readable_bytes(self.device_memory)
        if self.share == 1:
            yield f"Fits counts the {memory} of the device."
            return
        why = "XLA_PYTHON_CLIENT_MEM_FRACTION says so."
        if self.share == 0.75:
            why = (
                "three quarters, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise"
                " (1 stands for a TPU)."
            )
        taken = readable_bytes(self.available)
        yield f"Fits counts {taken}, which JAX takes of a GPU of {memory}: {why}"
        more = int(_MOST * self.device_memory)
        if ways := [x.way for x in self.rows if self.available <= x.device < more]:
            yield (
                f"With XLA_PYTHON_CLIENT_MEM_FRACTION={_MOST:g} JAX takes"
                f" {readable_bytes(more)}, and these fit too: {'; '.join(ways)}."
            )

    def __str__(self) -> str:
        return "\n\n".join((*(table(*x) for x in self.tables()), self.notes()))
