"""What can go wrong with a file, and what is said then. Whatever fails, nothing is half-written."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from compaction.errors import (
    InvalidInput,
    LogConflict,
    LogError,
    LogFull,
    LogLocked,
    LogMissing,
    LogNewer,
    LogReadOnly,
    NotALog,
)
from compaction.events import NewEvent
from compaction.store import AuditLog
from compaction.store.schema import APPLICATION_ID
from tests.contracts.log_contract import AT, append, appended, story

ROOT = Path(__file__).resolve().parents[2]
USER = {"role": "user", "content": "x"}


def test_a_log_is_for_its_owner_only(tmp_path: Path) -> None:
    """The file and its companions are created with mode 0600, whatever the umask."""
    old = os.umask(0)
    try:
        with AuditLog(tmp_path / "a.db") as log:
            append(log, "c", "m", USER)
            modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()}
    finally:
        os.umask(old)

    assert modes == {"a.db": "0o600", "a.db-wal": "0o600", "a.db-shm": "0o600"}


@pytest.mark.parametrize(("durability", "synchronous"), [("full", 2), ("normal", 1)])
def test_durability_is_what_sqlite_says(tmp_path: Path, durability: Any, synchronous: int) -> None:
    """WAL with synchronous FULL or NORMAL."""
    with AuditLog(tmp_path / "a.db", durability=durability) as log:
        pragmas = [log._store.query(f"PRAGMA {name}")[0] for name in ("journal_mode", "synchronous")]

    assert [next(iter(pragma.values())) for pragma in pragmas] == ["wal", synchronous]


def test_a_log_is_there_when_opened_again(tmp_path: Path) -> None:
    """Everything written is read by the next process."""
    with AuditLog(tmp_path / "a.db") as log:
        story(log)
        written = [list(log.events(name)) for name in "cdf"]

    with AuditLog(tmp_path / "a.db") as log:
        assert [list(log.events(name)) for name in "cdf"] == written


@pytest.mark.parametrize("content", [b"hello, I am no database", b"SQLite format 3\x00 but not really" * 40])
def test_a_strangers_file_is_refused_untouched(tmp_path: Path, content: bytes) -> None:
    """A file of another kind is named and left as it was."""
    path = tmp_path / "a.db"
    path.write_bytes(content)

    with pytest.raises(NotALog, match=r"a\.db"):
        AuditLog(path)

    assert path.read_bytes() == content


def test_a_strangers_database_is_refused_untouched(tmp_path: Path) -> None:
    """A SQLite database of somebody else gets no tables of ours."""
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE mine(x)")
    before = path.read_bytes()

    with pytest.raises(NotALog, match=r"a\.db"):
        AuditLog(path)

    assert path.read_bytes() == before


def test_a_folder_is_no_log(tmp_path: Path) -> None:
    """A path to something that is no file is refused."""
    with pytest.raises(NotALog):
        AuditLog(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """Folders are not made up."""
    with pytest.raises(LogError, match="folder does not exist"):
        AuditLog(tmp_path / "nowhere" / "a.db")


@pytest.mark.parametrize("path", ["", ":memory:"])
def test_special_names_are_not_special(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty path is refused; `:memory:` is a file of that name, never a log that is silently lost."""
    monkeypatch.chdir(tmp_path)

    with contextlib.suppress(InvalidInput), AuditLog(path) as log:
        append(log, "c", "m", USER)

    assert [file.name for file in tmp_path.iterdir()] == ([path] if path else [])


def test_an_unknown_durability_is_refused(tmp_path: Path) -> None:
    """Only the two that are documented."""
    with pytest.raises(InvalidInput, match="durability"):
        AuditLog(tmp_path / "a.db", durability="maybe")  # type: ignore[arg-type]


def test_a_newer_log_is_refused(tmp_path: Path) -> None:
    """A migration this version does not know is not guessed at."""
    path = tmp_path / "a.db"
    AuditLog(path).close()
    with closing(sqlite3.connect(path)) as connection:
        insert = "INSERT INTO _sqlite_migrations(migration_set, name, applied_at) VALUES ('compaction', 'm999', '')"
        connection.execute(insert)
        connection.commit()

    with pytest.raises(LogNewer, match="m999"):
        AuditLog(path)


def test_a_failed_migration_leaves_nothing(tmp_path: Path) -> None:
    """A step that cannot be applied is rolled back whole, its record included."""
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("CREATE TABLE bodies(x)")

    with pytest.raises(LogError, match="bodies already exists"):
        AuditLog(path)

    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("bodies",)]


