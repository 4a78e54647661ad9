"""Tables of ways to train a model, the way to choose, and its code."""

import dataclasses
import math
import textwrap
from collections.abc import Iterator

from paged_optax.backend import pinned_pool
from paged_optax.backend.text import readable_bytes, table
from paged_optax.planning.activations import ActivationBytes, Workload
from paged_optax.planning.cards import UNIFIED_MEMORY, Card

#: First word of the ways that compute one layer's gradients at a time.
LAYERWISE = "layerwise"
# The largest share of a GPU worth a try: CUDA needs some of it.
_MOST = 0.95


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes of one way to train.

    Attributes:
      way: Its name, with the codec of the moments.
      parameters: Parameters on the device.
      gradients: Gradients that are live at the same time, on the device.
      moments: Largest part of the moments on the device.
      scratch: Pages in flight, or the moments and updates of one layer.
      link_seconds: Seconds of transfers a step.
      moved: Bytes over the link a step, both ways.
      activations: Increase of the peak by activations, scores and logits; 0 without a
        batch.
      seconds: Seconds of a step, at best and at worst; None if unknown.
      arrays: Bytes of each array in host memory, in the order of allocation.
    """

    way: str
    parameters: int
    gradients: int
    moments: int
    scratch: int
    link_seconds: float
    moved: int = 0
    activations: int = 0
    seconds: tuple[float, float] | None = None
    arrays: tuple[int, ...] = ()

    @property
    def host(self) -> int:
        """Bytes in host memory."""
        return sum(self.arrays)

    @property
    def device(self) -> int:
        """Bytes on the device."""
        other = self.gradients + self.moments + self.scratch
        return self.parameters + other + self.activations

    @property
    def adapters(self) -> bool:
        """True if adapters are trained, beside frozen parameters."""
        return "LoRA" in self.way

    @property
    def by_layers(self) -> bool:
        """True if gradients are computed one layer at a time."""
        return self.way.startswith(LAYERWISE)


@dataclasses.dataclass(frozen=True)
class Footprints:
    """A sequence of ways to train a model. Prints as tables.

    Attributes:
      rows: The ways.
      machine: Memory and rates of a device.
      share: Share of the device's memory that JAX allocates.
      remarks: Notes on the model and the transformation.
      workload: Batch of a step; None if activations are not counted.
      held: Activations in the parts of a step; None without a batch.
      inner: The transformation, as code.
      arguments: Further arguments of `paged`, as code.
      devices: Devices that divide the model. Rows have the device bytes of one, and the
        host bytes of all.
      host_memory: Host memory in bytes; infinite if it is not counted.
    """

    rows: tuple[Footprint, ...]
    machine: Card
    share: float
    remarks: tuple[str, ...] = ()
    workload: Workload | None = None
    held: ActivationBytes | None = None
    inner: str = "inner"
    arguments: str = ""
    devices: int = 1
    host_memory: float = math.inf

    def __getitem__(self, index: int) -> Footprint:
        return self.rows[index]

    def __iter__(self) -> Iterator[Footprint]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def available(self) -> int:
        """Bytes of the device that JAX allocates."""
        return int(self.machine.memory * self.share)

    def left(self, row: Footprint) -> int:
        """Bytes that a way leaves of the device, and of a memory shared with it."""
        left = self.available - row.device
        shared = self.machine.memory - row.device - row.host
        return min(left, shared) if self.machine.unified_memory else left

    def fits(self, row: Footprint) -> bool:
        """True if a way leaves some of `available`, and takes what the host has."""
        return self.left(row) > 0 and row.host <= self.host_memory

    @property
    def fitting(self) -> tuple[Footprint, ...]:
        """The ways that fit, see `fits`."""
        return tuple(filter(self.fits, self.rows))

    @property
    def choice(self) -> Footprint | None:
        """The fastest way that fits and trains all parameters.

        The smallest of equally fast ways. Compares the seconds at worst, or those of
        the link. None if no way fits.
        """

        def rank(row: Footprint) -> tuple[float, ...]:
            best, worst = row.seconds or (0.0, row.link_seconds)
            return worst, best, -self.left(row)

        full = (row for row in self.fitting if not row.adapters)
        return min(full, key=rank, default=None)

    def tables(self) -> Iterator[str]:
        """Totals, parts on the device, and seconds with a batch."""
        # One unit for all rows, to compare them.
        largest = max((max(row.device, row.host) for row in self.rows), default=0)
        unit, scale = ("GiB", 30) if largest >= 2**30 else ("MiB", 20)
        size = lambda size: f"{size / 2**scale:.1f}"
        totals, parts, steps = [], [], []
        for x in self:
            total, left = map(size, (x.device, x.host)), size(self.left(x))
            fits = "yes" if self.fits(x) else "no"
            totals.append((x.way, *total, f"{x.link_seconds:.2g}", fits, left))
            on_device = x.parameters, x.gradients, x.moments, x.scratch
            parts.append((x.way, *map(size, on_device)))
            steps.append((x.way, size(x.activations), *_range(x)))
        labels = f"way, in {unit}", "device", "host", "link s", "fits", "left"
        yield table(labels, totals)
        labels = "on the device", "weights", "gradients", "moments", "scratch"
        yield table(labels, parts)
        if self.workload is not None:
            batch = f"{self.workload.batch} x {self.workload.length} tokens"
            labels = (batch, "activations", "seconds a step")
            yield table(labels[: len(steps[0])], steps)

    def notes(self) -> str:
        """Notes on the tables."""
        activations = "What is left is for activations, which are not counted."
        if self.workload is not None and self.held is not None:
            held, sizes = self.held, readable_bytes
            activations = (
                "Activations are what a batch adds to the peak, each layer a"
                f" jax.checkpoint: the layers' inputs have {sizes(held.saved)}, one"
                f" layer's backward pass {sizes(held.layer)} and {sizes(held.scores)}"
                f" of attention scores, the loss {sizes(held.head)}."
                f"{_savings(self.workload)}"
            )
        notes = [
            *self._share_notes(),
            f"{activations} Scratch is pages in flight, or one layer's"
            " moments and updates. Link: seconds a step at"
            f" {self.machine.link:g} GB/s each way.",
            *self.remarks,
            UNIFIED_MEMORY * self.machine.unified_memory,
            *(self._pool_notes() if self.machine.gpu else ()),
        ]
        return "\n".join(map(wrap_text, filter(None, notes)))

    def advice(self) -> str:
        """The way to choose, its seconds and its code; empty without a batch."""
        if self.workload is None:
            return ""
        size, best = readable_bytes, self.choice
        if best is not None:
            text = f"Choose {best.way}: the fastest that fits, {size(best.device)} of"
            text += f" {size(self.available)}"
            text += "".join(f", {x} seconds a step" for x in _range(best)) + "."
            if not best.seconds:
                text += " Its seconds need the rate of products: a card, or TFLOP/s."
            how = self.workload.fused_head, self.devices
            code = training_code(best.way, self.inner, self.arguments, *how)
            return f"{wrap_text(text)}\n\n{code}"
        if self.fitting:
            ways = "; ".join(row.way for row in self.fitting)
            text = f"No way that trains all parameters fits. Adapters do: {ways}."
            return wrap_text(text)
        lowest = max(self.rows, key=self.left)
        over = {"device": -self.left(lowest), "host": lowest.host - self.host_memory}
        missing = [f"{size(x)} too much of the {n}" for n, x in over.items() if x > 0]
        return wrap_text(
            f"Nothing fits: {lowest.way} takes the least of the device, and"
            f" {' and '.join(missing)}. Fewer or shorter sequences take less, as"
            f" micro-batches too.{_savings(self.workload)}"
        )

    def _pool_notes(self) -> Iterator[str]:
        row = self.choice
        if row is None or not row.host:
            row = max(self.fitting, key=lambda row: row.host, default=None)
        if row is None or not row.host:
            return
        taken = pinned_pool.pinned_bytes(row.arrays)
        takes = "does not hand out so much"
        if taken is not None:
            takes = f"takes {readable_bytes(taken)} for it"
        text = (
            f"Host memory: {row.way} needs {readable_bytes(row.host)} pinned, and XLA's"
            f" pool on a GPU {takes}."
        )
        # A limit helps if the pool would refuse an array, or would take less.
        gigabytes = pinned_pool.limit_gigabytes(row.arrays)
        limited = pinned_pool.pinned_bytes(row.arrays, gigabytes << 30) or 0
        if taken is not None and limited >= taken:
            yield text
            return
        pool = readable_bytes(limited)
        yield f"{text} With this, before JAX starts, the pool takes {pool}:"
        yield f"export {pinned_pool.POOL_LIMIT}={gigabytes}"

    def _share_notes(self) -> Iterator[str]:
        memory = readable_bytes(self.machine.memory)
        if self.devices > 1:
            yield (
                f"Device and link are those of each of {self.devices} devices, which"
                " divide the parameters, moments and batch. Host is that of all."
            )
        if self.host_memory < math.inf:
            size = readable_bytes(self.host_memory)
            yield f"Fits counts the {size} of the host too."
        if self.share == 1:
            yield f"Fits counts the {memory} of the device."
            return
        reason = "XLA_PYTHON_CLIENT_MEM_FRACTION says so."
        if self.share == 0.75:
            reason = (
                "three quarters, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise"
                " (1 stands for a TPU)."
            )
        taken = readable_bytes(self.available)
        yield f"Fits counts {taken}, which JAX takes of a GPU of {memory}: {reason}"
        raised = dataclasses.replace(self, share=_MOST)
        if ways := [x.way for x in raised.fitting if x not in self.fitting]:
            yield (
                f"With XLA_PYTHON_CLIENT_MEM_FRACTION={_MOST:g} JAX takes"
                f" {readable_bytes(raised.available)}, and these fit too:"
                f" {'; '.join(ways)}."
            )

    def __str__(self) -> str:
        parts = *self.tables(), self.notes(), self.advice()
        return "\n\n".join(filter(None, parts))


def training_code(
    way: str,
    inner: str,
    arguments: str = "",
    fused_head: bool = False,
    devices: int = 1,
) -> str:
    """Python code of a way to train, for a user's `loss`, `params` and `batch`.

    `inner` and further `arguments` of `paged` are code.
    """
    head = "# The loss ends with po.linear_cross_entropy(x, head, y).\n" * fused_head
    divided = _DIVIDED.format(devices) if devices > 1 else ""
    tx = f"po.paged({', '.join(filter(None, [inner, arguments]))})"
    step = _STEP
    if way.startswith(LAYERWISE):
        on_host = ', on_host="all"' if way.endswith("all on host") else ", on_host=True"
        step = _LAYERWISE.format(on_host if way.endswith("on host") else "")
    elif way == "resident":
        tx = inner
    return f"{_IMPORTS}{head}{divided}tx = {tx}\n{step}"


_IMPORTS = """\
import jax
import optax
import paged_optax as po

