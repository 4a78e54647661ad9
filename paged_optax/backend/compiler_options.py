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

#: How the warnings begin, for who filters them.
NO_OVERLAP = "XLA overlaps transfers with products on this GPU only if it is told to"
PIPELINED = "XLA's collective pipeliner computes wrong addresses of host memory"

_CONFIG: Any = jax.config
_DISABLED = "xla_disable_hlo_passes"
#: They move the first and last transfers of a loop out of it, with the optimization
#: level O1 or the flag below, and lose the index there: the last page is written to the
#: second row, and a layerwise step ends the process (jax 0.11.2 to 0.12.0.1; see
#: `tests/backend/test_pipelined.py`, whose smallest program is a report for XLA).
_PIPELINERS = ("collective-pipeliner-forward", "collective-pipeliner-backward")
_PIPELINING = "xla_gpu_enable_pipelined_host_offloading"


def addressing_options(device: Any) -> dict[str, Any]:
    """The compiler options with which a GPU addresses host memory right."""
    return {_DISABLED: ",".join(_disabled())} if _is_gpu(device) else {}


def _is_gpu(device: Any) -> bool:
    is_gpu = getattr(device, "platform", "") == "gpu"
    return is_gpu or compute_capability(device) is not None


def _disabled() -> list[str]:
    """The passes that `XLA_FLAGS` disable, and the pipeliners."""
    chosen = filter(None, _flags().get(_DISABLED, "").split(","))
    return list(dict.fromkeys((*chosen, *_PIPELINERS)))


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


def _flags() -> dict[str, str]:
    """The flags in `XLA_FLAGS`, which has them or the path of a file that does."""
    text = os.environ.get("XLA_FLAGS", "")
    if not text.lstrip().startswith("-") and os.path.isfile(text):
        text = pathlib.Path(text).read_text()
    parts = (flag.lstrip("-").partition("=") for flag in text.split())
    return {name: value for name, _, value in parts}


def warn_of_options(tree: PyTree) -> None:
    """Warns of traced arrays in host memory where XLA needs options for them."""
    if is_traced(tree) and any(map(on_host, jax.tree.leaves(tree))):
        device = jax.local_devices()[0]
        _warn_of_pipeliner(device)
        _warn_without_overlap(device)


# Which options `jax.jit` has been given shows nowhere in a trace. So the warnings say
# how to silence them. `jit_step` ignores them while it traces, and gives the options.
# One text at one place: Python shows it once, and again after filters changed.
def _warn_of_pipeliner(device: Any) -> None:
    flags = _flags()
    by_level = _CONFIG.jax_optimization_level not in ("UNKNOWN", "O0")
    by_flag = flags.get(_PIPELINING, "false").lower() not in ("false", "0")
    if not (by_level or by_flag) or not _is_gpu(device):
        return
    if set(_PIPELINERS) <= set(flags.get(_DISABLED, "").split(",")):
        return
    level = f"jax_optimization_level={_CONFIG.jax_optimization_level!r}"
    cause = level if by_level else f"--{_PIPELINING}"
    passes = ",".join(_disabled())
    warnings.warn(
        f"{PIPELINED} under {cause}: a moment's last page would be written over another"
        " one, or the compiler ends the process. Compile by paged_optax.jit_step, which"
        f" disables the passes {' and '.join(_PIPELINERS)}. Or set this before JAX"
        f" starts: XLA_FLAGS='--{_DISABLED}={passes}'. Or give your jax.jit"
        f" compiler_options={ {_DISABLED: passes}!r}, and silence this:"
        " warnings.filterwarnings('ignore', \"XLA's collective pipeliner\").",
        stacklevel=1,
    )


def _warn_without_overlap(device: Any) -> None:
    options = overlap_options(device)
    if not options:
        return
    flags = " ".join(f"--{name}={str(x).lower()}" for name, x in options.items())
    warnings.warn(
        f"{NO_OVERLAP}, and what is compiled by another than paged_optax.jit_step does"
        " not tell it. Copy this into your jax.jit, or eqx.filter_jit:"
        f" compiler_options={options!r}. If it is there, silence this:"
        " warnings.filterwarnings('ignore', 'XLA overlaps transfers'). Or set this"
        " before JAX starts, as for nnx.jit, which takes no options:"
        f" XLA_FLAGS='{flags}'.",
        stacklevel=1,
    )
