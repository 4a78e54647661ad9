"""Compiler options with which XLA:GPU overlaps transfers with computation.

XLA:GPU starts a transfer early, and computes in the meantime, under two conditions:

- Its latency-hiding scheduler is on, the default on Hopper only. Elsewhere most
  transfers start right before their results are used: a layerwise step of Llama-3-8B on
  an RTX 4090 would take 1.04 s instead of 0.76 (jax 0.12.0.1, by the model of
  `tests/steps.py`).
- No loop is a CUDA graph. By default XLA records loops as graphs, in which transfers
  and kernels run sequentially (openxla/xla#48900; measured in `docs/what_fits.md`).
"""

import os
import re
import warnings
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from paged_optax.backend.memory import on_host
from paged_optax.backend.types import is_traced


def compute_capability(device: Any) -> float | None:
    """Returns an NVIDIA GPU's compute capability, such as 8.9, or None."""
    text = str(getattr(device, "compute_capability", ""))
    return float(text) if re.fullmatch(r"[0-9]+[.][0-9]+", text) else None


_HOPPER = 9
_SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
#: Disables CUDA graphs. The program's memory is the same.
NO_GRAPHS: Mapping[str, Any] = {"xla_gpu_enable_command_buffer": ""}

#: Enables the scheduler, and lifts the memory limit of scheduling and
#: rematerialization, which counts arrays on the host. `jit_step` checks the compiled
#: program's memory.
SCHEDULED: Mapping[str, Any] = {
    _SCHEDULER: True,
    "xla_gpu_memory_limit_slop_factor": 1000,
}

#: Beginnings of the warnings, for filters.
NO_OVERLAP = "XLA overlaps transfers with products on this GPU only if it is told to"
PIPELINED = "XLA's collective pipeliner computes wrong addresses of host memory"

_CONFIG: Any = jax.config
_DISABLED = "xla_disable_hlo_passes"
#: With the optimization level O1 or the flag below they hoist the first and last
#: transfers out of a loop and lose the index: the last page is written to the second
#: row, and a layerwise step aborts (jax 0.11.2 to 0.12.0.1, reproduced by
#: `tests/backend/test_pipelined.py`).
_PIPELINERS = ("collective-pipeliner-forward", "collective-pipeliner-backward")
_PIPELINING = "xla_gpu_enable_pipelined_host_offloading"


def addressing_options(device: Any) -> dict[str, Any]:
    """Returns the options with which a GPU addresses host memory correctly."""
    return {_DISABLED: ",".join(_disabled())} if _is_gpu(device) else {}


def _is_gpu(device: Any) -> bool:
    is_gpu = getattr(device, "platform", "") == "gpu"
    return is_gpu or compute_capability(device) is not None


def _disabled() -> list[str]:
    subset = filter(None, _flags().get(_DISABLED, "").split(","))
    return list(dict.fromkeys((*subset, *_PIPELINERS)))


def overlap_options(device: Any) -> dict[str, Any]:
    """Returns the options of `jax.jit` with which transfers overlap.

    Empty on devices other than NVIDIA GPUs. Flags in `XLA_FLAGS` take precedence.
    """
    capability = compute_capability(device)
    if capability is None:
        return {}
    flags = _flags()
    graphs = {} if "xla_gpu_command_buffer_scheduling_mode" in flags else NO_GRAPHS
    scheduled = int(capability) == _HOPPER or _SCHEDULER in flags
    options = {**graphs, **({} if scheduled else SCHEDULED)}
    return {name: x for name, x in options.items() if name not in flags}


def _flags() -> dict[str, str]:
    """Returns the flags in `XLA_FLAGS`."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    parts = (flag.lstrip("-").partition("=") for flag in flags)
    return {name: value for name, _, value in parts}


def warn_of_options(tree: PyTree) -> None:
    """Warns if traced arrays in host memory need options of XLA."""
    if is_traced(tree) and any(map(on_host, jax.tree.leaves(tree))):
        device = jax.local_devices()[0]
        _warn_of_pipeliner(device)
        _warn_without_overlap(device)


# A trace does not contain the options of its `jax.jit`. `jit_step`, which sets them,
# ignores these warnings.
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
