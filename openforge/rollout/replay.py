"""Drive a recorded episode again: its answers come from the record, everything else is done anew.

A loopback server stands where the policy server would, and gives the recorded answers in order to whatever the proxy
asks. Refused and unanswered calls are not in the tables, so neither are they replayed.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from pathlib import Path
from typing import Any

from openforge import store
from openforge.environments import verdict
from openforge.proxy import lineage

Json = dict[str, Any]

AROUND = 30  # characters shown on either side of a difference
# Columns of an episode row that a verdict may hang on.
VERSIONS = ("harness", "harness_version", "verifier_version", "image_digest", "isolation", "network")


class RecordError(ValueError):
    """An episode that cannot be replayed; one sentence."""


@dataclass(frozen=True)
class Record:
    """A recorded episode.

    Attributes:
        episode, rollout: its rows; the rollout's holds the task.
        calls: its rows of the calls table, in order of arrival.
        texts: system texts and tool lists by hash.
    """

    episode: Json
    rollout: Json
    calls: list[Json]
    texts: dict[str, str]


def read(run_dir: Path, episode_id: str) -> Record:
    """The record of one episode of a run.

    Raises:
        RecordError: there is no such episode, or nothing of it to replay.
        StoreError: the run has no results.
    """
    with store.reader(run_dir) as tables:
        episodes = tables.rows("SELECT * FROM all_episodes WHERE episode_id = ?", [episode_id])
        if not episodes:
            (count,) = tables.rows("SELECT count(*) AS n FROM all_episodes")
            raise RecordError(f"run {run_dir.name} has no episode {episode_id!r}; it has {count['n']} episodes")
        calls = tables.rows("SELECT * FROM calls WHERE episode_id = ? ORDER BY call", [episode_id])
        if not calls:
            raise RecordError(
                f"episode {episode_id} of run {run_dir.name} has no recorded calls (it ended as "
                f"{episodes[0]['status']}), so there is nothing to replay"
            )
        rollouts = tables.rows("SELECT * FROM rollouts WHERE rollout_id = ?", [episodes[0]["rollout_id"]])
        if not rollouts:
            raise RecordError(f"the rollout row of episode {episode_id} is not in {run_dir}/rollouts, nor is its task")
        hashes = sorted({c[k] for c in calls for k in ("system_sha256", "tools_sha256") if c[k] is not None})
        sql = "SELECT sha256, any_value(bytes) AS bytes FROM blobs WHERE list_contains(?, sha256) GROUP BY sha256"
        texts = {b["sha256"]: b["bytes"].decode(errors="surrogatepass") for b in tables.rows(sql, [hashes])}
    return Record(episodes[0], rollouts[0], calls, texts)


# ---- requests --------------------------------------------------------------------------------------------------
def compare(record: Record, call: int, body: Mapping[str, Any], before: Sequence[list[Json]]) -> str | None:
    """Where a request first differs from that of the recorded call; None if it does not.

    A row holds the messages that are new since another call. It is known that all of that call's come before them where
    the prompt extends its whole prompt; of a shortened or rewritten history it is only known what is new.

    Args:
        before: messages of the requests before this one, all as recorded, after their system texts.
    """
    row = record.calls[call]
    system, messages = lineage.split_system(lineage.without_images(body["messages"]))
    tools = json.dumps(body["tools"], separators=(",", ":")) if body.get("tools") else None
    for what, now, digest in (("system text", system, row["system_sha256"]), ("tools", tools, row["tools_sha256"])):
        if (None if now is None else _sha256(now)) != digest:
            then = None if digest is None else record.texts.get(digest, "(not in blobs)")
            return difference(then, now, what)
    recorded = json.loads(row["messages"])
    if row["prefix_of"] is None:
        return difference(recorded, messages, "messages")
    earlier = before[row["prefix_of"]]
    if row["prefix_len"] >= record.calls[row["prefix_of"]]["prompt_tokens"]:
        return difference([*earlier, *recorded], messages, "messages")
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(earlier, messages, strict=False))))
    return difference(recorded, messages[same:], f"messages[{same}:]")


def difference(then: Any, now: Any, where: str) -> str | None:
    """The first place where two JSON values differ, in words; None if they are equal."""
    if isinstance(then, dict) and isinstance(now, dict):
        pairs: Iterator[tuple[Any, Any, Any]] = (
            (k, then.get(k), now.get(k)) for k in [*then, *sorted(now.keys() - then)]
        )
    elif isinstance(then, list) and isinstance(now, list):
        pairs = ((i, a, b) for i, (a, b) in enumerate(zip(then, now, strict=False)))
    elif isinstance(then, str) and isinstance(now, str) and then != now:
        at = next((i for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now)))
        return f"{where}, from character {at} on: recorded {_excerpt(then, at)}, now {_excerpt(now, at)}"
    else:
        return None if then == now else f"{where}: recorded {_short(then)}, now {_short(now)}"
    for key, a, b in pairs:
        if (found := difference(a, b, f"{where}[{key}]")) is not None:
            return found
    if isinstance(then, list) and len(then) != len(now):
        return f"{where}: recorded {len(then)} of them, now {len(now)}"
    return None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _excerpt(text: str, at: int) -> str:
    return repr(text[max(0, at - AROUND) : at + AROUND])


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 2 * AROUND else f"{text[: 2 * AROUND]}..."


# ---- the server that stands in ---------------------------------------------------------------------------------
class Upstream:
    """Gives the recorded answers.

    Attributes:
        arrived: requests that came, those beyond the record included.
        difference: the first request that differs, from 1, and where; None if none does.
    """

    def __init__(self, record: Record, window: int, told: Callable[[str], None]) -> None:
        self.record, self.window = record, window
        self.arrived = 0
        self.difference: tuple[int, str] | None = None
        self._before: list[list[Json]] = []
        self._told = told
        self._lock = threading.Lock()

    def models(self) -> Json:
        """GET /v1/models: the name under which the harness knew the policy."""
        entry = {"id": self.record.calls[0]["model"], "owned_by": "vllm", "max_model_len": self.window}
        return {"data": [entry]}

    def answer(self, body: Mapping[str, Any]) -> tuple[int, Json]:
        """Status and body of the next recorded answer."""
        with self._lock:
            call = self.arrived
            self.arrived += 1
            if call >= len(self.record.calls):
                told = f"the record holds {len(self.record.calls)} answers, and the harness asks for one more"
                # A status that neither the proxy nor a harness retries.
                return 404, {"error": {"message": told}}
            if self.difference is None:
                found = compare(self.record, call, body, self._before)
                self.difference = None if found is None else (call + 1, found)
                self._before.append(lineage.split_system(lineage.without_images(body["messages"]))[1])
                self._told(f"request {call + 1}: " + ("as recorded" if found is None else f"differs at {found}"))
            return 200, completion(self.record.calls, call)

    @property
    def same(self) -> bool:
        """Whether the same requests came, all of them and no other."""
        return self.difference is None and self.arrived == len(self.record.calls)

    def verdict(self) -> str:
        """One line on the requests."""
        recorded = len(self.record.calls)
        if self.difference is not None:
            return f"request {self.difference[0]} of {recorded} is the first that differs, at {self.difference[1]}"
        if self.arrived > recorded:
            return f"the {recorded} recorded ones came and another one after them, which the record has no answer to"
        if self.arrived < recorded:
            return f"only {self.arrived} of the {recorded} recorded ones came, the same as then"
        return f"all {recorded} came the same"


def completion(calls: Sequence[Mapping[str, Any]], call: int) -> Json:
    """The recorded answer in vLLM's shape, as the proxy reads it; without ids where none were recorded."""
    row = calls[call]
    ids, logprobs = row["response_token_ids"], row["logprobs"]
    choice: Json = {
        "index": 0,
        "message": json.loads(row["response"]),
        "finish_reason": row["finish_reason"],
        "logprobs": {"content": [{"token": "", "logprob": p, "top_logprobs": []} for p in logprobs]}
        if logprobs
        else None,
    }
    usage = {"prompt_tokens": row["prompt_tokens"], "completion_tokens": len(ids)}
    body: Json = {"object": "chat.completion", "choices": [choice], "usage": usage}
    if ids:
        choice["token_ids"] = ids
        body["prompt_token_ids"] = lineage.prompt_ids(calls, row["call"])
    return body


@contextmanager
def serving(upstream: Upstream) -> Iterator[str]:
    """Serve on the loopback for the length of the context; its OpenAI base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, upstream.models())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*upstream.answer(body))

        def _send(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# ---- ends ------------------------------------------------------------------------------------------------------
def ends(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether two episode rows end the same, status and verdict; and one line on it."""
    a, b = _end(then), _end(now)
    if a == b:
        return True, f"the same: {_said(a)}"
    found = difference(a, b, "verdict")
    return False, f"recorded {_said(a)}, now {_said(b)}" if _said(a) != _said(b) else str(found)


def _end(row: Mapping[str, Any]) -> list[Any]:
    line = row["verifier_output"]
    return [row["status"], *(verdict.parse(line) if line is not None else ())]


def _said(end: Sequence[Any]) -> str:
    if len(end) == 1:
        return f"{end[0]} without a verdict"
    return f"{end[0]}, reward {end[1]:g}, {'passed' if end[2] else 'not passed'}"


def versions(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each version of the harness, verifier and sandbox that is another one now."""
    return [f"{k}: recorded {then[k]!r}, now {now[k]!r}" for k in VERSIONS if then[k] != now[k]]
