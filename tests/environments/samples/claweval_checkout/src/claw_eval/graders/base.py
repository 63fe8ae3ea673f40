"""Stand-in: the interface of a grader."""

import importlib.util
import inspect
from abc import ABC, abstractmethod
from pathlib import Path

_TASKS = Path(__file__).resolve().parents[3] / "tasks"


class AbstractGrader(ABC):
    @abstractmethod
    def grade(self, messages, dispatches, task, audit_data=None, judge=None, media_events=None, env_snapshot=None): ...

    @staticmethod
    def final_text(messages) -> str:
        return next((m.message.text for m in reversed(messages) if m.message.role == "assistant"), "")

    @staticmethod
    def compute_robustness(dispatches) -> float:
        failed = [d.tool_name for d in dispatches if d.response_status >= 400]
        return 1.0 if not failed else 0.5


def load_peer_grader(task_id: str, tasks_dir: Path = _TASKS) -> type:
    file = tasks_dir / task_id / "grader.py"
    spec = importlib.util.spec_from_file_location(f"peer_{task_id}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return next(
        c
        for _, c in inspect.getmembers(module, inspect.isclass)
        if issubclass(c, AbstractGrader) and c is not AbstractGrader
    )
