"""Losses of small models, as their libraries' users write them: `zoo.MODELS[name]()`.

Each gives `(loss, params, batch)`, and what is frozen where the loss takes that.
"""

from helpers.zoo.modules import Decoder as Decoder
from helpers.zoo.plain import *  # noqa: F403
from helpers.zoo.towers import TOWERS as TOWERS