def test_a_locked_log_says_so(tmp_path: Path) -> None:
    """Another process's write lock is waited for, then named; the conversation is as it was."""
    with AuditLog(tmp_path / "a.db", timeout=0.1) as log, closing(sqlite3.connect(tmp_path / "a.db")) as other:
        append(log, "c", "m", USER)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LogLocked, match=r"a\.db"):
            append(log, "c", "m2", USER)
        other.rollback()

        assert (log.seq("c"), append(log, "c", "m2", USER).seq) == (1, 2)


def test_a_full_disk_says_so(tmp_path: Path) -> None:
    """Where the database may not grow the commit is refused whole, and goes through once there is room."""
    big = {"role": "user", "content": "x" * 500_000}
    with AuditLog(tmp_path / "a.db") as log:
        append(log, "c", "m", USER)
        pages = next(iter(log._store.query("PRAGMA page_count")[0].values()))
        log._store.query(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(LogFull, match=r"a\.db"):
            append(log, "c", "big", big)
        seq = log.seq("c")
        log._store.query("PRAGMA max_page_count = 1000000")

        assert (seq, append(log, "c", "big", big).seq, log.verify().ok) == (1, 2, True)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_really_full_disk_loses_nothing(tmp_path: Path) -> None:
    """On a file system of 1 MiB every message that was acknowledged is there, and the log verifies."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount here")
    try:
        with AuditLog(tmp_path / "a.db") as log:
            acknowledged = 0
            with pytest.raises(LogError, match=r"a\.db"):
                for number in range(1000):
                    append(log, "c", f"m{number}", {"role": "user", "content": f"{number} " * 2000})
                    acknowledged += 1
            kept, ok = log.seq("c"), log.verify().ok
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)

    assert (kept, ok, acknowledged > 0) == (acknowledged, True, True)


def _opened_by_nobody(path: Path) -> str:
    """What a user without rights (this one, unless root) is told on opening a log, in a child process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            if os.geteuid() == 0:
                os.setuid(65534)
            try:
                AuditLog(path)
            except LogReadOnly as error:
                os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    told = os.read(read, 4096).decode()
    os.close(read)
    return told


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("what", ["file", "folder", "new"])
def test_a_read_only_log_says_so(tmp_path: Path, what: str) -> None:
    """A file or a folder that cannot be written is named when it is opened, not when a message is lost."""
    tmp_path.chmod(0o755)
    folder = tmp_path / "logs"
    folder.mkdir()
    path = folder / "a.db"
    if what != "new":
        AuditLog(path).close()
        path.chmod(0o444 if what == "file" else 0o666)
    folder.chmod(0o777 if what == "file" else 0o555)

    told = _opened_by_nobody(path)

    folder.chmod(0o777)
    assert "a.db" in told


def test_a_log_can_be_opened_to_be_read_only(tmp_path: Path) -> None:
    """Everything reads and verifies while another connection writes; writing is refused and nothing is created."""
    with AuditLog(tmp_path / "a.db") as log:
        append(log, "c", "m", USER)
        with AuditLog(tmp_path / "a.db", readonly=True) as reader:
            append(log, "c", "n", USER)
            assert len(reader.messages("c")) == 2 and reader.verify().ok
            with pytest.raises(LogReadOnly):
                append(reader, "c", "o", USER)
            assert log.verify().ok and len(log.messages("c")) == 2
    with pytest.raises(LogMissing):
        AuditLog(tmp_path / "b.db", readonly=True)

    assert not (tmp_path / "b.db").exists()


def test_a_read_only_folder_can_be_audited(tmp_path: Path) -> None:
    """Mounted read-only, a log still reads and verifies (as root, who may write anywhere else)."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root and unshare to mount a folder read-only")
    with AuditLog(tmp_path / "a.db") as log:
        append(log, "c", "m", USER)
    script = (
        "from compaction.store import AuditLog\nwith AuditLog('a.db', readonly=True) as log: print(log.verify().ok)"
    )
    mounted = 'mount --bind . . && mount -o remount,bind,ro . && cd "$PWD"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mounted} && {sys.executable} -c "$SCRIPT"'],
        cwd=tmp_path,
        env={**os.environ, "SCRIPT": script, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if "mount" in done.stderr:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")

    assert done.stdout.strip() == "True", done.stderr


def test_a_fork_does_not_write_into_our_connection(tmp_path: Path) -> None:
    """SQLite connections do not survive a fork: the child is told to open the log itself."""
    with AuditLog(tmp_path / "a.db") as log, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                try:
                    log.seq("c")
                except LogError:
                    code = 0
            os._exit(code)

        assert os.waitpid(child, 0)[1] == 0


def _write(path: str, worker: int, count: int) -> None:
    """Append messages from a process of its own, reading again after each conflict."""
    with AuditLog(path, durability="normal") as log:
        for number in range(count):
            event, text = appended(f"{worker}-{number}", USER)
            while True:
                try:
                    log.commit("c", log.seq("c"), [event], [text])
                    break
                except LogConflict:
                    continue


def test_processes_lose_and_double_nothing(tmp_path: Path) -> None:
    """Two processes that create, open and write one file at once: all messages, each once, in one chain."""
    path = str(tmp_path / "a.db")
    workers = [multiprocessing.get_context("spawn").Process(target=_write, args=(path, n, 60)) for n in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    with AuditLog(path) as log:
        ids = sorted(event.payload["message"] for event in log.events("c"))
        assert (ids, log.verify().ok) == (sorted(f"{w}-{n}" for w in range(2) for n in range(60)), True)


def _write_forever(path: str, ready: Any) -> None:
    with AuditLog(path, durability="normal") as log:
        for number in range(100_000):
            pairs = [appended(f"{number}.{i}", {"role": "user", "content": f"{number} " * 99}) for i in range(3)]
            log.commit("c", 3 * number, [event for event, _ in pairs], [text for _, text in pairs])
            ready.value = 3 * (number + 1)


@pytest.mark.parametrize("moment", range(4))
def test_a_killed_process_leaves_whole_commits(tmp_path: Path, moment: int) -> None:
    """After SIGKILL every acknowledged message is there, and no commit in part."""
    context = multiprocessing.get_context("spawn")
    ready, path = context.Value("i", 0), str(tmp_path / "a.db")
    worker = context.Process(target=_write_forever, args=(path, ready))
    worker.start()
    while ready.value < 30 * (moment + 1) and worker.is_alive():
        pass
    os.kill(worker.pid or 0, signal.SIGKILL)
    worker.join()

    with AuditLog(path) as log:
        assert (log.seq("c") >= ready.value, log.seq("c") % 3, log.verify().ok) == (True, 0, True)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET kind = 'usage' WHERE id = 1",
        "DELETE FROM events WHERE id = 1",
        "INSERT OR REPLACE INTO events SELECT * FROM events WHERE id = 2",
        "INSERT INTO events SELECT 99, 'c', 99, kind, at, payload, hash FROM events WHERE id = 1",
        "UPDATE texts SET body = 'forged'",
        "DELETE FROM texts",
        "INSERT OR REPLACE INTO texts SELECT digest, salt, 'forged', NULL FROM texts",
        "UPDATE bodies SET body = 'forged'",
        "DELETE FROM bodies",
        "INSERT OR REPLACE INTO bodies SELECT id, lookup, 'forged' FROM bodies",
        "UPDATE span_ids SET id = 'x'",
        "DELETE FROM span_ids",
    ],
)
def test_tables_are_append_only(tmp_path: Path, statement: str) -> None:
    """Plain SQL can neither change nor remove nor replace a row."""
    with AuditLog(tmp_path / "a.db") as log:
        story(log)
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection, pytest.raises(sqlite3.IntegrityError):
        connection.execute(statement)


def test_an_interrupted_commit_leaves_nothing(tmp_path: Path) -> None:
    """An exception in the middle of a transaction, Ctrl-C included, rolls all of it back."""
    with AuditLog(tmp_path / "a.db") as log:
        append(log, "c", "m", USER)
        with pytest.raises(KeyboardInterrupt), log._store.writing() as connection:
            connection.execute("INSERT INTO bodies(lookup, body) VALUES (x'00', 'half')")
            raise KeyboardInterrupt

        assert (log.verify().ok, append(log, "c", "m2", USER).seq) == (True, 2)


def test_a_damaged_payload_is_not_read(tmp_path: Path) -> None:
    """Reading checks payloads: what cannot be an event is an error that says to verify."""
    with AuditLog(tmp_path / "a.db") as log:
        log.commit("c", 0, [NewEvent("reanchored", AT, {})])
        log._store.query("SELECT 1")
        with log._store.writing() as connection:
            connection.execute("DROP TRIGGER events_update")
            connection.execute("UPDATE events SET kind = 'usage'")
        with pytest.raises(LogError, match="run verify"):
            list(log.events("c"))
