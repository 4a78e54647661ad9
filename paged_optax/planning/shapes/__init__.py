"""Shapes of a model's parameters, allocated nowhere: what planning needs of a model."""

from paged_optax.planning.shapes.checkpoint import checkpoint_shapes
from paged_optax.planning.shapes.hugging_face import config_heads
from paged_optax.planning.shapes.models import (
    Decoder,
    decoder_of,
    model_shapes,
    module_shapes,
)

__all__ = [
    "Decoder",
    "checkpoint_shapes",
    "config_heads",
    "decoder_of",
    "model_shapes",
    "module_shapes",
]
