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
      host_memory: Host memory in bytes; None if it is not counted.
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
    host_memory: int | None = None

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
        host = math.inf if self.host_memory is None else self.host_memory
        return self.left(row) > 0 and row.host <= host

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
        sizes = lambda *sizes: [f"{size / 2**scale:.1f}" for size in sizes]
        fits = lambda row: (
            f"{row.link_seconds:.2g}",
            "yes" if self.fits(row) else "no",
        )
        rows = [
            (x.way, *sizes(x.device, x.host), *fits(x), *sizes(self.left(x)))
            for x in self
        ]
        labels = f"way, in {unit}", "device", "host", "link s", "fits", "left"
        yield table(labels, rows)
        rows = [
            (x.way, *sizes(x.parameters, x.gradients, x.moments, x.scratch))
            for x in self
        ]
        labels = "on the device", "weights", "gradients", "moments", "scratch"
        yield table(labels, rows)
        if self.workload is not None:
            batch = f"{self.workload.batch} x {self.workload.length} tokens"
            timed = ("seconds a step",) if self.rows[0].seconds else ()
            rows = [(x.way, *sizes(x.activations), *_range(x)) for x in self]
            yield table((batch, "activations", *timed), rows)

    def notes(self) -> str:
        """Notes on the tables."""
        activations = "What is left is for activations, which are not counted."
        if self.workload is not None and self.held is not None:
            sizes = readable_bytes
            activations = (
                "Activations are what a batch adds to the peak, each layer a"
                f" jax.checkpoint: the layers' inputs have {sizes(self.held.saved)},"
                f" one layer's backward pass {sizes(self.held.layer)} and"
                f" {sizes(self.held.scores)} of attention scores, the loss"
                f" {sizes(self.held.head)}.{_savings(self.workload)}"
            )
        notes = [
            *self._share_notes(),
            f"{activations} Scratch is pages in flight, or one layer's"
            " moments and updates. Link: seconds a step at"
            f" {self.machine.link:g} GB/s each way.",
            *self.remarks,
            *([UNIFIED_MEMORY] if self.machine.unified_memory else ()),
            *(self._pool_notes() if self.machine.gpu else ()),
        ]
        return "\n".join(map(wrap_text, notes))

    def advice(self) -> str:
        """The way to choose, its seconds and its code; empty without a batch."""
        if self.workload is None:
            return ""
        best = self.choice
        if best is None and self.fitting:
            ways = "; ".join(row.way for row in self.fitting)
            text = f"No way that trains all parameters fits. Adapters do: {ways}."
            return wrap_text(text)
        if best is None:
            lowest = max(self.rows, key=self.left)
            host = math.inf if self.host_memory is None else self.host_memory
            over = {"device": -self.left(lowest), "host": lowest.host - host}
            size = readable_bytes
            missing = [
                f"{size(x)} too much of the {n}" for n, x in over.items() if x > 0
            ]
            return wrap_text(
                f"Nothing fits: {lowest.way} takes the least of the device, and"
                f" {' and '.join(missing)}. Fewer or shorter sequences take less, as"
                f" micro-batches too.{_savings(self.workload)}"
            )
        size, maximum = readable_bytes(best.device), readable_bytes(self.available)
        text = f"Choose {best.way}: the fastest that fits, {size} of {maximum}"
        text += "".join(f", {x} seconds a step" for x in _range(best)) + "."
        if not best.seconds:
            text += " Its seconds need the rate of products: a card, or TFLOP/s."
        fused = self.workload.fused_head
        code = training_code(best.way, self.inner, self.arguments, fused, self.devices)
        return f"{wrap_text(text)}\n\n{code}"

    def _pool_notes(self) -> Iterator[str]:
        row = self.choice
        if row is None or not row.host:
            row = max(self.fitting, key=lambda row: row.host, default=None)
        if row is None or not row.host:
            return
        arrays, takes = row.arrays, "does not hand out so much"
        if (taken := pinned_pool.pinned_bytes(arrays)) is not None:
            takes = f"takes {readable_bytes(taken)} for it"
        text = (
            f"Host memory: {row.way} needs {readable_bytes(row.host)} pinned, and XLA's"
            f" pool on a GPU {takes}."
        )
        # A limit helps if the pool would refuse an array, or would take less.
        gigabytes = pinned_pool.limit_gigabytes(arrays)
        limited = pinned_pool.pinned_bytes(arrays, gigabytes << 30) or 0
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
        if self.host_memory is not None:
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
    yours = "# loss(params, batch), params and batch are yours.\n"
    code = f"import jax\nimport optax\nimport paged_optax as po\n\n{yours}{head}"
    if devices > 1:
        code += _DIVIDED.format(devices)
    paged = f"po.paged({', '.join(filter(None, [inner, arguments]))})"
    if not way.startswith(LAYERWISE):
        return f"{code}tx = {inner if way == 'resident' else paged}\n{_STEP}"
    on_host = ""
    if way.endswith("on host"):
        on_host = ', on_host="all"' if way.endswith("all on host") else ", on_host=True"
    return code + (
        f"tx = {paged}\n"
        "model = po.split_layers(loss, params, batch)\n"
        f"params = model.stack(params{on_host})\n"
        "state, workspace = model.init(tx, params), model.workspace(params)\n"
        "args = params, state, workspace, batch\n"
        "step = po.layerwise_step(model, tx)\n"
        "step = po.jit_step(step, *args, donate_argnums=(0, 1, 2))\n"
        "params, state, workspace, output = step(*args)"
    )


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
