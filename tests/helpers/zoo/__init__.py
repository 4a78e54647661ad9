"""Losses of small models, as their libraries' users write them: `zoo.MODELS[name]()`.

Each gives `(loss, params, batch)`, and what is frozen where the loss takes that.
"""

from helpers.zoo import families, flax_examples, habits, scans, towers
from helpers.zoo.plain import MODELS as PLAIN
from helpers.zoo.plain import (
    TOKENS,
    VOCAB,
    WIDTH,
    Decoder,
    around,
    cross_entropy,
    in_turn,
    layer,
    mlp,
    normal,
    parameters,
    rms,
)
from helpers.zoo.towers import TOWERS

MODELS = {
    **PLAIN,
    **families.MODELS,
    **flax_examples.MODELS,
    **habits.MODELS,
    **scans.MODELS,
    **towers.MODELS,
}

__all__ = [
    "MODELS",
    "TOKENS",
    "TOWERS",
    "VOCAB",
    "WIDTH",
    "Decoder",
    "around",
    "cross_entropy",
    "in_turn",
    "layer",
    "mlp",
    "normal",
    "parameters",
    "rms",
]
