"""Where gradients nearly vanish, no second moment is zero beside a first of some."""

import functools

import pytest

import paged_optax as po
from helpers import vanishing
from helpers.vanishing import EXACT, ROUNDING, SCENARIOS, eight_bits, largest_update


@functools.cache
def exact(name: str) -> float:
    return largest_update(SCENARIOS[name], EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_eight_bits_by_default(name):
    tx = po.paged_adamw_8bit(vanishing.LEARNING_RATE, weight_decay=0.0)
    assert largest_update(SCENARIOS[name], tx) <= 2 * exact(name)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int4", "fp8"])
def test_other_codecs(codec):
    tx = eight_bits(codec=vanishing.CODECS[codec])
    name = "equal examples"
    assert largest_update(SCENARIOS[name], tx) <= 2 * exact(name)


@pytest.mark.slow
def test_a_map_that_rounds_to_zero_shows_why():
    name = "equal examples"
    tx = eight_bits(codec=ROUNDING)
    assert largest_update(SCENARIOS[name], tx) > 50 * exact(name)
