"""calendar: the shared calendar of a team. State: {now, events: [{id, title, start, end, attendees, place}]}.

Times are local, YYYY-MM-DDTHH:MM.
"""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from base import Operation, Refused, State, find, main, new_id, text, texts

NAME, PORT = "calendar", 9201
_FORMAT = "%Y-%m-%dT%H:%M"


def _time(value: str, name: str) -> datetime:
    try:
        return datetime.strptime(value, _FORMAT)
    except ValueError:
        raise Refused(400, f"{name} is {value!r}; it must be a time as 2031-05-07T14:30") from None


def _check_times(event: dict[str, Any]) -> None:
    if _time(event["start"], "start") >= _time(event["end"], "end"):
        raise Refused(400, "the event ends before it starts")


def _list(state: State, date: str = "", attendee: str = "") -> dict[str, Any]:
    found = [e for e in state["events"] if e["start"].startswith(date) and (not attendee or attendee in e["attendees"])]
    return {"now": state["now"], "events": sorted(found, key=lambda e: (e["start"], e["id"]))}


def _create(
    state: State, title: str, start: str, end: str, attendees: list[str] | None = None, place: str = ""
) -> dict[str, Any]:
    event = {"title": title, "start": start, "end": end, "attendees": attendees or [], "place": place}
    _check_times(event)
    event = {"id": new_id(state["events"], "e"), **event}
    state["events"].append(event)
    return event


def _update(state: State, id: str, **changes: Any) -> dict[str, Any]:
    event = find(state["events"], id, "event")
    _check_times({**event, **changes})
    event.update(changes)
    return event


def _delete(state: State, id: str) -> dict[str, Any]:
    state["events"].remove(find(state["events"], id, "event"))
    return {"id": id, "status": "deleted"}


_EVENT = {
    "title": text("What it is."),
    "start": text("Start, as 2031-05-07T14:30."),
    "end": text("End, as 2031-05-07T15:00."),
    "attendees": texts("Names of those who take part."),
    "place": text("Where it is."),
}
OPERATIONS = (
    Operation(
        "list",
        "List events, all of them or those of a day or of a person.",
        _list,
        {"date": text("A day, as 2031-05-07."), "attendee": text("A name, as events have it.")},
    ),
    Operation("create", "Make an event.", _create, _EVENT, ["title", "start", "end"]),
    Operation("update", "Change an event.", _update, {"id": text("The event's id."), **_EVENT}, ["id"]),
    Operation("delete", "Delete an event.", _delete, {"id": text("The event's id.")}, ["id"]),
)

if __name__ == "__main__":
    main(NAME, OPERATIONS)
