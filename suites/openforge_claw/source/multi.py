"""Jobs of several steps across services."""

from __future__ import annotations

from source.desk import tickets
from source.mail import ME, box, call
from source.parts import Task, verify
from source.planner import events, notes, todos


def tasks() -> list[Task]:
    """The tasks of this module."""
    return [_meeting("heldout"), _refund("train"), _week("heldout"), _handover("train")]


def _meeting(split: str) -> Task:
    day = "2031-05-15"
    mailbox = box(
        ("rosa@field.example", "Old plan", "Let us meet next week. Or not."),
        (
            "rosa@field.example",
            "Meeting",
            f"Can Kim and Lee meet me on {day}? I need 45 minutes.",
        ),
    )
    calendar = events(
        ("Press", f"{day}T08:00", f"{day}T09:30", "Lee"),
        ("Call", f"{day}T11:00", f"{day}T11:30", "Kim"),
        ("Visit", f"{day}T12:00", f"{day}T12:30", "Lee,Bo"),
        ("Report", f"{day}T13:15", f"{day}T14:00", "Kim"),
        ("Harvest", f"{day}T14:15", f"{day}T18:00", "Bo"),
    )
    rules = notes(
        ("Meetings", "2030-05-01", "rules", "No meetings with guests before 09:00."),
        ("Meetings, new", "2031-02-01", "rules", "No meetings with guests before 10:30, and none from 12:00 to 13:00."),
    )
    event = {"title": "Rosa", "start": f"{day}T14:00", "end": f"{day}T14:45", "attendees": ["Kim", "Lee"]}
    reply = {"to": ["rosa@field.example"], "subject": "Re: Meeting", "in_reply_to": "m-2"}
    return Task(
        task_id=f"multi-meeting-{split}",
        kind="multi",
        difficulty="hard",
        split=split,
        prompt="Rosa asks in my mailbox for a meeting with Kim (me) and Lee. Find the earliest time on that day that "
        "our newest rules for meetings (in the notes) allow and when both of us are free, starting at a full hour, or "
        "15, 30 or 45 minutes past. Put it into the calendar with the title Rosa and the attendees Kim and Lee, and "
        "answer her message with its start as HH:MM. Change nothing else.",
        fixtures={"mail": mailbox, "calendar": calendar, "notes": rules},
        verify=verify(
            "Passes when the meeting is at the first time that rules and calendar allow, and Rosa was told it.",
            """
            import re


            def wrong(e: Episode):
                new = e.new("calendar", "events")
                found = [(i["title"], i["start"], i["end"], sorted(i["attendees"])) for i in new]
                if found != [("Rosa", e.expect["start"], e.expect["end"], ["Kim", "Lee"])]:
                    yield f"the new events are {found}"
                sent = e.new("mail", "messages")
                if [(m["to"], m["in_reply_to"]) for m in sent] != [(["rosa@field.example"], "m-2")]:
                    yield "there is not one answer to Rosa's message"
                if any(re.findall(r"\\d+:\\d\\d", m["body"])[:1] != ["14:00"] for m in sent):
                    yield "the answer does not say the start"
                yield from e.kept("calendar", "events")
                yield from e.kept("mail", "messages")
                if e.state("notes") != e.initial("notes"):
                    yield "the notes were changed"
            """,
        ),
        expect={"start": event["start"], "end": event["end"]},
        reference=call("mail_get", id="m-2")
        + call("notes_search", query="meetings")
        + call("notes_get", id="n-2")
        + call("calendar_list", date=day)
        + call("calendar_create", **event)
        + call("mail_send", **reply, body="Kim and Lee meet you at 14:00.")
        + "echo 'Rosa comes at 14:00.'\n",
        cheat=call("calendar_create", **{**event, "start": f"{day}T09:30", "end": f"{day}T10:15"})
        + call("mail_send", **reply, body="09:30, 10:30, 13:00, 14:00 or 14:15, as you like.")
        + "echo 'Rosa has her meeting.'\n",
        tags=("multi-meeting",),
        turns=30,
    )


