"""mail: one person's mailbox. State: {now, me, messages: [{id, folder, from, to, subject, date, body, read}]}."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from base import Operation, Refused, State, find, main, new_id, text, texts

NAME, PORT = "mail", 9200
_SHOWN = ("id", "folder", "from", "to", "subject", "date", "read")


def _list(state: State, folder: str = "inbox", unread: bool = False) -> dict[str, Any]:
    found = [m for m in state["messages"] if m["folder"] == folder and not (unread and m["read"])]
    return {"messages": [{k: m[k] for k in _SHOWN} for m in found]}


def _search(state: State, query: str) -> dict[str, Any]:
    wanted = query.lower()
    found = [m for m in state["messages"] if any(wanted in m[k].lower() for k in ("from", "subject", "body"))]
    return {"messages": [{k: m[k] for k in _SHOWN} for m in found]}


def _get(state: State, id: str) -> dict[str, Any]:
    message = find(state["messages"], id, "message")
    message["read"] = True
    return message


def _send(state: State, to: list[str], subject: str, body: str, in_reply_to: str = "") -> dict[str, Any]:
    for address in to:
        if address.count("@") != 1:
            raise Refused(400, f"{address!r} is no mail address")
    if not to:
        raise Refused(400, "a message needs at least one address in 'to'")
    if in_reply_to:
        find(state["messages"], in_reply_to, "message")
    message = {
        "id": new_id(state["messages"], "m"),
        "folder": "sent",
        "from": state["me"],
        "to": to,
        "subject": subject,
        "date": state["now"],
        "body": body,
        "read": True,
        "in_reply_to": in_reply_to,
    }
    state["messages"].append(message)
    return {"id": message["id"], "status": "sent"}


def _move(state: State, id: str, folder: str) -> dict[str, Any]:
    message = find(state["messages"], id, "message")
    if "sent" in (folder, message["folder"]):
        raise Refused(409, "nothing is moved into or out of the folder 'sent'")
    message["folder"] = folder
    return {"id": id, "folder": folder}


OPERATIONS = (
    Operation(
        "list",
        "List the messages of a folder, without their text.",
        _list,
        {
            "folder": text("The folder; inbox without it. Sent messages are in 'sent'."),
            "unread": {"type": "boolean", "description": "Only messages that have not been read."},
        },
    ),
    Operation(
        "search",
        "Find messages of all folders by a text in sender, subject or body.",
        _search,
        {"query": text("The text; case does not matter.")},
        ["query"],
    ),
    Operation("get", "Read one message whole.", _get, {"id": text("The message's id.")}, ["id"]),
    Operation(
        "send",
        "Send a message, or answer one.",
        _send,
        {
            "to": texts("Mail addresses."),
            "subject": text("The subject."),
            "body": text("The text."),
            "in_reply_to": text("The id of the message that is answered."),
        },
        ["to", "subject", "body"],
    ),
    Operation(
        "move",
        "Move a message to another folder; a folder that is not there is made.",
        _move,
        {"id": text("The message's id."), "folder": text("The folder's name.")},
        ["id", "folder"],
    ),
)

if __name__ == "__main__":
    main(NAME, OPERATIONS)
