"""The internal form that every dialect is translated to: one request, one answer, one refusal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

REDACTED = "[session key]"


class Refusal(Exception):
    """A request that gets an error instead of an answer; the dialect renders it in its own shape."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


@dataclass(frozen=True, slots=True)
class Request:
    """What a harness asked for, in chat-completion terms.

    Attributes:
        model: name the harness asked for; the answer carries it, the upstream call does not.
        messages: chat messages, role `developer` already `system`.
        tools: tool declarations; None without any.
        forwarded: the harness's own fields that go upstream as they are (stop, tool_choice, ...).
        max_tokens: output limit asked for; None without one.
        retry: the client's own count of resends of this request (0 for a first try).
        sha256: digest of the request's body, which finds the call that a resend repeats.
    """

    dialect: str
    model: str
    messages: list[Json]
    tools: list[Json] | None
    forwarded: Json
    max_tokens: int | None
    stream: bool
    include_usage: bool
    top_logprobs: int | None
    retry: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What the policy answered.

    Attributes:
        message: the parsed assistant message.
        finish_reason: stop, length, tool_calls or abort.
        usage: upstream's token counts, untouched.
        logprobs_content: upstream's own logprob entries, for a harness that asked for them.
        prompt_token_ids: length P; None where upstream gave none.
        response_token_ids: length R, the stop token included; None where upstream gave none.
        logprobs: length R; None where upstream gave none.
    """

    message: Json
    finish_reason: str | None
    usage: Json
    logprobs_content: list[Json] | None
    prompt_token_ids: list[int] | None
    response_token_ids: list[int] | None
    logprobs: list[float] | None


@dataclass(frozen=True, slots=True)
class Call:
    """An answered call that is in the journal.

    Attributes:
        call: index in order of arrival within the episode's journal.
        id: the answer's identity on the wire, the same for a resend.
        created: time of the answer in whole Unix seconds.
    """

    call: int
    id: str
    created: int
    answer: Answer
