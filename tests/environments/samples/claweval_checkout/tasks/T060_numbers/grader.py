"""Stand-in grader: needs a library."""

import numpy as np
from claw_eval.graders.base import AbstractGrader
from claw_eval.models.trace import DimensionScores


class SumGrader(AbstractGrader):
    def grade(self, messages, dispatches, task, audit_data=None, judge=None):
        return DimensionScores(completion=float(np.sum([1])))