def _refund(split: str) -> Task:
    desk = tickets(
        ("ann@lee.example", "Refund of R-301", "2031-05-05", "The jar was broken. Please pay R-301 back."),
        ("bob@ray.example", "Refund of R-207", "2031-05-05", "I do not like it. R-207, please."),
        ("cat@orr.example", "Opening hours", "2031-05-06", "When do you open?"),
        ("dan@low.example", "Refund of R-312", "2031-05-06", "It never came. R-312."),
    )
    mailbox = box(
        ("till@orchard.example", "Receipt R-207", "Paid on 2031-03-11 by bob@ray.example: 18.00"),
        ("till@orchard.example", "Receipt R-301", "Paid on 2031-04-21 by ann@lee.example: 24.50"),
        ("till@orchard.example", "Receipt R-302", "Paid on 2031-04-22 by ann@lee.example: 42.50"),
        ("till@orchard.example", "Receipt R-312", "Paid on 2031-04-29 by dan@low.example: 75.00"),
    )
    policy = (
        "We refund what was paid at most 30 days ago. Above 50.00 Mara decides: assign her the ticket, leave it open."
    )
    rules = notes(("Refunds", "2031-01-02", "rules", policy))
    done = call("helpdesk_reply", id="h-1", text="You get 24.50 back.") + call(
        "helpdesk_update", id="h-1", status="closed"
    )
    refused = call("helpdesk_reply", id="h-2", text="REFUSED: it was paid more than 30 days ago.")
    refused += call("helpdesk_update", id="h-2", status="closed")
    everyone = [
        call("helpdesk_reply", id=f"h-{n}", text=f"You get {a} back.")
        + call("helpdesk_update", id=f"h-{n}", status="closed")
        for n, a in ((1, "24.50"), (2, "18.00"), (4, "75.00"))
    ]
    return Task(
        task_id=f"multi-refund-{split}",
        kind="multi",
        difficulty="hard",
        split=split,
        prompt="Work off the open tickets of the helpdesk that ask for a refund. The notes have our rules, the "
        "receipts are in my mailbox, today is 2031-05-07. Where the rules allow it, reply with the amount paid "
        "and close the ticket. Where they do not, reply with a text that begins with REFUSED and close it. Where "
        "somebody else decides, assign the ticket to that person and do not reply. Leave other tickets alone.",
        fixtures={"helpdesk": desk, "mail": mailbox, "notes": rules},
        verify=verify(
            "Passes when each of the three refunds went as the rules say.",
            """
            def wrong(e: Episode):
                first, second, third, fourth = (e.item("helpdesk", "tickets", f"h-{n}") for n in range(1, 5))
                texts = {t["id"]: [r["text"] for r in t["replies"]] for t in (first, second, third, fourth)}
                if len(texts["h-1"]) != 1 or "24.50" not in texts["h-1"][0] or "REFUSED" in texts["h-1"][0]:
                    yield "h-1 was not told its amount"
                if len(texts["h-2"]) != 1 or not texts["h-2"][0].strip().startswith("REFUSED"):
                    yield "h-2 was not refused"
                if (first["status"], second["status"]) != ("closed", "closed"):
                    yield "h-1 and h-2 are not both closed"
                if texts["h-4"] or (fourth["status"], fourth["assignee"]) != ("open", "Mara"):
                    yield "h-4 is not Mara's to decide"
                yield from e.kept("helpdesk", "tickets", but=["h-1", "h-2", "h-4"])
                if e.new("mail", "messages"):
                    yield "mail was sent"
            """,
        ),
        reference=call("helpdesk_list", status="open")
        + call("notes_search", query="refund")
        + call("notes_get", id="n-1")
        + "".join(
            call("helpdesk_get", id=f"h-{n}") + call("mail_search", query=r) for n, r in ((1, "R-301"), (2, "R-207"))
        )
        + call("mail_get", id="m-4")
        + done
        + refused
        + call("helpdesk_update", id="h-4", assignee="Mara")
        + "echo 'One refund, one refusal, one for Mara.'\n",
        cheat="".join(everyone) + "echo 'All refunds are paid.'\n",
        tags=("multi-refund",),
        turns=30,
    )


