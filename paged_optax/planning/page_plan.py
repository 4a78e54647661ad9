"""`plan`: the placement of moments and the traffic of a step, without allocating."""

import collections
import dataclasses
from collections.abc import Hashable, Mapping

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from paged_optax.backend import pinned_pool
from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import readable_bytes, table
from paged_optax.backend.types import ArrayOrShape, Transformation
from paged_optax.backend.user_warnings import warn_user
from paged_optax.backend.validation import (
    check_arrays,
    check_count,
    check_transformation,
)
from paged_optax.engine.shards import Shards, spec_of_axes
from paged_optax.planning.activations import stacks_under
from paged_optax.planning.cards import (
    UNIFIED_MEMORY,
    Card,
    free_from,
    local_card,
    machine_rate,
)
from paged_optax.transform.codec_rules import SMALLEST_CODED
from paged_optax.transform.parameter_shardings import check_even
from paged_optax.transform.planned_moments import Moment, planned_moments, recorded


def fully_sharded(
    params: PyTree[ArrayOrShape], mesh: Mesh | AbstractMesh, layers: str = "layers"
) -> PyTree[NamedSharding]:
    """Shards every parameter over all devices of a mesh, as ZeRO and FSDP do.

    Each mesh axis shards the longest remaining dimension that it divides evenly, and
    replicates the parameter if there is none. Stacks keep their leading axis whole: a
    scan or `layerwise_step` reads one layer at a time, and would gather all layers.

    Args:
      params: The parameters, or their `ShapeDtypeStruct`s.
      mesh: The devices.
      layers: The key of the stacked layers, as in `layerwise_step`. Leaves under it are
        stacks if all have the same leading length, of at most 1000 layers.

    Returns:
      A `NamedSharding` for each parameter.

    Raises:
      TypeError: If `params` is no tree of arrays.

    Example:
      >>> import jax, jax.numpy as jnp, paged_optax as po
      >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
      >>> params = {"w": jnp.ones((512, 2048)), "b": jnp.ones(3)}
      >>> shardings = po.fully_sharded(params, mesh)
      >>> shardings["w"].spec, shardings["b"].spec
      (P(None, 'data'), P())
      >>> stacked = {"layers": {"w": jnp.ones((64, 32, 16))}}
      >>> po.fully_sharded(stacked, mesh)["layers"]["w"].spec
      P(None, 'data')

    References:
      Rajbhandari et al., `ZeRO <https://arxiv.org/abs/1910.02054>`_, 2020.
    """
    check_arrays("params", params)

    def shard(x: ArrayOrShape, stacked: bool) -> NamedSharding:
        axes: list[tuple[str, ...]] = [()] * len(x.shape)
        left = list(x.shape)
        for name, size in mesh.shape.items():
            divisible = [i for i in range(stacked, len(left)) if left[i] % size == 0]
            if divisible:
                longest = max(divisible, key=left.__getitem__)
                axes[longest] += (name,)
                left[longest] //= size
        return NamedSharding(mesh, spec_of_axes(axes))

    leaves, structure = jax.tree.flatten(params)
    stacks = stacks_under(params, layers)
    return structure.unflatten([shard(x, n in stacks) for n, x in enumerate(leaves)])


