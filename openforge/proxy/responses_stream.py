"""The events of a streamed response, numbered, each item from response.output_item.added to .done."""

from __future__ import annotations

from json.encoder import encode_basestring_ascii
from typing import Any

from openforge.proxy.calls import Json
from openforge.proxy.dialect import dumped


class Events:
    """Collects a stream's events; `sent` of them are out already."""

    def __init__(self, sent: int = 0) -> None:
        self._number = sent
        self._events: list[str] = []

    def bytes(self) -> bytes:
        return "".join(self._events).encode()

    def add(self, kind: str, **fields: Any) -> None:
        told = dumped({"type": kind, "sequence_number": self._number, **fields})
        self._events.append(f"event: {kind}\ndata: {told}\n\n")
        self._number += 1

    def item(self, index: int, item: Json, texts: list[list[str]]) -> None:
        """One output item; `texts` are the pieces of the answer's reasoning and of its text."""
        where = {"item_id": item["id"], "output_index": index}
        kind = item["type"]
        inner: Json = {"arguments": ""} if kind == "function_call" else {"input": ""}
        started = item | ({"content": []} if "content" in item else inner) | {"status": "in_progress"}
        started.pop("encrypted_content", None)
        self.add("response.output_item.added", output_index=index, item=started)
        if kind == "reasoning":
            self._text("response.reasoning_text", where | {"content_index": 0}, item["content"][0], texts[0])
        elif kind == "message":
            self._text("response.output_text", where | {"content_index": 0}, item["content"][0], texts[1])
        elif kind == "function_call":
            arguments = item["arguments"]
            self.add("response.function_call_arguments.delta", **where, delta=arguments)
            self.add("response.function_call_arguments.done", **where, arguments=arguments, name=item["name"])
        else:
            self.add("response.custom_tool_call_input.delta", **where, delta=item["input"])
            self.add("response.custom_tool_call_input.done", **where, input=item["input"])
        self.add("response.output_item.done", output_index=index, item=item)

    def _text(self, kind: str, where: Json, part: Json, pieces: list[str]) -> None:
        extra: Json = {"logprobs": []} if kind == "response.output_text" else {}
        self.add("response.content_part.added", **where, part=part | {"text": ""})
        # The events of a text differ in number and piece only.
        front = f'event: {kind}.delta\ndata: {{"type":"{kind}.delta",{dumped(where | extra)[1:-1]},"sequence_number":'
        first = self._number
        deltas = enumerate(pieces, first)
        self._events += [f'{front}{n},"delta":{encode_basestring_ascii(p)}}}\n\n' for n, p in deltas]
        self._number = first + len(pieces)
        self.add(f"{kind}.done", **where, **extra, text=part["text"])
        self.add("response.content_part.done", **where, part=part)
