"""Losses of small models, as their libraries' users write them: `zoo.MODELS[name]()`.

Each gives `(loss, params, batch)`, and what is frozen where the loss takes that.
"""

from helpers.zoo.modules import Decoder
from helpers.zoo.plain import (
    MODELS,
    TOKENS,
    VOCAB,
    WIDTH,
    around,
    cross_entropy,
    in_turn,
    mlp,
    normal,
    parameters,
    rms,
)
from helpers.zoo.towers import TOWERS

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
    "mlp",
    "normal",
    "parameters",
    "rms",
]
