"""`verify` against every change we can think of."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from compaction.errors import LogError, LogMissing
from compaction.events import NewEvent, chain
from compaction.store import AuditLog, MemoryLog, VerifyReport
from tests.contracts.log_contract import AT, append, committed, note, story

COLUMNS = {
    "events": ("id", "conversation", "seq", "kind", "at", "payload", "hash"),
    "texts": ("digest", "salt", "body", "shared"),
    "bodies": ("id", "lookup", "body"),
    "span_ids": ("decision", "position", "id"),
}
KEYS = {"events": ("id",), "texts": ("digest",), "bodies": ("id",), "span_ids": ("decision", "position")}
CASES = [(table, column) for table, columns in COLUMNS.items() for column in columns]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "audit.db"
    with AuditLog(path, durability="normal") as log:
        story(log)
        log.search("order")
    return path


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(template, tmp_path / "audit.db"))


def report(path: Path, head: str | None = None) -> VerifyReport:
    with AuditLog(path, durability="normal") as log:
        return log.verify(head)


def tamper(path: Path, work: Callable[[sqlite3.Connection], object]) -> None:
    """Edit behind the triggers' back: they are dropped, and put back word for word."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        work(connection)
        for _, sql in triggers:
            connection.execute(sql)


def flipped(value: object) -> object:
    """The value with one byte changed."""
    if isinstance(value, int):
        return value ^ 64
    raw = bytearray(value.encode() if isinstance(value, str) else bytes(value))  # type: ignore[call-overload]
    raw[len(raw) // 2] ^= 1
    return bytes(raw)


def test_an_untouched_log_verifies(path: Path) -> None:
    """No problems, every event counted, the head named."""
    with AuditLog(path) as log:
        found = log.verify(log.head())

        assert (found.ok, found.problems, found.events, found.head, found.unanchored) == (True, (), 11, log.head(), 0)


def test_without_a_head_nothing_is_anchored_or_not(path: Path) -> None:
    """`unanchored` is None where no head was given: there is nothing to count from."""
    assert report(path).unanchored is None


def test_an_empty_log_verifies() -> None:
    """Nothing is wrong with nothing, and its head is an ancestor of everything."""
    with MemoryLog() as log:
        head = log.head()
        append(log, "c", "m", {"role": "user", "content": "x"})

        assert (log.verify(head).ok, log.verify(head).unanchored) == (True, 1)


@pytest.mark.parametrize(("table", "column"), CASES)
def test_one_changed_byte_is_found(path: Path, table: str, column: str) -> None:
    """In any column of any row of any table; the report names the table and the row."""
    keys = ", ".join(KEYS[table])
    with closing(sqlite3.connect(path)) as connection:
        values = connection.execute(f"SELECT {keys}, {column} FROM {table} WHERE {column} IS NOT NULL").fetchall()
    silent = []
    for number, row in enumerate(values):
        copy = Path(shutil.copy(path, path.with_name(f"{number}.db")))
        where = " AND ".join(f"{key} = ?" for key in KEYS[table])
        cast = "CAST(? AS TEXT)" if isinstance(row[-1], str) else "?"
        change = f"UPDATE {table} SET {column} = {cast} WHERE {where}"
        tamper(copy, lambda c, sql=change, row=row: c.execute(sql, (flipped(row[-1]), *row[:-1])))  # type: ignore[misc]
        found = report(copy)
        key = "/".join(str(part) for part in row[:-1])
        changed = flipped(row[-1])
        renamed = (
            "/".join(
                (changed.decode() if isinstance(changed, bytes) else str(changed)) if name == column else str(part)
                for name, part in zip(KEYS[table], row[:-1], strict=True)
            )
            if column in KEYS[table]
            else key
        )
        if not any(problem.table == table and problem.row in {key, renamed} for problem in found.problems):
            silent.append((key, found.problems))

    assert (len(values) > 0, silent) == (True, [])


@pytest.mark.parametrize("table", COLUMNS)
def test_a_deleted_row_is_found(path: Path, table: str) -> None:
    """Whichever row it is; of the newest event only its texts and spans remain as witnesses."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(f"SELECT {', '.join(KEYS[table])} FROM {table}").fetchall()
    where = " AND ".join(f"{key} = ?" for key in KEYS[table])
    silent = []
    for number, key in enumerate(rows):
        copy = Path(shutil.copy(path, path.with_name(f"{number}.db")))
        tamper(copy, lambda c, key=key: c.execute(f"DELETE FROM {table} WHERE {where}", key))  # type: ignore[misc]
        if report(copy).ok:
            silent.append(key)

    assert silent == []


def test_an_inserted_event_is_found(path: Path) -> None:
    """A row that was never chained does not fit, even with the next id and seq."""
    insert = "INSERT INTO events VALUES (12, 'd', 2, 'reanchored', ?, '{}', ?)"
    tamper(path, lambda c: c.execute(insert, (AT, bytes(32))))

    assert [problem.row for problem in report(path).problems] == ["12"]


def test_inserted_texts_bodies_and_span_ids_are_found(path: Path) -> None:
    """What no event names does not belong here."""
    tamper(
        path,
        lambda c: [
            c.execute("INSERT INTO texts VALUES (?, x'00', 'x', NULL)", ("a" * 64,)),
            c.execute("INSERT INTO bodies VALUES (99, x'00', 'x')"),
            c.execute("INSERT INTO span_ids VALUES (99, 0, 'x')"),
        ],
    )

    assert {problem.table for problem in report(path).problems} == {"texts", "bodies", "span_ids"}


def test_swapped_events_are_found(path: Path) -> None:
    """Two events that change places break the chain at the first."""
    swap = "UPDATE events SET id = CASE id WHEN 3 THEN -4 WHEN 4 THEN -3 ELSE id END WHERE id IN (3, 4)"
    tamper(path, lambda c: [c.execute(swap), c.execute("UPDATE events SET id = -id WHERE id < 0")])

    assert {problem.row for problem in report(path).problems} >= {"3", "4"}


def test_swapped_bodies_are_found(path: Path) -> None:
    """Two texts that change bodies have the digests of neither."""
    with closing(sqlite3.connect(path)) as connection:
        one, two = connection.execute(
            "SELECT digest, shared FROM texts WHERE shared IS NOT NULL ORDER BY shared"
        ).fetchall()[:2]
    set_ = "UPDATE texts SET shared = ? WHERE digest = ?"
    tamper(path, lambda c: [c.execute(set_, (two[1], one[0])), c.execute(set_, (one[1], two[0]))])

    assert {problem.row for problem in report(path).problems if problem.table == "texts"} == {one[0], two[0]}


def cut_tail(connection: sqlite3.Connection) -> None:
    """Take the newest event and everything that hangs on it."""
    connection.execute("DELETE FROM span_ids WHERE decision = (SELECT max(id) FROM events)")
    connection.execute("DELETE FROM events WHERE id = (SELECT max(id) FROM events)")


def test_a_cut_tail_needs_an_outside_head(path: Path) -> None:
    """Without one the shorter log verifies, as documented; with one it does not."""
    with AuditLog(path) as log:
        head = log.head()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE spans_fts")
    tamper(path, cut_tail)

    assert (report(path).ok, report(path, head).ok) == (True, False)


def test_an_older_head_counts_what_came_after(path: Path) -> None:
    """Any ancestor is a proof up to there; the rest is counted as unanchored."""
    with closing(sqlite3.connect(path)) as connection:
        head = "sha256:" + connection.execute("SELECT hex(hash) FROM events WHERE id = 7").fetchone()[0].lower()

    assert (report(path, head).ok, report(path, head).unanchored) == (True, 4)


@pytest.mark.parametrize(
    "change",
    [
        "DROP TRIGGER events_update",
        "DROP VIEW spans",
        "DROP INDEX events_message",
        "CREATE TABLE mine(x)",
        "CREATE TRIGGER sly AFTER INSERT ON events BEGIN SELECT 1; END",
        "DROP VIEW usage; CREATE VIEW usage AS SELECT 1 AS prompt_tokens",
        "DROP TABLE bodies; CREATE TABLE bodies(id, lookup, body)",
    ],
)
def test_a_changed_schema_is_found(path: Path, change: str) -> None:
    """Triggers, views and tables are compared word for word."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(change)

    assert not report(path).ok


@pytest.mark.parametrize(
    "change",
    [
        "INSERT INTO spans_fts(rowid, text) VALUES (9 << 20 | 7, 'planted')",
        "INSERT INTO spans_fts(spans_fts, rowid, text) VALUES ('delete', 9 << 20 | 1, 'order 7712')",
        "UPDATE spans_fts_docsize SET sz = x'09' WHERE id = (SELECT min(id) FROM spans_fts_docsize)",
        "UPDATE spans_fts_data SET block = x'0102' WHERE id = 1",
        "DELETE FROM spans_fts_data WHERE id > 10",
    ],
)
def test_a_changed_index_is_found(path: Path, change: str) -> None:
    """Words that are in no span, or missing, or counted wrongly."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(change)
        connection.commit()

    assert "spans_fts" in {problem.table for problem in report(path).problems}


def test_a_span_that_goes_out_twice_is_found() -> None:
    """The same code points cannot be discarded by two decisions."""
    with MemoryLog() as log:
        append(log, "c", "m", {"role": "user", "content": "0123456789"})
        log.commit("c", 1, [committed([["m", "/content", 0, 6, 0, 1]]), committed([["m", "/content", 5, 9, 0, 1]])])

        assert [problem.table for problem in log.verify().problems] == ["spans"]


@pytest.mark.parametrize(
    "span",
    [
        ["m", "/content", 3, 11],
        ["m", "/content", 5, 3],
        ["m", "/nothing", 0, 1],
        ["x", "/content", 0, 1],
        ["m", "/n", 0, 1],
    ],
)
def test_a_span_outside_its_message_is_found(span: list[object]) -> None:
    """A range beyond the string, a pointer to nothing or to no string, and a message nobody appended."""
    with MemoryLog() as log:
        append(log, "c", "m", {"role": "user", "content": "0123456789", "n": 5})
        log.commit("c", 1, [committed([[*span, 0, 1]])])

        assert [problem.table for problem in log.verify().problems] == ["spans"]


def test_random_damage_is_found_or_changes_nothing(template: Path, tmp_path: Path) -> None:
    """One flipped bit anywhere in the file: refused, reported, or every row of every table is as it was."""
    good, rng = _dump(template), random.Random(7)
    raw = template.read_bytes()
    silent = []
    for number in range(150):
        damaged, place = bytearray(raw), rng.randrange(len(raw))
        damaged[place] ^= 1 << rng.randrange(8)
        copy = tmp_path / f"{number}.db"
        copy.write_bytes(damaged)
        try:
            ok = report(copy).ok
        except LogError:
            continue
        if ok and _dump(copy) != good:
            silent.append(place)
        copy.unlink()

    assert silent == []


def _dump(path: Path) -> list[object]:
    with closing(sqlite3.connect(path)) as connection:
        connection.text_factory = bytes
        return [connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in COLUMNS]


def rechain(connection: sqlite3.Connection) -> int:
    """Compute every hash anew, as a forger would who knows how."""
    previous = b""
    rows = connection.execute("SELECT id, conversation, seq, kind, at, payload FROM events ORDER BY id").fetchall()
    for row in rows:
        previous = chain(previous, *row)
        connection.execute("UPDATE events SET hash = ? WHERE id = ?", (previous, row[0]))
    return len(rows)


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ("UPDATE events SET id = 99 WHERE id = 11", "id"),
        ("UPDATE events SET seq = 99 WHERE id = 11", "seq"),
        ("UPDATE events SET payload = '{}' WHERE kind = 'usage'", "payload"),
        ("UPDATE events SET payload = '[' WHERE kind = 'reanchored' OR kind = 'usage'", "payload"),
        ("UPDATE events SET kind = 'nonsense' WHERE kind = 'usage'", "payload"),
    ],
)
def test_a_forged_chain_still_has_to_make_sense(path: Path, change: str, column: str) -> None:
    """Hashes that fit do not help a gap in ids or seqs, nor a payload that no event of its kind can have."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE spans_fts")
    tamper(path, lambda c: [c.execute("DROP INDEX events_message"), c.execute(change), rechain(c)])

    assert column in {problem.column for problem in report(path).problems if problem.table == "events"}


