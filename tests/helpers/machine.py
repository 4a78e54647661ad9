"""What a file of results says of the machine."""

import datetime
import os
import pathlib
import platform
import re
from typing import Any

import jax

from paged_optax.backend.memory import device_memory
from paged_optax.backend.pinned_pool import POOL_LIMIT, pool_limit
from paged_optax.cli.doctor import versions

#: Largest share of the free memory that a measurement allocates.
HOST_SHARE, DEVICE_SHARE = 0.65, 0.95


def describe() -> dict[str, Any]:
    """Versions, the device, and the load of the machine."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
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


def _cpu() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
        return re.findall(r"^model name\s*:\s*(.*)", text, re.M)[0]
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def host_available() -> int:
    """Bytes of free memory of this machine, or of this container."""
    try:
        text = pathlib.Path("/proc/meminfo").read_text()
        (kilobytes,) = re.findall(r"^MemAvailable:\s+(\d+)", text, re.M)
        free = 1024 * int(kilobytes)
    except (OSError, ValueError):  # not Linux: half of the physical memory
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        group = pathlib.Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        return min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no container, or no limit
        return free


def shortage(device_bytes: int, host_bytes: int) -> str | None:
    """The reason why so much memory is not available; None if it is."""
    limit, _ = device_memory()
    free = host_available() * HOST_SHARE
    # The CPU backend has no limit: device and host share the machine's memory.
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
    if jax.default_backend() == "gpu" and host_bytes > pool_limit():
        return (
            f"needs {host_bytes / 1e9:.1f} GB of pinned memory; XLA's pool holds "
            f"{pool_limit() / 1e9:.1f} ({POOL_LIMIT})"
        )
    return None
