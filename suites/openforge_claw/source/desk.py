"""Jobs with a helpdesk."""

from __future__ import annotations

from typing import Any

from source.mail import NOW, call
from source.parts import Task, text, verify


def tickets(*items: tuple[str, str, str, str]) -> dict[str, Any]:
    """A helpdesk of open tickets (customer, subject, created, body); ids are h-1, h-2, ..."""
    found = []
    for number, (customer, subject, created, body) in enumerate(items, 1):
        head = {"id": f"h-{number}", "customer": customer, "subject": subject, "body": body, "created": created}
        rest = {"status": "open", "priority": "normal", "assignee": "", "duplicate_of": "", "replies": []}
        found.append({**head, **rest})
    return {"now": NOW, "tickets": found}


def tasks() -> list[Task]:
    """The tasks of this module."""
    return [_priority("train"), _priority("heldout"), _duplicates("heldout"), _flaky("train"), _flaky("heldout")]


def _priority(split: str) -> Task:
    gold, basic = ("Hill Farm", "Bay Shop") if split == "train" else ("Coast Inn", "Dune Cafe")
    policy = """\
    # Priorities

    1. An outage of a gold customer is urgent.
    2. An outage of anyone else is high.
    3. A question about a bill is normal, whoever asks.
    4. Anything else is low; of a gold customer it is normal.

    Tickets that wait for us longer than 7 days (by the day they were created) are one step higher than these rules
    say; urgent stays urgent.
    """
    state = tickets(
        (basic, "Outage since noon", "2031-05-06", "The till does not start."),
        (gold, "Outage", "2031-05-07", "Nothing works."),
        (gold, "New logo", "2031-05-05", "We have a new logo."),
        (basic, "Question about a bill", "2031-04-20", "Why is it higher?"),
        (basic, "Thanks", "2031-05-02", "All is well."),
        (gold, "Outage again", "2031-04-11", "Still down at night."),
    )
    wanted = dict(
        zip((f"h-{n}" for n in range(1, 7)), ["high", "urgent", "normal", "high", "low", "urgent"], strict=True)
    )
    return Task(
        task_id=f"helpdesk-priority-{split}",
        kind="helpdesk",
        difficulty="medium",
        split=split,
        prompt="Give every open ticket of the helpdesk the priority that policy.md says; plans.csv has each customer's "
        "plan, and today is 2031-05-07. Change nothing else.",
        files={"policy.md": text(policy), "plans.csv": f"customer,plan\n{gold},gold\n{basic},basic\n"},
        fixtures={"helpdesk": state},
        verify=verify(
            "Passes when each ticket has the policy's priority and is otherwise as it was.",
            """
            def wrong(e: Episode):
                for old in e.initial("helpdesk")["tickets"]:
                    found = e.item("helpdesk", "tickets", old["id"])
                    if found != {**old, "priority": e.expect["wanted"][old["id"]]}:
                        yield f"{old['id']} has the priority {found.get('priority')}, or something else was changed"
            """,
        ),
        expect={"wanted": wanted},
        reference="cat policy.md plans.csv >/dev/null\n"
        + call("helpdesk_list", status="open")
        + "".join(call("helpdesk_update", id=k, priority=p) for k, p in wanted.items())
        + "echo 'All tickets have their priority.'\n",
        cheat="".join(call("helpdesk_update", id=k, priority="urgent") for k in wanted)
        + "echo 'All tickets have their priority.'\n",
        tags=("helpdesk-priority",),
    )


