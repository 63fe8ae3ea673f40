"""Canaries: an evaluation of an endpoint as a user types it, with the real harness, sandboxes and proxy. What it
writes, what stood in any command line meanwhile, and what the agent saw is searched for every secret there is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from plain_stub import PlainStub

ROOT = Path(__file__).resolve().parents[2]
ENDPOINT, SHELL = "sk-canary-of-the-endpoint-4711", "canary-of-the-users-shell-0815"
# The agent shows all that it can see and leaves it in its work folder, where the verifier repeats it.
LEAK = "env > leak.txt; cat /proc/[0-9]*/environ >> leak.txt; cat leak.txt; echo 144 > answer.txt"
VERIFIER = """\
import json, pathlib, sys
work, task = pathlib.Path(sys.argv[1]), json.loads(pathlib.Path("task.json").read_text())
passed = (work / "answer.txt").read_text().strip() == task["payload"]["answer"]
leak = (work / "leak.txt").read_text(errors="replace")
print(leak, file=sys.stderr)
print(json.dumps({"score": float(passed), "passed": passed, "leak": leak}))
"""
CONFIG = """\
model: tiny-random
tasks: {source: t.parquet, columns: {task_id: id, instruction: question}, verifier: judge.py}
server: {api_key_env: CANARY_KEY}
limits: {seconds: 60}
cells:
  - {name: fork, split: train, harness: {config: show.yaml}}
  - {name: command, split: train, harness: {config: show.yaml, launch: command}}
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The project without results, with a table of one's own."""
    root = tmp_path / "clone"
    root.mkdir()
    shutil.copy(ROOT / "Snakefile", root)
    for part in ("rules", "scripts", "profiles", "envs", "openforge"):
        shutil.copytree(ROOT / part, root / part)
    (root / ".software").symlink_to(ROOT / ".software")
    (root / "config").mkdir()
    (root / "config" / "eval_outside.yaml").write_text(CONFIG)
    (root / "judge.py").write_text(VERIFIER)
    tiny = (ROOT / "config" / "harness" / "tiny.yaml").read_text()
    shown = tiny.replace("{{output.returncode}}", "{{output.output}}")
    assert shown != tiny
    (root / "show.yaml").write_text(shown)
    rows = [{"id": 1, "question": "Write the square of 12 to answer.txt", "answer": "144"}]
    pq.write_table(pa.Table.from_pylist(rows), root / "t.parquet")
    return root


@pytest.fixture
async def stub() -> AsyncIterator[PlainStub]:
    one = PlainStub()
    one.key, one.says = ENDPOINT, [LEAK]
    await one.start()
    yield one
    await one.stop()


class Watch:
    """Looks all the while at every command line, and at every file that is written."""

    def __init__(self, *places: Path) -> None:
        self.places, self.lines, self.files, self.looked = places, set[bytes](), dict[str, str](), 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.1):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    self.lines.add(file.read_bytes())
            self.look()

    def look(self) -> None:
        for file in (f for place in self.places for f in written(place)):
            with contextlib.suppress(OSError):
                data = file.read_bytes()
                self.looked += 1
                for canary in (ENDPOINT, SHELL):
                    if canary.encode() in data:
                        self.files[str(file)] = canary


def written(place: Path) -> Iterator[Path]:
    """Files below a folder, links to other folders aside."""
    for folder, folders, files in os.walk(place):
        folders[:] = [f for f in folders if f not in ("__pycache__", "openforge", "envs", "rules", "scripts")]
        yield from (Path(folder) / f for f in files if not (Path(folder) / f).is_symlink())


def contents(root: Path) -> Iterator[tuple[Path, str]]:
    """Every file's text; a table's columns, for its pages are compressed."""
    for file in written(root):
        yield file, file.read_bytes().decode(errors="replace")
        if file.suffix == ".parquet":
            yield file, repr(pq.ParquetFile(file).read().to_pylist())


async def evaluated(root: Path, stub: PlainStub, **env: str) -> tuple[int, str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith("OPENFORGE_")}
    words = ["eval_outside", "--nocolor", "--config", f"policy={stub.url}"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "snakemake", *words),
        cwd=root,
        env=own | env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_a_missing_key_stops_before_any_job(clone: Path, stub: PlainStub) -> None:
    code, out = await evaluated(clone, stub)
    assert code == 1 and "server.api_key_env names the environment variable CANARY_KEY, which is not set" in out
    assert "Traceback" not in out and not (clone / "results").exists() and stub.heads == []


@pytest.mark.slow
async def test_no_secret_is_written_shown_or_seen(clone: Path, stub: PlainStub) -> None:
    # Not below tmp_path: the path of a UNIX socket is short.
    with tempfile.TemporaryDirectory(prefix="of-") as tmp, Watch(clone, Path(tmp)) as watch:
        env = {"CANARY_KEY": ENDPOINT, "AWS_SECRET_ACCESS_KEY": SHELL, "TMPDIR": tmp}
        code, out = await evaluated(clone, stub, **env)
        left = [f for f in Path(tmp).rglob("*") if f.is_file()]
    assert code == 0, out
    results = clone / "results" / "eval_outside"
    evals = list(results.glob("eval/*/iteration=none/eval.json"))
    assert len(evals) == 2 and all('"p": 1.0' in e.read_text() for e in evals), out
    # The endpoint was asked with the key, and was told what the agent saw: its own key, and no other secret.
    assert set(stub.heads) == {f"Bearer {ENDPOINT}"}
    seen = repr([b["messages"] for b in stub.bodies])
    keys = set(re.findall(r"OPENAI_API_KEY=([\w-]{32})", seen))
    assert len(keys) == 2 and "canary" not in seen
    for file, text in contents(clone):
        for secret in (ENDPOINT, SHELL, *keys):
            assert secret not in text, file
    tables = repr([text for file, text in contents(results) if file.suffix == ".parquet"])
    assert tables.count("[session key]") >= 4
    lines = b"\n".join(watch.lines).decode(errors="replace")
    # It did look: the jobs, the proxy and the sandboxes were among them.
    assert all(word in lines for word in ("openforge.proxy", "bwrap", "bin/mini"))
    for secret in (ENDPOINT, SHELL, *keys):
        assert secret not in out and secret not in lines
    assert watch.files == {}
    assert watch.looked > 100 and left == []
