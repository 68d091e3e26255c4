"""Where a conversation may be cut, and what may be appended to it.

Invariant: tool calls and their results are one unit, told by position and never by id alone (ids repeat in real runs).
Each rule is a small object that says where a cut is legal; the legal cuts are the intersection of all of them.
This module knows nothing about tokens, budgets or policies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from compaction.errors import InvalidMessage
from compaction.messages import Message

__all__ = [
    "BOUND_PARTS",
    "LEADING",
    "Batch",
    "CutRule",
    "Line",
    "UserFirst",
    "WholeUnits",
    "editable",
    "follow",
    "legal_cuts",
]

LEADING = frozenset({"system", "developer"})
BOUND_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning", "compaction"})


class Line(Protocol):
    """What a rule needs to know of an entry."""

    @property
    def id(self) -> str:
        """The entry's id."""

    @property
    def role(self) -> str:
        """The role it is sent under."""

    @property
    def unit(self) -> str:
        """Entries of one batch share it; anything else is its own."""


class CutRule(Protocol):
    """One reason why a list may not be cut somewhere."""

    def allows(self, lines: Sequence[Line]) -> bytearray:
        """One byte for each cut 0..len(lines): 1 where everything before the cut may go."""


@dataclass(frozen=True, slots=True)
class WholeUnits:
    """A batch of calls and results is never cut in two."""

    def allows(self, lines: Sequence[Line]) -> bytearray:
        """1 wherever the neighbours belong to different units, and at both ends."""
        units = [line.unit for line in lines]
        return bytearray([1, *(a != b for a, b in pairwise(units)), 1]) if units else bytearray([1])


@dataclass(frozen=True, slots=True)
class UserFirst:
    """Where a template wants a user first, a cut ends before a user entry or after the last user message."""

    def allows(self, lines: Sequence[Line]) -> bytearray:
        """1 before each user entry, and everywhere after the last one."""
        flags = bytearray(line.role == "user" for line in lines)
        last = flags.rfind(1)
        return flags[: last + 1] + bytearray([1]) * (len(lines) - last)


def legal_cuts(lines: Sequence[Line], rules: Sequence[CutRule]) -> tuple[int, ...]:
    """All cuts every rule allows, in order."""
    allowed = [rule.allows(lines) for rule in rules]
    return tuple(i for i, flags in enumerate(zip(*allowed, strict=True)) if all(flags))


def editable(message: Message, path: str) -> bool:
    """Whether a range of the string at `path` may be replaced.

    Content text may; tool-call arguments, ids, and text a provider has signed may not.
    """
    content = message.data.get("content")
    if path == "/content":
        return isinstance(content, str)
    keys = path.split("/")
    if len(keys) != 4 or keys[1] != "content" or keys[3] != "text" or not isinstance(content, list):
        return False
    part: Any = next((part for index, part in enumerate(content) if str(index) == keys[2]), {})
    return isinstance(part.get("text"), str) and part.get("type") not in BOUND_PARTS


@dataclass(frozen=True, slots=True)
class Batch:
    """An assistant message with tool calls, and which of them still wait for a result. `unit` is the message's id."""

    unit: str
    waiting: Counter[str]

    @property
    def pending(self) -> tuple[str, ...]:
        """Ids without a result, in the order of the calls."""
        return tuple(self.waiting.elements())


def _orphan(call: str) -> str:
    return (
        f"tool result {call!r} answers no open call of the assistant message just before it: "
        "append that assistant message first, or send the text as a user message"
    )


def follow(batch: Batch | None, message: Message) -> Batch | None:
    """The batch a list ends with once the message is appended; `batch` is the one it ended with before.

    Raises InvalidMessage for a tool result that no call of the batch waits for; nothing is changed then.
    """
    if message.role == "tool":
        call = message.answers or ""
        if batch is None or not batch.waiting[call]:
            raise InvalidMessage(_orphan(call))
        return Batch(batch.unit, batch.waiting - Counter((call,)))
    return Batch(message.id, Counter(message.call_ids)) if message.role == "assistant" and message.call_ids else None
