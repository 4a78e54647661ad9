"""Ways to train a model, as tables, and the code of one of them."""

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from typing import overload

from paged_optax.backend import pinned_pool
from paged_optax.backend.text import readable_bytes, table
from paged_optax.planning.layers import ActivationBytes, Workload


def training_code(
    way: str, inner: str, arguments: str = "", fused_head: bool = False
) -> str:
    """The code of a way to train, to paste into a script.

    `inner` and further `arguments` of `paged` are code themselves.
    """
    lines = ["import optax", "import paged_optax as po", ""]
    lines += fused_head * ["# The loss ends with po.linear_cross_entropy(x, head, y)."]
    if way == "resident":
        made = [f"tx = {inner}", "state = tx.init(params)"]
        made += ["step = jax.jit(step, donate_argnums=(0, 1))"]
        return "\n".join(["import jax", *lines, *made])
    lines += [f"tx = po.paged({', '.join(filter(None, [inner, arguments]))})"]
    if not way.startswith("layerwise"):
        lines += [
            "state = tx.init(params)",
            "args = params, state, batch",
            "step = po.jit_step(step, *args, donate_argnums=(0, 1))",
        ]
        return "\n".join(lines)
    where = ""
    if way.endswith("on host"):
        where = ', on_host="all"' if way.endswith("all on host") else ", on_host=True"
    lines += [
        "model = po.split_layers(loss, params, batch)",
        f"params = model.stack(params{where})",
        "state, workspace = model.init(tx, params), model.workspace(params)",
        "args = params, state, workspace, batch",
        "step = po.layerwise_step(model, tx)",
        "step = po.jit_step(step, *args, donate_argnums=(0, 1, 2))",
        "params, state, workspace, output = step(*args)",
    ]
    return "\n".join(lines)


# The largest share of a GPU that is worth a try: CUDA needs some of it.
_MOST = 0.95
#: How the ways that make one layer's gradients at a time begin.
LAYERWISE = "layerwise"


@dataclasses.dataclass(frozen=True)
class Footprint:
    """The bytes that one way to train takes.

    Attributes:
      way: Its name, and the codec if one stores the moments.
      parameters: Parameters, on the device.
      gradients: Gradients alive at once, on the device.
      moments: Most of the moments that are on the device at once.
      scratch: Pages in flight, or the moments and the updates of one layer.
      host: Moments in host memory.
      link_seconds: Seconds a step of transfers.
      moved: Bytes a step over the link, both ways together.
      activations: What activations, scores and logits add to the most that the device
        has at once; 0 where no batch was stated.
      seconds: Of a whole step, at best and at worst; None where it is not known.
      arrays: Bytes of each array in host memory, in the order in which they are made.
    """

    way: str
    parameters: int
    gradients: int
    moments: int
    scratch: int
    host: int
    link_seconds: float
    moved: int = 0
    activations: int = 0
    seconds: tuple[float, float] | None = None
    arrays: tuple[int, ...] = ()

    @property
    def device(self) -> int:
        """Bytes on the device, all together."""
        other = self.gradients + self.moments + self.scratch
        return self.parameters + other + self.activations

    @property
    def by_layers(self) -> bool:
        """Whether one layer's gradients are made at a time."""
        return self.way.startswith(LAYERWISE)


