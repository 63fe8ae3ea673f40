"""Stand-in service: a list of to-dos."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mock_services._base import serve


def load():
    return {"todos": json.loads(Path(os.environ["TODO_FIXTURES"]).read_text())}


serve("todo", 9102, load, {"/todo/tasks": lambda d, b: {"tasks": d["todos"]}})
