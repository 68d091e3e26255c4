"""What a session hands out: the request to send, a reply, and the figures of the moment.

Invariant: messages and tools are fresh copies; changing them changes nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from compaction.budget import Budget
from compaction.decide import Decision
from compaction.messages import Message, dumps
from compaction.ports import Usage
from compaction.state import State
from compaction.view import Entry

__all__ = ["Prepared", "Reply", "SessionUsage"]


@dataclass(frozen=True)
class Prepared:
    """A request that fits. `decision` says what was compacted for it; None: nothing was."""

    tokens: int
    kv_bytes: int | None
    decision: Decision | None
    _entries: Sequence[Entry]
    _length: int
    _history: Mapping[str, Message]
    _tools: Sequence[Mapping[str, Any]] | None

    @classmethod
    def of(cls, state: State, tools: Sequence[Mapping[str, Any]] | None, decision: Decision | None) -> Prepared:
        """The state's view as it stands; costs the same however long it is."""
        kv_bytes = state.storage.bytes(state.tokens) if state.storage else None
        return cls(state.tokens, kv_bytes, decision, state.entries, len(state.entries), state.history, tools)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages to send, fresh copies."""
        return [entry.render(self._history) for entry in self._own()]

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tool schemas to send, fresh copies."""
        return json.loads(dumps(list(self._tools))) if self._tools else None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries behind the messages."""
        return tuple(self._own())

    def _own(self) -> Iterator[Entry]:
        return islice(self._entries, self._length)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of the engine, appended under `message_id` ("" for a probe, which is not appended)."""

    message_id: str
    text: str
    finish_reason: str
    usage: Usage
    decision: Decision | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a chat-completions message, a fresh copy."""
        return {"role": "assistant", "content": self.text}


@dataclass(frozen=True, slots=True)
class SessionUsage:
    """Figures of the moment: tokens of the next request, KV bytes measured now, and the last turn's timings."""

    tokens: int
    kv_bytes: int | None
    budget: Budget
    ttft_ms: float | None
    tpot_ms: float | None
    prefilled: int | None
    reused: int | None
