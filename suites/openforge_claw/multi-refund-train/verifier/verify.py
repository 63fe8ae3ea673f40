"""Passes when each of the three refunds went as the rules say."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


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


verdict(wrong)
