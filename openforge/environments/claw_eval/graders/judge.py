"""The judge that a published grader is handed: an OpenAI-compatible endpoint, asked as ClawEval's graders ask theirs.

An outage must not become a score. Graders catch exceptions and fall back to a rule, so a judge that cannot be had
raises what no `except Exception` holds.
"""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from typing import Any

TRIES = 4
WAIT = 2.0  # seconds before the second try, doubled for each further one
TIMEOUT = 120.0
ROLE = (
    "You judge the work of an AI agent. Follow the rubric and give a score from 0.0 to 1.0. "
    'Answer with JSON only: {"score": <number>, "reasoning": "<one short paragraph>"}'
)


class JudgeFailed(BaseException):
    """No judgement could be had; the message says why."""


class Judgement:
    """What a grader reads of a judgement."""

    def __init__(self, score: float, reasoning: str) -> None:
        self.score, self.reasoning = score, reasoning


class Judge:
    """Asks the endpoint named by OPENFORGE_JUDGE_URL (with its /v1), _MODEL and _KEY; keeps what was answered."""

    def __init__(self, url: str, model: str, key: str) -> None:
        self.url, self.model_id, self._key = url.rstrip("/"), model, key
        self._calls: list[dict[str, Any]] = []
        self.failed: str | None = None

    # ---- what graders call -------------------------------------------------------------------------
    def evaluate(self, task_prompt: str, conversation: str, actions_summary: str, rubric: str) -> Judgement:
        """Judge a conversation."""
        parts = {"Task": task_prompt, "Conversation": conversation, "Actions": actions_summary, "Rubric": rubric}
        return self._ask("evaluate", rubric, [_text(parts)])

    def evaluate_actions(self, task_prompt: str, artifacts: str, rubric: str) -> Judgement:
        """Judge what was done, by the services' own records."""
        parts = {"Task": task_prompt, "Actions on record": artifacts, "Rubric": rubric}
        return self._ask("evaluate_actions", rubric, [_text(parts)])

    def evaluate_visual(
        self,
        rubric: str,
        reference_images_b64: list[str],
        candidate_images_b64: list[str],
        context: str = "",
    ) -> Judgement:
        """Judge images (PNG, base64) against others."""
        parts = [_text({"Context": context, "Rubric": rubric})]
        for title, images in (("Reference", reference_images_b64), ("Candidate", candidate_images_b64)):
            parts.append({"type": "text", "text": f"{title} images: {len(images)}"})
            for image in images:
                parts.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}})
        return self._ask("evaluate_visual", rubric, parts)

    def reset_call_log(self) -> None:
        self._calls.clear()

    def get_call_log(self) -> list[dict[str, Any]]:
        return list(self._calls)

    # ---- asking ------------------------------------------------------------------------------------
    def _ask(self, method: str, rubric: str, parts: list[dict[str, Any]]) -> Judgement:
        content: Any = parts if len(parts) > 1 else parts[0]["text"]
        body = {
            "model": self.model_id,
            "messages": [{"role": "system", "content": ROLE}, {"role": "user", "content": content}],
            "temperature": 0.0,
            "max_tokens": 8192,
        }
        why = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(WAIT * 2 ** (attempt - 1))
            try:
                found = parse(self._post(body))
            except urllib.error.HTTPError as e:
                why = f"it answered {e.code}"
                if e.code in (400, 401, 403, 404):
                    break
            except (OSError, ValueError, KeyError, IndexError, TypeError) as e:
                why = f"{type(e).__name__}: {e}"
            else:
                self._calls.append(
                    {"method": method, "rubric": rubric, "score": found.score, "reasoning": found.reasoning}
                )
                return found
        self.failed = f"the judge {self.model_id} at {self.url} gave no judgement: {why}"
        raise JudgeFailed(self.failed)

    def _post(self, body: dict[str, Any]) -> str:
        request = urllib.request.Request(
            f"{self.url}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            told = json.load(answer)["choices"][0]
        if told.get("finish_reason") == "length":
            raise ValueError("its answer was cut off")
        return str(told["message"]["content"])


def parse(answer: str) -> Judgement:
    """The judgement in an answer: one JSON object, alone or in a code fence.

    Raises:
        ValueError, KeyError, TypeError: there is none, or its score is no number from 0 to 1.
    """
    fenced = re.fullmatch(r"\s*```(?:json)?\s*(.*?)\s*```\s*", answer, re.S)
    told = json.loads(fenced[1] if fenced else answer)
    score, reasoning = told["score"], told["reasoning"]
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not 0 <= score <= 1:
        raise ValueError(f"its score is {score!r}, not a number from 0 to 1")
    return Judgement(float(score), str(reasoning))


def of_environment() -> Judge | None:
    """The judge that the environment variables name; None without."""
    url = os.environ.get("OPENFORGE_JUDGE_URL")
    if not url:
        return None
    return Judge(url, os.environ.get("OPENFORGE_JUDGE_MODEL", ""), os.environ.get("OPENFORGE_JUDGE_KEY", ""))


def _text(parts: dict[str, str]) -> dict[str, Any]:
    return {"type": "text", "text": "\n\n".join(f"## {title}\n{text}" for title, text in parts.items() if text)}
