"""Where gradients vanish or are at the ends of the floats, codecs keep their bounds."""

import functools

import pytest

import paged_optax as po
from helpers import extreme, vanishing
from helpers.extreme import BOUNDS, FINITE, compare_codec
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


compared = functools.cache(compare_codec)
CODED = [("paged_adamw", codec) for codec in BOUNDS]
CODED += [("paged_ademamix", "dynamic_int8"), ("paged_lion", "dynamic_int8")]


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(("alias", "codec"), CODED)
@pytest.mark.parametrize("stream", FINITE)
def test_streams(alias, codec, stream):
    """Within the codec's own bound of each exact step; updates are not much larger.

    The bounds are those of test_codecs.py and of the scenarios above.
    """
    errors, sizes = compared(alias, codec)
    assert errors[stream] <= 1 + 1e-6
    assert sizes[stream] <= 2


def test_a_stream_ends_where_it_says():
    """Moments of the converging stream are denormal at the end."""
    last = FINITE["converging"](extreme.STEPS - 1)
    assert 0 < abs(last).max() < 1e-38