@dataclasses.dataclass(frozen=True)
class PagePlan:
    """Placement of all moments, and the traffic of a step. Prints as a table.

    Attributes:
      moments: All arrays of all paged states.
      link_gigabytes_per_second: Link rate in one direction, in 10^9 bytes.
      devices: Devices of the mesh. All bytes are those of one device.
      devices_per_host: Devices of the mesh that share a host's memory.
      parameters: Number of parameters.
      teraflops: Rate of products, in 10^12 operations a second; None if unknown.
      parameter_bytes: Bytes of the parameters, of all devices.
      unified_memory: True if device and host are one memory.
      page_latency: Seconds of a moment's page beyond its bytes.
    """

    moments: tuple[Moment, ...]
    link_gigabytes_per_second: int | float
    devices: int = 1
    devices_per_host: int = 1
    parameters: int = 0
    teraflops: int | float | None = None
    parameter_bytes: int = 0
    unified_memory: bool = False
    page_latency: float = 0.0

    @property
    def device_bytes(self) -> int:
        """Bytes of moments that stay on the device."""
        return sum(x.bytes for x in self.moments if not x.on_host)

    @property
    def host_bytes(self) -> int:
        """Bytes of moments in host memory."""
        return sum(self.arrays_on_host)

    @property
    def arrays_on_host(self) -> tuple[int, ...]:
        """Bytes of each array of moments in host memory, in the order of `init`."""
        return tuple(x.bytes for x in self._paged)

    @property
    def _paged(self) -> list[Moment]:
        return [x for x in self.moments if x.on_host]

    @property
    def bytes_per_host(self) -> int:
        """Bytes of moments in the memory of one host, of all its devices."""
        return self.host_bytes * self.devices_per_host

    @property
    def save_bytes(self) -> int:
        """Bytes of a host's memory while Orbax saves the parameters and the moments.

        Moments on the host are written from where they are. Arrays of the device are
        copied to the host. Compression takes up to as many bytes again, see the guide.
        """
        copied = self.parameter_bytes // self.devices + self.device_bytes
        return self.bytes_per_host + copied * self.devices_per_host

    @property
    def scratch_bytes(self) -> int:
        """Device bytes of pages in flight.

        This bounds what the engine allocates. XLA adds up to 8 MiB for temporary arrays
        and scales. Resharded gradients are not included. `memory_report` shows XLA's
        own figures.
        """
        # Moments with equal numbers share a loop.
        in_flight = collections.Counter[int]()
        for x in self._paged:
            in_flight[x.leaf] += x.in_flight * x.page_bytes + 2 * x.beside
        return max(in_flight.values(), default=0)

    @property
    def link_bytes(self) -> int:
        """Bytes over the link a step, both ways."""
        return 2 * self.host_bytes

    @property
    def link_seconds(self) -> float:
        """Seconds of transfers a step.

        A moment of n pages takes the time of n + 1 pages if one page is read while
        another is written, and of 2n pages otherwise.
        """
        bytes_moved = sum(
            x.bytes * (x.pages + 1 if x.bidirectional else 2 * x.pages) / x.pages
            for x in self._paged
        )
        return bytes_moved / (self.link_gigabytes_per_second * 1e9)

    @property
    def latency_seconds(self) -> float:
        """Seconds of the pages' latency a step, at most: leaves share loops."""
        return self.page_latency * sum(x.pages for x in self._paged)

    @property
    def free_from(self) -> int | None:
        """The tokens a step from which `layerwise_step` hides all transfers.

        None without `teraflops`.
        """
        if self.teraflops is None or not self.parameters:
            return None
        directions = 1 if all(x.bidirectional for x in self._paged) else 2
        rate = self.link_gigabytes_per_second * 1e9
        seconds = directions * self.host_bytes / rate
        return free_from(self.parameters, seconds, self.teraflops)

    def __str__(self) -> str:
        # Moments with equal cells share a row.
        groups = collections.defaultdict[Hashable, list[Moment]](list)
        for x in self.moments:
            key = x.shape, x.dtype, x.on_host, x.pages, x.page_bytes, x.stays
            groups[key].append(x)
        rows = []
        for group in sorted(groups.values(), key=lambda g: -sum(x.bytes for x in g)):
            first, *others = group
            pages = f"{first.pages} x {readable_bytes(first.page_bytes)}"
            path = f"{first.path} +{len(others)}" if others else first.path
            shape = "x".join(map(str, first.shape)) or "scalar"
            codec = first.dtype.partition("(")[0]  # its name
            where = ("host", pages) if first.on_host else ("device", first.stays)
            size = readable_bytes(sum(x.bytes for x in group))
            rows.append((path, shape, codec, *where, size))
        totals = [
            ("moments on the device", readable_bytes(self.device_bytes)),
            ("moments on the host", readable_bytes(self.host_bytes)),
            ("pages in flight (bound)", readable_bytes(self.scratch_bytes)),
            ("over the link a step", readable_bytes(self.link_bytes)),
            (
                f"seconds a step at {self.link_gigabytes_per_second:g} GB/s",
                f"{self.link_seconds:.3g}",
            ),
            ("and of the pages' latency, up to", f"{self.latency_seconds:.3g}"),
        ]
        if self.free_from is not None:
            rates = f"tokens a step at {self.teraflops:g} TFLOP/s"
            totals.append((f"layerwise free from, {rates}", f"{self.free_from:,}"))
        title = "total"
        if self.devices > 1:
            title = f"each of {self.devices} devices"
            label = f"moments on a host of {self.devices_per_host} devices"
            totals.append((label, readable_bytes(self.bytes_per_host)))
        totals.append(("host memory at a save", readable_bytes(self.save_bytes)))
        labels = ("moments", "shape", "dtype", "where", "pages", "bytes")
        texts = table(labels, rows), table((title, ""), totals)
        refused = [x for x in self.moments if x.refused]
        notes = [f"{x.path} cannot be paged here: {x.refused}." for x in refused]
        notes += [UNIFIED_MEMORY] * self.unified_memory
        return "\n\n".join((*texts, *notes, *filter(None, [self.uncoded])))

    @property
    def uncoded(self) -> str:
        """A note on moments too small for their codec; empty without such moments."""
        small = [x.bytes for x in self.moments if x.uncoded]
        if not small:
            return ""
        return (
            f"Stored without the codec, for they have fewer than {SMALLEST_CODED:,}"
            f" values: {len(small)} of {len(self.moments)} arrays,"
            f" {readable_bytes(sum(small))}."
        )


