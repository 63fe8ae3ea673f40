"""todo: a list of tasks. State: {now, items: [{id, title, owner, due, priority, done}]}."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from base import Operation, State, find, main, new_id, text

NAME, PORT = "todo", 9202


def _list(state: State, owner: str = "", done: bool | None = None) -> dict[str, Any]:
    found = [i for i in state["items"] if (not owner or i["owner"] == owner) and done in (None, i["done"])]
    return {"now": state["now"], "items": found}


def _create(state: State, title: str, owner: str = "", due: str = "", priority: str = "normal") -> dict[str, Any]:
    item = {"title": title, "owner": owner, "due": due, "priority": priority, "done": False}
    item = {"id": new_id(state["items"], "t"), **item}
    state["items"].append(item)
    return item


def _update(state: State, id: str, **changes: Any) -> dict[str, Any]:
    item = find(state["items"], id, "item")
    item.update(changes)
    return item


def _delete(state: State, id: str) -> dict[str, Any]:
    state["items"].remove(find(state["items"], id, "item"))
    return {"id": id, "status": "deleted"}


_ITEM = {
    "title": text("What is to be done."),
    "owner": text("Who does it."),
    "due": text("The day by which it is done, as 2031-05-07."),
    "priority": text("How urgent it is; normal without it.", "low", "normal", "high"),
}
_DONE = {"type": "boolean", "description": "Whether it is done."}
OPERATIONS = (
    Operation(
        "list",
        "List the items, all of them or those of a person, done or open.",
        _list,
        {"owner": text("A name, as items have it."), "done": _DONE},
    ),
    Operation("create", "Add an item.", _create, _ITEM, ["title"]),
    Operation(
        "update",
        "Change an item, or mark it as done.",
        _update,
        {"id": text("The item's id."), **_ITEM, "done": _DONE},
        ["id"],
    ),
    Operation("delete", "Delete an item.", _delete, {"id": text("The item's id.")}, ["id"]),
)

if __name__ == "__main__":
    main(NAME, OPERATIONS)
