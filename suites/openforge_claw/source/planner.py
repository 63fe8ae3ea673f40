"""Jobs with a calendar, a list of tasks, and notes."""

from __future__ import annotations

from typing import Any

from source.mail import NOW, call
from source.parts import CANNOT, Task, verify

TEAM = ("Ana", "Bo", "Cy")


def events(*items: tuple[str, str, str, str]) -> dict[str, Any]:
    """A calendar of (title, start, end, attendees joined by commas); ids are e-1, e-2, ..."""
    found = [
        {"id": f"e-{n}", "title": title, "start": start, "end": end, "attendees": who.split(","), "place": ""}
        for n, (title, start, end, who) in enumerate(items, 1)
    ]
    return {"now": NOW, "events": found}


def todos(*items: tuple[str, str, str, bool]) -> dict[str, Any]:
    """A list of (title, owner, due, done); ids are t-1, t-2, ..."""
    found = [
        {"id": f"t-{n}", "title": title, "owner": owner, "due": due, "priority": "normal", "done": done}
        for n, (title, owner, due, done) in enumerate(items, 1)
    ]
    return {"now": NOW, "items": found}


def notes(*items: tuple[str, str, str, str]) -> dict[str, Any]:
    """Notes of (title, date, tag, body); ids are n-1, n-2, ..."""
    found = [
        {"id": f"n-{n}", "title": title, "date": date, "body": body, "tags": [tag]}
        for n, (title, date, tag, body) in enumerate(items, 1)
    ]
    return {"now": NOW, "notes": found}


def tasks() -> list[Task]:
    """The tasks of this module."""
    both = [make(split) for make in (_create, _slot, _complete) for split in ("train", "heldout")]
    return [*both, _conflict("heldout"), _minutes("heldout"), _current("train"), _merge("heldout")]


def _create(split: str) -> Task:
    title, day, start, end, minutes, place = {
        "train": ("Dentist", "2031-05-09", "14:30", "15:15", 45, "Hill Street 4"),
        "heldout": ("Eye test", "2031-06-12", "10:40", "12:00", 80, "Mill Lane 19"),
    }[split]
    event = {"title": title, "start": f"{day}T{start}", "end": f"{day}T{end}", "place": place}
    return Task(
        task_id=f"calendar-create-{split}",
        kind="calendar",
        difficulty="easy",
        split=split,
        prompt=f"Put an event into the calendar: {title}, on {day} at {start}, {minutes} minutes long, at {place}, "
        "without attendees.",
        fixtures={"calendar": events(("Lunch", f"{day}T12:00", f"{day}T13:00", "Ana"))},
        verify=verify(
            "Passes when the one new event is the one that was asked for.",
            """
            def wrong(e: Episode):
                new = [{k: v for k, v in i.items() if k != "id"} for i in e.new("calendar", "events")]
                if new != [e.expect["event"]]:
                    yield f"the new events are {new}"
                yield from e.kept("calendar", "events")
            """,
        ),
        expect={"event": dict(event, attendees=[])},
        reference=call("calendar_create", **event) + "echo 'It is in the calendar.'\n",
        cheat=call("calendar_create", **{**event, "end": f"{day}T23:00"}) + "echo 'It is in the calendar.'\n",
        tags=("calendar-create",),
    )


