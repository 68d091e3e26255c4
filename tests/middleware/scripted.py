"""Scripted models and small readers for the middleware's tests.

Invariant: a scripted model remembers what it was sent and does what its script says, nothing else.
"""

from __future__ import annotations

import json
from typing import Any

from compaction.budget import Budget
from compaction.manager import SessionManager
from compaction.middleware.matching import same
from compaction.policies import Truncate
from compaction.session import Session
from compaction.store import MemoryLog
from compaction.testing import FakeClock, FakeCounter, FakeRng, fake_ids

__all__ = ["Chunk", "Model", "Refused", "chunk", "history", "kinds", "make_manager", "matches", "verified"]

Message = dict[str, Any]


def make_manager(tokens: int = 100_000, log: Any = None) -> SessionManager:
    """A manager whose counts, clock, ids and salts are fakes; log and policy are real."""
    fakes: dict[str, Any] = {"counter": FakeCounter(), "clock": FakeClock(), "ids": fake_ids, "rng": FakeRng()}
    real: dict[str, Any] = {"policy": Truncate(), "log": log if log is not None else MemoryLog()}
    return SessionManager(budget=Budget(tokens=tokens), **real, **fakes)


class Model:
    """Answers from a script: strings and mappings are replies, exceptions are raised; then `ok 1`, `ok 2`, …"""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.sent: list[list[Message]] = []
        self.keywords: list[Message] = []

    def __call__(self, messages: list[Message], **kw: Any) -> Any:
        self.sent.append(json.loads(json.dumps(messages)))
        self.keywords.append(kw)
        reply = self.script.pop(0) if self.script else f"ok {len(self.sent)}"
        if isinstance(reply, BaseException):
            raise reply
        return reply


class Refused(Exception):
    """A provider's error as SDKs raise it: words, an HTTP status, a code."""

    def __init__(self, words: str, status: int | None = 400, code: str | None = None, body: object = None) -> None:
        super().__init__(words)
        self.status_code = status
        self.code = code
        self.body = body


class Chunk:
    """An SDK object: it has `model_dump`, which leaves out what was never set."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self, *, exclude_unset: bool = False) -> Message:
        """What was set; with the defaults of the class where they are asked for."""
        return dict(self.fields) if exclude_unset else {"audio": None, "function_call": None, **self.fields}


def chunk(usage: Message | None = None, finish_reason: str | None = None, **delta: Any) -> Message:
    """A chat-completions chunk as a mapping."""
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}] if delta or finish_reason else []
    return {"object": "chat.completion.chunk", "choices": choices, **({"usage": usage} if usage else {})}


def history(session: Session) -> list[Message]:
    """The conversation's messages, as they were appended."""
    return [message.fresh() for message in session.state.history.values()]


def matches(session: Session, messages: list[Message]) -> bool:
    """Whether the history says what the list says."""
    known = history(session)
    return len(known) == len(messages) and all(map(same, known, messages))


def kinds(manager: SessionManager, conversation: str = "c") -> list[str]:
    """The kinds of the conversation's events, in order; that a call began is left out."""
    return [event.kind for event in manager.log.events(conversation) if event.kind != "generation_started"]


def verified(manager: SessionManager) -> bool:
    """Whether the log proves itself."""
    log: Any = manager.log
    return bool(log.verify().ok)