@dataclasses.dataclass(frozen=True)
class Footprints(Sequence[Footprint]):
    """Ways to train a model, the most ordinary first. Prints as a table.

    Attributes:
      rows: The ways.
      device_memory: Bytes of the device's memory.
      share: The share of it that JAX takes.
      link_gigabytes_per_second: The stated rate of the link, each way, in 10^9 bytes.
      remarks: What to know of this model and this transformation.
      workload: The batch of a step; None where activations are not counted.
      held: What activations take in the parts of a step, or None.
      inner: The transformation, as code.
      arguments: Further arguments of `paged`, as code.
      gpu: Whether it is for a GPU, whose host memory XLA's pool pins, and no TPU.
      host_memory: Bytes of the machine's memory that are free, or None: not known.
    """

    rows: tuple[Footprint, ...]
    device_memory: int
    share: float
    link_gigabytes_per_second: float
    remarks: tuple[str, ...] = ()
    workload: Workload | None = None
    held: ActivationBytes | None = None
    inner: str = "inner"
    arguments: str = ""
    gpu: bool = True
    host_memory: int | None = None

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
        """The ways that take less than JAX takes of the device."""
        return tuple(row for row in self.rows if row.device < self.available)

    @property
    def choice(self) -> Footprint | None:
        """The fastest way that fits, and of equally fast ones the smallest.

        The worst seconds count; if they are not known, those of the link. None if no
        way fits.
        """

        def rank(row: Footprint) -> tuple[float, ...]:
            best, worst = row.seconds or (0.0, row.link_seconds)
            return worst, best, row.device

        return min(self.fitting, key=rank, default=None)

    def tables(self) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
        """Titles and rows of two tables: what fits, and what is on the device."""
        # One unit for all rows, so that they can be compared.
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
        tables: list[tuple[tuple[str, ...], list[tuple[str, ...]]]] = [
            ((way, "device", "host", "link s", "fits", "left"), fits),
            (("on the device", "weights", *sizes[1:]), parts),
        ]
        if self.workload is not None:
            titles = (
                f"{self.workload.batch} x {self.workload.length} tokens",
                "activations",
            )
            titles += ("seconds a step",) if self.rows[0].seconds else ()
            steps = [(row.way, number(row.activations), *_range(row)) for row in self]
            tables += [(titles, steps)]
        return tables

    def notes(self) -> str:
        """What to know when reading the tables: a line or two each."""
        notes = [
            *self._share_notes(),
            f"{self._activation_note()} Scratch is pages in flight, or one layer's"
            " moments and updates. Link: seconds a step at"
            f" {self.link_gigabytes_per_second:g} GB/s each way.",
            *self.remarks,
            *(self._pool_notes() if self.gpu else ()),
        ]
        return "\n".join(map(wrap_text, notes))

    def advice(self) -> str:
        """The way to choose, its seconds and its code; empty without a batch."""
        if self.workload is None:
            return ""
        chosen = self.choice
        if chosen is None:
            least = min(self.rows, key=lambda row: row.device)
            missing = readable_bytes(least.device - self.available)
            return wrap_text(
                f"Nothing fits: {least.way} takes the least, and {missing} too much."
                " Fewer or shorter sequences take less, as micro-batches too."
                f"{_also(self.workload)}"
            )
        size, most = readable_bytes(chosen.device), readable_bytes(self.available)
        text = f"Choose {chosen.way}: the fastest that fits, {size} of {most}"
        text += "".join(f", {x} seconds a step" for x in _range(chosen)) + "."
        if not chosen.seconds:
            text += " Its seconds need the rate of products: a card, or TFLOP/s."
        fused = self.workload.fused_head
        code = training_code(chosen.way, self.inner, self.arguments, fused)
        return f"{wrap_text(text)}\n\n{code}"

    def _activation_note(self) -> str:
        if self.workload is None or self.held is None:
            return "What is left is for activations, which are not counted."
        sizes = readable_bytes
        return (
            "Activations are what a batch adds to the peak, each layer a"
            f" jax.checkpoint: the layers' inputs have {sizes(self.held.saved)}, one"
            f" layer's backward pass {sizes(self.held.layer)} and"
            f" {sizes(self.held.scores)} of attention scores, the loss"
            f" {sizes(self.held.head)}.{_also(self.workload)}"
        )

    def _pool_notes(self) -> Iterator[str]:
        row = self.choice
        if row is None or not row.host:
            row = max(self.rows, key=lambda row: row.host)
        if not row.host:
            return
        taken = pinned_pool.pinned_bytes(row.arrays)
        gigabytes = pinned_pool.limit_gigabytes(row.arrays)
        limited = pinned_pool.pinned_bytes(row.arrays, gigabytes << 30) or 0
        takes = "does not hand out so much"
        if taken is not None:
            takes = f"takes {readable_bytes(taken)} for it"
        text = (
            f"Host memory: {row.way} needs {readable_bytes(row.host)} pinned, and XLA's"
            f" pool on a GPU {takes}."
        )
        # Where the pool would refuse an array, or would take less with a limit.
        helps = taken is None or limited < taken
        if self.host_memory is not None:
            little = (limited if helps else taken or 0) > self.host_memory
            free = readable_bytes(self.host_memory)
            text += f" This machine has {free} free{': too little' * little}."
        if helps:
            least = readable_bytes(limited)
            text += f" With this, before JAX starts, the pool takes {least}:"
        yield text
        if helps:
            yield f"export {pinned_pool.POOL_LIMIT}={gigabytes}"

    def _share_notes(self) -> Iterator[str]:
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
        parts = *(table(*x) for x in self.tables()), self.notes(), self.advice()
        return "\n\n".join(filter(None, parts))


def wrap_text(text: str) -> str:
    """Text as wide as a terminal; names of variables stay whole."""
    return textwrap.fill(text, 80, break_long_words=False, break_on_hyphens=False)


def _also(workload: Workload) -> str:
    blocks, fused = workload.score_blocks > 1, workload.fused_head
    if blocks and fused:
        return ""
    if blocks:
        return " A head by linear_cross_entropy takes less."
    others = "" if fused else " and a head by linear_cross_entropy"
    return f" Scores in blocks{others} take less."


def _range(row: Footprint) -> tuple[str, ...]:
    return (" to ".join(f"{x:.2g}" for x in row.seconds),) if row.seconds else ()
