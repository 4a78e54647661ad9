"""Optax optimizers whose moments live in host memory.

Swap `optax.adamw` for `paged_adamw`, inside `optax.chain(...)` and everywhere else,
and train the same model to the same numbers with a few pages of optimizer state on
the device instead of 8 bytes a parameter.

The guide is the README:

.. include:: ../README.md
"""

from paged_optax.aliases import (
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
from paged_optax.convert import from_bitsandbytes, to_bitsandbytes
from paged_optax.fit import Footprint, Footprints, what_fits
from paged_optax.granularity import CrossLeafError
from paged_optax.place import place_state
from paged_optax.plan import PagePlan, plan
from paged_optax.report import MemoryReport, memory_report
from paged_optax.selfcheck import BackendError
from paged_optax.shapes import model_shapes
from paged_optax.sharding import fully_sharded
from paged_optax.state import (
    abstract_state,
    device_bytes,
    device_resident_count,
    get_step,
    host_bytes,
    increment_step,
    init_param,
    is_device_resident,
    page_in,
    page_out,
    rebalance,
)
from paged_optax.step import DonationError, Step, jit_step
from paged_optax.transform import paged
from paged_optax.workspace import (
    GradientWorkspace,
    LayerwiseOutput,
    layerwise_step,
    offload,
)
from paged_optax.wrappers import (
    MultiSteps,
    apply_if_finite,
    conditionally_mask,
    conditionally_transform,
    lookahead,
)

__all__ = [
    "BackendError",
    "CrossLeafError",
    "DonationError",
    "Footprint",
    "Footprints",
    "GradientWorkspace",
    "LayerwiseOutput",
    "MemoryReport",
    "MultiSteps",
    "PagePlan",
    "Step",
    "abstract_state",
    "apply_if_finite",
    "conditionally_mask",
    "conditionally_transform",
    "device_bytes",
    "device_resident_count",
    "from_bitsandbytes",
    "fully_sharded",
    "get_step",
    "host_bytes",
    "increment_step",
    "init_param",
    "is_device_resident",
    "jit_step",
    "layerwise_step",
    "lookahead",
    "memory_report",
    "model_shapes",
    "offload",
    "page_in",
    "page_out",
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
    "place_state",
    "plan",
    "rebalance",
    "to_bitsandbytes",
    "what_fits",
]

__version__ = "0.1.0"
