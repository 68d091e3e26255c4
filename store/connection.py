"""One SQLite connection, opened safely, guarded by a lock, with errors that say what to do.

Invariant: whatever fails, nothing is half-written: every write happens inside `Store.writing`, which commits on leaving
and rolls back on any exception. This module knows nothing about events.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from compaction.errors import LogError, LogFull, LogLocked, LogMissing, LogNewer, LogReadOnly, NotALog
from compaction.store.migrations import migrate, pending, unknown
from compaction.store.schema import APPLICATION_ID

__all__ = ["Store", "open_file", "open_memory", "open_readonly", "translated"]

_MAGIC = b"SQLite format 3\x00"
_OLDEST = (3, 37, 0)  # STRICT tables
_SHM_STEP = 32 * 1024  # bytes the wal-index grows by

_FAULTS: tuple[tuple[str, Callable[[str], LogError]], ...] = (
    ("is locked", lambda n: LogLocked(f"{n}: another process is writing to it: wait for it, or give a longer timeout")),
    ("readonly database", lambda n: LogReadOnly(f"{n}: cannot be written: check the permissions of file and folder")),
    (
        "unable to open",
        lambda n: LogReadOnly(f"{n}: cannot be opened for writing: check that its folder can be written"),
    ),
    (
        "disk is full",
        lambda n: LogFull(f"{n}: no space left on the device: free some, then retry; nothing was written"),
    ),
    ("not a database", lambda n: NotALog(f"{n}: not a compaction log: give another path, it is left as it was")),
    ("closed database", lambda n: LogError(f"{n}: the log is closed: open it again")),
    (
        "no such module: fts5",
        lambda n: LogError(f"{n}: this Python's SQLite has no FTS5, so no search: use another build"),
    ),
    (
        "UNIQUE constraint failed: index 'events_message'",
        lambda n: LogError(f"{n}: message id already in the log: ids must be unique in a file"),
    ),
)


@contextlib.contextmanager
def translated(name: str) -> Iterator[None]:
    """Turn SQLite's errors into LogErrors that name the file and the next step."""
    try:
        yield
    except sqlite3.Error as exc:
        # Where the wal-index cannot grow, SQLite calls a full disk an I/O error.
        text = "disk is full" if "disk I/O error" in str(exc) and _no_space(name) else str(exc)
        for part, make in _FAULTS:
            if part in text:
                raise make(name) from exc
        raise LogError(f"{name}: SQLite says {text!r}: run verify, and restore a copy if the file is damaged") from exc


def _no_space(name: str) -> bool:
    folder = Path(name).parent
    return folder.is_dir() and shutil.disk_usage(folder).free < _SHM_STEP


class Store:
    """A connection, its lock, and transactions.

    Safe to share between threads (they take turns), not across a fork. `name` stands in every message.
    """

    def __init__(self, db: Database, name: str) -> None:
        self.db = db
        self.name = name
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = False

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, to one thread at a time. Reads outside a transaction see the newest committed state."""
        with self._lock, translated(self.name):
            self._check()
            yield self.db.conn

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The connection inside a write transaction: committed on leaving, rolled back on any exception."""
        with self._lock, translated(self.name):
            self._check()
            connection = self.db.conn
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def query(self, sql: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> list[dict[str, Any]]:
        """All rows of a constant SQL text, as dictionaries. Caller strings go into `parameters` only."""
        with self.reading():
            return list(self.db.query(sql, parameters))

    def close(self) -> None:
        """Close the connection; closing twice is fine."""
        with self._lock:
            self._closed = True
            self.db.conn.close()

    def _check(self) -> None:
        if self._closed:
            raise LogError(f"{self.name}: the log is closed: open it again")
        if os.getpid() != self._pid:
            raise LogError(f"{self.name}: opened in another process before a fork: open it again in this one")


def open_memory() -> Store:
    """A private in-memory database with the schema of a log file."""
    _require_version()
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    db = Database(connection, execute_plugins=False)
    migrate(db)
    return Store(db, "in-memory log")


def open_file(path: str, *, synchronous: str, timeout: float) -> Store:
    """Open or create a log file (mode 0600), in WAL mode.

    Raises NotALog, LogNewer, LogLocked, LogReadOnly or LogError; a file that is refused is left as it was.
    """
    _require_version()
    _touch(path)
    connection = sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False)
    try:
        with translated(path):
            db = Database(connection, execute_plugins=False)
            _refuse_strangers(db, path)
            _use_wal(connection, time.monotonic() + timeout)
            connection.execute(
                {"FULL": "PRAGMA synchronous = FULL", "NORMAL": "PRAGMA synchronous = NORMAL"}[synchronous]
            )
            if pending(db):
                migrate(db)
    except BaseException:
        connection.close()
        raise
    return Store(db, path)


