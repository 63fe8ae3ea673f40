"""Why an episode or a group is not trained on, as the samples' report counts it, and what that means."""

from __future__ import annotations

from openforge.rollout.status import ENDS

REASONS: dict[str, str] = {
    "not_final": "An attempt that another one took the place of.",
    "filtered": "It fails the condition data.filter.",
    "not_passed": "Successes alone are trained on (adv_estimator sft), and it is none.",
    "no_call": "It ended before its first recorded call.",
    "no_trainable_call": "None of its calls may be trained; the calls' own reasons say why.",
    "row_too_long": "Its rows do not fit actor.ppo_max_token_len_per_gpu.",
    "singleton_group": "One alone in its group: there is nothing to compare its reward with.",
    "zero_variance": "All of its group had the same outcome.",
    "no_row": "None of its episodes gives a row.",
}
# Of calls that the proxy found nothing wrong with; its own reasons are in openforge/proxy/trained.py.
CALLS: dict[str, str] = {
    "image_tokens": "Its image tokens are not those that the trainer's image processor makes of its images.",
    "image_token_sampled": "The policy sampled a token that stands for an image or a video.",
    "image_format": "It shows an image that is no PNG, JPEG or GIF, whose size is not known.",
}
SCORES = {"missing": "It was not scored.", "NULL": "Its score has no reward.", "judge_failed": "Its judge failed."}


def meaning(reason: str) -> str:
    """A sentence on a reason; empty for one of a call, which the proxy gave."""
    kind, _, name = reason.rpartition(": ")
    if kind.endswith("status"):
        return ENDS[name].meaning
    return SCORES.get(name, "It could not be scored.") if kind.endswith("score") else (REASONS | CALLS).get(name, "")
