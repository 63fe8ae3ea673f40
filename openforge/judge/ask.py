"""Asking a judge: retries, budget, cache, and what is recorded of each judgement."""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from openforge import config_judge
from openforge.judge.cache import Cache, key
from openforge.judge.rubric import PROMPT_VERSION, AnswerError, Question, parse, prompt
from openforge.proxy.wire import is_loopback

# Why a judgement failed, and whether asking once more may mend it.
FAILURES: dict[str, bool] = {
    "unauthorized": False,  # 401, 403
    "refused": False,  # any other 4xx
    "rate_limited": True,  # 429
    "server_error": True,  # 5xx
    "timeout": True,
    "unreachable": True,
    "garbage": True,  # no chat completion, or no judgement in it
    "cut_off": True,  # finish_reason is not stop
    "budget": False,  # judge.calls or judge.tokens is used up
}
# Seconds before the second try; doubled each time, at most MOST_WAIT.
WAIT, MOST_WAIT = 1.0, 30.0
SHOWN = 300

Json = dict[str, Any]


@dataclass(frozen=True)
class Judgement:
    """One judgement, or why there is none.

    Attributes:
        score, reasoning: None where it failed.
        failure, message: one of FAILURES, and a sentence; None where it did not fail.
        model: the model that answered, as the endpoint named it; else the one asked for.
        prompt_sha256: of the messages as JSON.
        answer: the words it was read from, or of the last try.
        prompt_tokens, completion_tokens: as the endpoint told; None where it did not.
        cached: whether the answer was kept from an earlier time.
        tries: requests that were sent.
    """

    score: float | None
    reasoning: str | None
    failure: str | None
    message: str | None
    model: str
    url: str
    prompt_version: str
    prompt_sha256: str
    answer: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached: bool
    tries: int

    def record(self) -> Json:
        """All of it as plain data, for the column `judge` of the scores."""
        return asdict(self)


class _Failed(Exception):
    """One try came to nothing."""

    def __init__(self, failure: str, message: str, answer: str | None = None, wait: float | None = None) -> None:
        super().__init__(message)
        self.failure, self.answer, self.wait = failure, answer, wait


