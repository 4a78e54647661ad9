"""Gradients at the ends of the floats: infinite, NaN, denormal, vanishing."""

import functools

import pytest

from helpers import apart, exact, extreme
from helpers.extreme import BOUNDS, FINITE, compare_codec
from helpers.reference import ALIASES

pytestmark = pytest.mark.optimized


@pytest.fixture(scope="module")
def exactly():
    with apart.process(exact.__file__, exact.FLAGS) as ask:
        yield ask


@pytest.mark.quick("-paged_adamw-")
@pytest.mark.parametrize("alias", [x for x in ALIASES if not x.endswith("_32bit")])
def test_paged_is_optax(exactly, alias):
    """Bit for bit where XLA rounds one way, also what is not finite."""
    found = exactly(f"extreme {alias}")
    if alias == "paged_muon":
        # Its sums have an order of their own, see tests/transform/test_numbers.py.
        assert found["state"] == {}
    else:
        assert found == {"state": {}, "parameters": {}}


compared = functools.cache(compare_codec)
CODED = [("paged_adamw", codec) for codec in BOUNDS]
CODED += [("paged_ademamix", "dynamic_int8"), ("paged_lion", "dynamic_int8")]


@pytest.mark.slow
@pytest.mark.parametrize(("alias", "codec"), CODED)
@pytest.mark.parametrize("stream", FINITE)
def test_codecs(alias, codec, stream):
    """Within the codec's own bound of each exact step; updates are not much larger.

    The bounds are those of test_codecs.py and test_vanishing.py.
    """
    errors, sizes = compared(alias, codec)
    assert errors[stream] <= 1 + 1e-6
    assert sizes[stream] <= 2


def test_a_stream_ends_where_it_says():
    """Moments of the converging stream are denormal at the end."""
    last = FINITE["converging"](extreme.STEPS - 1)
    assert 0 < abs(last).max() < 1e-38
