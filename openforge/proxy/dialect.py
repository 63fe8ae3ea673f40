"""What a dialect is, and what the three have in common: reading a body, the internal form, cutting an answer up.

A dialect is a module. It translates one API's requests into `Request` and an answered call into that API's bytes,
plain or as server-sent events; everything between is the same for all.

The internal form is that of vLLM's chat completions, reduced to what a chat template renders: role, content (a text, or
parts where there are images or several texts), tool_calls, tool_call_id, name and reasoning. Whatever else a harness
sends (cache marks, annotations, ids of items) is not shown to the policy, so what differs in nothing else is the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

from openforge.proxy.calls import Answer, Call, Json, Refusal, Request
from openforge.proxy.fastjson import loads

# Larger than any window, and small enough for every decoder of JSON.
_INT_MOST = 2**31 - 1
_BILLING = "x-anthropic-billing-header"
# An escaped one, one in what passes for UTF-8 (as Korean text does too), and any in UTF-16.
_MAY_BE_SURROGATES = (b"\\ud", b"\\uD", b"\xed", b"\x00")
_SURROGATE = re.compile("[\ud800-\udfff]")


class Dialect(Protocol):
    """One API. `sent` counts the events that `alive` has sent on this stream; `ident` is the stream's own id."""

    DIALECT: str

    def parse(self, raw: bytes, headers: Mapping[str, str]) -> Request:
        """A request's body in the internal form; raises `Refusal` 400, and nothing else."""

    def render(self, calls: Sequence[Call], request: Request) -> bytes:
        """The whole answer as one JSON body. More than one call only where more choices were asked for."""

    def stream(self, calls: Sequence[Call], request: Request, sent: int = 0) -> bytes:
        """The whole answer as server-sent events."""

    def alive(self, ident: str, request: Request, sent: int) -> bytes:
        """What keeps a stream alive whose answer is not there yet."""

    def failed(self, refusal: Refusal, ident: str, request: Request, sent: int) -> bytes:
        """A refusal as the end of a stream that has begun."""

    def error(self, refusal: Refusal) -> bytes:
        """A refusal as a JSON body."""


# ---- reading -----------------------------------------------------------------------------------
def bad(message: str) -> Refusal:
    return Refusal(400, "invalid_request", message)


def read_body(raw: bytes) -> Json:
    """The request's JSON object, in text that a tokenizer takes."""
    try:
        body = loads(raw)
        if any(mark in raw for mark in _MAY_BE_SURROGATES):
            body = _well_formed(body)
    except ValueError as e:
        raise bad(f"the request body is not JSON: {e}") from None
    except RecursionError:
        raise bad("the request body is nested too deeply") from None
    if not isinstance(body, dict):
        raise bad("the request body must be a JSON object")
    return body


def _well_formed(body: Any) -> Any:
    """JSON with U+FFFD for every lone surrogate, as JavaScript's own repair has it.

    Harnesses in JavaScript cut a command's output by UTF-16 units, and what is cut in the middle of a character stays
    in their history. vLLM refuses such a text, and answers 500 to such a stop string, which would be retried for ever.
    """
    told = json.dumps(body, ensure_ascii=False)
    return json.loads(_SURROGATE.sub("\ufffd", told)) if _SURROGATE.search(told) else body


def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def retries(headers: Mapping[str, str]) -> int:
    value = headers.get("x-stainless-retry-count", "0")
    return int(value) if value.isdecimal() and len(value) < 10 else 0


def count(body: Json, key: str, least: int = 0) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise bad(f"{key} is {shown(value)}; it must be a whole number, {least} or more")
    return min(value, _INT_MOST)


def objects(value: Any, where: str) -> list[Json]:
    """A list of objects; an absent one is empty."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise bad(f"{where} must be a list of objects")
    return value


def text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise bad(f"{where} is {shown(value)}; it must be a string")
    return value


def optional_text(value: Any, where: str) -> str:
    return "" if value is None else text(value, where)


def texts(value: Any, where: str) -> list[str]:
    """A string or a list of strings; an absent one is empty."""
    if value is None:
        return []
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(v, str) for v in found):
        raise bad(f"{where} must be a string or a list of strings")
    return found


def shown(value: Any) -> str:
    told = repr(value)
    return told if len(told) <= 60 else f"{told[:57]}..."


# ---- messages ----------------------------------------------------------------------------------
def parts(content: Any, where: str, read: Callable[[Json, str], Json | None]) -> list[Json]:
    """The parts of a message's content; `read` translates one of a dialect's, None for what is not shown."""
    if content is None:
        return []
    if isinstance(content, str):
        return [text_part(content)]
    found = (read(p, f"{where}[{i}]") for i, p in enumerate(objects(content, where)))
    return [p for p in found if p is not None]


def text_part(value: str) -> Json:
    return {"type": "text", "text": value}


def image_part(url: Any, where: str) -> Json:
    """An image by its data. The policy server would fetch any other address on the agent's behalf, out of its sandbox
    and into whatever net that server stands in."""
    if not isinstance(url, str) or not url.startswith("data:"):
        raise bad(f"{where} must be an image as a data: URL; an image elsewhere is not fetched")
    return {"type": "image_url", "image_url": {"url": url}}


def content_of(found: list[Json]) -> str | list[Json]:
    """Parts as a message carries them. One text is a string: harnesses send the same turn now so, now as a part."""
    if not found:
        return ""
    if len(found) == 1 and found[0].get("type") == "text":
        return str(found[0]["text"])
    return found


def result_of(found: list[Json]) -> str | list[Json]:
    """A tool's result: one string, as templates take it and vLLM makes it, unless there are images."""
    return found if any(p["type"] != "text" for p in found) else joined(found, "\n")