def open_readonly(path: str, *, timeout: float) -> Store:
    """Open a log file to read it only; neither the file nor its folder need to be writable, and nothing is created.

    Raises NotALog, LogNewer, LogMissing or LogError.
    """
    _require_version()
    if not Path(path).exists():
        raise LogMissing(f"{path}: no such log, and none was created")
    _check_magic(path)
    alone = not Path(f"{path}-wal").exists() and not os.access(Path(path).parent, os.W_OK)
    uri = f"{Path(path).as_uri()}?mode=ro{'&immutable=1' if alone else ''}"
    connection = sqlite3.connect(uri, timeout=timeout, isolation_level=None, check_same_thread=False, uri=True)
    try:
        with translated(path):
            db = Database(connection, execute_plugins=False)
            _refuse_strangers(db, path)
    except BaseException:
        connection.close()
        raise
    return Store(db, path)


def _require_version() -> None:
    if sqlite3.sqlite_version_info < _OLDEST:
        raise LogError(f"this Python's SQLite is {sqlite3.sqlite_version}, the log needs 3.37 or newer")


def _touch(path: str) -> None:
    """Make sure that the file exists, is ours to write, and looks like SQLite."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        _sync_folder(path)
    except FileExistsError:
        pass
    except FileNotFoundError as exc:
        raise LogError(f"{path}: its folder does not exist: create it first") from exc
    except OSError as exc:
        raise LogReadOnly(f"{path}: cannot be created ({exc.strerror}): check that its folder can be written") from exc
    if Path(path).is_file() and not (os.access(path, os.W_OK) and os.access(Path(path).parent, os.W_OK)):
        raise LogReadOnly(f"{path}: file or folder cannot be written: change the permissions, or work on a copy")
    _check_magic(path)


def _check_magic(path: str) -> None:
    """Raises NotALog for what does not look like SQLite, LogReadOnly for what cannot be read."""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise NotALog(f"{path}: not a regular file: give the path of a log file")
        with Path(path).open("rb") as file:
            start = file.read(len(_MAGIC))
    except OSError as exc:
        raise LogReadOnly(f"{path}: cannot be read ({exc.strerror}): check the permissions of file and folder") from exc
    if start not in (b"", _MAGIC):
        raise NotALog(f"{path}: not a compaction log: give another path, it is left as it was")


def _sync_folder(path: str) -> None:
    """Make the new file's name durable too; SQLite does so for its own companions only."""
    folder = os.open(Path(path).parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _refuse_strangers(db: Database, path: str) -> None:
    if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        return
    if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise NotALog(f"{path}: a SQLite database, but not a compaction log: give another path, it is left as it was")
    newer = unknown(db)
    if newer:
        raise LogNewer(f"{path}: written by a newer version (it has {newer[0]}): upgrade kv-compaction to open it")


def _use_wal(connection: sqlite3.Connection, deadline: float) -> None:
    """Switch to WAL. SQLite does not wait for a lock here, so two processes that open one new file retry."""
    while True:
        try:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as exc:
            if "locked" not in str(exc) or time.monotonic() >= deadline:
                raise
            time.sleep(0.01)
