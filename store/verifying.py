"""Proving that a log file agrees with itself, and with a head kept outside.

Invariant: everything is read again; nothing that was stored is believed because it is stored. One changed byte in any
column of any documented table is a `Problem` that names the table and the row. Without an outside head, a file whose
newest events were cut off verifies: what was never seen cannot be missed. Keep `head()` somewhere else.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from compaction.errors import CompactionError, InvalidInput
from compaction.events import chain, check_payload, digest_of
from compaction.messages import resolve
from compaction.plan import Span
from compaction.store.anchors import GENESIS, head_text
from compaction.store.connection import Store, open_memory
from compaction.store.indexing import check_index
from compaction.store.overlap import Outside
from compaction.store.references import mentions, named, span_of
from compaction.store.rows import Problem, VerifyReport
from compaction.store.search import INDEX_PREFIX
from compaction.store.writing import lookup_of, pack, unpack

__all__ = ["verify"]


def verify(store: Store, heads: tuple[str, ...]) -> VerifyReport:
    """Check the whole file in one consistent read. `heads` are hashes kept outside, each must be an ancestor."""
    with store.reading() as connection:
        factory = connection.text_factory
        connection.text_factory = _lenient
        try:
            connection.execute("BEGIN")
            return _Verifier(store, connection, heads).run()
        finally:
            connection.text_factory = factory
            if connection.in_transaction:
                connection.execute("ROLLBACK")


def _lenient(raw: bytes) -> str:
    """Text that is no UTF-8 any more must be reported, not crash the report."""
    return raw.decode("utf-8", "surrogateescape")


class _Verifier:
    def __init__(self, store: Store, connection: sqlite3.Connection, heads: tuple[str, ...]) -> None:
        self.store = store
        self.connection = connection
        self.heads = set(heads)
        self.anchored = 0
        self.problems: list[Problem] = []
        self.last = (0, b"")
        self.seqs: dict[str, int] = {}
        self.outside: dict[str, Outside] = {}
        self.messages: dict[str, str] = {}
        self.referenced: dict[str, int] = {}
        self.erased: set[str] = set()
        self.leaf = lru_cache(maxsize=256)(self._leaf)

    def run(self) -> VerifyReport:
        """Every check in turn; one that SQLite cannot even read to its end is a problem of the file."""
        checks: tuple[tuple[str, Callable[[], None]], ...] = (
            ("database", self.check_schema),
            ("database", self.check_pages),
            ("events", self.check_events),
            ("texts", self.check_texts),
            ("bodies", self.check_bodies),
            ("span_ids", self.check_span_ids),
            (INDEX_PREFIX, self.check_index),
        )
        for table, check in checks:
            try:
                check()
            except (sqlite3.Error, CompactionError, ValueError, TypeError, KeyError, AttributeError) as exc:
                self.problem(table, "", None, f"cannot be read to its end: {exc}")
        self.check_heads()
        return VerifyReport(
            ok=not self.problems,
            events=self.last[0],
            problems=tuple(self.problems),
            head=head_text(self.last[1]),
            unanchored=self.last[0] - self.anchored if self.heads else None,
        )

    def problem(self, table: str, row: object, column: str | None, message: str) -> None:
        """Note one."""
        self.problems.append(Problem(table, str(row), column, message))

    def check_schema(self) -> None:
        """Tables, views, indexes and triggers are those of the newest schema, word for word, and no others."""
        with contextlib.closing(open_memory()) as fresh:
            found, expected = _schema(self.connection), _schema(fresh.db.conn)
        for name in sorted(expected.keys() - found.keys()):
            self.problem("sqlite_master", name, None, "missing: the schema has been changed")
        for name in sorted(found.keys() - expected.keys()):
            self.problem("sqlite_master", name, None, "does not belong to a compaction log")
        for name in sorted(found.keys() & expected.keys()):
            if found[name] != expected[name]:
                self.problem("sqlite_master", name, "sql", "differs from the schema of this version")

    def check_pages(self) -> None:
        """SQLite's own check of pages, indexes and constraints."""
        for (message,) in self.connection.execute("PRAGMA integrity_check").fetchall():
            if message != "ok":
                self.problem("database", "", None, message)

    def check_events(self) -> None:
        """The chain, ids and seqs without a gap, payload shapes, and what each kind says about the others."""
        sql = "SELECT id, conversation, seq, kind, at, payload, hash FROM events ORDER BY id"
        for id, conversation, seq, kind, at, payload, hash in self.connection.execute(sql):
            if id != self.last[0] + 1:
                self.problem("events", id, "id", f"comes after event {self.last[0]}: events in between are missing")
            if seq != self.seqs.get(conversation, 0) + 1:
                before = self.seqs.get(conversation, 0)
                self.problem("events", id, "seq", f"seq {seq} of {conversation!r} comes after seq {before}")
            if _chained(self.last[1], id, conversation, seq, kind, at, payload) != hash:
                self.problem("events", id, None, "its hash is not that of its fields and the event before it")
            self.seqs[conversation] = seq
            self.last = (id, bytes(hash))
            if head_text(self.last[1]) in self.heads:
                self.anchored = id
            self.check_payload(id, conversation, seq, kind, payload)

    def check_payload(self, id: int, conversation: str, seq: int, kind: str, text: str) -> None:
        """One event's payload: its shape, and the texts, message and spans it names."""
        try:
            payload = json.loads(text)
            check_payload(kind, payload)
            for digest in named(payload):
                self.referenced.setdefault(digest, id)
            outside = self.outside.setdefault(conversation, Outside())
            if kind == "opened" and seq == 1 and "forked_from" in payload:
                source = payload["forked_from"]
                outside.fork(self.outside.setdefault(source["conversation"], Outside()), source["seq"])
            elif kind == "appended":
                self.messages[payload["message"]] = payload["text"]
            elif kind == "decision_committed":
                self.check_spans(id, seq, [span_of(row) for row in payload["spans"]], outside)
            elif kind == "restored":
                span = Span(payload["message"], payload["path"], payload["start"], payload["end"])
                outside.restore(seq, span)
            elif kind == "rewound":
                outside.rewind(seq, payload["to"])
            elif kind == "redacted":
                self.erased.update(mentions(payload))
        except (ValueError, InvalidInput, TypeError, KeyError, AttributeError, RecursionError) as exc:
            self.problem("events", id, "payload", f"not a {kind} payload: {exc}")

    def check_spans(self, id: int, seq: int, spans: list[Span], outside: Outside) -> None:
        """Spans lie inside their messages' strings, and nothing goes out twice."""
        for position, clash in outside.take(seq, spans):
            self.problem("spans", f"{spans[position].id} of event {id}", None, clash)
        for span in spans:
            length = self.leaf(span.message_id, span.path)
            if length is None:
                self.problem("spans", f"{span.id} of event {id}", "path", f"{span.message_id!r} has no {span.path!r}")
            elif not 0 <= span.start <= span.end <= length:
                self.problem("spans", f"{span.id} of event {id}", "end", f"leaves its string of {length:,} characters")

    def _leaf(self, message_id: str, path: str) -> int | None:
        """Code points of the string at a path of a message; None where there is none; unbounded once erased."""
        digest = self.messages.get(message_id)
        if digest is None:
            return None
        row = self.connection.execute(
            "SELECT coalesce(t.body, b.body) FROM texts t LEFT JOIN bodies b ON b.id = t.shared WHERE t.digest = ?",
            (digest,),
        ).fetchone()
        if row is None or row[0] is None:
            return 1 << 62  # the text is missing or erased: that is reported where texts are checked
        body = unpack(row[0])
        try:
            string = body if path == "" else resolve(json.loads(body), path)
        except (KeyError, ValueError):
            return None
        return len(string) if isinstance(string, str) else None

    def check_texts(self) -> None:
        """Each text has the digest it stands under, is named by an event, and each named text is there."""
        missing = dict(self.referenced)
        sql = (
            "SELECT t.digest, t.salt, t.body, t.shared, b.id, b.body FROM texts t LEFT JOIN bodies b ON b.id = t.shared"
        )
        for digest, salt, body, shared, shared_id, shared_body in self.connection.execute(sql):
            if missing.pop(digest, None) is None:
                self.problem("texts", digest, "digest", "named by no event")
            if salt is None and body is None and shared is None:
                if digest not in self.erased:
                    self.problem("texts", digest, "body", "erased, but no event says so")
            elif shared is not None and (shared_id is None or body is not None):
                self.problem("texts", digest, "shared", f"body {shared} is not there, or there are two")
            elif not _sealed(digest, salt, body if shared is None else shared_body):
                self.problem("texts", digest, None, "its digest is not that of its salt and body")
        for digest, id in missing.items():
            self.problem("texts", digest, None, f"missing, but event {id} names it")

    def check_bodies(self) -> None:
        """Each shared body has the lookup of its text and is used by a text."""
        sql = "SELECT id, lookup, body, EXISTS (SELECT 1 FROM temp.used u WHERE u.id = b.id) FROM bodies b"
        self.connection.execute("CREATE TEMP TABLE used(id INTEGER PRIMARY KEY)")
        self.connection.execute("INSERT OR IGNORE INTO temp.used SELECT shared FROM texts WHERE shared IS NOT NULL")
        for id, lookup, body, used in self.connection.execute(sql):
            if body is None or lookup != lookup_of(_text(body)):
                self.problem("bodies", id, None, "its lookup is not that of its body")
            if not used:
                self.problem("bodies", id, "id", "used by no text")

    def check_span_ids(self) -> None:
        """The derived table equals what the decisions say."""
        found = {
            (decision, position): span_id
            for decision, position, span_id in self.connection.execute("SELECT decision, position, id FROM span_ids")
        }
        for key, span_id in self.expected_span_ids():
            if found.pop(key, None) != span_id:
                self.problem("span_ids", f"{key[0]}/{key[1]}", "id", f"is not {span_id}, which the decision says")
        for decision, position in found:
            self.problem("span_ids", f"{decision}/{position}", None, "no decision has such a span")

    def expected_span_ids(self) -> Iterator[tuple[tuple[int, int], str]]:
        """((decision, position), span id) as the events say."""
        sql = "SELECT id, payload FROM events WHERE +kind = 'decision_committed' ORDER BY id"
        for id, payload in self.connection.execute(sql):
            for position, row in enumerate(json.loads(payload)["spans"]):
                yield (id, position), span_of(row).id

    def check_index(self) -> None:
        """The full-text index, where there is one, holds the words of the spans and no others."""
        for row, message in check_index(self.store, self.connection):
            self.problem(INDEX_PREFIX, row, None, message)

    def check_heads(self) -> None:
        """Every head kept outside is the hash of some event of this file."""
        known = {GENESIS}
        if self.heads - known:
            sql = "SELECT 1 FROM events WHERE hash = ?"
            for head in sorted(self.heads - known):
                try:
                    hash = bytes.fromhex(head.removeprefix("sha256:"))
                except ValueError:
                    hash = b""
                if self.connection.execute(sql, (hash,)).fetchone() is None:
                    self.problem(
                        "events", "", "hash", f"no event has the outside head {head}: the tail was cut or changed"
                    )


def _schema(connection: sqlite3.Connection) -> dict[str, Any]:
    rows = connection.execute("SELECT name, type, tbl_name, sql FROM sqlite_master").fetchall()
    return {
        name: (type, table, sql)
        for name, type, table, sql in rows
        if not (name.startswith("sqlite_stat") or name == INDEX_PREFIX or name.startswith(f"{INDEX_PREFIX}_"))
    }


def _chained(previous: bytes, id: int, conversation: str, seq: int, kind: str, at: str, payload: str) -> bytes:
    try:
        return chain(previous, id, conversation, seq, kind, at, payload)
    except (TypeError, ValueError):
        return b""


def _text(stored: str | bytes) -> str:
    """A body as it was, or something that no digest fits where it is no longer readable."""
    try:
        return unpack(stored)
    except (UnicodeDecodeError, AttributeError):
        return "\x00unreadable"


def _sealed(digest: str, salt: bytes | None, body: str | bytes | None) -> bool:
    if salt is None or body is None:
        return False
    text = _text(body)
    return digest_of(salt, text).hex() == digest and pack(text) == body
