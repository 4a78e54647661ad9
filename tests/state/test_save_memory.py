"""Host memory while a state is saved, as the guide on saving has it."""

import json

import pytest

from helpers.apart import alone

#: By writer: saves, a step beside each, and the most over the state, in states.
MOST = {
    "orbax": (20, False, 0.05),
    "orbax, async": (20, False, 0.05),
    # A step copies what is being written: XLA:CPU does not reuse what NumPy reads.
    "orbax, async, a step beside": (20, True, 1.1),
    "orbax, compressed": (2, False, 1.6),
    "pickle": (2, False, 1.1),
    "pickle, device_get": (2, False, 0.1),
    "flax": (2, False, 3.1),
}


@pytest.mark.slow
@pytest.mark.pure
@pytest.mark.parametrize("name", MOST)
def test_peak_of_host_memory(name):
    """A state of a gigabyte; what Orbax restores has its bits."""
    saves, beside, most = MOST[name]
    call = f"{name!r}, 1 << 30, {saves}, {beside}"
    code = "import json; from helpers.save_memory import measure"
    over, equal = json.loads(alone(f"{code}; print(json.dumps(measure({call})))"))
    assert over < most
    assert equal