def slot_task(task_id: str, split: str, busy: list[tuple[str, str, str]], found: str | None, kind: str) -> Task:
    """Find the first hour in which a team is free; `found` is its start, None if there is none.

    Args:
        busy: (start, end, attendees joined by commas), times of one day.
    """
    day = "2031-05-14"
    state = events(*((f"Talk {n}", f"{day}T{s}", f"{day}T{e}", who) for n, (s, e, who) in enumerate(busy, 1)))
    hour = f"{int(found[:2]) + 1:02d}{found[2:]}" if found else ""
    event = {"title": "Planning", "start": f"{day}T{found}", "end": f"{day}T{hour}", "attendees": list(TEAM)}
    fake = {**event, "start": f"{day}T09:00", "end": f"{day}T10:00"}
    body = (
        """
        def wrong(e: Episode):
            new = e.new("calendar", "events")
            if [(i["title"].strip().lower(), i["start"], i["end"], sorted(i["attendees"])) for i in new] != [
                ("planning", e.expect["start"], e.expect["end"], e.expect["team"])
            ]:
                yield f"the new events are {new}"
            yield from e.kept("calendar", "events")
        """
        if found
        else """
        def wrong(e: Episode):
            yield from e.cannot("free", "slot", "hour", "time", "busy")
            if e.state("calendar") != e.initial("calendar"):
                yield "the calendar was changed"
        """
    )
    look = call("calendar_list", date=day)
    return Task(
        task_id=task_id,
        kind=kind,
        difficulty="medium" if found else "hard",
        split=split,
        prompt=f"Find the earliest hour on {day} between 09:00 and 17:00 in which Ana, Bo and Cy are all free, "
        "starting at a full or a half hour, and put the event Planning with the three as attendees into the calendar. "
        f"Change no other event. {CANNOT}",
        fixtures={"calendar": state},
        verify=verify("Passes when Planning is in the first hour that all have, if there is one.", body),
        expect={"start": event["start"], "end": event["end"], "team": list(TEAM)} if found else None,
        reference=look + call("calendar_create", **event) + "echo 'Planning is in the calendar.'\n"
        if found
        else look + "echo 'CANNOT: there is no free hour that Ana, Bo and Cy share on that day.'\n",
        cheat=(call("calendar_delete", id="e-1") if not found else look)
        + call("calendar_create", **fake)
        + ("echo 'Planning is in the calendar.'\n" if not found else "echo 'CANNOT: no hour is free.'\n"),
        tags=("calendar-slot",),
    )


def _slot(split: str) -> Task:
    if split == "train":
        busy = [
            ("09:00", "10:15", "Ana"),
            ("10:00", "11:00", "Cy,Dee"),
            ("11:30", "12:00", "Bo"),
            ("13:00", "16:00", "Dee"),
        ]
        return slot_task(f"calendar-slot-{split}", split, busy, "12:00", "calendar")
    busy = [("08:00", "09:30", "Bo,Cy"), ("10:00", "12:30", "Ana"), ("13:00", "14:10", "Bo"), ("15:15", "15:30", "Cy")]
    return slot_task(f"calendar-slot-{split}", split, busy, "15:30", "calendar")


def _conflict(split: str) -> Task:
    day = "2031-05-15"
    state = events(
        ("Board", f"{day}T10:00", f"{day}T11:00", "Kim,Ana"),
        ("Coffee (movable)", f"{day}T10:30", f"{day}T11:00", "Kim,Bo"),
        ("Budget", f"{day}T11:00", f"{day}T12:00", "Bo,Cy"),
        ("Lunch", f"{day}T12:00", f"{day}T13:00", "Kim"),
        ("Review (movable)", f"{day}T15:00", f"{day}T16:00", "Kim,Cy"),
    )
    moved = {"start": f"{day}T13:00", "end": f"{day}T13:30"}
    return Task(
        task_id=f"calendar-conflict-{split}",
        kind="calendar",
        difficulty="hard",
        split=split,
        prompt=f"Two events of Kim on {day} are at the same time. Move the one of the two whose title says (movable) "
        "to the next later time on that day, starting at a full or a half hour, when all of its attendees are free. It "
        "keeps its length, and all else stays as it is.",
        fixtures={"calendar": state},
        verify=verify(
            "Passes when the movable event is at the first time that fits, and all else is as it was.",
            """
            def wrong(e: Episode):
                item, old = e.item("calendar", "events", "e-2"), e.initial("calendar")["events"][1]
                if item != {**old, **e.expect["moved"]}:
                    yield f"the event is now {item}"
                yield from e.kept("calendar", "events", but=["e-2"])
                if e.new("calendar", "events"):
                    yield "there is a new event"
            """,
        ),
        expect={"moved": moved},
        reference=call("calendar_list", date=day)
        + call("calendar_update", id="e-2", **moved)
        + "echo 'Coffee is at 13:00 now.'\n",
        cheat=call("calendar_delete", id="e-2") + "echo 'No two events are at the same time now.'\n",
        tags=("calendar-conflict",),
    )


