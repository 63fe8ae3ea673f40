"""A mock service of the tests, standard library only: a box of items behind POST /NAME/OPERATION.

Environment: PORT, NAME, and MODE, one of its faults.

    POST /NAME/list {}              the items
    POST /NAME/add {"text": ...}    adds one; {"id": n}
    POST /NAME/crash                the process ends without an answer
    GET /NAME/find?text=...         items that hold the text
    GET /NAME/audit, POST /NAME/reset, POST /NAME/health
"""

import json
import os
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NAME, MODE = os.environ["NAME"], os.environ.get("MODE", "")
START = json.loads(os.environ.get("START", "[]"))
state = {"items": list(START), "calls": []}


class Handler(BaseHTTPRequestHandler):
    def answer(self, status: int, value: object) -> None:
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        if url.path == f"/{NAME}/audit":
            if MODE == "no-audit":
                self.answer(200, "not json")
            else:
                self.answer(200, {"calls": state["calls"], "items": state["items"]})
        elif url.path == f"/{NAME}/find":
            text = urllib.parse.parse_qs(url.query)["text"][0]
            self.answer(200, {"found": [i for i in state["items"] if text in i]})
        else:
            self.answer(404, {"error": "no such page"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        operation = self.path.rpartition("/")[2]
        if operation == "health":
            self.answer(503 if MODE == "never-ready" else 200, {})
        elif operation == "reset":
            state.update(items=list(START), calls=[])
            self.answer(500 if MODE == "no-reset" else 200, {})
        elif operation == "list":
            state["calls"].append("list")
            self.answer(200, {"items": state["items"]})
        elif operation == "add":
            if MODE == "errors":
                self.answer(500, {"error": "try again"})
                return
            state["calls"].append("add")
            state["items"].append(body["text"])
            self.answer(200, {"id": len(state["items"])})
        elif operation == "text":
            self.answer(200, "plain words")
        elif operation == "slow":
            time.sleep(3600)
        elif operation == "crash":
            print("out of order", flush=True)
            os._exit(7)


if MODE == "dies":
    print("cannot find my fixtures", flush=True)
    sys.exit(3)
if MODE == "silent":
    threading.Event().wait()
ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