# loss(params, batch), params and batch are yours.
"""
_DIVIDED = """\
mesh = jax.make_mesh(({},), ("data",), (jax.sharding.AxisType.Auto,))
params = jax.device_put(params, po.fully_sharded(params, mesh))
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
batch = jax.device_put(batch, rows)
"""
_STEP = """\
state = tx.init(params)


def step(params, state, batch):
    value, gradients = jax.value_and_grad(loss)(params, batch)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


args = params, state, batch
step = po.jit_step(step, *args, donate_argnums=(0, 1))
params, state, value = step(*args)"""
_LAYERWISE = """\
model = po.split_layers(loss, params, batch)
params = model.stack(params{})
state, workspace = model.init(tx, params), model.workspace(params)
args = params, state, workspace, batch
step = po.layerwise_step(model, tx)
step = po.jit_step(step, *args, donate_argnums=(0, 1, 2))
params, state, workspace, output = step(*args)"""


def wrap_text(text: str) -> str:
    """Wraps text to the width of a terminal; names of variables stay whole."""
    return textwrap.fill(text, 80, break_long_words=False, break_on_hyphens=False)


def _savings(workload: Workload) -> str:
    blocks, fused = workload.score_blocks > 1, workload.fused_head
    if blocks:
        return "" if fused else " A head by linear_cross_entropy takes less."
    head = "" if fused else " and a head by linear_cross_entropy"
    return f" Scores in blocks{head} take less."


def _range(row: Footprint) -> tuple[str, ...]:
    return (" to ".join(f"{x:.2g}" for x in row.seconds),) if row.seconds else ()
