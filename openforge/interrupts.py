"""How a command ends early: Ctrl-C, SIGTERM, or the death of Snakemake reach every job as one SIGTERM.

Snakemake itself waits for its running jobs on either signal, and a job outlives a killed Snakemake. So the Snakefile
hands signals on to the jobs, and every job watches the process that owns it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

from openforge.policy import process

# How Snakemake names the script that it starts for a job.
_SCRIPT = b"/.snakemake/scripts/"


def hand_on(runs: list[str]) -> None:
    """In Snakemake's main thread: end this command's running jobs when it is told to end."""
    if threading.current_thread() is not threading.main_thread():
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=_watch_signals, args=(read_end, runs), daemon=True).start()


def _watch_signals(read_end: int, runs: list[str]) -> None:
    while data := os.read(read_end, 64):
        if signal.SIGINT in data or signal.SIGTERM in data:
            break
    where = ", ".join(f"results/{r}" for r in runs) or "results"
    print(
        f"\ninterrupted: ending the running jobs. Finished jobs and the finished episodes of running shards stay in "
        f"{where}; the same command goes on.",
        file=sys.stderr,
        flush=True,
    )
    told: set[process.Identity] = set()
    # Until this process ends: a job may just be starting.
    while True:
        for who in jobs(process.this()):
            if who not in told:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(who.pid, signal.SIGTERM)
                told.add(who)
        time.sleep(0.2)


def jobs(owner: process.Identity) -> list[process.Identity]:
    """The scripts that run for a Snakemake process of this machine."""
    found = []
    mark = f"OPENFORGE_OWNER={owner}".encode()
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                # The interpreter with its script, not the shell around it, which would die before it.
                if len(words) < 2 or not any(_SCRIPT in w for w in words[1:2]):
                    continue
                who = process.identity(int(entry))
                if who is not None and mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(who)
    return found


def end_with_owner() -> None:
    """In a job: SIGTERM ends it once and in order, and so does the death of the Snakemake that owns it.

    SIGINT is ignored: a terminal sends it to the job and to Snakemake, which hands it on as SIGTERM. A second SIGTERM
    must not cut the first one's clean-up short.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt)
    owner = os.environ.get("OPENFORGE_OWNER")
    if owner:
        threading.Thread(target=_watch_owner, args=(process.parse(owner),), daemon=True).start()


def _interrupt(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _watch_owner(owner: process.Identity) -> None:
    try:
        pidfd = os.pidfd_open(owner.pid)
    except OSError:
        pidfd = None
    if pidfd is not None and process.alive(owner):
        select.select([pidfd], [], [])
    # The main thread itself: delivered to another, the signal would not wake it from what it waits for.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def cancel_task_on_end() -> None:
    """In a job's event loop: what ends the job cancels the task that calls this, once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        # A second one must not cut the clean-up short.
        if not task.cancelling():
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, cancel)
