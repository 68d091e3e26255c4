"""`AuditLog`, a log in a file, and `MemoryLog`, the same log in memory.

Invariant: `commit` writes all of its events and texts in one transaction or none of them, and has checked them before;
at durability "full" they survive a power failure once it has returned, at "normal" a crash of the process.

`MemoryLog` is not a second implementation: it is the same code over a private in-memory SQLite database, so that what
holds for one holds for the other, verification and search included.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from compaction.errors import InvalidInput, LogError
from compaction.events import Event, NewEvent, Text
from compaction.store import reading, search, verifying
from compaction.store.anchors import HeadFile, head_text
from compaction.store.connection import Store, open_file, open_memory, open_readonly
from compaction.store.rows import ConversationRow, DecisionRow, Hit, MessageRow, SpanRow, UsageRow, VerifyReport
from compaction.store.writing import newest, prepare, seq_of, write

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AuditLog", "MemoryLog"]


class _SqliteLog:
    """What both logs do. Safe to use from many threads; they take turns."""

    def __init__(self, store: Store, heads: HeadFile | None = None) -> None:
        self._store = store
        self._heads = heads

    def commit(
        self, conversation: str, after: int, events: Sequence[NewEvent], texts: Sequence[Text] = ()
    ) -> tuple[Event, ...]:
        """Write texts and events in ONE transaction, durable on return; seqs follow `after` without a gap.

        Raises LogConflict where the conversation's newest event is not `after`, InvalidInput for payloads, digests or
        spans that cannot be, LogMissing where an event names a text the log does not have, and LogLocked, LogReadOnly,
        LogFull or LogError where SQLite cannot write. Nothing has been written then.
        """
        batch = prepare(conversation, events, texts)
        with self._store.writing() as connection:
            written = write(connection, conversation, after, batch)
        if self._heads is not None and written:
            self._heads.write(written[-1].id, written[-1].hash)
        return written

    def events(self, conversation: str, after: int = 0) -> Iterator[Event]:
        """The conversation's events with seq > after, in order. Payloads have been checked."""
        return reading.events(self._store, conversation, after)

    def seq(self, conversation: str) -> int:
        """The newest event's seq; 0 where the log does not know the conversation."""
        with self._store.reading() as connection:
            return seq_of(connection, conversation)

    def text(self, digest: bytes) -> str:
        """The text under a salted digest (32 bytes). Raises LogMissing where it never was or has been erased."""
        return reading.text(self._store, digest)

    def conversations(self) -> list[ConversationRow]:
        """Every conversation with its totals, in the order in which they began."""
        return reading.conversations(self._store)

    def messages(self, conversation: str) -> list[MessageRow]:
        """The conversation's messages as appended, in order."""
        return reading.messages(self._store, conversation)

    def decisions(self, conversation: str | None = None) -> list[DecisionRow]:
        """Committed decisions, of one conversation or of all, in the order in which they were written."""
        return reading.decisions(self._store, conversation)

    def spans(self, conversation: str | None = None, decision: int | None = None) -> list[SpanRow]:
        """What was discarded, verbatim; of one conversation, of one of its decisions (a seq), or all of it."""
        return reading.spans(self._store, conversation, decision)

    def usage(self, conversation: str) -> list[UsageRow]:
        """What each generation of the conversation cost, in order."""
        return reading.usage(self._store, conversation)

    def restore(self, span_id: str) -> str:
        """A span's text from the original message, byte for byte; path "" gives the message's JSON.

        Raises LogMissing where no decision discarded such a span, or its text has been erased.
        """
        return reading.restore(self._store, span_id)

    def search(self, query: str, limit: int = 20, *, conversation: str | None = None) -> list[Hit]:
        """Discarded spans that hold every word of the query, best first; the first search fills the index."""
        return search.search(self._store, query, limit, conversation)

    def head(self) -> str:
        """The newest event's hash, "sha256:…". Keep it outside: only that shows later whether a tail was cut off."""
        with self._store.reading() as connection:
            return head_text(newest(connection)[1])

    def newest(self) -> int:
        """The newest event's id in the file, which is the number of events; 0 in an empty log."""
        with self._store.reading() as connection:
            return newest(connection)[0]

    def verify(self, head: str | None = None) -> VerifyReport:
        """Read everything again and say what disagrees. `head` and the head file's records must be ancestors."""
        heads = [record for _, record in self._heads.records()] if self._heads is not None else []
        if head is not None:
            heads.append(head)
        return verifying.verify(self._store, tuple(heads))

    def close(self) -> None:
        """Release the file. A closed log raises LogError when used; closing twice is fine."""
        self._store.close()
        if self._heads is not None:
            self._heads.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store.name!r})"


class AuditLog(_SqliteLog):
    """A log in one SQLite file (plus its `-wal` and `-shm` while open), created with mode 0600.

    Args:
        path: the file; created where it does not exist, its folder must.
        durability: "full" loses no acknowledged event on power failure; "normal" none on a crash of the process.
        head_file: a file, better on another disk, that keeps the newest hash after every commit; see `verify`.
        timeout: seconds to wait for another process's write lock before LogLocked.
        readonly: open an existing file to read it only; its folder need not be writable. Writing raises LogReadOnly.

    Raises NotALog, LogNewer, LogLocked, LogReadOnly or LogError where the file cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: Literal["full", "normal"] = "full",
        head_file: str | os.PathLike[str] | None = None,
        timeout: float = 5.0,
        readonly: bool = False,
    ) -> None:
        if durability not in ("full", "normal"):
            raise InvalidInput(f'durability is "full" or "normal", not {durability!r}')
        if not os.fspath(path):
            raise InvalidInput("a log needs a path; for one in memory use MemoryLog()")
        self.path = str(Path(path).absolute())
        self.durability = durability
        if readonly:
            store = open_readonly(self.path, timeout=timeout)
        else:
            store = open_file(self.path, synchronous=durability.upper(), timeout=timeout)
        try:
            heads = HeadFile(str(Path(head_file).absolute())) if head_file is not None else None
        except BaseException:
            store.close()
            raise
        super().__init__(store, heads)
        try:
            self._compare_heads()
        except BaseException:
            self.close()
            raise

    def _compare_heads(self) -> None:
        """Refuse to go on where the head file knows more than the log: the next commit would overwrite the proof."""
        if self._heads is None:
            return
        with self._store.reading() as connection:
            for id, head in self._heads.records():
                row = connection.execute("SELECT hash FROM events WHERE id = ?", (id,)).fetchone()
                if row is None or head_text(row[0]) != head:
                    raise LogError(
                        f"{self.path}: event {id} is not the one that {self._heads.path} recorded: the log was cut or "
                        "changed, or the head file is another log's; move the head file away to go on without it"
                    )


class MemoryLog(_SqliteLog):
    """The log of a session that was given none: same contract, same reading, gone with the process."""

    def __init__(self) -> None:
        super().__init__(open_memory())
