"""Small changes of the code are noticed: the record of `python tests/mutants.py`."""

import json
import pathlib

RECORD = pathlib.Path(__file__).parents[1] / "data" / "mutants.json"


def test_on_record():
    """85% are noticed, and what was not has a reason: somebody has read each run."""
    runs = json.loads(RECORD.read_text())
    for run in runs:
        assert run["killed"] + len(run["survivors"]) == run["mutants"] >= 50
        assert all(x["file"] and x["change"] and x["why"] for x in run["survivors"])
    since = sum("by" in x for run in runs for x in run["survivors"])
    noticed = sum(run["killed"] for run in runs) + since
    assert noticed >= 0.85 * sum(run["mutants"] for run in runs)