def _duplicates(split: str) -> Task:
    state = tickets(
        ("Ann Lee", "Late", "2031-05-01", "My order 5512 is late."),
        ("Bob Ray", "Order 5521", "2031-05-01", "Order 5521 came broken."),
        ("Ann Lee", "Where is it?", "2031-05-03", "Still waiting for 5512!"),
        ("Cat Orr", "Late", "2031-05-03", "Order 5530 is late."),
        ("Ann Lee", "A new order", "2031-05-04", "Can I still change order 5544?"),
        ("Bob Ray", "Again", "2031-05-04", "About 5521: I sent photos."),
        ("Dan Low", "Help", "2031-05-05", "A friend ordered 5512 and asks me to write."),
        ("Ann Lee", "5512", "2031-05-06", "Hello? 5512?"),
    )
    closed = {"h-3": "h-1", "h-6": "h-2", "h-8": "h-1"}
    return Task(
        task_id=f"helpdesk-duplicates-{split}",
        kind="helpdesk",
        difficulty="hard",
        split=split,
        prompt="Clear the helpdesk of duplicates. Tickets of the same customer about the same order are duplicates of "
        "the earliest of them: close those, and name the earliest as what they are a duplicate of. Tickets of other "
        "customers or about other orders stay as they are, and so does the earliest. Write to nobody.",
        fixtures={"helpdesk": state},
        verify=verify(
            "Passes when the duplicates are closed and linked, and all others are as they were.",
            """
            def wrong(e: Episode):
                for old in e.initial("helpdesk")["tickets"]:
                    original = e.expect["closed"].get(old["id"])
                    change = {"status": "closed", "duplicate_of": original} if original else {}
                    if e.item("helpdesk", "tickets", old["id"]) != {**old, **change}:
                        yield f"{old['id']} is not as it should be"
            """,
        ),
        expect={"closed": closed},
        reference=call("helpdesk_list")
        + "".join(call("helpdesk_get", id=f"h-{n}") for n in range(1, 9))
        + "".join(call("helpdesk_update", id=k, status="closed", duplicate_of=o) for k, o in closed.items())
        + "echo 'Three duplicates are closed.'\n",
        cheat="".join(call("helpdesk_update", id=f"h-{n}", status="closed", duplicate_of="h-1") for n in range(2, 9))
        + "echo 'All duplicates are closed.'\n",
        tags=("helpdesk-duplicates",),
    )


# Calls a tool again while its service says that it failed without a change.
_AGAIN = """\
again() {
  while :; do
    out=$(tool "$@" 2>&1)
    case "$out" in *"temporarily unavailable"*) ;; *) echo "$out"; return ;; esac
  done
}
"""


def _flaky(split: str) -> Task:
    said, topic = (
        ("The office is closed on Friday.", "visit") if split == "train" else ("We moved to Dock 9.", "address")
    )
    state = tickets(
        ("Ann Lee", f"Question: {topic}", "2031-05-01", "Can I come on Friday?"),
        ("Bob Ray", "Broken jar", "2031-05-02", "It came broken."),
        ("Cat Orr", f"{topic}", "2031-05-03", "Are you there on Friday?"),
        ("Dan Low", f"Your {topic}", "2031-05-03", "Where do I ring?"),
        ("Eve Fox", "Invoice", "2031-05-04", "Please send it again."),
    )
    ids = ["h-1", "h-3", "h-4"]
    steps = [
        call(tool, id=i, **rest).replace("tool ", "again ", 1)
        for i in ids
        for tool, rest in (("helpdesk_reply", {"text": said}), ("helpdesk_update", {"status": "pending"}))
    ]
    blind = [
        call("helpdesk_reply", id=i, text=said) * 3 + call("helpdesk_update", id=i, status="pending") * 3 for i in ids
    ]
    return Task(
        task_id=f"helpdesk-flaky-{split}",
        kind="helpdesk",
        difficulty="medium",
        split=split,
        prompt=f"Answer every ticket whose subject has the word {topic} with exactly this text: {said} Then set those "
        "tickets to pending. The helpdesk is overloaded, and a call may fail; a call that fails has changed nothing. "
        "No customer may get the answer twice, and the other tickets stay as they are.",
        fixtures={"helpdesk": state},
        error_rate=0.35,
        verify=verify(
            "Passes when each ticket of the topic has the answer once and is pending.",
            """
            def wrong(e: Episode):
                for old in e.initial("helpdesk")["tickets"]:
                    found = e.item("helpdesk", "tickets", old["id"])
                    mine = old["id"] in e.expect["ids"]
                    if [r["text"].strip() for r in found["replies"]] != [e.expect["said"]] * mine:
                        yield f"{old['id']} has {len(found['replies'])} answers"
                    if found["status"] != ("pending" if mine else "open"):
                        yield f"{old['id']} is {found['status']}"
            """,
        ),
        expect={"ids": ids, "said": said},
        reference=_AGAIN + "again helpdesk_list '{}' >/dev/null\n" + "".join(steps) + "echo 'The customers know.'\n",
        cheat="".join(blind) + "echo 'The customers know.'\n",
        tags=("helpdesk-flaky",),
    )
