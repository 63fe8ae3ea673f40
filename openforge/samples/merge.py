"""From an episode's calls to its training rows: exact prefixes only, each trainable call's loss in exactly
one row."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from openforge.proxy.lineage import Prompts

# Why a call may not be trained on after all, by its row and what gives a call's prompt; None where it may.
Fault = Callable[[Mapping[str, Any], Callable[[int], "array[int]"]], str | None]


class SamplesError(ValueError):
    """Rows that contradict one another; one sentence that names the episode and the call or group."""


@dataclass(frozen=True)
class Merged:
    """One training row before credit; sequences have length L.

    Attributes:
        calls: indices of the calls whose responses are trained in it, in order.
        token_ids: the last call's prompt and response, int32.
        lengths: tokens of each call's response, in the order of `calls`.
        loss_mask: 1 where a token is a response token of one of `calls`.
        logprobs: recorded log-probabilities there, 0 elsewhere.
        policy_versions: the versions that sampled `calls`.
        images: hashes of the images in the last call's prompt, in the order of their tokens.
    """

    calls: list[int]
    lengths: list[int]
    token_ids: array[int]
    loss_mask: list[int]
    logprobs: list[float]
    policy_versions: list[str]
    images: list[str]

    @property
    def trained_tokens(self) -> int:
        return sum(self.lengths)

    def spread(self, values: Mapping[int, float]) -> list[float]:
        """A value by call at each of its response tokens, 0 elsewhere (L)."""
        trained = (values[c] for c, n in zip(self.calls, self.lengths, strict=True) for _ in range(n))
        return [next(trained) if m else 0.0 for m in self.loss_mask]


def _no_fault(_: Mapping[str, Any], __: Callable[[int], array[int]]) -> None:
    return None


def merge(rows: Sequence[Mapping[str, Any]], fault: Fault = _no_fault) -> tuple[list[Merged], Counter[str]]:
    """Training rows of one episode, by their first call, and how many calls are not trained for which reason.

    A trainable call continues the row of the nearest trainable call that its prompt exactly extends. Where
    several extend the same one, the first to arrive continues its row; each other begins a row of its own
    with the shared prefix as context, and so does one whose prompt shows other images in the same tokens. Calls in
    between that are not trainable are context. `fault` is asked of those that the table calls trainable.

    Raises:
        SamplesError: counts that disagree, or a parent that the prompt does not extend.
    """
    calls = {int(r["call"]): r for r in rows}
    if len(calls) != len(rows):
        raise SamplesError(f"episode {rows[0]['episode_id']}: a call stands twice in the calls table")
    prompts = Prompts(rows)
    reasons = {c: fault(r, prompts.of) if r["trainable"] else r["reason"] or "not trainable" for c, r in calls.items()}
    dropped = Counter(reason for reason in reasons.values() if reason is not None)
    heads, following = _chains(calls, {c for c, reason in reasons.items() if reason is None})
    return [_row(head, following, calls, prompts) for head in heads], dropped


def _chains(calls: Mapping[int, Mapping[str, Any]], trainable: set[int]) -> tuple[list[int], dict[int, int]]:
    """First calls of rows, and for a call the one that continues its row."""
    following: dict[int, int] = {}
    heads = []
    for c in sorted(trainable):
        before = calls[c]["parent"]
        while before is not None and before not in trainable:
            before = calls[before]["parent"]
        if before is None or before in following or not _shows_more(calls[before], calls[c]):
            heads.append(c)
        else:
            following[before] = c
    return heads, following


def _shows_more(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether a prompt's images go on from those of the one before: images of one size have the same tokens."""
    images = before["images"] or []
    return list(images) == list((after["images"] or [])[: len(images)])


def _check(row: Mapping[str, Any], prompt: Sequence[int]) -> None:
    where = f"episode {row['episode_id']}, call {row['call']}"
    ids, logprobs = row["response_token_ids"], row["logprobs"]
    if not ids or len(ids) != len(logprobs):
        raise SamplesError(f"{where} is trainable with {len(ids)} response tokens and {len(logprobs)} logprobs")
    if not prompt or len(prompt) != row["prompt_tokens"]:
        raise SamplesError(f"{where}: its prompt has {row['prompt_tokens']} tokens, but {len(prompt)} are stored")


def _row(head: int, following: Mapping[int, int], calls: Mapping[int, Mapping[str, Any]], prompts: Prompts) -> Merged:
    chain = [head]
    while chain[-1] in following:
        chain.append(following[chain[-1]])
    ids = array("i")
    mask: list[int] = []
    logprobs: list[float] = []
    for c in chain:
        prompt, row = prompts.of(c), calls[c]
        _check(row, prompt)
        # Never a blind slice: a prompt that is not the row so far and more is another conversation.
        if prompt[: len(ids)] != ids:
            raise SamplesError(
                f"episode {row['episode_id']}, call {c}: its prompt does not extend call {row['parent']}, its parent"
            )
        response = row["response_token_ids"]
        context = len(prompt) - len(ids)
        mask.extend(repeat(0, context))
        mask.extend(repeat(1, len(response)))
        logprobs.extend(repeat(0.0, context))
        logprobs.extend(map(float, row["logprobs"]))
        ids = prompt
        ids.extend(response)
    versions = [str(calls[c]["policy_version"]) for c in chain]
    lengths = [len(calls[c]["response_token_ids"]) for c in chain]
    return Merged(chain, lengths, ids, mask, logprobs, versions, list(calls[chain[-1]]["images"] or ()))
