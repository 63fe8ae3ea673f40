"""Dynamic sampling: which reserve groups run, whatever the order in which episodes end, and after a kill."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_stub import StubUpstream
from shard_rig import PARTIAL, Make, row, rows_of

from openforge.rollout import engine
from openforge.rollout.groups import Groups, metric_of
from openforge.rollout.partial import Partial
from openforge.rollout.rows import Book

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def table(planned: int, reserve: int, n: int = 2) -> list[dict[str, Any]]:
    """Rollouts g0.0, g0.1, g1.0 ...; groups from number `planned` on are the reserve."""
    return [
        {"group_id": f"g{g}", "rollout_id": f"g{g}.{i}", "reserve": g >= planned}
        for g in range(planned + reserve)
        for i in range(n)
    ]


def play(groups: Groups, values: dict[str, float | None], draw: Any) -> list[str]:
    """End rollouts one by one, `draw` choosing among those that run; names of the groups that ran."""
    going, ran = list(groups.due), []
    while going:
        r = going.pop(draw(len(going)))
        ran.append(r["group_id"])
        going += groups.ended(r, values[r["rollout_id"]])
    return sorted(set(ran))


def expected(planned: int, reserve: int, flat: set[str]) -> list[str]:
    """The shortest head of the table with as many groups of variance as are planned, or all of it."""
    for count in range(planned, planned + reserve + 1):
        head = [f"g{g}" for g in range(count)]
        if sum(g not in flat for g in head) >= planned:
            break
    return sorted(head)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_which_groups_run_depends_on_their_variance_alone(data: st.DataObject) -> None:
    planned, reserve = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 6))
    rows = table(planned, reserve)
    flat = data.draw(st.sets(st.sampled_from(sorted({r["group_id"] for r in rows}))))
    values = {r["rollout_id"]: 0.5 if r["group_id"] in flat else float(r["rollout_id"].endswith(".1")) for r in rows}

    def draw(n: int) -> int:
        return data.draw(st.integers(0, n - 1))

    ran = play(Groups(rows, ()), values, draw)
    assert ran == expected(planned, reserve, flat)
    # A process that died at any point: what had ended is told again, what had begun is due, and the rest is the same.
    first, going, ended = Groups(rows, ()), [], []
    going += first.due
    for _ in range(data.draw(st.integers(0, len(going)))):
        r = going.pop(draw(len(going)))
        ended.append(r)
        going += first.ended(r, values[r["rollout_id"]])
    begun = {r["rollout_id"] for r in ended} | {r["rollout_id"] for r in going[: draw(len(going) + 1)]}
    again = Groups(rows, begun)
    going = [r for r in again.due if r not in ended]
    for r in ended:
        going += again.ended(r, values[r["rollout_id"]])
    while going:
        going += again.ended(r := going.pop(draw(len(going))), values[r["rollout_id"]])
    assert sorted({r["group_id"] for r in again.due}) == ran


def test_a_group_that_infrastructure_failed_is_not_replaced() -> None:
    # One verdict says nothing of variance; that is for the quorum.
    groups = Groups(table(1, 2), ())
    assert [groups.ended(r, v) for r, v in zip(groups.due, [1.0, None], strict=True)] == [[], []]
    # Two of three that agree do.
    groups = Groups(table(1, 1, n=3), ())
    a, b, c = groups.due
    assert groups.ended(a, 1.0) == groups.ended(b, None) == []
    assert [r["rollout_id"] for r in groups.ended(c, 1.0)] == ["g1.0", "g1.1", "g1.2"]


def test_more_groups_than_planned_are_not_made_up_for() -> None:
    # A reserve group began, then its cause went away (a failed rollout, run again, gave the group variance).
    rows = table(2, 3)
    groups = Groups(rows, {"g2.0"})
    assert [r["rollout_id"] for r in groups.due] == ["g0.0", "g0.1", "g1.0", "g1.1", "g2.0", "g2.1"]
    for r, v in zip(groups.due[:4], [0.0, 1.0, 0.0, 0.0], strict=True):
        assert groups.ended(r, v) == []
    assert groups.ended(groups.due[4], 1.0) == []
    assert [r["rollout_id"] for r in groups.ended(groups.due[5], 1.0)] == ["g3.0", "g3.1"]


@pytest.mark.parametrize(
    ("status", "line", "reward", "acc"),
    [
        ("completed", {"score": 0.25, "passed": False}, 0.25, 0.0),
        ("agent_timeout", {"score": 0.75, "passed": True, "shaping": -0.25}, 1.0, 1.0),
        ("verifier_failed", None, None, None),
        ("sandbox_lost", None, None, None),
    ],
)
def test_what_an_episode_adds(status: str, line: Any, reward: float | None, acc: float | None) -> None:
    episode = {"status": status, "verifier_output": json.dumps(line) if line else None}
    assert (metric_of(episode, "reward"), metric_of(episode, "acc")) == (reward, acc)


# ---- in a shard -----------------------------------------------------------------------------------
def judged(name: str, score: float, reserve: bool) -> dict[str, Any]:
    """A rollout of group `name` before its dot that calls no policy and is judged so."""
    verdict = json.dumps({"score": score, "passed": score == 1.0})
    return row(name, agent="true", verifier=f"print({verdict!r})", group_id=name.split(".")[0], reserve=reserve)


def group(name: str, scores: tuple[float, float], reserve: bool = False) -> list[dict[str, Any]]:
    return [judged(f"{name}.{i}", s, reserve) for i, s in enumerate(scores)]


# Two groups are planned. a has no variance, nor has its first stand-in; d is not needed.
ROWS = [
    *group("a", (1.0, 1.0)),
    *group("b", (0.0, 1.0)),
    *group("r", (0.0, 0.0), True),
    *group("s", (1.0, 0.0), True),
    *group("d", (1.0, 0.0), True),
]


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_a_shard_runs_reserve_groups_until_its_quota(make: Make, concurrency: int) -> None:
    shard = make(*ROWS, concurrency=concurrency)
    episodes, _ = await rows_of(shard)
    assert [(e["rollout_id"], e["status"]) for e in episodes] == [
        (f"{g}.{i}", "completed") for g in "abrs" for i in range(2)
    ]
    assert all(e["final"] for e in episodes)
    assert (shard.progress.done, shard.progress.total) == (8, 8)


async def test_by_whether_they_passed(make: Make) -> None:
    # Scores differ, verdicts do not.
    rows = [*group("a", (0.25, 0.5)), *group("r", (0.0, 1.0), True)]
    episodes, _ = await rows_of(make(*rows, metric="acc"))
    assert {e["group_id"] for e in episodes} == {"a", "r"}


async def test_a_shard_that_died_goes_on_with_the_reserve_it_had_begun(
    make: Make, upstream: StubUpstream, tmp_path: Path
) -> None:
    first = make(*ROWS[:4])
    await first.run()
    first.partial.close()
    # It died with one rollout of r under way, and s not yet due.
    dead = Partial(tmp_path / PARTIAL, "d")
    dead.start("r.1", 0, NOW)
    dead.close()
    shard = make(*ROWS)
    episodes, _ = await rows_of(shard)
    assert Counter(e["rollout_id"] for e in episodes if e["final"]) == Counter(
        f"{g}.{i}" for g in "abrs" for i in range(2)
    )
    assert [(e["attempt"], e["status"]) for e in episodes if e["rollout_id"] == "r.1"] == [
        (0, "sandbox_lost"),
        (1, "completed"),
    ]
    assert [e["attempt"] for e in episodes if e["group_id"] in "ab"] == [0] * 4
    assert (shard.progress.done, shard.progress.total) == (8, 8)


async def test_a_rerun_of_a_whole_shard_runs_nothing(make: Make) -> None:
    await make(*ROWS).run()
    shard = make(*ROWS)
    episodes, _ = await rows_of(shard)
    assert len(episodes) == 8 and {e["attempt"] for e in episodes} == {0}


def test_a_sealed_shard_loses_what_had_begun_and_no_other(tmp_path: Path) -> None:
    partial = Partial(tmp_path, "d")
    book = Book(ROWS, "1", "0@abc", 0, "x.zip")
    for r in ROWS[:3]:
        partial.start(r["rollout_id"], 0, NOW)
        partial.end(book.row(r, 0, NOW) | {"status": "completed"})
    partial.start("r.0", 0, NOW)
    partial.close()
    got = [(e["rollout_id"], e["status"]) for e in book.sealed(Partial(tmp_path, "d"))]
    assert got == [("a.0", "completed"), ("a.1", "completed"), ("b.0", "completed")] + [
        (name, "shard_lost") for name in ("b.1", "r.0", "r.1")
    ]


async def test_a_failed_member_is_tried_again_before_its_group_counts(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "BACK_OFF", 0.01)
    broken = judged("a.2", 1.0, False)
    broken = row("a.2", agent="true", verifier="raise SystemExit(9)", group_id=broken["group_id"])
    rows = [*group("a", (1.0, 1.0)), broken, *group("r", (1.0, 0.0), True)]
    episodes, _ = await rows_of(make(*rows))
    # Two verdicts that agree, and a third that never came: r takes its place, after both attempts.
    assert [(e["rollout_id"], e["attempt"]) for e in episodes] == [
        ("a.0", 0),
        ("a.1", 0),
        ("a.2", 0),
        ("a.2", 1),
        ("r.0", 0),
        ("r.1", 0),
    ]
