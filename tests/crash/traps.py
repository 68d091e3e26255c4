"""Failpoints as wrappers around the seams: a trap counts how often a place is reached and ends the process there.

Invariant: the library has no hook for any of this. A place is inside a wrapper's call, between two SQL statements, or
between two instructions of SQLite's machine; the end is SIGKILL, so no `finally` and no `ROLLBACK` runs.
"""

from __future__ import annotations

import os
import signal
import sqlite3
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compaction.budget import Target, Window
from compaction.events import Event, NewEvent, Text
from compaction.plan import Plan
from compaction.ports import Counter, Engine, Generated, Generation, Policy, Summarizer, Summary
from compaction.session import Session
from compaction.store import AuditLog
from compaction.view import View

__all__ = ["Trap", "TrapCounter", "TrapEngine", "TrapLog", "TrapPolicy", "TrapSummarizer", "open_log", "watch"]

INSTRUCTIONS = 100
"""Instructions of SQLite's machine between two places inside a statement."""


@dataclass
class Trap:
    """Ends the process at the `nth` time that `place` is reached; without a place it only counts."""

    place: str | None = None
    nth: int = 1
    reached: Tally[str] = field(default_factory=Tally)

    def reach(self, place: str) -> None:
        """Say that the process is at this place."""
        self.reached[place] += 1
        if place == self.place and self.reached[place] == self.nth:
            os.kill(os.getpid(), signal.SIGKILL)


def open_log(path: Path, trap: Trap) -> AuditLog:
    """A log whose creation can be cut: the connection made to the file is wrapped, nothing else is."""
    real, made = sqlite3.connect, list[sqlite3.Connection]()

    def connect(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = real(*args, **options)
        if args[0] != str(path):  # a scratch database in memory
            return connection
        made.append(connection)
        connection.set_trace_callback(lambda _: trap.reach("sql create"))
        connection.set_progress_handler(lambda: trap.reach("vm create"), INSTRUCTIONS)
        return connection

    sqlite3.connect = connect  # type: ignore[assignment]
    try:
        return AuditLog(path)
    finally:
        sqlite3.connect = real
        for connection in made:
            connection.set_trace_callback(None)
            connection.set_progress_handler(None, 0)


@dataclass
class TrapLog:
    """A log whose commits can be cut anywhere: before, at each statement, inside a statement, after."""

    inner: AuditLog
    trap: Trap

    def commit(
        self, conversation: str, after: int, events: Sequence[NewEvent], texts: Sequence[Text] = ()
    ) -> tuple[Event, ...]:
        """As the log's own; named after its first event."""
        kind = events[0].kind
        connection = self.inner._store.db.conn
        self.trap.reach(f"log {kind} before")
        connection.set_trace_callback(lambda _: self.trap.reach(f"sql {kind}"))
        connection.set_progress_handler(lambda: self.trap.reach(f"vm {kind}"), INSTRUCTIONS)
        try:
            written = self.inner.commit(conversation, after, events, texts)
        finally:
            connection.set_trace_callback(None)
            connection.set_progress_handler(None, 0)
        self.trap.reach(f"log {kind} after")
        return written

    def events(self, conversation: str, after: int = 0) -> Iterator[Event]:
        return self.inner.events(conversation, after)

    def seq(self, conversation: str) -> int:
        return self.inner.seq(conversation)

    def text(self, digest: bytes) -> str:
        return self.inner.text(digest)

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class TrapCounter:
    """A counter that can be cut while it measures."""

    inner: Counter
    trap: Trap

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def exact(self) -> bool:
        return self.inner.exact

    @property
    def additive(self) -> bool:
        return self.inner.additive

    def head(self, leading: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> int:
        self.trap.reach("counter")
        return self.inner.head(leading, tools)

    def message(self, message: Mapping[str, Any]) -> int:
        self.trap.reach("counter")
        return self.inner.message(message)

    def request(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> int:
        self.trap.reach("counter")
        return self.inner.request(messages, tools)

    def text(self, text: str) -> int:
        self.trap.reach("counter")
        return self.inner.text(text)


@dataclass(frozen=True)
class TrapPolicy:
    """A policy that can be cut before and after it plans."""

    inner: Policy
    trap: Trap

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def needs(self) -> frozenset[str]:
        return self.inner.needs

    @property
    def params(self) -> Mapping[str, Any]:
        return self.inner.params

    def plan(self, view: View, target: Target) -> Plan:
        again = " again" if view.failures else ""
        self.trap.reach(f"policy before{again}")
        plan = self.inner.plan(view, target)
        self.trap.reach(f"policy after{again}")
        return plan


@dataclass(frozen=True)
class TrapSummarizer:
    """A summariser that can be cut before and after it answers."""

    inner: Summarizer
    trap: Trap

    @property
    def name(self) -> str:
        return self.inner.name

    def __call__(self, source: str, *, instruction: str, max_tokens: int, limit: int) -> Summary:
        self.trap.reach("summarizer before")
        summary = self.inner(source, instruction=instruction, max_tokens=max_tokens, limit=limit)
        self.trap.reach("summarizer after")
        return summary


@dataclass
class _TrapGeneration:
    inner: Generation
    trap: Trap

    @property
    def result(self) -> Generated | None:
        return self.inner.result

    def __iter__(self) -> Iterator[str]:
        for piece in self.inner:
            self.trap.reach("engine piece")
            yield piece
        self.trap.reach("engine end")

    def close(self) -> None:
        self.inner.close()


class TrapEngine:
    """An engine that can be cut before a reply, inside it, and after its last token."""

    def __init__(self, inner: Engine, trap: Trap) -> None:
        self._inner = inner
        self._trap = trap

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def counter(self) -> Counter:
        return self._inner.counter

    @property
    def window(self) -> Window:
        return self._inner.window

    @property
    def kv_bytes_per_token(self) -> int:
        return self._inner.kv_bytes_per_token

    @property
    def user_first(self) -> bool:
        return self._inner.user_first

    def generate(
        self,
        conversation: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        max_new_tokens: int,
    ) -> Generation:
        self._trap.reach("engine before")
        made = self._inner.generate(conversation, messages, tools, max_new_tokens=max_new_tokens)
        return _TrapGeneration(made, self._trap)

    def forget_reply(self, conversation: str) -> None:
        self._inner.forget_reply(conversation)

    def complete(self, messages: Sequence[Mapping[str, Any]], *, max_new_tokens: int) -> Generated:
        return self._inner.complete(messages, max_new_tokens=max_new_tokens)

    def kv_bytes(self, conversation: str) -> int:
        return self._inner.kv_bytes(conversation)

    def release(self, conversation: str) -> None:
        self._inner.release(conversation)


def watch(session: Session, trap: Trap) -> None:
    """Traps at the session's own hooks: before it decides, and after a decision has been applied."""
    at: Callable[[str], Callable[..., None]] = lambda place: lambda *_: trap.reach(place)  # noqa: E731
    session.on("before_compaction", at("hook before"))
    session.on("after_compaction", at("hook after"))
