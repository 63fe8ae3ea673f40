"""One vLLM server: its command line for CPU and GPU, its life, and a change of weights that is checked.

The server's weight RPCs (`/pause`, `/collective_rpc`, ...) are open to whoever reaches its port, API key or not,
so it listens on loopback only and nobody forwards these paths.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from openforge import software
from openforge.config import Server as ServerConfig
from openforge.policy import process
from openforge.policy.probe import compare, read_probe

MODEL = "policy"
PORTS = range(20000, 32768)
PORT_TRIES = 3
HEARTBEAT_SECONDS = 120.0
SWAP_SECONDS = 600.0
_PORT_TAKEN = "address already in use"
# Whoever starts the server may be killed -9; the kernel then ends the server. Asked for by a program that becomes the
# server: Python code between fork and exec deadlocks on a lock that another thread held, and the heartbeat is one.
_DIE_WITH_PARENT = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, {int(signal.SIGTERM)})  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("the policy server's keeper is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class ServerError(RuntimeError):
    """The policy server could not be started, died, or refused new weights; with its last log lines."""


def command(
    cfg: ServerConfig,
    model_dir: Path,
    port: int,
    python: Path,
    *,
    api_key: str,
    root: Path | None = None,
    base: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """The command line and whole environment that serve `model_dir` on 127.0.0.1:`port`.

    Args:
        python: of the serve environment.
        api_key: handed over in the environment, for every user of a machine can read command lines.
        root: chat_template's path starts here; the project's root.
        base: environment to start from; this process's.
    """
    argv = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    argv += [
        "--model",
        str(model_dir),
        "--served-model-name",
        MODEL,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    argv += [
        "--dtype",
        cfg.dtype,
        "--max-model-len",
        str(cfg.max_model_len),
        "--max-num-seqs",
        str(cfg.max_num_seqs),
    ]
    argv += ["--block-size", str(cfg.block_size)]
    # Model folders carry sampling defaults; recorded logprobs would be renormalised on a truncated support.
    argv += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    argv += ["--no-enable-log-requests", "--disable-uvicorn-access-log"]
    env = dict(os.environ if base is None else base)
    env |= {
        "VLLM_API_KEY": api_key,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if cfg.device == "cpu":
        # On CPU a request with a seed kills the engine once its prompt is prefilled in chunks.
        tokens = max(cfg.max_model_len, cfg.max_num_seqs, 2048)
        argv += ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(tokens)]
        env |= {
            # Without it the first request with logprobs compiles for 26 s, or kills the engine without g++.
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(cfg.kv_cache_gb),
            # vLLM binds one thread itself; two OpenMP threads on a busy machine collapse.
            "OMP_NUM_THREADS": "1",
            # Snakemake sets it to the job's threads, and torch lets it win over OMP_NUM_THREADS: measured, two
            # threads bound to one core sample 20 times slower.
            "MKL_NUM_THREADS": "1",
        }
        for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
            env.pop(name, None)
    else:
        argv += ["--tensor-parallel-size", str(cfg.tensor_parallel_size)]
    if cfg.chat_template is not None:
        argv += ["--chat-template", str((root or software.ROOT) / cfg.chat_template)]
    if cfg.tool_call_parser is not None:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", cfg.tool_call_parser]
    return argv, env


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now.

    Below the range of outgoing connections (from 32768): vLLM binds it seconds later, and one of those could
    take it.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerError(f"100 ports of 127.0.0.1 between {PORTS.start} and {PORTS.stop - 1} are all in use")


class Server:
    """A running vLLM server.

    Attributes:
        port, api_key: how to reach it on 127.0.0.1.
        version: policy_version of the weights it serves, checked by the probe.
        identity: of the process that leads its session.
    """

    def __init__(
        self,
        cfg: ServerConfig,
        child: subprocess.Popen[bytes],
        who: process.Identity,
        port: int,
        api_key: str,
        log: Path,
    ) -> None:
        self.cfg, self.port, self.api_key, self.log = cfg, port, api_key, log
        self.identity = who
        self.version: str | None = None
        self._child = child
        headers = {"Authorization": f"Bearer {api_key}"}
        # trust_env=False: a proxy of the environment must not see loopback.
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, trust_env=False)

    @classmethod
    def start(
        cls,
        cfg: ServerConfig,
        policy: Path,
        version: str,
        *,
        log: Path,
        root: Path | None = None,
        at: tuple[int, str] | None = None,
        started: Callable[[Server], None] = lambda _: None,
        waiting: Callable[[], None] = lambda: None,
    ) -> Server:
        """Start a server on `policy`, wait until it is healthy, and check its weights by the probe.

        Must be called in a thread that outlives the server: the child dies with it (PR_SET_PDEATHSIG).

        Args:
            log: its output is appended here.
            at: port and API key of a dead server that this one replaces; else a free port, another one where vLLM
                finds it taken when it binds it, and a new key.
            started: called with the server as soon as its process exists.
            waiting: called several times a second until it is healthy; what it raises ends the start.

        Raises:
            ServerError: it died or was not healthy in time; with the last lines of its log.
            PolicyMismatch: it serves other weights than the folder's.
        """
        for left in reversed(range(PORT_TRIES)):
            port, api_key = at or (free_port(), secrets.token_hex(16))
            begin = log.stat().st_size if log.exists() else 0
            try:
                return cls._start(cfg, policy, version, log, root, port, api_key, started, waiting)
            except ServerError:
                # vLLM binds it seconds after it was found free.
                if not left or _PORT_TAKEN not in _text(log, begin).lower():
                    raise
        raise AssertionError("unreachable")

    @classmethod
    def _start(
        cls,
        cfg: ServerConfig,
        policy: Path,
        version: str,
        log: Path,
        root: Path | None,
        port: int,
        api_key: str,
        started: Callable[[Server], None],
        waiting: Callable[[], None],
    ) -> Server:
        python = software.python_of(f"serve-{cfg.device}", root)
        argv, env = command(cfg, policy.resolve(), port, python, api_key=api_key, root=root)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *argv],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        who = process.identity(child.pid)
        if who is None:
            raise ServerError(f"the policy server died (exit code {child.wait()}){last_lines(log)}")
        server = cls(cfg, child, who, port, api_key, log)
        try:
            started(server)
            server._wait_healthy(waiting)
            server.probe(policy, version)
            server._post("/update_weight_version", {"new_version": version})
        except BaseException:
            server.stop()
            raise
        server.version = version
        return server

    def _wait_healthy(self, waiting: Callable[[], None]) -> None:
        deadline = time.monotonic() + self.cfg.start_seconds
        # A dead server looks like a slow one over HTTP: watch the process too.
        while self._child.poll() is None:
            # Short: a stranger on a port that vLLM is about to find taken may never answer.
            if self.healthy(seconds=2):
                return
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the policy server was not healthy within {self.cfg.start_seconds:g} s (server.start_seconds)"
                    f"{last_lines(self.log)}"
                )
            waiting()
            time.sleep(0.1)
        raise ServerError(f"the policy server died (exit code {self._child.returncode}){last_lines(self.log)}")

    def healthy(self, seconds: float = 10) -> bool:
        """Whether the process lives and /health answers 200 within `seconds`."""
        try:
            return self._child.poll() is None and self._http.get("/health", timeout=seconds).status_code == 200
        except httpx.HTTPError:
            return False

    def fault(self) -> str | None:
        """Why the server cannot answer any more: its process ended, or /health says so; None while neither does.

        One that is only slow to say it is no fault: `heartbeat` tells whether it hangs.
        """
        code = self._child.poll()
        if code is not None:
            return f"it died (exit code {code})"
        try:
            status = self._http.get("/health", timeout=5).status_code
        except httpx.ConnectError as e:
            return f"it does not take connections ({e})"
        except httpx.HTTPError:
            return None  # slow, or it closed an idle connection just now
        return None if status == 200 else f"its engine is dead (/health answered {status})"

    def heartbeat(self, seconds: float = HEARTBEAT_SECONDS) -> bool:
        """Whether the engine samples one token within `seconds`: /health answers 200 while it hangs.

        For a thread of its own.
        """
        body = {"model": MODEL, "prompt": ".", "max_tokens": 1}
        url, headers = f"http://127.0.0.1:{self.port}/v1/completions", {"Authorization": f"Bearer {self.api_key}"}
        try:
            return httpx.post(url, json=body, headers=headers, timeout=seconds, trust_env=False).status_code == 200
        except httpx.TimeoutException:
            return False
        except httpx.HTTPError:
            return True  # a dead server, which `fault` names, hangs no more

    def swap(self, policy: Path, version: str) -> None:
        """Serve the weights of `policy` from now on, after the requests in flight; checked by the probe.

        Raises:
            ServerError: a step was refused. The server's weights are then unknown: stop it.
            PolicyMismatch: the server still serves other weights. Stop it.
        """
        self.version = None
        self._post("/pause?mode=wait")
        weights = {"method": "reload_weights", "kwargs": {"weights_path": str(policy.resolve())}}
        self._post("/collective_rpc", weights)
        if not self._post("/reset_prefix_cache").get("success", False):
            raise ServerError("the policy server could not drop its prefix cache, which belongs to the old weights")
        self._post("/update_weight_version", {"new_version": version})
        self._post("/resume")
        self.probe(policy, version)
        self.version = version

    def probe(self, policy: Path, version: str) -> float:
        """Compare the server's logprobs of the probe prompt with the checkpoint's; the largest difference.

        Raises:
            PolicyMismatch: they differ by more than the tolerance of the server's dtype.
        """
        ids, expected = read_probe(policy)
        body = {"model": MODEL, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        # One that hangs must not hold its keeper for as long as a change of weights may take.
        answer = self._post("/v1/completions", body, HEARTBEAT_SECONDS)
        served = answer["choices"][0]["prompt_logprobs"][1:]
        values = [float(at[str(token)]["logprob"]) for at, token in zip(served, ids[1:], strict=True)]
        return compare(expected, values, self.cfg.dtype, f"policy {version} ({policy})")

    def _post(self, path: str, body: Any = None, seconds: float = SWAP_SECONDS) -> dict[str, Any]:
        try:
            answer = self._http.post(path, json={} if body is None else body, timeout=seconds)
        except httpx.HTTPError as e:
            raise ServerError(f"the policy server gave no answer to {path}: {e!r}{last_lines(self.log)}") from e
        if answer.status_code != 200:
            raise ServerError(
                f"the policy server answered {path} with {answer.status_code}: {answer.text[:500]}"
                f"{last_lines(self.log)}"
            )
        data = answer.json() if answer.content else {}
        return data if isinstance(data, dict) else {}

    def stop(self) -> None:
        """End the server and everything it started."""
        self.version = None
        process.end_session(self.identity)
        self._child.wait()
        self._http.close()


def _text(log: Path, begin: int) -> str:
    with open(log, "rb") as f:
        f.seek(begin)
        return f.read().decode(errors="replace")


def last_lines(log: Path, n: int = 12) -> str:
    """The last lines of a log, to be appended to an error message."""
    try:
        lines = log.read_bytes()[-20000:].decode(errors="replace").strip().splitlines()[-n:]
    except OSError:
        return ""
    return f"; the end of {log}:\n" + "\n".join(lines) if lines else f"; {log} is empty"
