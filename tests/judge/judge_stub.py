"""Mock of a judge: a loopback server in the shape of a chat completions endpoint that answers a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GOOD = '{"score": 0.8, "reasoning": "The mail was sent."}'


def completion(content: Any, finish: str = "stop") -> tuple[int, Any]:
    return 200, {
        "model": "judge-of-today",
        "choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": finish}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20},
    }


class JudgeStub:
    """Gives its answers in order, the last one again and again; keeps what it was asked.

    An answer is (status, JSON or text), or None for a connection that is closed without one.
    """

    def __init__(self, answers: Sequence[tuple[int, Any] | None]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""


@contextmanager
def serving(*answers: tuple[int, Any] | None) -> Iterator[JudgeStub]:
    stub = JudgeStub(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            stub.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            stub.keys.append(self.headers.get("authorization"))
            answer = stub.answers.pop(0) if len(stub.answers) > 1 else stub.answers[0]
            if answer is None:
                self.close_connection = True
                return
            status, body = answer
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.send_header("retry-after", "2")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
