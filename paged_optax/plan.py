"""What lives where: configuration, page geometry, residency, totals."""

import collections
import dataclasses
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from paged_optax.context import within
from paged_optax.memory import (
    PINNED_HOST,
    device_memory,
    host_pool_bytes,
    resolve_host_memory_kind,
)
from paged_optax.sharding import (
    Shards,
    explicitly_typed,
    fully_sharded,
    refuse_uneven,
)
from paged_optax.table import readable_bytes, table

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def parse_bytes(name: str, size: int | str) -> int:
    """Reads a number of bytes.

    Args:
      name: The argument's name, for messages.
      size: A number of bytes, or a string such as `"16MiB"`.

    Returns:
      The number of bytes.

    Raises:
      ValueError: If the size is negative or cannot be read.

    Example:
      >>> parse_bytes("page_size", "16MiB")
      16777216
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        unit = match and _UNITS.get(match[2] or "B")
        if match is None or unit is None:
            raise ValueError(
                f"{name}={size!r} is not a size: write bytes as an int, or a number"
                f" with one of {', '.join(_UNITS)}, such as '16MiB'."
            )
        return int(float(match[1]) * unit)
    if isinstance(size, bool) or not isinstance(size, int):
        way_out = ""
        if isinstance(size, jax.Array):
            way_out = (
                " optax.inject_hyperparams makes an array of every number: there, pass"
                f" the string, or static_args={name!r}."
            )
        raise ValueError(
            f"{name}={size!r} is not a size: pass an int of bytes, or a string such as"
            f" '16MiB'.{way_out}"
        )
    if size < 0:
        raise ValueError(f"{name}={size} is negative: pass 0 or more bytes.")
    return size


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What `paged` was asked for, in bytes.

    Attributes:
      page_size: Bytes of one page of one moment.
      device_budget: Bytes of moments that may stay on the device; None: all; `"auto"`:
        what the device has left.
      min_paged_size: Moments of fewer bytes stay on the device.
      host_memory_kind: `"pinned_host"` or `"auto"`.
    """

    page_size: int
    device_budget: int | Literal["auto"] | None
    min_paged_size: int
    host_memory_kind: str

    @classmethod
    def of(
        cls,
        page_size: int | str,
        device_budget: Any,
        min_paged_size: int | str,
        host_memory_kind: str,
    ) -> "Configuration":
        """Reads and checks the arguments of `paged`."""
        page_bytes = parse_bytes("page_size", page_size)
        if page_bytes == 0:
            raise ValueError(
                f"page_size={page_size!r}: a page needs at least one byte; the default"
                " is '16MiB'."
            )
        if host_memory_kind not in ("auto", PINNED_HOST):
            # Only now, when it raises anyway, may JAX be made to start its backend.
            resolve_host_memory_kind(host_memory_kind)
        if device_budget is not None and device_budget != "auto":
            device_budget = parse_bytes("device_budget", device_budget)
        return cls(
            page_bytes,
            device_budget,
            parse_bytes("min_paged_size", min_paged_size),
            host_memory_kind,
        )

    def budget(self, parameters: int, moments: int = 0) -> int | None:
        """The device budget in bytes.

        `"auto"` takes what the device has free now, less a reserve for what a training
        step will need: gradients (as many bytes as parameters) and, for activations and
        pages, a quarter of the device's memory. Where the backend keeps no statistics
        (CPU) everything is paged.

        Args:
          parameters: Bytes of the parameters, which are on the device already.
          moments: Bytes of moments on the device that count as free.

        Returns:
          Bytes of moments that may stay on the device; None: all.

        Raises:
          ValueError: For `"auto"` in one of several processes.
        """
        if self.device_budget != "auto":
            return self.device_budget
        if jax.process_count() > 1:
            raise ValueError(
                f"device_budget='auto' in one of {jax.process_count()} processes: each"
                " would measure its own devices and build another program. Pass bytes."
            )
        limit, used = device_memory()
        return max(0, limit - used + moments - parameters - limit // 4)


def parameter_of(
    state_paths: Sequence[jax.tree_util.KeyPath],
    parameter_paths: Sequence[jax.tree_util.KeyPath],
) -> list[int | None]:
    """Which parameter each state leaf belongs to, by the end of its path.

    Optax keeps moments in trees of the parameters' structure, so that the path of a
    moment ends with the path of its parameter, as do those of all others of its tree.

    Returns:
      For each state leaf the parameter's position, or None.
    """
    position = {tuple(path): i for i, path in enumerate(parameter_paths)}
    lengths = sorted({len(path) for path in position}, reverse=True)
    split = lambda path, n: (tuple(path[: len(path) - n]), tuple(path[len(path) - n :]))
    found = [
        next(
            (
                (tree, position[end])
                for tree, end in (split(path, n) for n in lengths if n <= len(path))
                if end in position
            ),
            None,
        )
        for path in state_paths
    ]
    members = collections.Counter(tree for tree, _ in filter(None, found))
    inside = collections.Counter(
        tuple(path[:n]) for path in state_paths for n in range(len(path) + 1)
    )
    # A step count is no moment of a parameter that is called `count`: beside it, in
    # what would be their tree, are others.
    return [
        each and (each[1] if members[each[0]] == inside[each[0]] else None)
        for each in found
    ]


def resident(
    sizes: Sequence[int | None],
    owners: Sequence[int | None],
    budget: int | None,
    min_paged_size: int,
) -> list[bool]:
    """Which state leaves stay on the device.

    A full sweep touches every page once a step, in one order, so the best choice
    (Belady's) is a fixed set: small leaves, step counts and keys always, then the
    moments of one parameter after the other until the budget is spent.

    Args:
      sizes: Bytes of each of the state's leaves; None for what is never paged.
      owners: The parameter each belongs to, or None.
      budget: Bytes of moments that may stay; None: all.
      min_paged_size: Moments of fewer bytes stay, and cost no budget.

    Returns:
      For each state leaf whether it stays.
    """
    if budget is None:
        return [True] * len(sizes)
    stays = [size is None or size < min_paged_size for size in sizes]
    together: dict[Any, list[int]] = {}
    for leaf, owner in enumerate(owners):
        if not stays[leaf]:
            key = ("leaf", leaf) if owner is None else owner
            together.setdefault(key, []).append(leaf)
    for group in together.values():
        size = sum(sizes[leaf] or 0 for leaf in group)
        if size <= budget:
            budget -= size
            for leaf in group:
                stays[leaf] = True
    return stays


@dataclasses.dataclass(frozen=True)
class Moment:
    """One leaf of a paged state, as the plan places it.

    Attributes:
      path: Its path in the state.
      shape: Its shape; on a mesh, that of one device's shard.
      dtype: Its dtype.
      bytes: Its bytes, on one device or for it.
      on_host: Whether it lives in host memory.
      pages: Pages a sweep cuts it into; 1 where it travels whole; 0 on the device.
      page_bytes: Bytes of one of them.
      leaf: Moments with equal numbers travel together.
      in_flight: Pages of it that may be on the device at once: what is read and what
        is written, and what is computed in between where a codec stores it or the page
        is a whole leaf.
      beside: Bytes of its scales, where they do not go in pages but travel whole.
      refused: Why it cannot be paged on this backend although it is larger than a
        page; else empty.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    on_host: bool
    pages: int
    page_bytes: int
    leaf: int
    in_flight: int = 2
    beside: int = 0
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class PagePlan:
    """What lives where, and what a step moves. Prints as a table.

    Attributes:
      moments: Every array of every paged state.
      link_gigabytes_per_second: The stated rate of the link, each way, in 10^9 bytes.
      devices: Devices of the mesh. All bytes are those of one of them.
      devices_per_host: Devices that share a host's memory.
    """

    moments: tuple[Moment, ...]
    link_gigabytes_per_second: float
    devices: int = 1
    devices_per_host: int = 1

    @property
    def device_bytes(self) -> int:
        """Bytes of moments that stay on the device."""
        return sum(x.bytes for x in self.moments if not x.on_host)

    @property
    def host_bytes(self) -> int:
        """Bytes of moments in host memory."""
        return sum(x.bytes for x in self.moments if x.on_host)

    @property
    def bytes_per_host(self) -> int:
        """Bytes of moments in the memory of one host, for all its devices."""
        return self.host_bytes * min(self.devices, self.devices_per_host)

    @property
    def scratch_bytes(self) -> int:
        """Device bytes of pages in flight: each page read, and each written.

        The bound the engine is built to, beside which XLA keeps up to 8 MiB of its own
        and of scales; `memory_report` says what it assigned. What XLA takes to move
        gradients that are divided otherwise than their parameters is not in it.
        """
        flying: dict[int, int] = {}
        for x in self.moments:
            if x.on_host:
                here = x.in_flight * x.page_bytes + 2 * x.beside
                flying[x.leaf] = flying.get(x.leaf, 0) + here
        return max(flying.values(), default=0)

    @property
    def link_bytes(self) -> int:
        """Bytes a step moves over the link, both ways together."""
        return 2 * self.host_bytes

    @property
    def link_seconds(self) -> float:
        """Seconds those bytes take when one way waits for the other."""
        return self.link_bytes / (self.link_gigabytes_per_second * 1e9)

    def __str__(self) -> str:
        groups: dict[Any, list[Moment]] = {}
        for x in self.moments:
            key = (x.shape, x.dtype, x.on_host, x.pages, x.page_bytes)
            groups.setdefault(key, []).append(x)
        rows = []
        for group in sorted(groups.values(), key=lambda g: -sum(x.bytes for x in g)):
            first = group[0]
            rows.append(
                (
                    first.path + (f" +{len(group) - 1}" if len(group) > 1 else ""),
                    "x".join(map(str, first.shape)) or "scalar",
                    first.dtype,
                    "host" if first.on_host else "device",
                    f"{first.pages} x {readable_bytes(first.page_bytes)}"
                    if first.on_host
                    else "-",
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
        title = "total"
        if self.devices > 1:
            title = f"each of {self.devices} devices"
            here = min(self.devices, self.devices_per_host)
            each = f"moments on a host of {here} devices"
            totals.append((each, readable_bytes(self.bytes_per_host)))
        titles = ("moments", "shape", "dtype", "where", "pages", "bytes")
        tables = table(titles, rows), table((title, ""), totals)
        notes = [f"{x.path} is not paged here: {x.refused}." for x in self.moments]
        notes = [note for note, x in zip(notes, self.moments, strict=True) if x.refused]
        return "\n\n".join((*tables, *notes))


#: Lists what a paged `update` will do, given its extra arguments.
Describe = Callable[[dict[str, Any]], list[Moment]]


def recorded(
    tx: optax.GradientTransformation, params: optax.Params
) -> list[tuple[Configuration, Describe]]:
    """Finds every paged transformation inside `tx`: chained, masked, injected.

    Args:
      tx: The transformation; it is initialised on shapes alone.
      params: The parameters, or their `ShapeDtypeStruct`s.

    Returns:
      What each was asked for, and what lists its moments.

    Raises:
      ValueError: If nothing in `tx` is paged.
    """
    found: list[tuple[Configuration, Describe]] = []
    # A new function each time: JAX would not run one again that it has traced.
    record = lambda configuration, describe: found.append((configuration, describe))
    with within(record=record), explicitly_typed(params) as shapes:
        jax.eval_shape(tx.init, shapes)
    if not found:
        raise ValueError(
            "tx has no paged transformation inside: wrap one with paged(...), or use"
            " an alias such as paged_adamw."
        )
    return found


def plan(
    tx: optax.GradientTransformation,
    params: optax.Params,
    *,
    link_gigabytes_per_second: float = 25.0,
    mesh: Mesh | AbstractMesh | None = None,
    devices_per_host: int = 8,
    extra_args: Mapping[str, Any] | None = None,
) -> PagePlan:
    """Says beforehand what lives where, without allocating anything.

    On a mesh all figures are those of one device, which pages its own shard over its
    own link. Parameters that say how they are divided are taken at their word, others
    are divided as `fully_sharded` does.

    Args:
      tx: A transformation with `paged(...)` somewhere inside.
      params: The parameters, or their `ShapeDtypeStruct`s.
      link_gigabytes_per_second: The rate of the link between host and device in one
        direction, in 10^9 bytes a second (PCIe 3 x16: about 12; 4: 25; 5: 50).
      mesh: Devices to divide the parameters over. They need not be there:
        `jax.sharding.AbstractMesh((64,), ("data",))`.
      devices_per_host: Devices that share one host's memory.
      extra_args: Arguments by name that the wrapped `update` cannot be traced without,
        such as `{"value": 0.0}`.

    Returns:
      The plan. It prints as a table.

    Raises:
      ValueError: If the rate is not positive, if nothing in `tx` is paged, or if a
        parameter's sharding does not divide it evenly.

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
    refuse_uneven(params)
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
    found = filter(None, map(Shards.of_array, jax.tree.leaves(params)))
    devices = max((shards.mesh.size for shards in found), default=1)
    if not link_gigabytes_per_second > 0:
        raise ValueError(
            f"link_gigabytes_per_second={link_gigabytes_per_second} is not positive."
        )
    moments: list[Moment] = []
    for _, describe in recorded(tx, params):
        described, before = describe(dict(extra_args or {})), len(moments)
        moments += [dataclasses.replace(x, leaf=before + x.leaf) for x in described]
    result = PagePlan(
        tuple(moments), link_gigabytes_per_second, devices, devices_per_host
    )
    # Planning for a GPU is mostly done elsewhere; only a TPU has no such pool.
    if jax.default_backend() != "tpu" and result.bytes_per_host > host_pool_bytes():
        warnings.warn(
            f"the moments need {readable_bytes(result.bytes_per_host)} of pinned host"
            f" memory, and XLA's pool on a GPU holds"
            f" {readable_bytes(host_pool_bytes())}: set"
            " XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB="
            f"{-(-result.bytes_per_host * 9 // (8 * 2**30))} before JAX starts.",
            stacklevel=2,
        )
    return result