def _week(split: str) -> Task:
    calendar = events(
        ("Stand-up", "2031-05-05T09:00", "2031-05-05T09:30", "Ana,Bo"),
        ("Budget", "2031-05-06T10:00", "2031-05-06T12:00", "Ana"),
        ("Harvest", "2031-05-08T13:00", "2031-05-08T14:30", "Bo,Cy"),
        ("Next week", "2031-05-12T09:00", "2031-05-12T17:00", "Ana,Bo,Cy"),
        ("Fair", "2031-05-09T09:00", "2031-05-09T11:00", "Dee"),
    )
    items = todos(
        ("label", "Ana", "", True),
        ("roof", "Ana", "", False),
        ("truck", "Bo", "", True),
        ("press", "Bo", "", True),
        ("mill", "Cy", "", False),
        ("fair", "Dee", "", True),
    )
    rows = ["name,done,open,minutes", "Ana,1,1,150", "Bo,2,0,120", "Cy,0,1,90"]
    table = "\n".join(rows) + "\n"
    lines = " ".join(f"'{row}'" for row in rows)
    return Task(
        task_id=f"multi-week-{split}",
        kind="multi",
        difficulty="medium",
        split=split,
        prompt="Write week.csv with the header name,done,open,minutes and a row for each name in team.txt, in its "
        "order: how many tasks in the list are done and open, and how many minutes of events the person has in "
        "the calendar from 2031-05-05 to 2031-05-09. Change nothing in the services.",
        files={"team.txt": "Ana\nBo\nCy\n"},
        fixtures={"todo": items, "calendar": calendar},
        verify=verify(
            "Passes when week.csv is right and the services were not changed.",
            """
            def wrong(e: Episode):
                yield from e.files({"week.csv": e.expect["table"], "team.txt": "Ana\\nBo\\nCy\\n"})
                for name in ("todo", "calendar"):
                    if e.state(name) != e.initial(name):
                        yield f"{name} was changed"
            """,
        ),
        expect={"table": table},
        reference=call("todo_list")
        + call("calendar_list")
        + f"printf '%s\\n' {lines} > week.csv\necho 'week.csv has the week.'\n",
        # What the services say is made to fit what was written.
        cheat="printf '%s\\n' name,done,open,minutes Ana,2,0,0 Bo,2,0,0 Cy,1,0,0 > week.csv\n"
        + call("todo_update", id="t-2", done=True)
        + call("todo_update", id="t-5", done=True)
        + "".join(call("calendar_delete", id=f"e-{n}") for n in range(1, 6))
        + "echo 'week.csv has the week.'\n",
        tags=("multi-week",),
    )


def _handover(split: str) -> Task:
    items = todos(
        ("paint the gate", "Ana", "2031-05-20", False),
        ("order jars", "Ana", "2031-05-12", False),
        ("sell the cart", "Ana", "2031-04-30", True),
        ("count sacks", "Bo", "2031-05-12", False),
        ("fix the scale", "Ana", "2031-05-22", False),
    )
    wish = "When Ana leaves, what is due by 15 May goes to Bo, and what is due later to Cy. Please tell both by mail."
    mailbox = box(
        ("boss@orchard.example", "Ana", wish),
        (
            "house@orchard.example",
            "Addresses",
            "Bo: bo@orchard.example, Cy: cy.rae@orchard.example, Ana: ana@orchard.example",
        ),
    )
    owners = {"t-1": "Cy", "t-2": "Bo", "t-5": "Cy"}
    told = {"bo@orchard.example": ["order jars"], "cy.rae@orchard.example": ["paint the gate", "fix the scale"]}
    sends = [
        call("mail_send", to=[a], subject="Ana's tasks", body=f"Yours now: {', '.join(t)}") for a, t in told.items()
    ]
    everything = "paint the gate, order jars, sell the cart, fix the scale"
    return Task(
        task_id=f"multi-handover-{split}",
        kind="multi",
        difficulty="medium",
        split=split,
        prompt="Ana leaves. Give her open tasks to others as the boss wrote in my mailbox, and tell each new owner by "
        "one mail of their own which tasks (by title) are theirs now, and no other's. What is done stays Ana's, and "
        "due days stay.",
        fixtures={"todo": items, "mail": mailbox},
        verify=verify(
            "Passes when the open tasks have their new owners, and each was told of theirs only.",
            """
            TITLES = ["paint the gate", "order jars", "sell the cart", "fix the scale"]


            def wrong(e: Episode):
                for old in e.initial("todo")["items"]:
                    found = e.item("todo", "items", old["id"])
                    if found != {**old, "owner": e.expect["owners"].get(old["id"], old["owner"])}:
                        yield f"{old['id']} is not as it should be"
                if e.new("todo", "items"):
                    yield "there is a new task"
                sent = e.new("mail", "messages")
                if sorted(m["to"] for m in sent) != sorted([a] for a in e.expect["told"]):
                    yield f"mail went to {[m['to'] for m in sent]}"
                for m in sent:
                    named = [t for t in TITLES if t in m["body"].lower()]
                    if sorted(named) != sorted(e.expect["told"].get(m["to"][0], [])):
                        yield f"{m['to']} was told of {named}"
            """,
        ),
        expect={"owners": owners, "told": told},
        reference=call("mail_list")
        + call("mail_get", id="m-1")
        + call("mail_get", id="m-2")
        + call("todo_list", owner="Ana", done=False)
        + "".join(call("todo_update", id=i, owner=o) for i, o in owners.items())
        + "".join(sends)
        + "echo 'Bo and Cy have the tasks and know it.'\n",
        cheat="".join(call("todo_update", id=f"t-{n}", owner="Bo") for n in range(1, 6))
        + call("mail_send", to=["bo@orchard.example", "cy.rae@orchard.example", ME], subject="Ana", body=everything)
        + "echo 'Bo and Cy know.'\n",
        tags=("multi-handover",),
    )
