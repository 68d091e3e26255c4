"""Sessions whose policy is a function, and logs that do what a test tells them.

Invariant: every source of chance is counted; a log here is a real one with a moment of bad luck.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compaction import Budget, SessionManager
from compaction.budget import Target
from compaction.errors import LogLocked
from compaction.events import Event, NewEvent, Text
from compaction.plan import Plan
from compaction.policies import NoOp
from compaction.ports import Counter, Log, Policy
from compaction.store import MemoryLog
from compaction.testing import FakeClock, FakeCounter, FakeRng, fake_ids
from compaction.view import View

__all__ = ["BusyLog", "Planned", "RacyLog", "kinds", "make_manager"]


@dataclass(frozen=True)
class Planned:
    """A policy that is a function of view and target; what it returns is handed on, whatever it is."""

    function: Callable[[View, Target], Any]
    name: str = "planned"
    params: Mapping[str, Any] = field(default_factory=dict)
    version: int = 1
    needs: frozenset[str] = frozenset()

    def plan(self, view: View, target: Target) -> Plan:
        made: Plan = self.function(view, target)
        return made


class BusyLog(MemoryLog):
    """While `busy`, nothing can be written."""

    busy = False

    def commit(
        self, conversation: str, after: int, events: Sequence[NewEvent], texts: Sequence[Text] = ()
    ) -> tuple[Event, ...]:
        if self.busy:
            raise LogLocked("somebody else is writing")
        return super().commit(conversation, after, events, texts)


class RacyLog(MemoryLog):
    """Just before the next write to `conversation`, somebody else does `first`."""

    conversation = ""
    first: Callable[[], object] | None = None

    def commit(
        self, conversation: str, after: int, events: Sequence[NewEvent], texts: Sequence[Text] = ()
    ) -> tuple[Event, ...]:
        if conversation == self.conversation and self.first is not None:
            first, self.first = self.first, None
            first()
        return super().commit(conversation, after, events, texts)


def make_manager(
    log: Log | None = None,
    *,
    tokens: int = 1000,
    high: float = 0.9,
    low: float = 0.5,
    clamp_user: bool = False,
    policy: Policy | None = None,
    counter: Counter | None = None,
    **more: Any,
) -> SessionManager:
    """A manager that never compacts unless told how."""
    return SessionManager(
        policy=policy or NoOp(),
        budget=Budget(tokens=tokens, high=high, low=low, clamp_user=clamp_user),
        log=MemoryLog() if log is None else log,
        counter=FakeCounter() if counter is None and "engine" not in more else counter,
        clock=FakeClock(),
        ids=fake_ids,
        rng=FakeRng(),
        **more,
    )


def kinds(log: Log, conversation: str = "c") -> list[str]:
    """The kinds of a conversation's events, in order."""
    return [event.kind for event in log.events(conversation)]
