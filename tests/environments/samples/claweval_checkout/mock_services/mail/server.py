"""Stand-in service: an inbox that can be listed and answered."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mock_services._base import serve


def load():
    return {"inbox": json.loads(Path(os.environ["MAIL_FIXTURES"]).read_text()), "audit": {"sent": []}}


def send(data, body):
    data["audit"]["sent"].append(body)
    return {"status": "sent"}


serve("mail", 9100, load, {"/mail/messages": lambda d, b: {"messages": d["inbox"]}, "/mail/send": send})
