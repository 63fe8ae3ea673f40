"""The internal form that every dialect is translated to: one request, one answer, one refusal."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Json = dict[str, Any]

REDACTED = "[session key]"


class Refusal(Exception):
    """A request that gets an error instead of an answer; the dialect renders it in its own shape."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Declared(NamedTuple):
    """What a harness calls a tool that the policy knows by another name or in another form.

    Attributes:
        namespace: the namespace it was declared in; None for none.
        custom: it takes free text, and not arguments.
    """

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """What a harness asked for, in chat-completion terms.

    Attributes:
        model: name the harness asked for; the answer carries it, the upstream call does not.
        messages: chat messages of the roles system (the first at most), user, assistant and tool.
        tools: function declarations; None without any.
        forwarded: the harness's own fields that go upstream as they are (stop, tool_choice, ...).
        max_tokens: output limit asked for; None without one.
        retry: the client's own count of resends of this request (0 for a first try).
        sha256: digest of the request's body, which finds the call that a resend repeats.
        n: choices asked for; each is a call of its own.
        declared: by the policy's name of a tool, what the harness calls it where that differs.
        sealed_reasoning: the harness takes reasoning back as an opaque text.
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
    n: int = 1
    declared: Mapping[str, Declared] = field(default_factory=dict)
    sealed_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What the policy answered.

    Attributes:
        message: the parsed assistant message.
        finish_reason: stop, length, tool_calls or abort.
        usage: upstream's token counts, untouched.
        logprobs_content: upstream's own logprob entries, for a harness that asked for them.
        prompt_token_ids: length P, int32; None where upstream gave none.
        response_token_ids: length R, int32, the stop token included; None where upstream gave none.
        logprobs: length R; None where upstream gave none.
        stop_reason: the stop string that ended it, or a server's own token id; None for the model's own end.
    """

    message: Json
    finish_reason: str | None
    usage: Json
    logprobs_content: list[Json] | None
    prompt_token_ids: array[int] | None
    response_token_ids: array[int] | None
    logprobs: list[float] | None
    stop_reason: Any = None


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
