"""The status of an episode as a literal table: who sets it, and what follows from it. docs/statuses.md is rendered."""

from __future__ import annotations

from typing import NamedTuple


class End(NamedTuple):
    """What an end state means.

    Attributes:
        verified: the verifier ran, or had to run; the episode may have a reward.
        trained: its trainable calls are trained on.
        retried: the rollout is run again while attempts are left (infrastructure failures only).
    """

    verified: bool
    trained: bool
    retried: bool
    meaning: str


ENDS: dict[str, End] = {
    "completed": End(True, True, False, "The harness ended by itself, at its own turn limit included."),
    "agent_timeout": End(True, True, False, "The agent phase used up its seconds and was killed."),
    "agent_error": End(True, True, False, "The harness exited with an error of its own."),
    "budget_exhausted": End(True, True, False, "A limit of ours (turns or tokens) was refused at the proxy."),
    "deadline": End(False, False, False, "The iteration's deadline came first."),
    "setup_failed": End(False, False, True, "Sandbox, files, services or harness could not be set up."),
    "verifier_failed": End(False, False, True, "The verifier crashed or printed no verdict."),
    "verifier_timeout": End(False, False, True, "The verifier used up its seconds."),
    "policy_failed": End(
        False, False, True, "The policy server or the proxy gave no answer within the episode's time."
    ),
    "user_failed": End(False, False, True, "The model that plays the task's user gave no message."),
    "sandbox_lost": End(
        False, False, True, "Sandbox or job died under the episode, or the machine lacked memory or disk."
    ),
    "shard_lost": End(False, False, False, "Its shard's last attempt sealed without it."),
    "unsupported": End(False, False, False, "The task needs what this installation lacks."),
}

# What to look at, beyond the message in the episode's row.
ADVICE: dict[str, str] = {
    "completed": "Nothing; a wrong answer is a reward of 0.",
    "agent_timeout": "`limits.seconds`, and the harness's log among the artifacts.",
    "agent_error": "`harness_exit` and the harness's log among the artifacts.",
    "budget_exhausted": "`limits.turns`, `limits.tokens` and the task's own limits.",
    "deadline": "How many episodes are in flight for the seconds that an episode takes.",
    "setup_failed": "The message: a missing file, software environment or bubblewrap, or more seconds than "
    "`sandbox.create_seconds` or `sandbox.setup_seconds`.",
    "verifier_failed": "The verifier, by hand: its command stands in the rollout's row.",
    "verifier_timeout": "`verifier.timeout_seconds` of the task, and `sandbox.verify_seconds`.",
    "policy_failed": "`.servers/*.log` and the proxy's log in the shard's partial folder.",
    "user_failed": "The endpoint of `judge`, which plays users.",
    "sandbox_lost": "Where sandboxes run; memory, and who killed processes there. An interrupted job's own open "
    "attempts end so too.",
    "shard_lost": "The log of the shard's job.",
    "unsupported": "What the message names.",
}

TRANSITIONS: dict[str, tuple[str, ...]] = {
    "planned": ("setup", "deadline", "shard_lost", "unsupported"),
    "setup": ("agent", "setup_failed", "policy_failed", "sandbox_lost", "unsupported", "deadline", "shard_lost"),
    "agent": ("verify", "policy_failed", "user_failed", "sandbox_lost", "deadline", "shard_lost"),
    "verify": (
        "completed",
        "agent_timeout",
        "agent_error",
        "budget_exhausted",
        "verifier_failed",
        "verifier_timeout",
        "sandbox_lost",
        "deadline",
        "shard_lost",
    ),
}


def failed(status: str) -> bool:
    """Whether a rollout that ended so came to nothing for want of infrastructure: another attempt may mend it."""
    return ENDS[status].retried or status == "shard_lost"


def markdown() -> str:
    """docs/statuses.md."""
    out = [
        "# How an episode ends",
        "",
        "Rendered from `openforge/rollout/status.py` by `make docs`; a test compares. The column `status` of the table "
        "`episodes` holds one of these ends, one row an attempt; `final` marks the attempt that counts. What befell "
        "the infrastructure is never a reward of 0: such an episode has no reward, and its rollout is run again as the "
        "next attempt while `rollout.attempts` are left. When less than `rollout.quorum` of an iteration's rollouts "
        "have a reward, its score job stops the run.",
        "",
        "| status | meaning | reward | trained on | run again | look at |",
        "|---|---|---|---|---|---|",
    ]
    for name, end in ENDS.items():
        marks = ("yes" if yes else "no" for yes in (end.verified, end.trained, end.retried))
        out.append(f"| {name} | {end.meaning} | {' | '.join(marks)} | {ADVICE[name]} |")
    out += [
        "",
        "Trained on means that its trainable calls are: an episode whose group has no spread, whose rows are too long "
        "or whose calls were not delivered is left out all the same, under a reason that `samples/**/report.json` "
        "counts.",
        "",
        "An episode passes these states; from each, it can go on to:",
        "",
        "| state | next |",
        "|---|---|",
    ]
    out += [f"| {state} | {', '.join(following)} |" for state, following in TRANSITIONS.items()]
    return "\n".join([*out, ""])