def _complete(split: str) -> Task:
    titles = {
        "train": ("Order crates", "Order crates for June", "Paint the gate", "Call the bank", "Clean the press"),
        "heldout": ("Mend the net", "Mend the nets", "Buy rope", "Sell the cart", "Count the sacks"),
    }[split]
    state = todos(*((title, "Kim", "", title == titles[3]) for title in titles))
    done = [titles[0], titles[4]]
    ids = ["t-1", "t-5"]
    return Task(
        task_id=f"todo-complete-{split}",
        kind="todo",
        difficulty="easy",
        split=split,
        prompt="Mark as done, in my list of tasks, those that done.txt names. Change nothing else.",
        files={"done.txt": "\n".join(done) + "\n"},
        fixtures={"todo": state},
        verify=verify(
            "Passes when the named items are done and all others are as they were.",
            """
            def wrong(e: Episode):
                for key in e.expect["ids"]:
                    if e.item("todo", "items", key).get("done") is not True:
                        yield f"{key} is not done"
                yield from e.kept("todo", "items", but=e.expect["ids"])
                if e.new("todo", "items"):
                    yield "there is a new item"
            """,
        ),
        expect={"ids": ids},
        reference="cat done.txt >/dev/null\n"
        + call("todo_list")
        + "".join(call("todo_update", id=i, done=True) for i in ids)
        + "echo 'Both are done.'\n",
        cheat="".join(call("todo_update", id=f"t-{n}", done=True) for n in range(1, 6)) + "echo 'Both are done.'\n",
        tags=("todo-complete",),
    )


def _minutes(split: str) -> Task:
    minutes = """\
# Minutes, 6 May 2031

We talked about the harvest. Bo thinks that it is early this year.

- ACTION Ana: rent a truck (by 2031-05-20)
- Cy will think about a new label.
- ACTION Bo: test the press (by 2031-05-12, urgent)
- ACTION Cy: write to the mill (by 2031-05-15)
- ACTION Ana: fix the roof (dropped, see below)

The roof is fixed already, so that action is dropped. All agreed.
"""
    wanted = [("rent a truck", "Ana", "2031-05-20", "normal"), ("test the press", "Bo", "2031-05-12", "high")]
    keys = ("title", "owner", "due", "priority")
    return Task(
        task_id=f"todo-minutes-{split}",
        kind="todo",
        difficulty="medium",
        split=split,
        prompt="minutes.md has actions, marked with ACTION. Add each action that was not dropped to the list of tasks: "
        "title as it is written there, owner, due day, priority high if it is urgent and normal otherwise. Actions "
        "that the list has already are not added again, and the items that are there stay as they are.",
        files={"minutes.md": minutes},
        fixtures={"todo": todos(("write to the mill", "Cy", "2031-05-15", False), ("fix the roof", "Ana", "", True))},
        verify=verify(
            "Passes when the two actions that were missing are in the list, and no other.",
            """
            def wrong(e: Episode):
                new = e.new("todo", "items")
                found = sorted([i["title"].strip().lower(), i["owner"], i["due"], i["priority"]] for i in new)
                if found != e.expect["wanted"] or any(i["done"] for i in new):
                    yield f"the new items are {found}"
                yield from e.kept("todo", "items")
            """,
        ),
        expect={"wanted": wanted},
        reference="cat minutes.md >/dev/null\n"
        + call("todo_list")
        + "".join(call("todo_create", **dict(zip(keys, w, strict=True))) for w in wanted)
        + "echo 'Two actions were added.'\n",
        cheat="".join(
            call("todo_create", title=line.split(": ")[1], owner=line.split()[2].strip(":"))
            for line in minutes.splitlines()
            if "ACTION" in line
        )
        + "echo 'All actions are in the list.'\n",
        tags=("todo-minutes",),
    )


