"""A log with an ear on what is committed.

Invariant: it changes nothing: what the log returns or raises is returned or raised, and whoever listens hears of a
commit once it is durable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from compaction.errors import LogError
from compaction.events import Event, NewEvent, Text
from compaction.ports import Log

__all__ = ["WatchedLog"]


class WatchedLog:
    """Any log, with an ear on what it commits; all else it is asked for goes to the log itself.

    Args:
        log: the log that does the work.
        written: called after each commit with its events and its seconds; a commit is durable by then.
        failed: called with what the log raised, before it is raised on.
    """

    def __init__(
        self,
        log: Log,
        written: Callable[[Sequence[Event], float], None],
        failed: Callable[[LogError], None],
    ) -> None:
        self.log = log
        self._written, self._failed = written, failed

    def commit(
        self, conversation: str, after: int, events: Sequence[NewEvent], texts: Sequence[Text] = ()
    ) -> tuple[Event, ...]:
        """As `ports.Log.commit`."""
        started = time.perf_counter()
        try:
            made = self.log.commit(conversation, after, events, texts)
        except LogError as exc:
            self._failed(exc)
            raise
        self._written(made, time.perf_counter() - started)
        return made

    def events(self, conversation: str, after: int = 0) -> Iterator[Event]:
        """As `ports.Log.events`."""
        return self.log.events(conversation, after)

    def seq(self, conversation: str) -> int:
        """As `ports.Log.seq`."""
        return self.log.seq(conversation)

    def text(self, digest: bytes) -> str:
        """As `ports.Log.text`."""
        return self.log.text(digest)

    def close(self) -> None:
        """As `ports.Log.close`."""
        self.log.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.log, name)
