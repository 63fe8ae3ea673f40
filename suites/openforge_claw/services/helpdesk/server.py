"""helpdesk: customers' tickets.

State: {now, tickets: [{id, customer, subject, body, created, status, priority, assignee, duplicate_of, replies}]}.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from base import Operation, Refused, State, find, main, text

NAME, PORT = "helpdesk", 9204
_STATUSES = ("open", "pending", "closed")


def _list(state: State, status: str = "") -> dict[str, Any]:
    shown = ("id", "customer", "subject", "created", "status", "priority", "assignee")
    found = [t for t in state["tickets"] if status in ("", t["status"])]
    return {"now": state["now"], "tickets": [{k: t[k] for k in shown} for t in found]}


def _get(state: State, id: str) -> dict[str, Any]:
    return find(state["tickets"], id, "ticket")


def _update(state: State, id: str, **changes: Any) -> dict[str, Any]:
    ticket = find(state["tickets"], id, "ticket")
    original = changes.get("duplicate_of")
    if original == id:
        raise Refused(409, "a ticket cannot be a duplicate of itself")
    if original:
        find(state["tickets"], original, "ticket")
    ticket.update(changes)
    return ticket


def _reply(state: State, id: str, text: str) -> dict[str, Any]:
    ticket = find(state["tickets"], id, "ticket")
    if ticket["status"] == "closed":
        raise Refused(409, f"ticket {id!r} is closed; open it before a reply")
    ticket["replies"].append({"date": state["now"], "text": text})
    return {"id": id, "replies": len(ticket["replies"])}


OPERATIONS = (
    Operation(
        "list",
        "List the tickets, without their text.",
        _list,
        {"status": text("Only tickets of this status.", *_STATUSES)},
    ),
    Operation("get", "Read one ticket whole.", _get, {"id": text("The ticket's id.")}, ["id"]),
    Operation(
        "update",
        "Change a ticket's status, priority or assignee, or name the ticket that it repeats.",
        _update,
        {
            "id": text("The ticket's id."),
            "status": text("The status.", *_STATUSES),
            "priority": text("The priority.", "low", "normal", "high", "urgent"),
            "assignee": text("Who works on it."),
            "duplicate_of": text("The id of the ticket that this one repeats."),
        },
        ["id"],
    ),
    Operation(
        "reply",
        "Send the customer an answer; the ticket must not be closed.",
        _reply,
        {"id": text("The ticket's id."), "text": text("The text.")},
        ["id", "text"],
    ),
)

if __name__ == "__main__":
    main(NAME, OPERATIONS)
