"""One episode by hand: the job of a shard of one row, with what happens in it printed as it happens."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from openforge import tables
from openforge.config import EvalConfig, RunConfig, Sandbox, Server
from openforge.config_sandbox import DEFAULT_IMAGE, Artifacts
from openforge.environments import verdict
from openforge.job import Job
from openforge.policy import process
from openforge.policy.state import Place, server_key
from openforge.proxy import journal
from openforge.rollout.shard import Watch, run_shard
from openforge.rollout.status import ENDS
from openforge.sandboxes import reap

Say = Callable[[str], None]

CELL = "by_hand"
SHOWN = 200  # characters of a line of the harness's or of an answer
LOOK_SECONDS = 0.1
SCRATCH = ".scratch-"
# partial/<part>/<shard>/<digest>. Not **: that would walk the sandboxes, which come and go and are the agent's.
_PARTIAL = "partial/*/*/*"
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Outcome:
    """An episode that has ended.

    Attributes:
        episode: its row of the episodes table.
        calls: its rows of the calls table.
        records: its journal records.
        reward: the verdict's score; None without a verdict.
        kept: its work folder, None where it was not kept.
    """

    episode: dict[str, Any]
    calls: list[dict[str, Any]]
    records: list[dict[str, Any]]
    reward: float | None
    kept: Path | None

    def text(self) -> str:
        """The episode as JSON, its calls with whole messages and tools: the table has what is new in each."""
        asked = sorted((r for r in self.records if r["record"] == "call"), key=lambda r: int(r["call"]))
        calls = [
            {**c, **{k: r[k] for k in ("messages", "tools", "response")}}
            for c, r in zip(self.calls, asked, strict=True)
        ]
        record = {"episode": self.episode, "reward": self.reward, "calls": calls}
        return json.dumps(record, indent=1, default=_plain) + "\n"


@dataclass(frozen=True)
class _Job(Job):
    """The shard's job, whose lines go to a person."""

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def run(
    row: Mapping[str, Any],
    config: RunConfig | EvalConfig,
    policy: Path | None,
    server: Server,
    root: Path,
    *,
    keep: bool,
    say: Say,
) -> Outcome:
    """Run a rollout row once, as a shard would, and print what happens.

    Args:
        row: any rollout row; it gets a rollout_id of its own.
        config: holds the cell CELL; its `rollout` section but for `attempts`, and its `sandbox` section but for
            `artifacts` and `warm`, whatever backend the row was planned for.
        policy: checkpoint folder; None where `server` has a URL.
        keep: move the sandbox's work folder to results/.episodes/.

    Raises:
        KeyboardInterrupt: Ctrl-C; what was started has ended.
        ServerError, PolicyMismatch, ProxyError, SandboxError, HarnessError, SoftwareMissing: no episode could be run.
    """
    episodes = root / "results" / ".episodes"
    _sweep(episodes)
    row = {**row, "rollout_id": tables.h("by hand", uuid.uuid4().hex), **_here(row, config.sandbox)}
    kept = f"{tables.episode_id(row['rollout_id'], 0)}-*"
    once = {
        "rollout": config.rollout.model_copy(update={"attempts": 1}),
        "sandbox": config.sandbox.model_copy(update={"warm": 0, "artifacts": Artifacts(keep="none")}),
    }
    part = {"purpose": "eval", "cell": CELL, "k": "none", "shard": "0001"}
    scratch = episodes / f"{SCRATCH}{process.this()}"
    scratch.mkdir(parents=True)
    try:
        job = _Job("episode", CELL, root, scratch, config.model_copy(update=once), part, sys.stderr)
        watch = Watch(scratch / "harness.log", episodes if keep else None)
        with _owning(), _live(scratch, say):
            done = run_shard([row], policy, _attached_or_own(server, policy, root), job, watch=watch)
        (episode,) = done.episodes
        records = journal.read(done.partial.journal)
        done.partial.remove()
        _drop_logs(root)
    except KeyboardInterrupt:
        _drop_logs(root)
        say("interrupted: the episode, its sandbox and proxy, and a server started for it have ended")
        for folder in episodes.glob(kept):
            say(f"work folder: {folder}")
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Outcome(episode, done.calls, records, reward(episode), next(episodes.glob(kept), None))


def _here(row: Mapping[str, Any], sandbox: Sandbox) -> dict[str, Any]:
    """What of a row depends on where its sandbox is made: a recorded one may be of another backend."""
    options = json.loads(row["harness_options"])
    if options.get("launch") == "fork" and not sandbox.can_fork():
        options["launch"] = "command"
    return {
        "orchestrator": sandbox.backend,
        "image": sandbox.image or DEFAULT_IMAGE,
        "harness_options": json.dumps(options, sort_keys=True),
    }


def reward(episode: Mapping[str, Any]) -> float | None:
    """The score of an episode's verdict; None where it has none."""
    if episode["verifier_output"] is None or not ENDS[episode["status"]].verified:
        return None
    return verdict.parse(episode["verifier_output"]).score


