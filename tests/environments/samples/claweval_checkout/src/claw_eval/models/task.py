"""Stand-in: what graders read of a task."""

from pathlib import Path

import yaml
from pydantic import BaseModel, Field


class Prompt(BaseModel):
    text: str
    language: str = "zh"
    attachments: list[str] = Field(default_factory=list)


class TaskDefinition(BaseModel):
    task_id: str
    task_name: str
    prompt: Prompt
    judge_rubric: str = ""
    safety_checks: list[dict] = Field(default_factory=list)

    @classmethod
    def from_yaml(cls, path: str | Path) -> "TaskDefinition":
        return cls.model_validate(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
