"""What a file of results says of the machine."""

import datetime
import os
import pathlib
import platform
import re
from typing import Any

import jax

from paged_optax.backend.memory import device_memory
from paged_optax.cli.doctor import versions
from paged_optax.cli.machine import host_available


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
