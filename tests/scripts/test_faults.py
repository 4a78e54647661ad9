"""Training that is killed, resumes from the last checkpoint, and ends in the same bits.

A hundred kills: `python tests/faults.py`.
"""

import json
import pathlib

import pytest

from helpers import kills
from helpers.trainer import PHASES

RECORD = pathlib.Path(__file__).parents[1] / "data" / "killed.json"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("adamw", 2),
        ("8 bits", 5),
        ("layerwise, weights on the host", 5),
        ("four processes", 1),
        ("four processes, layerwise, deferred", 3),
    ],
)
def test_killed_and_resumed(tmp_path, kind, number):
    count = kills.Runs(kills.KINDS[kind], tmp_path).killed(number, 1, seconds=0.5)
    assert count.exact == count.phases.total() == number


@pytest.mark.slow
def test_a_moment_that_was_lost_shows(tmp_path):
    """Of a life whose restored state has one moment zeroed."""
    runs = kills.Runs(kills.KINDS["adamw"], tmp_path)
    folder = tmp_path / "run"
    life = runs.life(folder)
    life.reach("restoring")
    while kills.saved(folder) < 10:
        assert not life.wait(0.01)
    life.kill()
    runs.life(folder, "--spoil").reach(None)
    with pytest.raises(AssertionError, match="restored .*: other bits"):
        runs.check(folder)


def test_on_record():
    """A hundred kills and more, in every phase, of every kind of training."""
    runs = json.loads(RECORD.read_text())
    found = [run[kind] for run in runs for kind in kills.KINDS if kind in run]
    assert sum(x["kills"] for x in found) >= 100
    deferred = [run.get("four processes, layerwise, deferred") for run in runs]
    assert sum(x["kills"] for x in deferred if x) >= 50
    assert all(x["exact"] == x["kills"] == sum(x["phases"].values()) for x in found)
    assert {kind for run in runs for kind in run} >= kills.KINDS.keys()
    for phase in PHASES[1:-1]:
        assert sum(x["phases"][phase] for x in found) >= 10
