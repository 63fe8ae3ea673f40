"""Rows of the scores table: a verifier's verdict, completed by the judge where it leaves something to it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from openforge.environments import verdict
from openforge.environments.claw_eval.grading import Graded
from openforge.environments.verdict import Claw, Rubric, Verdict
from openforge.judge import Judge, Judgement, Question
from openforge.judge.transcript import transcript
from openforge.rollout.status import ENDS

SCORER_VERSION = "verifier-1"
NO_JUDGE = "the task is judged by a model, and no judge is configured; set judge.url and judge.model"

Row = dict[str, Any]
Given = Mapping[str, Any]
# Runs a grader that asks a judge itself: on an episode, its rollout and its calls.
Regrade = Callable[[Given, Given, Sequence[Given]], Graded]


class ScoreError(ValueError):
    """An episode whose evidence is not what its status says; one sentence."""


@dataclass(frozen=True)
class Scorer:
    """One way to score.

    Attributes:
        claw: what the reward of a verdict with ClawEval's dimensions is.
        judge: None where none is configured.
        regrade: for tasks whose own grader asks the judge; None where none is configured.
    """

    claw: Claw = "pass"
    judge: Judge | None = None
    regrade: Regrade | None = None

    def score_all(self, episodes: Sequence[Given], rollouts: Sequence[Given], calls: Sequence[Given]) -> list[Row]:
        """Score rows of the final episodes, in their order.

        Args:
            rollouts: rows that hold the episodes' tasks.
            calls: the episodes' calls, for what a judge sees.

        Raises:
            VerdictError: a verifier's line is no verdict.
            ScoreError: an episode is verified and holds no line, or its task has no rubric.
        """
        final = [e for e in episodes if e["final"]]
        verdicts = {e["episode_id"]: v for e in final if (v := _verdict(e)) is not None}
        tasks, by_episode = {r["rollout_id"]: r for r in rollouts}, defaultdict[str, list[Given]](list)
        for c in calls:
            by_episode[c["episode_id"]].append(c)
        judgements = self._judged(final, verdicts, tasks, by_episode)
        graded = self._graded(final, verdicts, tasks, by_episode)
        now = datetime.now(UTC)
        ids = [e["episode_id"] for e in final]
        return [
            self._row(e, verdicts.get(i), judgements.get(i), graded.get(i), now)
            for i, e in zip(ids, final, strict=True)
        ]

    def _judged(
        self,
        final: Sequence[Given],
        verdicts: Mapping[str, Verdict],
        tasks: Mapping[str, Given],
        calls: Mapping[str, Sequence[Given]],
    ) -> dict[str, Judgement]:
        if self.judge is None:
            return {}
        questions = {
            e["episode_id"]: _question(rubric, tasks[e["rollout_id"]], calls[e["episode_id"]])
            for e in final
            if (rubric := _rubric(verdicts.get(e["episode_id"]))) is not None
            and not rubric.grader
            and rubric.asked(verdicts[e["episode_id"]].score)
        }
        return dict(zip(questions, self.judge.judge_all(list(questions.values())), strict=True))

    def _graded(
        self,
        final: Sequence[Given],
        verdicts: Mapping[str, Verdict],
        tasks: Mapping[str, Given],
        calls: Mapping[str, Sequence[Given]],
    ) -> dict[str, Graded]:
        if self.judge is None or (regrade := self.regrade) is None:
            return {}
        asked = [e for e in final if (r := _rubric(verdicts.get(e["episode_id"]))) is not None and r.grader]
        with ThreadPoolExecutor(self.judge.config.concurrency) as pool:
            done = pool.map(lambda e: regrade(e, tasks[e["rollout_id"]], calls[e["episode_id"]]), asked)
            return dict(zip([e["episode_id"] for e in asked], done, strict=True))

    def _row(
        self, episode: Given, v: Verdict | None, judgement: Judgement | None, graded: Graded | None, now: datetime
    ) -> Row:
        row: Row = {
            "episode_id": episode["episode_id"],
            "scorer_version": SCORER_VERSION if v is None else self._version(v),
            "status": "not_scorable",
            "reward": None,
            "passed": None,
            "components": "{}",
            "judge": None,
            "scored_at": now,
        }
        if episode["status"] == "unsupported":
            return row | {"status": "unsupported"}
        if v is None:
            return row
        if v.judge is None:
            return row | self._of_program(v)
        return row | (self._of_grader(graded) if v.judge.grader else self._of_judge(v, v.judge, judgement))

    def _version(self, v: Verdict) -> str:
        """What of this scorer's settings an episode's score depends on."""
        parts = [SCORER_VERSION]
        if verdict.of_claw(v.components) or (v.judge is not None and v.judge.grader):
            parts.append(f"claw-{self.claw}")
        if v.judge is not None and self.judge is not None:
            parts.append(f"judge-{self.judge.version}")
        return "+".join(parts)

    def _of_program(self, v: Verdict) -> Row:
        reward = verdict.reward(v, self.claw)
        # Where the reward is another figure, the score that it was made of is kept, under its name in ClawEval.
        kept = v.components if reward == v.score else v.components | {"task_score": v.score}
        return {"status": "scored", "reward": reward, "passed": v.passed, "components": _json(kept)}

    def _of_grader(self, graded: Graded | None) -> Row:
        if graded is None:
            return {"status": "unsupported", "judge": _json({"failure": "no_judge", "message": NO_JUDGE})}
        if graded.output is None:
            status = "judge_failed" if graded.status == "judge_failed" else "not_scorable"
            return {"status": status, "judge": _json({"failure": graded.status, "message": graded.message})}
        found = verdict.parse(graded.output)
        calls = found.components.pop("judge_calls", [])
        return self._of_program(found) | {"judge": _json({"calls": calls})}

    def _of_judge(self, v: Verdict, rubric: Rubric, judgement: Judgement | None) -> Row:
        record = None if judgement is None else _json(judgement.record())
        components = v.components | {"verifier": v.score, "judge": None if judgement is None else judgement.score}
        row: Row = {"components": _json(components), "judge": record}
        if not rubric.asked(v.score):
            judged = 0.0
        elif judgement is None:
            return row | {"status": "unsupported", "judge": _json({"failure": "no_judge", "message": NO_JUDGE})}
        elif judgement.score is None:
            return row | {"status": "judge_failed"}
        else:
            judged = judgement.score
        whole = rubric.whole(v.score, judged)
        passed = whole >= rubric.threshold
        reward = verdict.reward(Verdict(whole, passed, v.components), self.claw)
        return row | {"status": "scored", "reward": reward, "passed": passed}

    @staticmethod
    def message(score: Given) -> str | None:
        """The sentence on a judgement that failed, of a score row."""
        record = json.loads(score["judge"]) if score["judge"] is not None else {}
        return record.get("message")


def _verdict(episode: Given) -> Verdict | None:
    """None where an end is not verified: infrastructure failures have no reward, and never 0."""
    if not ENDS[episode["status"]].verified:
        return None
    if episode["verifier_output"] is None:
        raise ScoreError(f"episode {episode['episode_id']} is {episode['status']} but holds no verifier output")
    return verdict.parse(episode["verifier_output"])


def _rubric(v: Verdict | None) -> Rubric | None:
    return None if v is None else v.judge


def _question(rubric: Rubric, rollout: Given, calls: Sequence[Given]) -> Question:
    text = rubric.text or json.loads(rollout["payload"]).get("judge_rubric")
    if not isinstance(text, str) or not text.strip():
        raise ScoreError(
            f"task {rollout['task_id']!r} leaves its score to the judge and has no rubric, neither in its verifier's "
            "line (judge.rubric) nor in its task.yaml (judge_rubric)"
        )
    return Question(rollout["instruction"], text, transcript(calls), rubric.evidence)


def merged(before: Sequence[Given], rows: Sequence[Given]) -> list[Given]:
    """Score rows of an earlier scoring and of this one: another scorer's stand beside, the same one's are replaced."""
    new = {(r["episode_id"], r["scorer_version"]) for r in rows}
    return [*(r for r in before if (r["episode_id"], r["scorer_version"]) not in new), *rows]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
