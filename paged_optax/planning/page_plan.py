"""What lives where, and what a step moves, known beforehand; on a mesh too."""

import dataclasses
from collections.abc import Hashable, Mapping

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from paged_optax.backend import pinned_pool
from paged_optax.backend.text import readable_bytes, table
from paged_optax.backend.types import ArrayOrShape, Transformation
from paged_optax.backend.user_warnings import warn_user
from paged_optax.backend.validation import (
    brief,
    check_arrays,
    check_count,
    check_mesh,
    check_transformation,
)
from paged_optax.engine.shards import Shards, spec_of_axes
from paged_optax.planning.card_rates import (
    CARDS,
    DEFAULT_LINK,
    card_name,
    free_from,
    machine_rate,
)
from paged_optax.planning.layers import stacks_under
from paged_optax.transform.codec_rules import SMALLEST_CODED
from paged_optax.transform.parameter_shardings import refuse_uneven
from paged_optax.transform.planned_moments import Moment, recorded


def fully_sharded(
    params: PyTree[ArrayOrShape], mesh: Mesh | AbstractMesh, layers: str = "layers"
) -> PyTree[NamedSharding]:
    """Divides every parameter over all devices of a mesh, as ZeRO and FSDP do.

    Each axis of the mesh, one after the other, cuts the longest dimension that is left
    of a parameter and that it divides evenly. Where there is none, it replicates. The
    axis that layers are stacked on stays whole, for a scan or `layerwise_step` takes
    one layer at a time, and would gather all of them.

    Args:
      params: The parameters, or their `ShapeDtypeStruct`s.
      mesh: The devices.
      layers: The key under which layers are stacked on the leading axis, as in
        `layerwise_step` and `what_fits`. What is under it is taken for stacks if all of
        it begins with one length, of at most 1000 layers. Another key: none are stacks.

    Returns:
      A `NamedSharding` for each parameter.

    Raises:
      TypeError: If `mesh` is no mesh, `params` no tree of arrays, or `layers` no text.

    Example:
      >>> import jax, jax.numpy as jnp, paged_optax as po
      >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
      >>> params = {"w": jnp.ones((512, 2048)), "b": jnp.ones(3)}
      >>> found = po.fully_sharded(params, mesh)
      >>> found["w"].spec, found["b"].spec
      (P(None, 'data'), P())
      >>> stacked = {"layers": {"w": jnp.ones((64, 32, 16))}}
      >>> po.fully_sharded(stacked, mesh)["layers"]["w"].spec
      P(None, 'data')

    References:
      Rajbhandari et al., `ZeRO <https://arxiv.org/abs/1910.02054>`_, 2020.
    """
    check_mesh("mesh", mesh)
    check_arrays("params", params)
    if not isinstance(layers, str):
        raise TypeError(f"layers={brief(layers)} is not a key, such as 'layers'.")

    def divide(x: ArrayOrShape, stacked: bool) -> NamedSharding:
        axes: list[tuple[str, ...]] = [()] * len(x.shape)
        left, first = list(x.shape), int(stacked)
        for name, size in mesh.shape.items():
            # Of dimensions of one length the first.
            longest = max(
                ((n, -i) for i, n in enumerate(left) if i >= first and n % size == 0),
                default=None,
            )
            if longest is not None:
                i = -longest[1]
                axes[i], left[i] = (*axes[i], name), left[i] // size
        return NamedSharding(mesh, spec_of_axes(axes))

    leaves, structure = jax.tree.flatten(params)
    stacks = stacks_under(params, layers)
    return structure.unflatten([divide(x, n in stacks) for n, x in enumerate(leaves)])


