"""What this machine is, and how much memory is left on it."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import re

import jax
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding, SingleDeviceSharding
from jaxtyping import PyTree

from paged_optax.backend.memory import PINNED_HOST, device_memory, typed_by_memory
from paged_optax.backend.xla import POOL_LIMIT, pool_limit

#: Most of the free memory that a measurement takes. On the CPU backend the device's
#: memory is the machine's, which other programs may be using too.
HOST_SHARE = 0.65
DEVICE_SHARE = 0.95


def describe() -> dict[str, PyTree[str | int | float]]:
    """Versions, the device, and the load of the machine."""
    from paged_optax import __version__

    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "optax": optax.__version__,
            "numpy": np.__version__,
            "paged_optax": __version__,
        },
        "backend": jax.default_backend(),
        "device_kind": device.device_kind,
        "device_bytes": device_memory()[0] or None,
        "devices": jax.device_count(),
        "platform_version": device.client.platform_version.splitlines()[0],
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "host_bytes_available": host_available(),
        "load_average": list(os.getloadavg()),
    }


def both_memories() -> tuple[NamedSharding, NamedSharding]:
    """The default memory of the first device, and pinned memory of its host.

    The types of arrays and of traced values show these placements.
    """
    device = jax.devices()[0]
    sharding = typed_by_memory(SingleDeviceSharding(device))
    return (
        sharding.with_memory_kind(device.default_memory().kind),
        sharding.with_memory_kind(PINNED_HOST),
    )


def typed_shapes(tree: PyTree[Array]) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes of arrays that state which of the two memories each is in."""
    device, host = both_memories()
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=host if x.sharding.memory_kind == PINNED_HOST else device,
        ),
        tree,
    )


def host_available() -> int:
    """Bytes of memory that this machine, or this container, has left."""
    try:
        text = pathlib.Path("/proc/meminfo").read_text()
        (kilobytes,) = re.findall(r"^MemAvailable:\s+(\d+)", text, re.M)
        left = 1024 * int(kilobytes)
    except (OSError, ValueError):  # not Linux: take half of all there is
        left = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        group = pathlib.Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        left = min(left, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no container, or no limit
    return left


def shortage(device_bytes: int, host_bytes: int) -> str | None:
    """Why this much memory cannot be had, or None if it can.

    Args:
      device_bytes: Bytes needed on the device.
      host_bytes: Bytes needed on the host; counted together where they are one.
    """
    limit, _ = device_memory()
    free = host_available() * HOST_SHARE
    # On the CPU backend, which has no limit, both are the machine's memory.
    if not limit:
        device_bytes, host_bytes = 0, device_bytes + host_bytes
    elif device_bytes > limit * DEVICE_SHARE:
        return (
            f"needs {device_bytes / 1e9:.1f} GB on the device; "
            f"XLA may take {limit / 1e9:.1f}"
        )
    if host_bytes > free:
        return (
            f"needs {host_bytes / 1e9:.1f} GB of the machine's memory; "
            f"{free / HOST_SHARE / 1e9:.1f} GB are free, of which at most "
            f"{HOST_SHARE:.0%} are used here"
        )
    pool = pool_limit()
    if jax.default_backend() == "gpu" and host_bytes > pool:
        return (
            f"needs {host_bytes / 1e9:.1f} GB of pinned memory; XLA's pool holds "
            f"{pool / 1e9:.1f} ({POOL_LIMIT})"
        )
    return None


def _cpu() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
        return re.findall(r"^model name\s*:\s*(.*)", text, re.M)[0]
    except (OSError, IndexError):
        return platform.processor() or platform.machine()
