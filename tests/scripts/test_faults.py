"""Training that is killed, resumes from the last checkpoint, and ends in the same bits.

A hundred kills: `python tests/faults.py`.
"""

import pytest

from helpers import kills
from helpers.kills import Kind, Life


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


@pytest.mark.slow
def test_saved_by_four_processes_and_restored_by_two(tmp_path):
    """The bits are those of one process with all four devices."""
    runs = kills.Runs(Kind("adamw", 1, 0, devices=4, last=20), tmp_path)
    for kind in (Kind("adamw", 4, 0, last=10), Kind("adamw", 2, 0, devices=2, last=20)):
        Life(kind, tmp_path / "run", tmp_path / "compiled").reach(None)
    assert runs.check(tmp_path / "run") == 1