def joined(content: Any, between: str = "") -> str:
    """The texts of an internal content."""
    if isinstance(content, list):
        return between.join(str(p["text"]) for p in content if isinstance(p, dict) and p.get("type") == "text")
    return "" if content is None else str(content)


def assistant(content: str | None, reasoning: str | None, calls: list[Json]) -> Json:
    """An assistant message. A text that its client split is one again: it was sampled as one."""
    message: Json = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def tool_call(ident: Any, name: Any, arguments: Any, where: str) -> Json:
    """A call of an assistant message; arguments as the text that they are."""
    if not isinstance(arguments, str):
        arguments = "{}" if arguments is None else dumped(arguments)
    function = {"name": text(name, f"{where}: the tool's name"), "arguments": arguments}
    return {"id": optional_text(ident, f"{where}: the call's id"), "type": "function", "function": function}


def template_roles(messages: list[Json]) -> list[Json]:
    """Messages in the roles that every chat template takes: at most one system message, and that first.

    Leading system messages become one. A later one becomes a user's turn, at its place and with its words: many
    templates raise on it, and moved into the first message it would change the prompt's head, so that no history
    would extend the one before. Every message is mapped without a look at those behind it, so what was append-only
    stays so.
    """
    n = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    texts = [joined(m["content"], "\n") for m in messages[:n]]
    told = without_billing("\n\n".join(texts)) if any(texts) else ""
    head: list[Json] = [{"role": "system", "content": told}] if told else []
    found = head + [{**m, "role": "user"} if m["role"] == "system" else m for m in messages[n:]]
    if not found:
        raise bad("the request must hold at least one message with content")
    return found


def without_billing(told: str) -> str:
    """A system text without the line that heads Claude Code's, which differs in every request: fault 6."""
    return told.partition("\n")[2].lstrip("\n") if told.startswith(_BILLING) else told


# ---- tools -------------------------------------------------------------------------------------
def function(name: Any, description: Any, parameters: Any, where: str) -> Json:
    """A tool's declaration. `strict` is left out: to vLLM it is a grammar, whose tokens have logprob 0."""
    declared: Json = {"name": text(name, f"{where}.name")}
    if description is not None:
        declared["description"] = text(description, f"{where}.description")
    if parameters is not None:
        if not isinstance(parameters, dict):
            raise bad(f"{where}: the tool's schema must be an object")
        declared["parameters"] = parameters
    return {"type": "function", "function": declared}


def choice_fields(choice: str | Json | None, tools: list[Json] | None, parallel: Any) -> Json:
    """tool_choice and parallel_tool_calls. Servers refuse both without tools, and harnesses send them even so."""
    if not tools:
        return {}
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        if name not in {t["function"]["name"] for t in tools}:
            raise bad(f"tool_choice names {shown(name)}, which is not among the tools")
    fields: Json = {} if choice is None else {"tool_choice": choice}
    return fields | ({"parallel_tool_calls": parallel} if isinstance(parallel, bool) else {})


def named(name: Any) -> Json:
    return {"type": "function", "function": {"name": text(name, "tool_choice: the tool's name")}}


def schema_format(schema: Any, name: Any = None, where: str = "the format's schema") -> Json:
    """An output format of a JSON schema, as chat completions have it."""
    if not isinstance(schema, dict):
        raise bad(f"{where} must be an object")
    return {
        "type": "json_schema",
        "json_schema": {"name": name if isinstance(name, str) else "answer", "schema": schema},
    }


# ---- answers -----------------------------------------------------------------------------------
def reasoning_of(message: Json) -> str:
    """What the policy thought, under whichever name its server gives it."""
    return joined(message.get("reasoning") or message.get("reasoning_content"))


def told(usage: Json, key: str, within: str | None = None) -> int | None:
    """A figure of upstream's usage; None where it gave none."""
    values = usage if within is None else usage.get(within)
    value = values.get(key) if isinstance(values, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def pieces(answer: Answer, *whole: str) -> list[list[str]]:
    """Texts cut into as many pieces as tokens were sampled, each by its share; a text of fewer characters into those.

    Even cuts: nobody can tell where a token ended, and its strings need not be kept for a resend.
    """
    length = sum(map(len, whole))
    tokens = told(answer.usage, "completion_tokens") or max(1, length // 4)
    return [_cut(t, min(len(t), -(-tokens * len(t) // length))) if t else [] for t in whole]


def _cut(value: str, n: int) -> list[str]:
    size = len(value)
    return [value[size * i // n : size * (i + 1) // n] for i in range(n)]


def ident_of(call: Call) -> str:
    """A call's identity without a dialect's prefix."""
    return call.id.rpartition("-")[2]


def dumped(value: Any) -> str:
    """JSON in ASCII: a lone surrogate in a sampled text has no UTF-8."""
    return json.dumps(value, separators=(",", ":"))


def each(head: str, values: Iterable[str], tail: str) -> str:
    """`head`, a JSON string, `tail` for each value: the events of a text differ in that string only."""
    return "".join([f"{head}{encode_basestring_ascii(v)}{tail}" for v in values])