class Judge:
    """A judge for one scoring job; its methods may be called from several threads."""

    def __init__(
        self,
        config: config_judge.Judge,
        root: Path,
        api_key: str | None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            root: what a relative `config.cache` starts from.
            api_key: sent as Bearer; it is in no record.
            sleep: waits between tries.
        """
        self.config, self.cache, self._sleep = config, Cache(root / config.cache), sleep
        self._url = config.url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(headers=headers, timeout=config.timeout, trust_env=not is_loopback(self._url))
        self._lock = threading.Lock()
        self.calls = self.tokens = 0

    @property
    def version(self) -> str:
        """What a score depends on beside the episode: model and endpoint, prompt, sampling."""
        c = self.config
        about = json.dumps([self._url, c.model, PROMPT_VERSION, c.temperature, c.max_tokens])
        return f"{c.model.rpartition('/')[2]}-{hashlib.sha256(about.encode()).hexdigest()[:8]}"

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def judge_all(self, questions: Sequence[Question]) -> list[Judgement]:
        """Judge these, `concurrency` at a time; the results in their order. None of them raises."""
        with ThreadPoolExecutor(self.config.concurrency) as pool:
            return list(pool.map(self.judge, questions))

    def judge(self, question: Question) -> Judgement:
        """Judge one; a failure is in the result and no exception."""
        messages = prompt(question)
        body: Json = {"model": self.config.model, "messages": messages, "max_tokens": self.config.max_tokens}
        if self.config.temperature is not None:
            body["temperature"] = self.config.temperature
        name = key(self._url, body)
        kept = self.cache.get(name)
        if kept is not None:
            try:
                return self._scored(messages, kept, cached=True, tries=0)
            except AnswerError:
                kept = None  # damaged: asked for again
        return self._ask(messages, body, name)

    def _ask(self, messages: list[dict[str, str]], body: Json, name: str) -> Judgement:
        failed, tries = _Failed("budget", "no try was made"), 0
        for attempt in range(self.config.retries + 1):
            if attempt:
                wait = min(WAIT * 2 ** (attempt - 1), MOST_WAIT) * random.uniform(0.5, 1)
                self._sleep(wait if failed.wait is None else min(failed.wait, MOST_WAIT))
            try:
                self._spend()
                tries += 1
                answer = self._post(body)
                judgement = self._scored(messages, answer, cached=False, tries=tries)
            except AnswerError as e:
                failed = _Failed("garbage", str(e), answer["content"])
            except _Failed as e:
                failed = e
            else:
                self.cache.put(name, answer)
                return judgement
            if not FAILURES[failed.failure]:
                break
        return self._judgement(messages, failure=failed.failure, message=str(failed), answer=failed.answer, tries=tries)

    def _spend(self) -> None:
        """Take a call of the budget; tokens are known only afterwards, so that calls at once may pass their limit."""
        with self._lock:
            for what, used, most in (
                ("calls", self.calls, self.config.calls),
                ("tokens", self.tokens, self.config.tokens),
            ):
                if most is not None and used >= most:
                    raise _Failed("budget", f"judge.{what} of this scoring job, {most}, are used up")
            self.calls += 1

    def _post(self, body: Json) -> Json:
        """One chat completion: content, model, and token counts."""
        where = f"the judge at {self._url}"
        try:
            got = self._http.post(f"{self._url}/chat/completions", json=body)
        except httpx.TimeoutException:
            raise _Failed("timeout", f"{where} gave no answer in {self.config.timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise _Failed("unreachable", f"{where} cannot be reached: {e}") from None
        if got.status_code != 200:
            raise _refused(where, got)
        try:
            data = got.json()
            (choice, *_) = data["choices"]
            content, finish = choice["message"]["content"], choice["finish_reason"]
            if not isinstance(content, str):
                raise TypeError("its content is no text")
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise _Failed("garbage", f"{where} sent no chat completion ({e}): {got.text[:SHOWN]!r}") from None
        usage = data.get("usage") if isinstance(data.get("usage"), dict) else {}
        answer: Json = {"content": content, "model": str(data.get("model") or self.config.model)}
        for ours in ("prompt_tokens", "completion_tokens"):
            answer[ours] = usage.get(ours) if isinstance(usage.get(ours), int) else None
        with self._lock:
            self.tokens += (answer["prompt_tokens"] or 0) + (answer["completion_tokens"] or 0)
        if finish != "stop":
            raise _Failed("cut_off", f"{where} ended its answer with {finish!r}, not stop", content)
        return answer

    def _scored(self, messages: list[dict[str, str]], answer: Mapping[str, Any], cached: bool, tries: int) -> Judgement:
        score, reasoning = parse(answer["content"])
        return self._judgement(
            messages,
            score=score,
            reasoning=reasoning,
            answer=answer["content"],
            model=answer.get("model") or self.config.model,
            prompt_tokens=answer.get("prompt_tokens"),
            completion_tokens=answer.get("completion_tokens"),
            cached=cached,
            tries=tries,
        )

    def _judgement(self, messages: list[dict[str, str]], **known: Any) -> Judgement:
        missing: Json = dict.fromkeys(Judgement.__dataclass_fields__)
        about = {
            "model": self.config.model,
            "url": self._url,
            "prompt_version": PROMPT_VERSION,
            "prompt_sha256": hashlib.sha256(json.dumps(messages).encode()).hexdigest(),
            "cached": False,
            "tries": 0,
        }
        return Judgement(**missing | about | known)


def _refused(where: str, got: httpx.Response) -> _Failed:
    status, told = got.status_code, " ".join(got.text.split())[:SHOWN]
    if status in (401, 403):
        failure = "unauthorized"
    elif status == 429:
        failure = "rate_limited"
    else:
        failure = "server_error" if status >= 500 else "refused"
    after = got.headers.get("retry-after", "")
    wait = float(after) if after.isdecimal() else None
    return _Failed(failure, f"{where} answered {status}: {told}", wait=wait)
