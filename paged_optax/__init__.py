"""Optax optimizers whose moments live in host memory.

Swap `optax.adamw` for `paged_adamw`, inside `optax.chain(...)` and everywhere else,
and train the same model to the same numbers with a few pages of optimizer state on
the device instead of 8 bytes a parameter.

The guides are Markdown pages in `docs`, and the reference is built from them by mkdocs.

## The house

Each room imports only from those below it.

| room | purpose |
| --- | --- |
| `paged_optax.cli` | the command line |
| `paged_optax.planning` | memory planning without allocating |
| `paged_optax.compiling` | compiled steps: donation checks, memory reports |
| `paged_optax.splitting` | splits an ordinary loss into layers |
| `paged_optax.layerwise` | a training step with one layer's gradients alive |
| `paged_optax.losses` | cross-entropy that never materializes the logits |
| `paged_optax.bitsandbytes` | conversion of bitsandbytes' optimizer states |
| `paged_optax.step_skipping` | Optax's step-skipping wrappers |
| `paged_optax.state` | reads and edits a state by the names of parameters |
| `paged_optax.transform` | `paged` and its aliases: init, update, codecs by moment |
| `paged_optax.engine` | pages: sizes, transfers, shards |
| `paged_optax.analysis` | splits a transformation into one program a leaf |
| `paged_optax.codecs` | storage formats of moments, for example 8 bits |
| `paged_optax.backend` | JAX's memory spaces, and differences between backends |
"""

from paged_optax.analysis.per_leaf import CrossLeafError
from paged_optax.bitsandbytes import from_bitsandbytes, to_bitsandbytes
from paged_optax.compiling.donations import DonationError
from paged_optax.compiling.jit_step import Step, jit_step
from paged_optax.compiling.memory_report import MemoryReport, memory_report
from paged_optax.engine.backend_check import BackendError
from paged_optax.layerwise import (
    GradientWorkspace,
    LayerwiseModel,
    LayerwiseOutput,
    LayerwiseStep,
    WeightedLoss,
    layerwise_step,
    offload,
)
from paged_optax.losses import linear_cross_entropy
from paged_optax.planning.footprints import Footprint, Footprints
from paged_optax.planning.models import model_shapes
from paged_optax.planning.page_plan import PagePlan, fully_sharded, plan
from paged_optax.planning.what_fits import what_fits
from paged_optax.splitting import SplitError, SplitModel, split_layers
from paged_optax.state.moments import (
    get_step,
    increment_step,
    init_param,
    master_weights,
    page_in,
    page_out,
)
from paged_optax.state.residency import (
    device_bytes,
    device_resident_count,
    host_bytes,
    is_device_resident,
    rebalance,
)
from paged_optax.state.restore import abstract_state, place_state, state_shardings
from paged_optax.step_skipping import (
    MultiSteps,
    apply_if_finite,
    conditionally_mask,
    conditionally_transform,
    lookahead,
)
from paged_optax.transform.paged import (
    paged,
    paged_adafactor,
    paged_adagrad,
    paged_adam,
    paged_adamw,
    paged_adamw_8bit,
    paged_adamw_32bit,
    paged_ademamix,
    paged_ademamix_8bit,
    paged_ademamix_32bit,
    paged_lamb,
    paged_lars,
    paged_lion,
    paged_lion_8bit,
    paged_lion_32bit,
    paged_muon,
    paged_nadamw,
    paged_rmsprop,
    paged_sgd,
)

__all__ = [
    # Optimizers whose moments live on the host.
    "paged",
    "paged_adafactor",
    "paged_adagrad",
    "paged_adam",
    "paged_adamw",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "paged_ademamix",
    "paged_ademamix_32bit",
    "paged_ademamix_8bit",
    "paged_lamb",
    "paged_lars",
    "paged_lion",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "paged_muon",
    "paged_nadamw",
    "paged_rmsprop",
    "paged_sgd",
    # Around them: wrappers that skip steps and move no byte when they do.
    "MultiSteps",
    "apply_if_finite",
    "conditionally_mask",
    "conditionally_transform",
    "lookahead",
    # A step: compiled, checked, measured.
    "jit_step",
    "Step",
    "memory_report",
    "MemoryReport",
    # A step with one layer's gradients alive.
    "layerwise_step",
    "LayerwiseModel",
    "LayerwiseOutput",
    "LayerwiseStep",
    "split_layers",
    "SplitModel",
    "SplitError",
    "WeightedLoss",
    "GradientWorkspace",
    "offload",
    # A loss without its logits.
    "linear_cross_entropy",
    # What fits, known beforehand.
    "plan",
    "PagePlan",
    "what_fits",
    "Footprint",
    "Footprints",
    "model_shapes",
    # Many devices.
    "fully_sharded",
    # A state saved, restored, and put back in its place.
    "abstract_state",
    "master_weights",
    "state_shardings",
    "place_state",
    "from_bitsandbytes",
    "to_bitsandbytes",
    # One parameter's state.
    "page_in",
    "page_out",
    "init_param",
    "get_step",
    "increment_step",
    "is_device_resident",
    "device_resident_count",
    "device_bytes",
    "host_bytes",
    "rebalance",
    # Errors.
    "BackendError",
    "CrossLeafError",
    "DonationError",
]

__version__ = "0.1.0"
