"""Reading a log: typed rows out of the SQL views, with text that is exact whatever it holds.

Invariant: reading never writes. The views show NULL where SQLite cannot hold a text; here it is cut out of the
message's JSON in Python, so it is exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from compaction.errors import InvalidInput, LogMissing, NotALog
from compaction.events import Event, check_payload
from compaction.messages import resolve
from compaction.store.connection import Store
from compaction.store.rows import ConversationRow, DecisionRow, MessageRow, SpanRow, UsageRow
from compaction.store.writing import unpack

__all__ = [
    "conversations",
    "decisions",
    "events",
    "messages",
    "restore",
    "span_at",
    "span_text",
    "spans",
    "spans_after",
    "text",
    "usage",
]

_PAGE = 256  # events or spans fetched at a time: the lock is free between two pages

_SPAN_COLUMNS = (
    'id, conversation, decision, event, position, message_id, path, start, "end", tokens, action, reason, replaced_by, '
    "message_json"
)


def events(store: Store, conversation: str, after: int) -> Iterator[Event]:
    """The conversation's events with seq > after, in order, each payload checked. Fetched page by page."""
    while True:
        with store.reading() as connection:
            rows = connection.execute(
                "SELECT id, conversation, seq, kind, at, payload, hash FROM events "
                "WHERE conversation = ? AND seq > ? ORDER BY seq LIMIT ?",
                (conversation, after, _PAGE),
            ).fetchall()
        for id, name, seq, kind, at, payload, hash in rows:
            yield Event(id, name, seq, kind, at, _checked(store, id, kind, payload), hash)
        if len(rows) < _PAGE:
            return
        after = rows[-1][2]


def text(store: Store, digest: bytes) -> str:
    """The text under a salted digest. Raises LogMissing where it was never written or has been erased."""
    with store.reading() as connection:
        row = connection.execute(
            "SELECT coalesce(t.body, b.body) FROM texts t LEFT JOIN bodies b ON b.id = t.shared WHERE t.digest = ?",
            (digest.hex(),),
        ).fetchone()
    if row is None:
        raise LogMissing(f"{store.name}: no text under digest {digest.hex()}")
    if row[0] is None:
        raise LogMissing(f"{store.name}: the text under digest {digest.hex()} has been erased")
    return unpack(row[0])


def conversations(store: Store) -> list[ConversationRow]:
    """Every conversation, in the order in which they began."""
    columns = ", ".join(field.name for field in fields(ConversationRow))
    order = "(SELECT e.id FROM events e WHERE e.conversation = conversations.conversation AND e.seq = 1)"
    return [ConversationRow(**row) for row in store.query(f"SELECT {columns} FROM conversations ORDER BY {order}")]


def messages(store: Store, conversation: str) -> list[MessageRow]:
    """The conversation's messages as appended, in order."""
    columns = ", ".join(field.name for field in fields(MessageRow))
    sql = f"SELECT {columns} FROM messages WHERE conversation = ? ORDER BY seq"
    return [MessageRow(**row) for row in store.query(sql, (conversation,))]


def usage(store: Store, conversation: str) -> list[UsageRow]:
    """What each generation of the conversation cost, in order."""
    columns = ", ".join(field.name for field in fields(UsageRow))
    sql = f"SELECT {columns} FROM usage WHERE conversation = ? ORDER BY seq"
    return [UsageRow(**row) for row in store.query(sql, (conversation,))]


def decisions(store: Store, conversation: str | None) -> list[DecisionRow]:
    """The committed decisions, of one conversation or of all, in the order in which they were written."""
    columns = ", ".join(field.name for field in fields(DecisionRow) if field.name not in ("failures", "undone"))
    sql = (
        f"SELECT {columns}, (SELECT json_extract(payload, '$.failures') FROM events WHERE id = event) AS failures "
        "FROM decisions WHERE :c IS NULL OR conversation = :c ORDER BY event"
    )
    rows = store.query(sql, {"c": conversation})
    taken_back = _taken_back(store, conversation) if rows else {}
    return [_decision(row, _undone(taken_back, row["conversation"], row["seq"])) for row in rows]