def test_a_forged_chain_does_not_fit_an_outside_head(path: Path) -> None:
    """History that was rewritten with all its hashes verifies alone, and not against a head kept outside."""
    with AuditLog(path) as log:
        head = log.head()
    tamper(path, lambda c: [c.execute("UPDATE events SET at = '2020' WHERE id = 2"), rechain(c)])

    assert (report(path).ok, report(path, head).ok) == (True, False)


def test_a_well_sealed_stowaway_is_found(path: Path) -> None:
    """A text with the right digest that no event names does not belong here."""
    text = note("stowaway", 99)
    insert = "INSERT INTO texts VALUES (?, ?, ?, NULL)"
    tamper(path, lambda c: c.execute(insert, (text.digest.hex(), text.salt, text.body)))

    assert [(problem.table, problem.row) for problem in report(path).problems] == [("texts", text.digest.hex())]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE texts SET salt = NULL, body = NULL WHERE body = 'old'",
        "UPDATE texts SET body = CAST(body AS BLOB) WHERE body = 'old'",
        "UPDATE texts SET body = 'x' WHERE shared IS NOT NULL",
        "UPDATE texts SET body = NULL WHERE body = 'old'",
    ],
)
def test_a_text_in_a_state_it_cannot_have_is_found(path: Path, change: str) -> None:
    """Erased without an event that says so, of another type, with two bodies, or with a salt and no body."""
    tamper(path, lambda c: c.execute(change))

    assert "texts" in {problem.table for problem in report(path).problems}


