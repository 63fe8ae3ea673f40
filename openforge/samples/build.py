"""Samples of an iteration: which episodes are trained on, as which rows, with which credit.

Episodes that give no row take no part in their group: the mean and standard deviation are those of the rows'
own episodes, so that the trainer can hold veRL's estimator against the table. Every episode, call and group
is counted, as trained or under the reason why not.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openforge import tables
from openforge.config import RunConfig
from openforge.rollout.status import ENDS
from openforge.samples.credit import ESTIMATORS, degenerate, discounts, outcome
from openforge.samples.images import Shown
from openforge.samples.merge import Merged, SamplesError, merge
from openforge.samples.shaping import overlong

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """Rows of the samples table, and what became of everything that went in.

    `report` holds, for episodes, calls and groups: `total`, `trained` and `dropped` (reason -> count), which
    add up; and `rows`, `tokens`, `trained_tokens`, `rows_per_episode`, `calls_per_row`, and of the trained
    episodes how many are `overlong`.
    """

    samples: list[dict[str, Any]]
    report: dict[str, Any]


@dataclass(frozen=True)
class _Episode:
    row: Row
    reward: float
    outcome: float
    merged: list[Merged]
    overlong: bool

    @property
    def name(self) -> str:
        return str(self.row["episode_id"])


def build(
    episodes: Sequence[Row],
    scores: Sequence[Row],
    calls: Sequence[Row],
    config: RunConfig,
    filtered: Collection[str] = (),
    shown: Shown | None = None,
) -> Result:
    """Rows of `tables.SAMPLES` from an iteration's training episodes, their scores and calls.

    `filtered` are the episodes that `data.filter` leaves out. `shown` is what the calls show of images; without it the
    model is a language model.

    Raises:
        SamplesError: tables that contradict one another, or a group sampled by two policies without a
        correction.
    """
    by_episode = _calls_of(calls, {str(e["episode_id"]) for e in episodes})
    latest = _latest(scores)
    lost: Counter[str] = Counter()  # episodes by reason
    unused: Counter[str] = Counter()  # calls by reason
    groups: dict[str, list[_Episode]] = defaultdict(list)
    successes = ESTIMATORS[config.algorithm.adv_estimator].within == "episode"
    for e in _unique_finals(episodes):
        own = by_episode[str(e["episode_id"])]
        reason = _unusable(e, latest.get(str(e["episode_id"])))
        if reason is None and e["episode_id"] in filtered:
            reason = "filtered"
        if reason is None and successes and not latest[str(e["episode_id"])]["passed"]:
            reason = "not_passed"
        if reason:
            lost[reason] += 1
            unused[f"episode: {reason}"] += len(own)
            continue
        score = latest[str(e["episode_id"])]
        rows, dropped = _rows(own, shown or Shown(None, {})) if own else ([], Counter())
        unused += dropped
        kept = [m for m in rows if len(m.token_ids) <= config.actor.row_tokens]
        unused["row_too_long"] += sum(len(m.calls) for m in rows) - sum(len(m.calls) for m in kept)
        if not kept:
            lost["no_call" if not own else "row_too_long" if rows else "no_trainable_call"] += 1
            continue
        shaping = overlong(sum(m.trained_tokens for m in rows), config.reward.reward_kwargs)
        reward = float(score["reward"]) + shaping
        groups[str(e["group_id"])].append(_Episode(e, reward, _outcome(score, config), kept, shaping < 0))
    samples, lost_groups = _credit(groups, config, lost, unused)
    asked = {str(e["group_id"]) for e in episodes}
    lost_groups["no_row"] += len(asked - groups.keys())
    for e in episodes:
        if not e["final"]:
            lost["not_final"] += 1
            unused["episode: not_final"] += len(by_episode[str(e["episode_id"])])
    report = _report(samples, episodes, calls, len(asked), lost, unused, lost_groups)
    long = {e.name for members in groups.values() for e in members if e.overlong}
    report["overlong"] = len(long & {s["episode_id"] for s in samples})
    return Result(samples, report)


def _calls_of(calls: Iterable[Row], known: set[str]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for c in calls:
        found[str(c["episode_id"])].append(c)
    strange = sorted(found.keys() - known)
    if strange:
        raise SamplesError(f"the calls table names episode {strange[0]}, which is not in the episodes table")
    return found


def _rows(calls: Sequence[Row], shown: Shown) -> tuple[list[Merged], Counter[str]]:
    try:
        return merge(calls, shown.fault)
    except KeyError as e:
        raise SamplesError(
            f"episode {calls[0]['episode_id']} shows image {e.args[0]}, which is not in the iteration's blobs"
        ) from None


def _latest(scores: Iterable[Row]) -> dict[str, Row]:
    latest: dict[str, Row] = {}
    for s in scores:
        e = str(s["episode_id"])
        if e not in latest or s["scored_at"] > latest[e]["scored_at"]:
            latest[e] = s
    return latest


def _unique_finals(episodes: Iterable[Row]) -> list[Row]:
    finals: dict[str, Row] = {}
    for e in episodes:
        if e["final"] and finals.setdefault(str(e["rollout_id"]), e) is not e:
            raise SamplesError(f"rollout {e['rollout_id']} has two final episodes; the episodes table must have one")
    return list(finals.values())


def _unusable(episode: Row, score: Row | None) -> str | None:
    if not ENDS[episode["status"]].trained:
        return f"status: {episode['status']}"
    if score is None:
        return "score: missing"
    if score["status"] != "scored" or score["reward"] is None:
        return f"score: {score['status'] if score['status'] != 'scored' else 'NULL'}"
    return None


def _outcome(score: Row, config: RunConfig) -> float:
    """What a group's members must differ in: what its shard looked at, or the reward before any shaping."""
    groups = config.algorithm.filter_groups
    if groups.enable and groups.metric == "acc":
        return float(score["passed"])
    return outcome(float(score["reward"]), json.loads(score["components"] or "{}"))