def plan(
    tx: Transformation,
    params: PyTree,
    *,
    link_gigabytes_per_second: int | float | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    devices_per_host: int = 8,
    extra_args: Mapping[str, PyTree] | None = None,
    teraflops: int | float | None = None,
    unified_memory: bool | None = None,
) -> PagePlan:
    """Plans the placement of a transformation's moments, without allocating them.

    On a mesh all figures are those of one device, which pages its own shards over its
    own link. Parameters keep their shardings; those without are sharded as in
    `fully_sharded`.

    Args:
      tx: A transformation with `paged(...)` inside.
      params: The parameters, or their `ShapeDtypeStruct`s.
      link_gigabytes_per_second: Link rate between host and device in one direction, in
        10^9 bytes a second (PCIe 3 x16: about 12; 4: 25; 5: 50). None: this machine's
        card's, or 25.
      mesh: Devices to shard the parameters over. They need not exist:
        `jax.sharding.AbstractMesh((64,), ("data",))`.
      devices_per_host: Devices that share a host's memory.
      extra_args: Arguments that tracing the wrapped `update` needs, such as
        `{"value": 0.0}`.
      teraflops: Rate of matrix products in training, in 10^12 operations a second. The
        plan then has the tokens a step from which `layerwise_step` hides all transfers,
        at six operations a parameter and token.
      unified_memory: True if device and host are one memory, as in `what_fits`. None:
        this machine's card's.

    Returns:
      The plan, which prints as a table.

    Raises:
      ValueError: If a rate is not positive, nothing in `tx` is paged, or a parameter's
        sharding does not divide it evenly.
      TypeError: If `params` is no tree of arrays, or another argument has a wrong type.

    Example:
      >>> import jax, jax.numpy as jnp, paged_optax as po
      >>> params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
      >>> po.plan(po.paged_adamw(1e-3), params).host_bytes // 2**20
      128

      The same on eight devices, each with its own shards:

      >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
      >>> po.plan(po.paged_adamw(1e-3), params, mesh=mesh).host_bytes // 2**20
      16
    """
    check_transformation("tx", tx)
    check_arrays("params", params)
    card = local_card() or Card(0)
    if unified_memory is None:
        unified_memory = card.unified_memory
    if link_gigabytes_per_second is None:
        link_gigabytes_per_second = card.link
    link = machine_rate("link_gigabytes_per_second", link_gigabytes_per_second)
    products = None if teraflops is None else machine_rate("teraflops", teraflops)
    check_count("devices_per_host", devices_per_host, 1)
    check_even(params)
    if mesh is not None:
        sharded = lambda x, sharding: (
            x
            if Shards.of_array(x)
            else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        )
        params = jax.tree.map(sharded, params, fully_sharded(params, mesh))
    leaves = jax.tree.leaves(params)
    shards = filter(None, map(Shards.of_array, leaves))
    devices = max((x.mesh.size for x in shards), default=1)
    devices_per_host = min(devices, int(devices_per_host))
    moments: list[Moment] = []
    for state in recorded(tx, params):
        described = planned_moments(state, dict(extra_args or {}))
        before = len(moments)  # leaves are numbered through all that `tx` pages
        moments += [dataclasses.replace(x, leaf=before + x.leaf) for x in described]
    result = PagePlan(
        tuple(moments),
        link,
        devices,
        devices_per_host,
        sum(x.size for x in leaves),
        products,
        nbytes(params),
        unified_memory,
        card.latency,
    )
    # Plans for a GPU are mostly made on a CPU; a TPU has no such pool.
    arrays = result.arrays_on_host * devices_per_host
    if jax.default_backend() != "tpu" and pinned_pool.pinned_bytes(arrays) is None:
        warn_user(
            f"the moments need {readable_bytes(result.bytes_per_host)} of pinned host"
            f" memory, and XLA's pool on a GPU holds"
            f" {readable_bytes(pinned_pool.pool_limit())}: set"
            f" {pinned_pool.POOL_LIMIT}={pinned_pool.limit_gigabytes(arrays)} before"
            " JAX starts."
        )
    return result
