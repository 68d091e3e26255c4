"""The values a view is made of.

Invariant: all of them are frozen; a range is always code points of the *original* string at a JSON Pointer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compaction.messages import Message, apply_edits
from compaction.plan import Edit, Span

__all__ = ["Entry", "Failure", "Floor", "Pin", "Unit"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the view: a message with edits, or a derived text (`text` set) that stands for spans.

    `tokens` is what it adds to the request; with merged roles, its marginal share. `unit` is shared by a whole batch.
    """

    id: str
    role: str
    tokens: int
    unit: str
    edits: tuple[Edit, ...] = ()
    text: str | None = None
    stands_for: tuple[Span, ...] = ()

    @property
    def derived(self) -> bool:
        """Whether this is not a message of the history."""
        return self.text is not None

    def render(self, messages: Mapping[str, Message]) -> dict[str, Any]:
        """The message to send, as a fresh copy."""
        if self.text is not None:
            return {"role": "user", "content": self.text}
        message = messages[self.id]
        if not self.edits:
            return message.fresh()
        return apply_edits(message.data, [(e.path, e.start, e.end, e.text) for e in self.edits])


@dataclass(frozen=True, slots=True)
class Floor:
    """Tokens that cannot be dropped, one figure for each part; `minimum` is its total with all tool results cleared.

    `template` is what the chat template and the generation prompt add by themselves.
    """

    template: int = 0
    system: int = 0
    tools: int = 0
    pins: int = 0
    last_user: int = 0
    newest_batch: int = 0

    @property
    def total(self) -> int:
        """The floor as it stands."""
        return self.template + self.system + self.tools + self.pins + self.last_user + self.newest_batch

    def to_json(self) -> dict[str, int]:
        """The parts, in a fixed order."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Pin:
    """A range of one message that stays byte-identical; path "" is the whole message."""

    message_id: str
    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Entries [start, end) that go or stay together; `kept` says that they must stay."""

    start: int
    end: int
    tokens: int
    kept: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a plan was not taken: `code` is a fixed word, `detail` may quote the conversation."""

    rung: int
    code: str
    detail: str

    def to_json(self) -> dict[str, Any]:
        """The failure as plain JSON values."""
        return {"rung": self.rung, "code": self.code, "detail": self.detail}