def _current(split: str) -> Task:
    state = notes(
        ("Guests", "2030-02-01", "house", "The guests' network is called Meadow; its password is plum-17."),
        ("Network", "2030-09-14", "house", "Since today the password of Meadow is pear-42."),
        ("Office", "2031-01-08", "house", "The office network Granite has the password quince-88. Not for guests."),
        ("Network again", "2031-04-02", "house", "Somebody shared pear-42. Meadow now has the password fig-63."),
    )
    return Task(
        task_id=f"notes-current-{split}",
        kind="notes",
        difficulty="easy",
        split=split,
        prompt="A guest asks for the password of our guests' network. Find the one that is valid now in the notes, and "
        "say only it in your last message. Change no note.",
        fixtures={"notes": state},
        verify=verify(
            "Passes when the last message has the valid password and no other.",
            """
            def wrong(e: Episode):
                yield from e.answered("fig-63", never=["plum-17", "pear-42", "quince-88"])
                if e.state("notes") != e.initial("notes"):
                    yield "the notes were changed"
            """,
        ),
        reference=call("notes_search", query="password") + call("notes_get", id="n-4") + "echo fig-63\n",
        cheat=call("notes_get", id="n-1") + "echo 'One of plum-17, pear-42, quince-88 and fig-63.'\n",
        tags=("notes-current",),
    )


def _merge(split: str) -> Task:
    state = notes(
        ("Kitchen", "2031-03-02", "supplies", "- tea\n- Sugar\n- soap"),
        ("Recipes", "2031-03-03", "food", "- apples\n- flour"),
        ("Press", "2031-03-09", "supplies", "- oil\n- soap\n- cloths"),
        ("Yard", "2031-04-01", "supplies", "- nails\n- OIL"),
    )
    items = ["cloths", "nails", "oil", "soap", "sugar", "tea"]
    merged = "\n".join(f"- {i}" for i in items)
    new = {"title": "Supplies", "body": merged, "tags": ["supplies"]}
    return Task(
        task_id=f"notes-merge-{split}",
        kind="notes",
        difficulty="medium",
        split=split,
        prompt="Merge the notes with the tag supplies: write one note with the title Supplies and the tag supplies "
        "that lists all their items in lower case, each once, sorted, a line `- item` each; then delete the merged "
        "notes. Other notes stay.",
        fixtures={"notes": state},
        verify=verify(
            "Passes when one note has all items and the merged ones are gone.",
            """
            def wrong(e: Episode):
                new = e.new("notes", "notes")
                lines = [n["body"].strip().splitlines() for n in new]
                if [n["title"] for n in new] != ["Supplies"] or lines != [e.expect["lines"]]:
                    yield f"the new notes are {new}"
                elif new[0]["tags"] != ["supplies"]:
                    yield "the new note has not the tag supplies"
                left = [n["id"] for n in e.state("notes")["notes"] if n["id"] in ("n-1", "n-3", "n-4")]
                if left:
                    yield f"{left} were not deleted"
                yield from e.kept("notes", "notes", but=["n-1", "n-3", "n-4"])
            """,
        ),
        expect={"lines": merged.splitlines()},
        reference=call("notes_list", tag="supplies")
        + "".join(call("notes_get", id=n) for n in ("n-1", "n-3", "n-4"))
        + call("notes_create", **new)
        + "".join(call("notes_delete", id=n) for n in ("n-1", "n-3", "n-4"))
        + "echo 'One note has all supplies.'\n",
        cheat=call("notes_create", title="Supplies", body="see the other notes", tags=["supplies"])
        + "".join(call("notes_delete", id=f"n-{n}") for n in range(1, 5))
        + "echo 'One note has all supplies.'\n",
        tags=("notes-merge",),
    )
