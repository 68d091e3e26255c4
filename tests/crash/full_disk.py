"""A disk that fills up in the middle of a conversation: nothing leaves the context, and it goes on once there is room.

Invariant: what a caller sees of a session before and after a commit that failed is the same.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from compaction import Budget, Session, SessionManager
from compaction.errors import LogError, LogFull
from compaction.messages import dumps
from compaction.policies import SlidingWindow, Summarize
from compaction.ports import Policy, Summary
from compaction.store import AuditLog
from compaction.testing import FakeCounter
from tests.builders import assistant, system, user
from tests.crash.checks import problems, snapshot, told
from tests.crash.results import Outcome
from tests.crash.scenarios import CONVERSATION

__all__ = ["POLICIES", "full_database", "full_file_system", "may_mount"]

POLICIES: tuple[Policy, ...] = (SlidingWindow(), Summarize(max_tokens=4000, keep_last=2))
ROOM = 20_000


class _LongSummarizer:
    """A summary that does not fit into the pages that are there."""

    name = "long"

    def __call__(self, source: str, *, instruction: str, max_tokens: int, limit: int) -> Summary:
        """As many words as are allowed, no two the same: they do not compress."""
        del source, instruction, limit
        return Summary(" ".join(str(number) for number in range(max_tokens // 2)))


def _session(log: AuditLog, policy: Policy) -> Session:
    manager = SessionManager(
        policy=policy,
        budget=Budget(tokens=ROOM, high=0.6, low=0.3),
        log=log,
        counter=FakeCounter(),
        summarizer=_LongSummarizer(),
    )
    return manager.session(CONVERSATION)


def _talk(session: Session, share: float) -> None:
    """Talk until that share of the budget is used."""
    turn = 0
    while session.state.tokens < share * ROOM:
        turn += 1
        session.append(user(f"{turn} " + "where is it? " * 120))
        session.append(assistant(f"{turn} " + "on its way. " * 120))


def full_database(policy: Policy, folder: Path) -> Outcome:
    """SQLite may not take another page: compacting and appending fail whole, then go through."""
    path = folder / f"full-{policy.name}.db"
    with AuditLog(path) as log:
        pragma = log._store.db.conn.execute
        session = _filled(log, policy)
        pragma(f"PRAGMA max_page_count = {pragma('PRAGMA page_count').fetchone()[0]}")
        found = _refused(session)
        pragma("PRAGMA max_page_count = 1000000")
        found += _goes_on(session)
    return _outcome(f"pages, {policy.name}", path, found)


def full_file_system(policy: Policy, folder: Path) -> Outcome:
    """A file system of 2 MiB that is full, then grows."""
    path = folder / "small" / "a.db"
    with _small_disk(path.parent) as grow:
        with AuditLog(path) as log:
            session = _filled(log, policy)
            found = _refused(session)
            grow()
            found += _goes_on(session)
        return _outcome(f"tmpfs, {policy.name}", path, found)


def may_mount(folder: Path) -> bool:
    """Whether this process may mount a file system."""
    if os.name != "posix" or os.geteuid() != 0:
        return False
    try:
        with _small_disk(folder / "probe"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@contextmanager
def _small_disk(folder: Path) -> Iterator[Callable[[], None]]:
    """A tmpfs of 2 MiB at `folder`; what is yielded makes it larger."""

    def grow() -> None:
        subprocess.run(["mount", "-o", "remount,size=16m", folder], check=True)

    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True, capture_output=True)
    try:
        yield grow
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()


def _filled(log: AuditLog, policy: Policy) -> Session:
    session = _session(log, policy)
    session.append(system("You look things up."))
    _talk(session, 0.7)
    return session


def _refused(session: Session) -> list[str]:
    """Append until nothing fits any more, then try to compact: each failure changes nothing."""
    found = _fails(session, lambda: _append_until_full(session), "append", grows=True)
    found += _fails(session, lambda: session.append(user("x" * 50_000)), "append")
    found += _fails(session, session.prepare, "prepare")
    found += _fails(session, session.compact_now, "compact_now")
    return found


def _append_until_full(session: Session) -> None:
    for turn in range(5000):
        session.append(user(f"{turn}?"))


def _fails(session: Session, act: Callable[[], object], what: str, *, grows: bool = False) -> list[str]:
    """The act must fail for want of space; unless it `grows` the context first, that must be as it was."""
    before, entries = snapshot(session.state), list(session.state.entries)
    try:
        act()
    except LogFull:
        same = snapshot(session.state) == before and list(session.state.entries) == entries
        return [] if same or grows else [f"{what}: the context changed though nothing was written"]
    except LogError as error:
        return [f"{what}: {type(error).__name__} where LogFull was due: {error}"]
    return [f"{what}: no LogFull"]


def _goes_on(session: Session) -> list[str]:
    decision = session.prepare().decision
    _talk(session, 0.55)
    return [] if decision is not None else ["no decision once there was room"]


def _outcome(name: str, path: Path, found: list[str]) -> Outcome:
    held, decisions = told(path)[CONVERSATION]
    story = [dumps(message) for message in map(json.loads, held)]
    found = [*found, *problems(path, {CONVERSATION: story}, complete=True)]
    return Outcome("full disk", f"{name}: {len(held)} messages, {len(decisions)} decisions", "", tuple(found))
