"""Stand-in grader: by the answer."""

from claw_eval.graders.base import AbstractGrader
from claw_eval.models.trace import DimensionScores


class AnswerGrader(AbstractGrader):
    def grade(self, messages, dispatches, task, audit_data=None, judge=None, media_events=None):
        return DimensionScores(completion=float("hello" in self.final_text(messages)), robustness=1.0)
