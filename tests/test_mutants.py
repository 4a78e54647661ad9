"""Small changes of the code are noticed: the record of `python tests/mutants.py`."""

import json
import pathlib

RECORD = pathlib.Path(__file__).parent / "data" / "mutants.json"


def test_on_record():
    """What was not noticed has a reason; so that new runs are read by somebody."""
    for run in json.loads(RECORD.read_text()):
        assert run["killed"] + len(run["survivors"]) == run["mutants"] >= 50
        assert all(x["file"] and x["change"] and x["why"] for x in run["survivors"])
