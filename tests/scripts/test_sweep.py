"""A choice of what `sweep.py` compiles: shapes that one of the compilers refused."""

import pytest

import sweep
from helpers import models

#: Attention kernels, a large convolution, and output matrices of odd vocabularies.
QUICK = [(2048, 32, 64), (24, 1024, 64), (3, 3, 512, 512), (768, 50257), (50257, 768)]

pytestmark = pytest.mark.compiler


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("float32", QUICK),
        ("int8, masters", [QUICK[-1]]),
        ("int8, remainders", [(4099, 4096)]),
    ],
)
def test_real_shapes(name, shapes):
    """They compile, in place, within the plan's scratch, at the plan's addresses.

    `sweep.py` does this with every codec.
    """
    chosen = [x for x in sweep.cases(shapes, [name]) if x.page_size == "1 MiB"]
    assert len(chosen) == 4 * len(shapes)
    if "remainders" in name:
        # Cut alone, moments of two bytes have other pages than those of one, and
        # XLA:TPU does not state how many: the traffic of `init` cannot be counted.
        chosen = [x for x in chosen if (x.compiler, x.phase) != ("v5e", "init")]
    results = list(sweep.outcomes(chosen, workers=1))
    assert len(results) == len(chosen)
    for case, found in results:
        assert not found.failure, case
        assert found.pages > 1, case
        assert found.traffic == pytest.approx(1, abs=0.05), case


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_vocabulary_in_codes(name):
    """A TPU holds pages in flight alone. An update of Llama-3's took 22 and 34 MiB."""
    case = sweep.Case((128256, 4096), name, "default", "v5e", "update")
    ((_, found),) = sweep.outcomes([case], workers=1)
    assert not found.failure
    assert found.scratch < 4 * 2**20


@pytest.mark.parametrize("compiler", ["h200", "v5e"])
def test_new_scales_leave_the_device_once(compiler):
    """They are small, and computed there: nothing is fetched for them."""
    case = sweep.Case((512, 2048), "int4", "default", compiler, "init")
    ((_, found),) = sweep.outcomes([case], workers=1)
    assert not found.failure
    assert found.traffic == pytest.approx(1, abs=0.01) and not found.host_scratch


@pytest.mark.slow
def test_a_process_that_ends_is_reported():
    """As a compiler's abort would be; the next case gets a process of its own."""
    good = sweep.Case((64, 1024), "float32", "default", "h200", "init")
    bad = sweep.Case((64, 1024), "no format", "default", "h200", "init")
    results = dict(sweep.outcomes([bad, good], workers=1))
    assert "the process ended" in results[bad].failure
    assert not results[good].failure


def test_all_models_are_in_the_sweep():
    assert len(models.MODELS) == 10
    assert len(list(models.distinct(4096))) > 100