def summary(outcome: Outcome) -> list[str]:
    """The last lines on an episode: verdict, end, reward, seconds by phase, what is kept."""
    e = outcome.episode
    seconds = ", ".join(f"{k} {v:.2f}" for k, v in e["seconds"].items() if v is not None)
    return [
        f"verifier: {e['verifier_output'] or 'no verdict'}",
        f"status: {e['status']}" + (f" ({e['message']})" if e["message"] else ""),
        f"reward: {'none' if outcome.reward is None else f'{outcome.reward:g}'}",
        f"seconds: {seconds}; {e['turns']} turns, {e['prompt_tokens']} tokens in, {e['response_tokens']} out",
        *([f"work folder: {outcome.kept}"] if outcome.kept else []),
    ]


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else str(value)


# ---- servers and leftovers -------------------------------------------------------------------------------------
@contextmanager
def _owning() -> Iterator[None]:
    """Make this process the owner of what the lease begins: no server outlives it on its account."""
    before = os.environ.get("OPENFORGE_OWNER")
    os.environ["OPENFORGE_OWNER"] = str(process.this())
    try:
        yield
    finally:
        os.environ.pop("OPENFORGE_OWNER")
        if before is not None:
            os.environ["OPENFORGE_OWNER"] = before


def _attached_or_own(server: Server, policy: Path | None, root: Path) -> Server:
    """The configuration that leases the warm server of a running run, or one of this episode's own that ends with it.

    A server's key has nothing of the policy's weights, so a run's server takes this policy in its turn.
    """
    if server.url is not None or policy is None or not (root / ".servers").is_dir():
        return server.model_copy(update={"warm": False})
    keeper = Place((root / ".servers").resolve(), server_key(server, policy, root)).connect()
    if keeper is not None:
        keeper.close()
    return server.model_copy(update={"warm": keeper is not None})


def _drop_logs(root: Path) -> None:
    """Remove what a server of this process alone has left: it ended in order, so nobody needs its logs."""
    for file in (root / ".servers").glob(f"*-{os.getpid()}.*"):
        file.unlink()


def _sweep(episodes: Path) -> None:
    """Remove what a killed process of this verb has left."""
    for scratch in episodes.glob(f"{SCRATCH}*"):
        with contextlib.suppress(ValueError):
            if not process.alive(process.parse(scratch.name.removeprefix(SCRATCH))):
                for sandboxes in scratch.glob(f"{_PARTIAL}/sandboxes"):
                    reap(sandboxes, CELL)
                shutil.rmtree(scratch, ignore_errors=True)


# ---- live output -----------------------------------------------------------------------------------------------
@contextmanager
def _live(scratch: Path, say: Say) -> Iterator[None]:
    """Print the journal's calls and the harness's lines while they come, in a thread of its own."""
    follow, over = _Follower(scratch, say), threading.Event()

    def loop() -> None:
        while not over.wait(LOOK_SECONDS):
            follow.look()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        follow.look(last=True)


class _Follower:
    """Reads what was appended to the journal and to the harness's log since it last looked."""

    def __init__(self, scratch: Path, say: Say) -> None:
        self._scratch, self._say = scratch, say
        self._places: dict[Path, int] = {}
        self._turn = 0

    def look(self, last: bool = False) -> None:
        for path in sorted(self._scratch.glob(f"{_PARTIAL}/journal/*.jsonl")):
            for line in self._lines(path):
                self._record(json.loads(line))
        for line in self._lines(self._scratch / "harness.log", last):
            text = shortened(line.decode(errors="replace"))
            if text:
                self._say(f"harness: {text}")

    def _lines(self, path: Path, last: bool = False) -> list[bytes]:
        """Whole new lines of a file; with `last` the one without an end as well."""
        try:
            with path.open("rb") as f:
                f.seek(self._places.get(path, 0))
                data = f.read()
        except FileNotFoundError:
            return []
        end = len(data) if last else data.rfind(b"\n") + 1
        self._places[path] = self._places.get(path, 0) + end
        return data[:end].splitlines()

    def _record(self, record: dict[str, Any]) -> None:
        if record["record"] == "call":
            self._turn += 1
            tokens = record["usage"].get("prompt_tokens"), record["usage"].get("completion_tokens")
            self._say(
                f"turn {self._turn}: {tokens[0]} tokens in, {tokens[1]} out, {record['latency']:.2f} s, "
                f"{record['finish_reason']}: {shortened(_said(record['response']))}"
            )
        elif record["record"] == "failure":
            self._say(f"a call got no answer: {shortened(record['reason'])}")


def _said(message: Mapping[str, Any]) -> str:
    """What an assistant message says: its text, then its tool calls."""
    content = message.get("content")
    parts = [content if isinstance(content, str) else json.dumps(content) if content else ""]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        parts.append(f"{function.get('name')}({function.get('arguments')})")
    return " ".join(p for p in parts if p)


def shortened(text: str) -> str:
    """One printable line: an agent's text can hold what moves a terminal's cursor."""
    plain = _COLOURS.sub("", text.strip())
    shown = "".join(c if c.isprintable() else "\\n" if c == "\n" else " " for c in plain)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}... ({len(shown)} characters)"
