"""Passes when the settings are right and results.json says what the checks say of them."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    yield from e.files({"settings.ini": 'port = 8443\nworkers = 4\ntimeout = 30\nmode = safe\ncache = on\n', "run_checks.py": 'import json\n\nWANTED = {"port": "8443", "workers": "4", "timeout": "30", "mode": "safe", "cache": "on"}\nfound = dict(line.strip().split(" = ") for line in open("settings.ini"))\nresults = {key: "pass" if found.get(key) == value else "fail" for key, value in WANTED.items()}\njson.dump(results, open("results.json", "w"), indent=1, sort_keys=True)\n'})
    try:
        found = json.loads(e.text("results.json") or "")
    except ValueError:
        found = None
    if found != {"cache": "pass", "mode": "pass", "port": "pass", "timeout": "pass", "workers": "pass"}:
        yield f"results.json is {found}"


verdict(wrong)
