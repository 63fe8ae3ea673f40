"""Stand-in grader: asks a judge, and falls back to a rule where that raises, as the published ones do."""

from claw_eval.graders.base import AbstractGrader
from claw_eval.models.trace import DimensionScores


class ReportGrader(AbstractGrader):
    def grade(self, messages, dispatches, task, audit_data=None, judge=None, media_events=None, env_snapshot=None):
        scores = DimensionScores(robustness=1.0)
        try:
            found = judge.evaluate(task.prompt.text, self.final_text(messages), "", task.judge_rubric)
            scores.completion = scores.communication = found.score
        except Exception:
            scores.completion = 0.0
        return scores
