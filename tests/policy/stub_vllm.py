"""A STUB of vLLM's API server for lease tests: the paths the launcher uses, no model.

Its probe answers are read from the probe.json of the folder whose weights it "serves". Files in a policy folder
steer it: `stale` (reload_weights answers 200 and keeps the old weights, as vLLM does with a tied head), `dies` (it
exits at once), `held` (it is not healthy while the file exists), `stubborn` (it ignores SIGTERM), `hung` (it samples
nothing; a start removes the file). Every start and reload is a line of $STUB_EVENTS.
"""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

argv = sys.argv[1:]
model = Path(argv[argv.index("--model") + 1])
port = int(argv[argv.index("--port") + 1])
served = model


def event(*words: object) -> None:
    with open(os.environ["STUB_EVENTS"], "a") as f:
        print(*words, file=f)


class Handler(BaseHTTPRequestHandler):
    def _send(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(503 if (model / "held").exists() else 200, {})
        elif self.path == "/v1/models":
            known = self.headers["Authorization"] == f"Bearer {os.environ['VLLM_API_KEY']}"
            self._send(200 if known else 401, {"data": [{"id": "policy", "max_model_len": 777}], "served": str(served)})

    def do_POST(self) -> None:
        global served
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            path = Path(body["kwargs"]["weights_path"])
            event("reload", path.name)
            if not (path / "stale").exists():
                served = path
        if self.path == "/v1/completions" and body["prompt"] == ".":
            while (model / "hung").exists():
                time.sleep(0.02)
            self._send(200, {"choices": [{"text": "a"}]})
        elif self.path == "/v1/completions":
            probe = json.loads((served / "probe.json").read_text())
            assert body["prompt"] == probe["ids"]
            at = [None]
            for i, lp in zip(probe["ids"][1:], probe["logprobs"], strict=True):
                at.append({str(i): {"logprob": lp}})
            self._send(200, {"choices": [{"prompt_logprobs": at}]})
        else:
            self._send(200, {"success": True})

    def log_message(self, *args: object) -> None:
        pass


if (model / "dies").exists():
    print("the stub dies as told", flush=True)
    sys.exit(3)
if (model / "stubborn").exists():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(model / "hung").unlink(missing_ok=True)
server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
event("start", model.name, os.getpid())
server.serve_forever()