def _credit(
    groups: Mapping[str, list[_Episode]], config: RunConfig, lost: Counter[str], unused: Counter[str]
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Samples of the groups that teach something; the others' episodes and calls are counted as lost."""
    algorithm, lost_groups = config.algorithm, Counter[str]()
    estimator = ESTIMATORS[algorithm.adv_estimator]
    everyone = [e for members in groups.values() for e in members]
    kept: dict[str, list[_Episode]] = {}
    for group, members in groups.items():
        reason = _teaches_nothing(members if estimator.within == "group" else everyone)
        if reason and estimator.within != "episode":
            lost_groups[reason] += 1
            lost[reason] += len(members)
            unused[f"group: {reason}"] += sum(len(m.calls) for e in members for m in e.merged)
            continue
        _one_policy(group, members, config)
        kept[group] = members
    advantages: dict[str, float] | None = None
    if estimator.formula is not None and kept:
        rewards = {group: {e.name: e.reward for e in members} for group, members in kept.items()}
        advantages = estimator.formula(rewards, algorithm.norm_adv_by_std_in_grpo)
    return [
        row
        for members in kept.values()
        for e in members
        for row in _samples(e, None if advantages is None else advantages[e.name], algorithm.gamma)
    ], lost_groups


def _teaches_nothing(members: Sequence[_Episode]) -> str | None:
    """Why advantages that are relative to one another's rewards say nothing about `members`."""
    if len(members) < 2:
        return "singleton_group"
    if degenerate([e.outcome for e in members]) or degenerate([e.reward for e in members]):
        return "zero_variance"
    return None


def _one_policy(group: str, members: Sequence[_Episode], config: RunConfig) -> None:
    """A group is sampled by one policy, and that is checkpoint b(k): the correction of stale episodes (recorded
    log-probs as old ones, or their ratio to checkpoint k-1's) knows no other."""
    versions = sorted({v for e in members for m in e.merged for v in m.policy_versions})
    if len(versions) > 1:
        raise SamplesError(
            f"group {group} was sampled by {len(versions)} policies ({', '.join(versions)}); an iteration samples with "
            "one checkpoint, so that its episodes are of two runs: remove the iteration's episodes and run them again"
        )
    k = int(members[0].row["iteration"])
    if versions[0].partition("@")[0] != str(config.sampled(k)):
        raise SamplesError(
            f"group {group} was sampled by {versions[0]}; with lag {config.lag} iteration {k} samples with checkpoint "
            f"{config.sampled(k)}: remove the iteration's episodes and run them again"
        )


def _samples(episode: _Episode, advantage: float | None, gamma: float) -> list[dict[str, Any]]:
    e, discount = episode.name, discounts([c for m in episode.merged for c in m.calls], gamma)
    total = sum(m.trained_tokens for m in episode.merged)
    return [
        {
            "sample_id": tables.h("sample", e, i),
            "episode_id": e,
            "group_id": str(episode.row["group_id"]),
            "calls": m.calls,
            "token_ids": m.token_ids.tolist(),
            "loss_mask": m.loss_mask,
            "logprobs": m.logprobs,
            # A row ends with a response, so its last token is its last trained one.
            "rewards": [0.0] * (len(m.token_ids) - 1) + [episode.reward],
            "advantages": None if advantage is None else [advantage * x for x in m.spread(discount)],
            # By trained tokens, not by rows: a mean over all of an episode's tokens is then the weighted mean
            # of its rows' means, however the episode was cut into rows.
            "weight": m.trained_tokens / total,
            "policy_version": ",".join(dict.fromkeys(m.policy_versions)),
            "images": m.images,
        }
        for i, m in enumerate(episode.merged)
    ]


def _report(
    samples: Sequence[Row],
    episodes: Sequence[Row],
    calls: Sequence[Row],
    groups: int,
    lost: Counter[str],
    unused: Counter[str],
    lost_groups: Counter[str],
) -> dict[str, Any]:
    trained = {
        "episodes": len({s["episode_id"] for s in samples}),
        "calls": sum(len(s["calls"]) for s in samples),
        "groups": len({s["group_id"] for s in samples}),
    }
    totals = {"episodes": len(episodes), "calls": len(calls), "groups": groups}
    reasons = {"episodes": lost, "calls": unused, "groups": lost_groups}
    report: dict[str, Any] = {
        what: {
            "total": totals[what],
            "trained": trained[what],
            "dropped": {r: n for r, n in sorted(reasons[what].items()) if n},
        }
        for what in totals
    }
    rows = len(samples)
    return report | {
        "rows": rows,
        "tokens": sum(len(s["token_ids"]) for s in samples),
        "trained_tokens": sum(sum(s["loss_mask"]) for s in samples),
        "rows_per_episode": rows / trained["episodes"] if rows else None,
        "calls_per_row": trained["calls"] / rows if rows else None,
    }
