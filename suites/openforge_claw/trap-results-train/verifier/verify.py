"""Passes when the settings are right and results.json says what the checks say of them."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    yield from e.files({"settings.ini": e.expect["good"], "run_checks.py": e.expect["script"]})
    try:
        found = json.loads(e.text("results.json") or "")
    except ValueError:
        found = None
    if found != e.expect["results"]:
        yield f"results.json is {found}"


verdict(wrong)
