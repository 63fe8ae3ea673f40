"""The snapshot of a work folder after the agent's death, in ClawEval's shape (`evidence`)."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from openforge.environments.claw_eval.setup import Snapshot
from openforge.sandboxes.join import WORK
from openforge.sandboxes.protocol import Sandbox, SandboxError

FIND_SECONDS = 60.0
FILES_MOST, BYTES_MOST = 200, 16 << 20  # of all patterns together
_TEXT_MOST = 1 << 20  # of what a command prints

# Run inside, where links lead nowhere that the agent could not go itself. Prints {pattern: [[path, base64], ...]}.
_READ = """\
import base64, glob, json, os, stat, sys
patterns, files, size = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
found = {}
for pattern in patterns:
    found[pattern] = rows = []
    for path in sorted(glob.glob(os.path.join("/workspace", pattern), recursive=True)):
        if len(rows) >= files or size <= 0:
            break
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            with open(descriptor, "rb") as f:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    continue
                data = f.read(size + 1)
        except OSError as e:
            rows.append([path, None, e.strerror])
            continue
        size -= len(data)
        rows.append([path, base64.b64encode(data).decode() if size >= 0 else None, "too large"])
sys.stdout.write(json.dumps(found))
"""


async def take(sandbox: Sandbox, asked: Snapshot, env: Mapping[str, str]) -> dict[str, Any]:
    """Run the commands, then read the files.

    Args:
        env: environment of the commands.

    Returns:
        By "cmd:COMMAND" and "file:PATH"; what could not be had is {"error": why}.

    Raises:
        SandboxError: the sandbox refused.
    """
    found: dict[str, Any] = {}
    for command in asked.commands:
        done = await sandbox.exec(command, timeout=asked.seconds, cwd=WORK, env=env)
        if done.timed_out:
            found[f"cmd:{command}"] = {"error": f"it was killed after {asked.seconds:g} s"}
            continue
        found[f"cmd:{command}"] = {
            "exit_code": done.exit_code,
            "stdout": done.stdout[:_TEXT_MOST].decode(errors="replace"),
            "stderr": done.stderr[:_TEXT_MOST].decode(errors="replace"),
        }
        # What a command leaves running could change the files while they are read.
        await sandbox.end_processes()
    return found | await _files(sandbox, asked, env)


async def _files(sandbox: Sandbox, asked: Snapshot, env: Mapping[str, str]) -> dict[str, Any]:
    if not asked.files:
        return {}
    argv = ["python3", "-I", "-S", "-c", _READ, json.dumps(asked.files), str(FILES_MOST), str(BYTES_MOST)]
    # Not by its output, which `exec` keeps the ends of only.
    target = "/tmp/snapshot.json"
    command = ["bash", "-c", 'exec "$@" > ' + target, "bash", *argv]
    done = await sandbox.exec(command, timeout=FIND_SECONDS, cwd="/", env=env)
    if done.exit_code != 0:
        told = done.stderr.decode(errors="replace").strip()[-300:] or "out of time"
        raise SandboxError(f"the files of the snapshot could not be read: {told}")
    read = json.loads(await sandbox.download_content(target))
    found: dict[str, Any] = {}
    for pattern, rows in read.items():
        if not rows:
            found[f"file:{pattern}"] = {"error": "no such file"}
        for path, data, why in rows:
            key = pattern if path in (pattern, f"{WORK}/{pattern}") else path
            found[f"file:{key}"] = {"error": why} if data is None else content(base64.b64decode(data))
    return found


def content(data: bytes) -> dict[str, str]:
    """A file's bytes as {"encoding", "content"}: utf-8 for text, else base64."""
    try:
        return {"encoding": "utf-8", "content": data.decode()}
    except UnicodeDecodeError:
        return {"encoding": "base64", "content": base64.b64encode(data).decode()}
