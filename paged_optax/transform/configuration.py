"""What `paged` was asked for."""

import dataclasses
from typing import Literal

import jax

from paged_optax.backend.memory import (
    PINNED_HOST,
    device_memory,
    resolve_host_memory_kind,
)
from paged_optax.backend.sizes import parse_bytes


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
        device_budget: int | str | None,
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
            # This call starts JAX's backend, which only a call that raises may do.
            resolve_host_memory_kind(host_memory_kind)
        budget: int | Literal["auto"] | None = None
        if device_budget == "auto":
            budget = "auto"
        elif device_budget is not None:
            budget = parse_bytes("device_budget", device_budget)
        return cls(
            page_bytes,
            budget,
            parse_bytes("min_paged_size", min_paged_size),
            host_memory_kind,
        )

    def budget(self, parameters: int, moments: int = 0) -> int | None:
        """The device budget in bytes.

        `"auto"` takes what the device has free now, less a reserve for what a training
        step will need: gradients (as many bytes as parameters) and, for activations and
        pages, a quarter of the device's memory. If the backend keeps no statistics
        (CPU), everything is paged.

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
