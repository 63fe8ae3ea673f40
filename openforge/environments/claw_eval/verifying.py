"""After the agent's death: the evidence, the snapshot, and the verifier's run.

What the agent left in the sandbox is treated as hostile: the verifier's folder has a name it could not know, holds
nothing of the agent's, and is the verifier's working folder; links out of the work folder, by which the agent's
"result" could be the verifier's own expected one, are removed before those files enter.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from openforge.environments import EnvCallResult
from openforge.environments.claw_eval import setup as setups
from openforge.environments.claw_eval import snapshot
from openforge.environments.claw_eval.evidence import Evidence
from openforge.environments.claw_eval.setup import Setup
from openforge.environments.verdict import VerdictError, parse
from openforge.harnesses.base import path_with_python, upload_all
from openforge.sandboxes.join import BASE_ENV, WORK
from openforge.sandboxes.protocol import ExecResult, Sandbox, SandboxError

CLEAN_SECONDS = 60.0
MESSAGE = 300

# Run in the work folder: removes links that lead out of it and whatever is no file, folder or link (a named
# pipe would block the verifier). realpath: a chain of links counts by where it ends, dangling or not. Folders
# that the agent closed to itself are opened first, so that nothing hides there.
_CLEAN = """\
import contextlib, os, stat
work = "/workspace"
def clean(path):
    mode = os.lstat(path).st_mode
    if stat.S_ISDIR(mode):
        if mode & 0o700 != 0o700:
            os.chmod(path, stat.S_IMODE(mode) | 0o700)
    elif stat.S_ISLNK(mode):
        if not (os.path.realpath(path) + "/").startswith(work + "/"):
            os.unlink(path)
    elif not stat.S_ISREG(mode):
        os.unlink(path)
clean(work)
for folder, folders, files in os.walk(work):
    for name in folders + files:
        with contextlib.suppress(OSError):
            clean(os.path.join(folder, name))
"""


@dataclass(frozen=True)
class Verifier:
    """How a task is judged.

    Attributes:
        declared: the row's column `verifier`.
        sandbox: where it runs.
        python: the Python of the task's services and grader.
    """

    declared: Mapping[str, Any]
    sandbox: Sandbox
    python: str

    async def run(self, evidence: Evidence, result: EnvCallResult) -> None:
        """Bring its files in and run it; its verdict goes into the result, its failure replaces the status."""
        folder = f"/tmp/verifier-{secrets.token_hex(8)}"
        answer = (f"{folder}/answer", (result.answer or "").encode(errors="replace"), 0o600)
        files = [(f"{folder}/evidence/{name}", data, 0o600) for name, data in evidence.files().items()]
        await upload_all(self.sandbox, [*placed(self.declared["files"], folder), answer, *files])
        places = {
            "{answer}": f"{folder}/answer",
            "{workspace}": WORK,
            "{evidence}": f"{folder}/evidence",
            "{python}": self.python,
        }
        seconds = self.declared["seconds"]
        done = await self.sandbox.exec(
            [places.get(word, word) for word in self.declared["command"]],
            timeout=seconds,
            cwd=folder,
            env=_clean_env(folder),
        )
        result.verifier_exit = done.exit_code
        problem = judged(done, seconds)
        if problem is None:
            result.verifier_output = _last_line(done.stdout)
        else:
            result.status, result.message = problem


async def clean(sandbox: Sandbox) -> None:
    """Remove from the work folder what is no file or folder of it.

    Raises:
        SandboxError: that could not be done.
    """
    command = ["python3", "-I", "-S", "-c", _CLEAN]
    done = await sandbox.exec(command, timeout=CLEAN_SECONDS, cwd="/", env=_clean_env("/tmp"))
    if done.exit_code != 0:
        told = done.stderr.decode(errors="replace").strip()[-MESSAGE:] or "out of time"
        raise SandboxError(f"the work folder could not be cleaned before verification: {told}")


async def look(sandbox: Sandbox, declared: Mapping[str, Any], setup: Setup) -> dict[str, Any] | None:
    """Place the grader's late files in a clean work folder, then take the snapshot; None where the task asks for none.

    Args:
        declared: the row's column `verifier`, which holds those files.
    """
    by_path = {f["path"]: f for f in declared["files"]}
    late = [{**by_path[f"{setups.LATE}/{name}"], "path": name} for name in setup.late]
    await upload_all(sandbox, placed(late, WORK))
    local = {f"local_file:{name}": _base64(by_path[f"{setups.LOCAL}/{name}"]["content"]) for name in setup.local}
    if setup.snapshot is None:
        return local or None
    return await snapshot.take(sandbox, setup.snapshot, _clean_env("/tmp")) | local


def _base64(data: bytes) -> dict[str, str]:
    return {"encoding": "base64", "content": base64.b64encode(data).decode()}


def judged(done: ExecResult, seconds: float) -> tuple[str, str] | None:
    """Status and message of a verifier that failed; None if it gave a verdict."""
    if done.timed_out:
        return "verifier_timeout", f"the verifier was killed after {seconds:g} s"
    if done.exit_code != 0:
        told = done.stderr.decode(errors="replace").strip()[-MESSAGE:] or "it printed no error"
        return "verifier_failed", f"the verifier exited with code {done.exit_code}: {told}"
    line = _last_line(done.stdout)
    if not line:
        return "verifier_failed", "the verifier printed no line"
    try:
        parse(line)
    except VerdictError as e:
        return "verifier_failed", str(e)
    return None


def placed(files: Iterable[Mapping[str, Any]], folder: str) -> list[tuple[str, bytes, int]]:
    """Files of a row as what `upload_all` takes."""
    return [(f"{folder}/{f['path']}", f["content"], f["mode"]) for f in files]


def _last_line(stdout: bytes) -> str:
    lines = stdout.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _clean_env(home: str) -> dict[str, str]:
    """Nothing of the agent's home: a file there could change how a program starts."""
    path = path_with_python()
    return {**BASE_ENV, "HOME": home, "PATH": path, "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
