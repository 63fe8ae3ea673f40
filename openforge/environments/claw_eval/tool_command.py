#!/usr/bin/env python3
"""The command `tool` inside a sandbox: it calls the tools of the task. Standard library only.

tool --list              every tool, its description and the schema of its arguments
tool NAME '{"a": 1}'     call one; prints its answer, exit code 0, or 1 for an error
"""

import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

USAGE = 'usage: tool --list | tool NAME \'{"argument": "value"}\' (- reads the arguments from standard input)'


def ask(path: str, body: "bytes | None" = None) -> "tuple[int, str]":
    """Status and text of an answer."""
    base = Path(__file__).resolve().with_name("tool.url").read_text().strip()
    request = urllib.request.Request(base + path, data=body, headers={"Content-Type": "application/json"})
    # No proxy of the environment's: the tools are on this very host.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode(errors="replace")


def main(words: "list[str]") -> int:
    if not words or words[0] in ("-h", "--help") or len(words) > 2:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        if words[0] == "--list":
            for tool in json.loads(ask("/tools")[1]):
                print(f"{tool['name']}: {tool['description']}\n  {json.dumps(tool['input_schema'])}")
            return 0
        arguments = words[1] if len(words) > 1 else "{}"
        body = sys.stdin.buffer.read() if arguments == "-" else arguments.encode()
        name = urllib.parse.quote(words[0], safe="")
        status, text = ask(f"/tools/{name}", body)
    except OSError as e:
        print(f"tool: the tools cannot be reached: {e}", file=sys.stderr)
        return 1
    print(text, file=sys.stdout if status < 400 else sys.stderr)
    return 0 if status < 400 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
