"""Proving that the full-text index says what the spans say.

Invariant: the index is compared word by word, with positions, with one built anew from the spans; it may stop at some
decision (it is filled lazily), but up to there it is complete.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from compaction.store.connection import Store
from compaction.store.reading import spans_after
from compaction.store.search import FTS, INDEX_PREFIX, indexable, indexed, place, rowid

__all__ = ["check_index"]

_PAGE = 2000
_ENOUGH = 20  # problems; a damaged index is thrown away as a whole anyway


def check_index(store: Store, connection: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    """(row, what is wrong) for each disagreement; nothing where there is no index yet."""
    done = indexed(connection)
    if done is None:
        return
    row = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (INDEX_PREFIX,)).fetchone()
    if row is None or row[0] != FTS:
        yield "", "is not defined as this version defines it"
    with contextlib.closing(sqlite3.connect(":memory:")) as fresh:
        fresh.execute(FTS)
        for page in _pages(store, done):
            fresh.executemany("INSERT INTO spans_fts(rowid, text) VALUES (?, ?)", page)
        connection.execute("CREATE VIRTUAL TABLE temp.spans_words USING fts5vocab(main, spans_fts, instance)")
        fresh.execute("CREATE VIRTUAL TABLE temp.spans_words USING fts5vocab(main, spans_fts, instance)")
        wrong = 0
        for message, sql in _COMPARED:
            for stored, derived in zip_longest(connection.execute(sql), fresh.execute(sql)):
                if stored != derived:
                    yield place(int((stored or derived)[0])), message
                    wrong += 1
                if wrong >= _ENOUGH:
                    return


_COMPARED: tuple[tuple[str, str], ...] = (
    ("its number of words is not that of the span", "SELECT id, sz FROM spans_fts_docsize ORDER BY id"),
    ("its words are not those of the span", "SELECT doc, term, col, offset FROM temp.spans_words"),
    ("its totals are not those of the spans", "SELECT 0, block FROM spans_fts_data WHERE id = 1"),
)


def _pages(store: Store, done: int) -> Iterator[list[tuple[int, Any]]]:
    """(rowid, words) of every span up to a decision."""
    event = 0
    while spans := spans_after(store, event, _PAGE):
        yield [(rowid(span), indexable(span)) for span in spans if span.event <= done]
        event = spans[-1].event
        if event >= done:
            return