@dataclasses.dataclass(frozen=True)
class PagePlan:
    """What lives where, and what a step moves. Prints as a table.

    Attributes:
      moments: Every array of every paged state.
      link_gigabytes_per_second: The stated rate of the link, each way, in 10^9 bytes.
      devices: Devices of the mesh. All bytes are those of one of them.
      devices_per_host: Devices that share a host's memory.
      parameters: How many parameters a device multiplies a token with, all of them.
      teraflops: The stated rate of products, in 10^12 operations a second, or None.
    """

    moments: tuple[Moment, ...]
    link_gigabytes_per_second: int | float
    devices: int = 1
    devices_per_host: int = 1
    parameters: int = 0
    teraflops: int | float | None = None

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
        """Bytes of each array of moments in host memory, as `init` makes them."""
        return tuple(x.bytes for x in self.moments if x.on_host)

    @property
    def bytes_per_host(self) -> int:
        """Bytes of moments in the memory of one host, for all its devices."""
        return self.host_bytes * min(self.devices, self.devices_per_host)

    @property
    def scratch_bytes(self) -> int:
        """Device bytes of pages in flight: each page read, and each written.

        Where moments have several widths XLA may keep a page more of the widest.
        The engine keeps to this bound. XLA takes up to 8 MiB more, for itself and for
        scales; `memory_report` says what it assigned. What XLA takes to move
        gradients that are divided otherwise than their parameters is not in it.
        """
        # Moments with equal numbers travel together, others before or after them.
        flying: dict[int, int] = {}
        for x in self.moments:
            if x.on_host:
                size = x.in_flight * x.page_bytes + 2 * x.beside
                flying[x.leaf] = flying.get(x.leaf, 0) + size
        return max(flying.values(), default=0)

    @property
    def link_bytes(self) -> int:
        """Bytes a step moves over the link, both ways together."""
        return 2 * self.host_bytes

    @property
    def link_seconds(self) -> float:
        """Seconds those bytes take.

        Where pages travel both ways at once, a moment of n pages takes the time of
        n + 1 pages. Elsewhere one direction waits for the other, and it takes the time
        of 2n pages.
        """
        bytes_moved = sum(
            x.bytes * (x.pages + 1 if x.both_ways else 2 * x.pages) / x.pages
            for x in self.moments
            if x.on_host
        )
        return bytes_moved / (self.link_gigabytes_per_second * 1e9)

    @property
    def free_from(self) -> int | None:
        """The tokens a step from which paging takes no time in a `layerwise_step`.

        None where no rate of products was stated; see
        `paged_optax.planning.card_rates`.
        """
        if self.teraflops is None or not self.parameters:
            return None
        return free_from(
            self.parameters,
            self.host_bytes,
            self.host_bytes,
            up_gigabytes_per_second=self.link_gigabytes_per_second,
            teraflops=self.teraflops,
            both_ways=all(x.both_ways for x in self.moments if x.on_host),
        )

    def __str__(self) -> str:
        # Moments of which the table would say the same share a row.
        groups: dict[Hashable, list[Moment]] = {}
        for x in self.moments:
            key = (x.shape, x.dtype, x.on_host, x.pages, x.page_bytes, x.stays)
            groups.setdefault(key, []).append(x)
        rows = []
        for group in sorted(groups.values(), key=lambda g: -sum(x.bytes for x in g)):
            first = group[0]
            rows.append(
                (
                    first.path + (f" +{len(group) - 1}" if len(group) > 1 else ""),
                    "x".join(map(str, first.shape)) or "scalar",
                    first.dtype.partition("(")[0],  # of a codec, its name
                    "host" if first.on_host else "device",
                    f"{first.pages} x {readable_bytes(first.page_bytes)}"
                    if first.on_host
                    else first.stays,
                    readable_bytes(sum(x.bytes for x in group)),
                )
            )
        rate = self.link_gigabytes_per_second
        totals = [
            ("moments on the device", readable_bytes(self.device_bytes)),
            ("moments on the host", readable_bytes(self.host_bytes)),
            ("pages in flight (bound)", readable_bytes(self.scratch_bytes)),
            ("over the link a step", readable_bytes(self.link_bytes)),
            (f"seconds a step at {rate:g} GB/s", f"{self.link_seconds:.3g}"),
        ]
        if self.free_from is not None:
            rates = f"tokens a step at {self.teraflops:g} TFLOP/s"
            totals.append((f"layerwise free from, {rates}", f"{self.free_from:,}"))
        title = "total"
        if self.devices > 1:
            title = f"each of {self.devices} devices"
            sharing = min(self.devices, self.devices_per_host)
            each = f"moments on a host of {sharing} devices"
            totals.append((each, readable_bytes(self.bytes_per_host)))
        titles = ("moments", "shape", "dtype", "where", "pages", "bytes")
        tables = table(titles, rows), table((title, ""), totals)
        notes = [
            f"{x.path} cannot be paged here: {x.refused}."
            for x in self.moments
            if x.refused
        ]
        return "\n\n".join((*tables, *notes, *filter(None, [self.uncoded])))

    @property
    def uncoded(self) -> str:
        """A note on moments too small for their codec; empty if there are none."""
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
) -> PagePlan:
    """Says beforehand what lives where, without allocating anything.

    On a mesh all figures are those of one device, which pages its own shard over its
    own link. Parameters that say how they are divided are taken at their word, others
    are divided as `fully_sharded` does.

    Args:
      tx: A transformation with `paged(...)` somewhere inside.
      params: The parameters, or their `ShapeDtypeStruct`s.
      link_gigabytes_per_second: The rate of the link between host and device in one
        direction, in 10^9 bytes a second (PCIe 3 x16: about 12; 4: 25; 5: 50). None:
        what is stated of this machine's card if its name is known, or 25.
      mesh: Devices to divide the parameters over. They need not be there:
        `jax.sharding.AbstractMesh((64,), ("data",))`.
      devices_per_host: Devices that share one host's memory.
      extra_args: Arguments by name that the wrapped `update` cannot be traced without,
        such as `{"value": 0.0}`.
      teraflops: The rate of matrix products that training reaches, in 10^12 operations
        a second. The plan then says from how many tokens a step `layerwise_step` hides
        the transfers, at six operations a parameter and token.

    Returns:
      The plan. It prints as a table.

    Raises:
      ValueError: If the rate is not positive, if nothing in `tx` is paged, or if a
        parameter's sharding does not divide it evenly.
      TypeError: If `params` is no tree of arrays, or another argument of another type.

    Example:
      >>> import jax, jax.numpy as jnp, paged_optax as po
      >>> params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
      >>> po.plan(po.paged_adamw(1e-3), params).host_bytes // 2**20
      128

      The same on eight devices, each with its own part of the moments:

      >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
      >>> po.plan(po.paged_adamw(1e-3), params, mesh=mesh).host_bytes // 2**20
      16
    """
    check_transformation("tx", tx)
    check_arrays("params", params)
    if link_gigabytes_per_second is None:
        name = card_name(jax.local_devices()[0].device_kind)
        link_gigabytes_per_second = CARDS[name].link if name else DEFAULT_LINK
    link = machine_rate("link_gigabytes_per_second", link_gigabytes_per_second)
    products = None if teraflops is None else machine_rate("teraflops", teraflops)
    check_count("devices_per_host", devices_per_host, 1)
    if not isinstance(extra_args or {}, Mapping):
        raise TypeError(f"extra_args={brief(extra_args)} is not a mapping of names.")
    refuse_uneven(params)
    # A parameter that says how it is divided is taken at its word.
    if mesh is not None:
        params = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(
                x.shape,
                x.dtype,
                sharding=x.sharding if Shards.of_array(x) else sharding,
            ),
            params,
            fully_sharded(params, mesh),
        )
    shards = filter(None, map(Shards.of_array, jax.tree.leaves(params)))
    devices = max((each.mesh.size for each in shards), default=1)
    moments: list[Moment] = []
    for _, describe in recorded(tx, params):
        # Leaves are numbered through all that `tx` pages.
        described, before = describe(dict(extra_args or {})), len(moments)
        moments += [dataclasses.replace(x, leaf=before + x.leaf) for x in described]
    result = PagePlan(
        tuple(moments),
        link,
        devices,
        int(devices_per_host),
        sum(x.size for x in jax.tree.leaves(params)),
        products,
    )
    # Planning for a GPU is mostly done elsewhere; only a TPU has no such pool.
    arrays = result.arrays_on_host * min(devices, devices_per_host)
    if jax.default_backend() != "tpu" and pinned_pool.pinned_bytes(arrays) is None:
        warn_user(
            f"the moments need {readable_bytes(result.bytes_per_host)} of pinned host"
            f" memory, and XLA's pool on a GPU holds"
            f" {readable_bytes(pinned_pool.pool_limit())}: set"
            f" {pinned_pool.POOL_LIMIT}={pinned_pool.limit_gigabytes(arrays)} before"
            " JAX starts."
        )
    return result
