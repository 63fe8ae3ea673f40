"""The status of an episode as a literal table: who sets it, and what follows from it."""

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
    "sandbox_lost": End(
        False, False, True, "Sandbox or job died under the episode, or the machine lacked memory or disk."
    ),
    "shard_lost": End(False, False, False, "Its shard's last attempt sealed without it."),
    "unsupported": End(False, False, False, "The task needs what this installation lacks."),
}

TRANSITIONS: dict[str, tuple[str, ...]] = {
    "planned": ("setup", "deadline", "shard_lost", "unsupported"),
    "setup": ("agent", "setup_failed", "policy_failed", "sandbox_lost", "deadline", "shard_lost"),
    "agent": ("verify", "policy_failed", "sandbox_lost", "deadline", "shard_lost"),
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
