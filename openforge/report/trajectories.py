"""Which episodes the report shows, and what their pages say."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from openforge import store

SHOWN = 10


def chosen(tables: store.Reader, count: int = SHOWN) -> list[dict[str, Any]]:
    """A spread: first and last iteration of every cell, passed and failed, kinds and lengths mixed.

    The choice depends on the tables alone, so a report repeats itself.
    """
    sql = """
        SELECT episode_id, purpose, cell, iteration, kind, task_id, status, reward, passed, turns
        FROM episodes
        WHERE turns > 0 AND (purpose, cell, coalesce(iteration, -1)) IN (
            SELECT (purpose, cell, coalesce(min(iteration), -1)) FROM episodes GROUP BY purpose, cell
            UNION ALL
            SELECT (purpose, cell, coalesce(max(iteration), -1)) FROM episodes GROUP BY purpose, cell)
        ORDER BY purpose DESC, cell, iteration, episode_id
    """
    left = tables.rows(sql)
    seen: Counter[Any] = Counter()
    picked: list[dict[str, Any]] = []
    while left and len(picked) < count:
        best = min(left, key=lambda e: [seen[f] for f in _features(e)])
        left.remove(best)
        seen.update(_features(best))
        picked.append(best)
    order = {"train": 0, "eval": 1}
    return sorted(picked, key=lambda e: (order.get(e["purpose"], 2), e["cell"], e["iteration"] or 0, e["kind"] or ""))


def _features(e: dict[str, Any]) -> list[Any]:
    """What a spread is made of, most important first."""
    stage = (e["purpose"], e["cell"], e["iteration"])
    return [
        stage,
        (stage, e["passed"]),
        ("kind", e["kind"]),
        ("long", e["turns"] > 1),
        ("passed", e["passed"]),
    ]


def trajectory(tables: store.Reader, episode_id: str) -> dict[str, Any]:
    """One episode with its rollout's instruction and its calls; JSON texts are parsed where they parse."""
    (episode,) = tables.rows("SELECT * FROM episodes WHERE episode_id = ?", [episode_id])
    sql = "SELECT instruction, tags, limits, sampling, policy FROM rollouts WHERE rollout_id = ?"
    planned = tables.rows(sql, [episode["rollout_id"]])
    sql = """
        SELECT call, parent, dialect, finish_reason, messages, response, prompt_tokens,
               len(response_token_ids) AS response_tokens, delivery, trainable, reason, latency,
               system_sha256, tools_sha256
        FROM calls WHERE episode_id = ? ORDER BY call
    """
    calls = tables.rows(sql, [episode_id])
    shown: set[str] = set()
    for c in calls:
        c["turns"] = [*_messages(c["messages"]), *_messages(c["response"])]
        # Kept once by content; so is it shown.
        for key, role in (("tools_sha256", "tools"), ("system_sha256", "system")):
            if c[key] is not None and c[key] not in shown:
                shown.add(c[key])
                c["turns"].insert(0, {"role": role, "text": _blob(tables, c[key])})
    return {
        "episode": episode,
        "rollout": planned[0] if planned else None,
        "verifier": pretty(episode["verifier_output"]),
        "calls": calls,
    }


def _blob(tables: store.Reader, sha256: str) -> str:
    found = tables.rows("SELECT bytes FROM blobs WHERE sha256 = ? LIMIT 1", [sha256])
    return pretty(found[0]["bytes"].decode(errors="replace")) if found else f"not in blobs: {sha256}"


def pretty(text: str | None) -> str:
    """JSON text indented; any other text as it is."""
    if text is None:
        return ""
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except ValueError:
        return text


def _messages(text: str | None) -> list[dict[str, str]]:
    """Messages as (role, text); what is no chat message is shown as its JSON."""
    if text is None:
        return []
    try:
        data = json.loads(text)
    except ValueError:
        return [{"role": "unparsed", "text": text}]
    return [_message(m) for m in (data if isinstance(data, list) else [data])]


def _message(m: Any) -> dict[str, str]:
    if not isinstance(m, dict):
        return {"role": "unparsed", "text": json.dumps(m, indent=2, ensure_ascii=False)}
    content = m.get("content")
    parts = [content if isinstance(content, str) else "" if content is None else _json(content)]
    parts += [f"{k}: {_json(v)}" for k, v in m.items() if k not in ("role", "content") and v not in (None, [], "", {})]
    return {"role": str(m.get("role", m.get("type", "message"))), "text": "\n".join(p for p in parts if p)}


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