def spans(store: Store, conversation: str | None, decision: int | None) -> list[SpanRow]:
    """The discarded spans, of one conversation or one decision (its seq) of it, or of all, in order."""
    sql = (
        f"SELECT {_SPAN_COLUMNS} FROM spans WHERE (:c IS NULL OR conversation = :c) AND (:d IS NULL OR decision = :d) "
        "ORDER BY event, position"
    )
    rows = store.query(sql, {"c": conversation, "d": decision})
    taken_back = _taken_back(store, conversation) if rows else {}
    return [_span(row, _undone(taken_back, row["conversation"], row["decision"])) for row in rows]


def spans_after(store: Store, event: int, limit: int) -> list[SpanRow]:
    """At least `limit` spans of the decisions after an event id (fewer at the end), whole decisions only.

    `undone` is not looked up.
    """
    sql = (
        f"SELECT {_SPAN_COLUMNS} FROM spans WHERE event > :e AND event <= (SELECT max(decision) FROM (SELECT decision "
        "FROM span_ids WHERE decision > :e ORDER BY decision, position LIMIT :n)) ORDER BY event, position"
    )
    return [_span(row) for row in store.query(sql, {"e": event, "n": limit})]


def span_at(store: Store, event: int, position: int) -> SpanRow:
    """The span at a position of a decision (its event id); `undone` is not looked up."""
    sql = f"SELECT {_SPAN_COLUMNS} FROM spans WHERE event = ? AND position = ?"
    return _span(store.query(sql, (event, position))[0])


def restore(store: Store, span_id: str) -> str:
    """The span's text from the original message, byte for byte.

    Raises LogMissing where no decision discarded such a span or its text has been erased.
    """
    rows = store.query(f"SELECT {_SPAN_COLUMNS} FROM spans WHERE id = ? ORDER BY event LIMIT 1", (span_id,))
    if not rows:
        raise LogMissing(f"{store.name}: no span {span_id!r}: `compaction audit spans DB` lists them")
    found = _span(rows[0]).text
    if found is None:
        raise LogMissing(f"{store.name}: the text of span {span_id!r} has been erased")
    return found


def span_text(message_json: str, path: str, start: int, end: int) -> str:
    """Code points [start, end) of the string at a JSON Pointer; the whole JSON text for path "".

    Raises KeyError where the path leads to no string.
    """
    if path == "":
        return message_json
    string = resolve(json.loads(message_json), path)
    if not isinstance(string, str):
        raise KeyError(path)
    return string[start:end]


def _checked(store: Store, id: int, kind: str, payload: str) -> dict[str, Any]:
    try:
        parsed: dict[str, Any] = json.loads(payload)
        check_payload(kind, parsed)
    except (ValueError, InvalidInput) as exc:
        raise NotALog(f"{store.name}: event {id} cannot be read ({exc}): run verify") from exc
    return parsed


def _taken_back(store: Store, conversation: str | None) -> dict[str, list[tuple[int, int]]]:
    """Of each conversation the pairs (to, seq) of its rewinds that count: what lies between the two is undone.

    Read backwards, since a rewind undoes earlier rewinds too.
    """
    sql = "SELECT conversation, seq, json_extract(payload, '$.to') AS \"to\" FROM events WHERE kind = 'rewound'"
    if conversation is not None:
        sql += " AND conversation = :c"
    found: dict[str, list[tuple[int, int]]] = {}
    for row in store.query(f"{sql} ORDER BY id DESC", {"c": conversation}):
        pairs = found.setdefault(row["conversation"], [])
        if not pairs or row["seq"] <= pairs[-1][0]:
            pairs.append((row["to"], row["seq"]))
    return found


def _undone(taken_back: dict[str, list[tuple[int, int]]], conversation: str, seq: int) -> bool:
    return any(to < seq < rewound for to, rewound in taken_back.get(conversation, ()))


def _decision(row: dict[str, Any], undone: bool) -> DecisionRow:
    for name in ("params", "limits", "target", "before", "after"):
        row[name] = json.loads(row[name]) if row[name] else {}
    row["actions"] = tuple(json.loads(row["actions"]))
    row["failures"] = tuple(failure["code"] for failure in json.loads(row["failures"] or "[]"))
    return DecisionRow(**row, undone=undone)


def _span(row: dict[str, Any], undone: bool = False) -> SpanRow:
    source = row.pop("message_json")
    for name in ("reason", "replaced_by"):
        row[name] = None if row[name] is None else unpack(row[name])
    try:
        found = None if source is None else span_text(source, row["path"], row["start"], row["end"])
    except KeyError:
        found = None
    return SpanRow(**row, text=found, undone=undone)
