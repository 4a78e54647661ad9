"""What generation a GPU is of."""

import re
from typing import Any


def compute_capability(device: Any) -> float | None:
    """The compute capability of an NVIDIA GPU, such as 8.9; None of other devices.

    Args:
      device: One of `jax.devices()`.
    """
    found = str(getattr(device, "compute_capability", ""))
    return float(found) if re.fullmatch(r"[0-9]+[.][0-9]+", found) else None
