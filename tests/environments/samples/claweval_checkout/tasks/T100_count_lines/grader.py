"""Stand-in grader: by what stood in the work folder."""

import base64

from claw_eval.graders.base import AbstractGrader
from claw_eval.models.trace import DimensionScores


class CountGrader(AbstractGrader):
    def grade(self, messages, dispatches, task, audit_data=None, judge=None, media_events=None, env_snapshot=None):
        shot = env_snapshot or {}
        told = shot.get("cmd:python /workspace/fixtures/verify_count.py", {}).get("stdout", "")
        truth = base64.b64decode(shot["local_file:fixtures/truth.txt"]["content"]).decode().strip()
        file = shot.get("file:/workspace/count.txt", {}).get("content", "").strip()
        done = told.strip() == "RIGHT" and file == truth
        return DimensionScores(completion=float(done), robustness=self.compute_robustness(dispatches))
