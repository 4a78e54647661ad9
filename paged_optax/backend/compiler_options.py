"""What XLA must be told to overlap transfers with products.

XLA:GPU begins a transfer long before its result is needed, and computes meanwhile, if
two things are so:

- Its latency-hiding scheduler is on. By default that is so on a Hopper GPU alone. On
  others most transfers begin right before they are waited for: a layerwise step of
  Llama-3-8B on an RTX 4090 would take 1.04 s at the rates at which it takes 0.76 (jax
  0.12.0.1, by the model of its schedule in `tests/steps.py`).
- Nothing is a CUDA graph. XLA makes graphs of loops, and by default lets what is in one
  follow on each other, transfers too (openxla/xla#48900). A layerwise step of
  Llama-3-8B in eight bits took 1.14 s of an H200, and 0.79 s without graphs (jax
  0.11.2, measured by `tests/benchmarks/decoders.py`). Graphs that are `CONCURRENT` took
  0.72 s, and 3.3 GiB more of the device.
"""

import os
import pathlib
import re
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
from jaxtyping import PyTree

from paged_optax.backend.memory import on_host
from paged_optax.backend.types import is_traced


def compute_capability(device: Any) -> float | None:
    """The compute capability of an NVIDIA GPU, such as 8.9; None of other devices."""
    text = str(getattr(device, "compute_capability", ""))
    return float(text) if re.fullmatch(r"[0-9]+[.][0-9]+", text) else None


_HOPPER = 9
_SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
#: Makes no CUDA graphs. The program takes the same bytes with them and without.
NO_GRAPHS: Mapping[str, Any] = MappingProxyType({"xla_gpu_enable_command_buffer": ""})

#: Switches the scheduler on. It keeps within a limit of memory, and so does
#: rematerialization. XLA counts arrays on the host against it, so the limit is lifted:
#: `jit_step` looks at what the compiled program takes instead.
SCHEDULED: Mapping[str, Any] = MappingProxyType(
    {_SCHEDULER: True, "xla_gpu_memory_limit_slop_factor": 1000}
)

#: How the warning begins, for who filters it.
NO_OVERLAP = "XLA overlaps transfers with products on this GPU only if it is told to"


def overlap_options(device: Any) -> dict[str, Any]:
    """What to give `jax.jit(..., compiler_options=...)`, so that transfers overlap.

    Nothing on a device that is no NVIDIA GPU, and nothing that `XLA_FLAGS` decide.
    """
    capability = compute_capability(device)
    if capability is None:
        return {}
    told = _flags()
    graphs = {} if "xla_gpu_command_buffer_scheduling_mode" in told else NO_GRAPHS
    scheduled = int(capability) == _HOPPER or _SCHEDULER in told
    options = {**graphs, **({} if scheduled else SCHEDULED)}
    return {name: x for name, x in options.items() if name not in told}


def _flags() -> set[str]:
    """The names in `XLA_FLAGS`, which are flags or the path of a file that has them."""
    text = os.environ.get("XLA_FLAGS", "")
    if not text.lstrip().startswith("-") and os.path.isfile(text):
        text = pathlib.Path(text).read_text()
    return {flag.lstrip("-").partition("=")[0] for flag in text.split()}


def warn_without_overlap(tree: PyTree) -> None:
    """Warns of traced arrays in host memory, on a GPU that overlaps only if told to."""
    if not is_traced(tree) or not any(map(on_host, jax.tree.leaves(tree))):
        return
    options = overlap_options(jax.local_devices()[0])
    if not options:
        return
    flags = " ".join(f"--{name}={str(x).lower()}" for name, x in options.items())
    # Which options `jax.jit` has been given shows nowhere in a trace. So the warning
    # says how to silence it. `jit_step` ignores it while it traces, and gives the
    # options. One text at one place: Python shows it once, and again after filters
    # changed.
    warnings.warn(
        f"{NO_OVERLAP}, and what is compiled by another than paged_optax.jit_step does"
        " not tell it. Copy this into your jax.jit, or eqx.filter_jit:"
        f" compiler_options={options!r}. If it is there, silence this:"
        " warnings.filterwarnings('ignore', 'XLA overlaps transfers'). Or set this"
        " before JAX starts, as for nnx.jit, which takes no options:"
        f" XLA_FLAGS='{flags}'.",
        stacklevel=1,
    )
