"""notes: a team's notes. State: {now, notes: [{id, title, date, body, tags}]}."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from base import Operation, State, find, main, new_id, text, texts

NAME, PORT = "notes", 9203


def _shown(note: dict[str, Any]) -> dict[str, Any]:
    return {k: note[k] for k in ("id", "title", "date", "tags")}


def _list(state: State, tag: str = "") -> dict[str, Any]:
    return {"notes": [_shown(n) for n in state["notes"] if not tag or tag in n["tags"]]}


def _search(state: State, query: str) -> dict[str, Any]:
    wanted = query.lower()
    return {"notes": [_shown(n) for n in state["notes"] if wanted in f"{n['title']}\n{n['body']}".lower()]}


def _get(state: State, id: str) -> dict[str, Any]:
    return find(state["notes"], id, "note")


def _create(state: State, title: str, body: str, tags: list[str] | None = None) -> dict[str, Any]:
    note = {"title": title, "date": state["now"][:10], "body": body, "tags": tags or []}
    note = {"id": new_id(state["notes"], "n"), **note}
    state["notes"].append(note)
    return _shown(note)


def _update(state: State, id: str, **changes: Any) -> dict[str, Any]:
    note = find(state["notes"], id, "note")
    note.update(changes)
    return _shown(note)


def _delete(state: State, id: str) -> dict[str, Any]:
    state["notes"].remove(find(state["notes"], id, "note"))
    return {"id": id, "status": "deleted"}


_NOTE = {"title": text("The title."), "body": text("The text."), "tags": texts("Tags.")}
OPERATIONS = (
    Operation("list", "List the notes, without their text.", _list, {"tag": text("Only notes with this tag.")}),
    Operation(
        "search",
        "Find notes by a text in title or body.",
        _search,
        {"query": text("The text; case does not matter.")},
        ["query"],
    ),
    Operation("get", "Read one note whole.", _get, {"id": text("The note's id.")}, ["id"]),
    Operation("create", "Write a new note.", _create, _NOTE, ["title", "body"]),
    Operation(
        "update", "Replace title, text or tags of a note.", _update, {"id": text("The note's id."), **_NOTE}, ["id"]
    ),
    Operation("delete", "Delete a note.", _delete, {"id": text("The note's id.")}, ["id"]),
)

if __name__ == "__main__":
    main(NAME, OPERATIONS)
