"""How a log file comes to have today's schema.

Invariant: each step runs in the transaction that records it; old files always load, and a file with a step that this
version does not know is refused, never guessed at. A step, once released, is never edited.
"""

from __future__ import annotations

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

from compaction.store.schema import APPLICATION_ID, TABLES, VIEWS

__all__ = ["MIGRATIONS", "migrate", "pending", "unknown"]

MIGRATIONS = Migrations("compaction")


@MIGRATIONS()
def m001_events_and_texts(db: Database) -> None:
    """The first schema: events, texts, shared bodies, span ids, and the views."""
    for statement in (*TABLES, *VIEWS):
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID:d}")


def pending(db: Database) -> bool:
    """Whether the file lacks a step."""
    return bool(MIGRATIONS.pending(db))


def unknown(db: Database) -> list[str]:
    """Steps recorded in the file that this version does not have: a newer version wrote it."""
    with Database(memory=True, execute_plugins=False) as empty:
        known = {migration.name for migration in MIGRATIONS.pending(empty)}
    return [migration.name for migration in MIGRATIONS.applied(db) if migration.name not in known]


def migrate(db: Database) -> None:
    """Apply what is missing in one write transaction, so that two processes may open one new file at once."""
    db.execute("BEGIN IMMEDIATE")
    try:
        MIGRATIONS.apply(db)
        db.execute("COMMIT")
    except BaseException:
        if db.conn.in_transaction:
            db.execute("ROLLBACK")
        raise
