"""Full-text search over what was discarded.

Invariant: the index holds the words of every span up to some decision and nothing else; it is filled on search, never
on the hot path, and can be thrown away at any time. It is contentless: the text itself stays in one place. Its rowid
is the decision's event id and the span's position, so no second table says what is indexed.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator

from compaction.messages import leaves
from compaction.store.connection import Store
from compaction.store.reading import span_at, spans_after
from compaction.store.rows import Hit, SpanRow

__all__ = ["FTS", "INDEX_PREFIX", "indexable", "indexed", "place", "rowid", "search"]

FTS = "CREATE VIRTUAL TABLE spans_fts USING fts5(text, content='', tokenize='unicode61')"
INDEX_PREFIX = "spans_fts"
_SHIFT = 20
_FILL = 2000  # spans written in one transaction: other writers get their turn in between

_SEARCH = """
SELECT spans_fts.rowid, bm25(spans_fts)
FROM spans_fts JOIN events ON events.id = spans_fts.rowid >> 20
WHERE spans_fts MATCH ? AND (? IS NULL OR events.conversation = ?)
ORDER BY bm25(spans_fts), spans_fts.rowid LIMIT ?
"""


def search(store: Store, query: str, limit: int, conversation: str | None) -> list[Hit]:
    """Spans with every word of the query, best first (bm25). A word with punctuation in it is searched as a phrase."""
    match = _quoted(query)
    if not match or limit < 1:
        return []
    _fill(store)
    with store.reading() as connection:
        ranked = connection.execute(_SEARCH, (match, conversation, conversation, limit)).fetchall()
        sources = [span_at(store, key >> _SHIFT, key & ((1 << _SHIFT) - 1)) for key, _ in ranked]
    snippets = _snippets([indexable(span) for span in sources], match)
    return [
        Hit(span.id, span.conversation, span.decision, span.message_id, span.path, snippet, rank)
        for span, snippet, (_, rank) in zip(sources, snippets, ranked, strict=True)
    ]


def rowid(span: SpanRow) -> int:
    """The span's row in the index."""
    return span.event << _SHIFT | span.position


def place(key: int) -> str:
    """An index row as people read it: decision's event id / position of the span."""
    return f"{key >> _SHIFT}/{key & ((1 << _SHIFT) - 1)}"


def indexed(connection: sqlite3.Connection) -> int | None:
    """The newest decision (event id) in the index; 0 where it is empty, None where there is no index yet."""
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'spans_fts'").fetchone() is None:
        return None
    row = connection.execute("SELECT rowid FROM spans_fts ORDER BY rowid DESC LIMIT 1").fetchone()
    return int(row[0]) >> _SHIFT if row else 0


def indexable(span: SpanRow) -> str:
    """The words of a span: its text, for a whole message the strings in it but its role.

    What UTF-8 cannot hold becomes "?", a NUL a space.
    """
    if span.text is None:
        return ""
    words = span.text
    if span.path == "":
        words = "\n".join(string for path, string in leaves(json.loads(span.text)) if path != "/role")
    return words.encode("utf-8", "replace").decode("utf-8").replace("\x00", " ")


def _fill(store: Store) -> None:
    with store.reading() as connection:
        newest = connection.execute("SELECT max(decision) FROM span_ids").fetchone()[0] or 0
        more = indexed(connection) is None or newest > (indexed(connection) or 0)
    while more:
        with store.writing() as connection:
            done = indexed(connection)
            if done is None:
                connection.execute(FTS)
            spans = spans_after(store, done or 0, _FILL)
            connection.executemany(
                "INSERT INTO spans_fts(rowid, text) VALUES (?, ?)", ((rowid(span), indexable(span)) for span in spans)
            )
            more = len(spans) >= _FILL


def _quoted(query: str) -> str:
    """Every word as a quoted FTS5 string, so that no operator and no syntax error can come from a caller."""
    clean = query.encode("utf-8", "replace").decode("utf-8").replace("\x00", " ")
    return " ".join('"' + word.replace('"', '""') + '"' for word in clean.split())


def _snippets(texts: list[str], match: str) -> Iterator[str]:
    """A few words around the match, from a throw-away index over these texts alone."""
    scratch = sqlite3.connect(":memory:")
    try:
        scratch.execute("CREATE VIRTUAL TABLE s USING fts5(text, tokenize='unicode61')")
        for text in texts:
            key = scratch.execute("INSERT INTO s(text) VALUES (?)", (text,)).lastrowid
            sql = "SELECT snippet(s, 0, '[', ']', '…', 16) FROM s WHERE s MATCH ? AND rowid = ?"
            row = scratch.execute(sql, (match, key)).fetchone()
            yield row[0] if row else text[:80]
    finally:
        scratch.close()