def test_a_damaged_sql_index_is_found(path: Path) -> None:
    """An index that disagrees with its table would hide rows from queries: SQLite's own check is part of verify."""
    with closing(sqlite3.connect(path)) as connection:
        page = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'span_ids_id'").fetchone()[0]
        size = connection.execute("PRAGMA page_size").fetchone()[0]
        span_id = connection.execute("SELECT id FROM span_ids").fetchone()[0].encode()
    raw = bytearray(path.read_bytes())
    place = raw.index(span_id, (page - 1) * size)
    raw[place] ^= 1
    path.write_bytes(raw)

    assert place < page * size and "database" in {problem.table for problem in report(path).problems}


def test_problems_read_as_one_line(path: Path) -> None:
    """Table, column, row and what is wrong."""
    tamper(path, lambda c: c.execute("UPDATE events SET seq = 77 WHERE id = 11"))

    assert str(report(path).problems[0]) == "events.seq row 11: seq 77 of 'f' comes after seq 1"


def test_an_erased_text_is_fine_where_an_event_says_so(path: Path) -> None:
    """Redaction removes body and salt; the chain, which holds digests only, still verifies."""
    with AuditLog(path) as log:
        digest = log.events("c").__next__().payload["tools"]
        log.commit("c", log.seq("c"), [NewEvent("redacted", AT, {"texts": [digest]})])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TRIGGER texts_update")
        connection.execute("UPDATE texts SET salt = NULL, body = NULL WHERE digest = ?", (digest,))
        connection.commit()

    with AuditLog(path) as log:
        with pytest.raises(LogMissing, match="erased"):
            log.text(bytes.fromhex(digest))
        assert [str(problem.table) for problem in log.verify().problems] == ["sqlite_master"]


@pytest.mark.parametrize(
    ("event", "found"),
    [
        (NewEvent("restored", AT, {"message": "m", "path": "/content", "start": 0, "end": 6}), 0),
        (NewEvent("rewound", AT, {"to": 1}), 0),
        (NewEvent("rewound", AT, {"to": 2}), 1),
    ],
)
def test_what_came_back_may_go_out_again(event: NewEvent, found: int) -> None:
    """A restore, or a rewind to before the decision, puts a span into the view again."""
    out = committed([["m", "/content", 0, 6, 0, 1]])
    with MemoryLog() as log:
        append(log, "c", "m", {"role": "user", "content": "0123456789"})
        log.commit("c", 1, [out, event, out])

        assert len(log.verify().problems) == found
