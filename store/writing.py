"""Turning events and texts into rows, and writing them in one transaction.

Invariant: what is written has been checked first (payload shapes, digests, that every text is named by an event and
every named text is there), so that a log never holds a row that `verify` would complain about.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compaction.errors import InvalidInput, LogConflict, LogMissing
from compaction.events import Event, NewEvent, Text, chain, check_payload, digest_of
from compaction.messages import dumps
from compaction.store.references import named, span_of
from compaction.store.schema import SHARE_ABOVE

__all__ = ["Batch", "lookup_of", "newest", "pack", "prepare", "unpack", "write"]

_SPANS_PER_DECISION = 1 << 20


@dataclass(frozen=True, slots=True)
class _Row:
    event: NewEvent
    payload: str
    parsed: dict[str, object]
    spans: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Checked rows, ready to be written: events, texts, and the digests (hex) that must be in the log already."""

    rows: tuple[_Row, ...]
    texts: tuple[Text, ...]
    needed: tuple[str, ...]


def prepare(conversation: str, events: Sequence[NewEvent], texts: Sequence[Text]) -> Batch:
    """Check everything that can be checked without the database.

    Raises InvalidInput; nothing has been touched then.
    """
    _check_name("conversation id", conversation)
    rows = tuple(_row(event) for event in events)
    brought: set[str] = set()
    for text in texts:
        if digest_of(text.salt, text.body) != text.digest:
            raise InvalidInput(f"the digest of a text is not that of its salt and body: {text.digest.hex()}")
        brought.add(text.digest.hex())
    wanted = {digest: None for row in rows for digest in named(row.parsed)}
    for digest in brought.difference(wanted):
        raise InvalidInput(
            f"text {digest} is named by none of the events it comes with: write it with the one that does"
        )
    return Batch(rows, tuple(texts), tuple(digest for digest in wanted if digest not in brought))


def write(connection: sqlite3.Connection, conversation: str, after: int, batch: Batch) -> tuple[Event, ...]:
    """Write a batch inside the caller's transaction.

    Raises LogConflict where the conversation has moved on, LogMissing where an event names an unknown text.
    """
    found = seq_of(connection, conversation)
    if found != after:
        raise LogConflict(conversation, after, found)
    for text in batch.texts:
        _write_text(connection, text)
    for digest in batch.needed:
        if connection.execute("SELECT 1 FROM texts WHERE digest = ?", (digest,)).fetchone() is None:
            raise LogMissing(f"an event names text {digest}, which is not in the log: write the text with the event")
    written = tuple(_events(connection, conversation, after, batch.rows))
    connection.executemany(
        "INSERT INTO events(id, conversation, seq, kind, at, payload, hash) VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (event.id, conversation, event.seq, event.kind, event.at, row.payload, event.hash)
            for event, row in zip(written, batch.rows, strict=True)
        ],
    )
    for event, row in zip(written, batch.rows, strict=True):
        if row.spans:
            connection.executemany(
                "INSERT INTO span_ids(decision, position, id) VALUES (?, ?, ?)",
                [(event.id, position, span_id) for position, span_id in enumerate(row.spans)],
            )
    return written


def newest(connection: sqlite3.Connection) -> tuple[int, bytes]:
    """Id and hash of the newest event of the file; 0 and no bytes in an empty log."""
    row = connection.execute("SELECT id, hash FROM events ORDER BY id DESC LIMIT 1").fetchone()
    return (int(row[0]), bytes(row[1])) if row else (0, b"")


def seq_of(connection: sqlite3.Connection, conversation: str) -> int:
    """The newest seq of a conversation, 0 where there is none."""
    row = connection.execute("SELECT max(seq) FROM events WHERE conversation = ?", (conversation,)).fetchone()
    return int(row[0] or 0)


def lookup_of(body: str) -> bytes:
    """16 bytes by which equal bodies find each other. Unsalted, so it goes when the body goes."""
    return hashlib.sha256(body.encode("utf-8", "surrogatepass")).digest()[:16]


def pack(body: str) -> str | bytes:
    """A body as SQLite can keep it: TEXT, or the WTF-8 bytes where it holds a NUL or a lone surrogate."""
    if body.isascii():
        return body.encode("ascii") if "\x00" in body else body
    raw = body.encode("utf-8", "surrogatepass")
    if "\x00" in body:
        return raw
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw
    return body


def unpack(stored: str | bytes) -> str:
    """The inverse of `pack`."""
    return stored if isinstance(stored, str) else stored.decode("utf-8", "surrogatepass")


def _check_name(what: str, value: object) -> None:
    """A name goes into a TEXT column and into SQL functions: no NUL, no lone surrogate."""
    if not isinstance(value, str) or not value or not isinstance(pack(value), str):
        raise InvalidInput(f"{what} must be a non-empty text without NUL and lone surrogates, not {value!r}")


def _row(event: NewEvent) -> _Row:
    _check_name("an event's time", event.at)
    try:
        payload = dumps(event.payload)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidInput(f"{event.kind} payload: not a JSON value: {exc}") from exc
    parsed = json.loads(payload)
    if not isinstance(parsed, dict):
        raise InvalidInput(f"{event.kind} payload: not a JSON object")
    check_payload(event.kind, parsed)
    spans: tuple[str, ...] = ()
    if event.kind == "decision_committed":
        try:
            spans = tuple(span_of(row).id for row in parsed["spans"])
        except ValueError as exc:
            raise InvalidInput(f"decision_committed payload: {exc}") from exc
        if len(spans) >= _SPANS_PER_DECISION:
            raise InvalidInput(f"a decision of {len(spans):,} spans: split it, {_SPANS_PER_DECISION - 1:,} fit in one")
    return _Row(event, payload, parsed, spans)


def _events(connection: sqlite3.Connection, conversation: str, after: int, rows: Sequence[_Row]) -> Iterator[Event]:
    id, previous = newest(connection)
    for seq, row in enumerate(rows, after + 1):
        id += 1
        previous = chain(previous, id, conversation, seq, row.event.kind, row.event.at, row.payload)
        yield Event(id, conversation, seq, row.event.kind, row.event.at, row.parsed, previous)


def _write_text(connection: sqlite3.Connection, text: Text) -> None:
    digest = text.digest.hex()
    present = connection.execute("SELECT salt FROM texts WHERE digest = ?", (digest,)).fetchone()
    if present is not None:
        if present[0] == text.salt:  # then the body is the same too: the digest covers both
            return
        raise InvalidInput(f"text {digest} is in the log under another salt, or erased: seal it with a fresh salt")
    shared = _share(connection, text.body) if len(text.body) > SHARE_ABOVE else None
    body = pack(text.body) if shared is None else None
    connection.execute(
        "INSERT INTO texts(digest, salt, body, shared) VALUES (?, ?, ?, ?)", (digest, text.salt, body, shared)
    )


def _share(connection: sqlite3.Connection, body: str) -> int | None:
    """The row that holds a long body, written if need be; None where its lookup belongs to something else."""
    lookup, packed = lookup_of(body), pack(body)
    found = connection.execute("SELECT id, body FROM bodies WHERE lookup = ?", (lookup,)).fetchone()
    if found is not None:
        return int(found[0]) if found[1] == packed else None
    return connection.execute("INSERT INTO bodies(lookup, body) VALUES (?, ?)", (lookup, packed)).lastrowid
