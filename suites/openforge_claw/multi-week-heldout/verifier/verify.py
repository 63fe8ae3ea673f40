"""Passes when week.csv is right and the services were not changed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    yield from e.files({"week.csv": e.expect["table"], "team.txt": "Ana\nBo\nCy\n"})
    for name in ("todo", "calendar"):
        if e.state(name) != e.initial(name):
            yield f"{name} was changed"


verdict(wrong)
