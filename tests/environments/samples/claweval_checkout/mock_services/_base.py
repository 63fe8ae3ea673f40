"""Stand-in: what our two services share; standard library only."""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def serve(name: str, port: int, load, routes) -> None:
    state = {"data": load(), "calls": []}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args) -> None:
            pass

        def answer(self, body) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.answer({"calls": state["calls"], **state["data"].get("audit", {})})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            if self.path == f"/{name}/reset":
                state.update(data=load(), calls=[])
                return self.answer({"status": "reset"})
            answer = routes[self.path](state["data"], body)
            if self.headers.get("X-Health-Check") is None:
                state["calls"].append({"endpoint": self.path, "request_body": body, "response_body": answer})
            return self.answer(answer)

    ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", port))), Handler).serve_forever()
