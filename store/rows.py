"""What the log gives back: plain frozen values, nothing that still hangs on the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ConversationRow",
    "DecisionRow",
    "Hit",
    "MessageRow",
    "Problem",
    "SpanRow",
    "UsageRow",
    "VerifyReport",
]


@dataclass(frozen=True, slots=True)
class ConversationRow:
    """One conversation: counts of its events, messages and decisions, tokens as counted when appended."""

    conversation: str
    events: int
    messages: int
    tokens: int
    decisions: int
    first_at: str
    last_at: str


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One committed decision. `event` is its id in the file, `seq` in its conversation.

    `spans` counts what it discarded, `discarded_tokens` sums their tokens; `before` and `after` are the view's figures.
    `failures` are the codes of what did not work before it, in order. `undone`: a later rewind took it back.
    """

    event: int
    conversation: str
    seq: int
    at: str
    trigger: str
    policy: str
    version: int
    params: Mapping[str, Any]
    rung: int
    limits: Mapping[str, Any]
    target: Mapping[str, Any]
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    actions: tuple[str, ...]
    spans: int
    discarded_tokens: int
    failures: tuple[str, ...]
    undone: bool


@dataclass(frozen=True, slots=True)
class SpanRow:
    """One discarded range: `text` is code points [start, end) of the original string at `path`, always exact.

    `text` is None once erased; path "" is the whole message, its text the message's JSON. `decision` is the seq of the
    decision, `event` its id in the file, `position` the place among its spans. `replaced_by` is None where nothing
    stands in its place. `undone`: a later rewind took the decision back.
    """

    id: str
    conversation: str
    decision: int
    event: int
    position: int
    message_id: str
    path: str
    start: int
    end: int
    tokens: int
    action: str | None
    reason: str | None
    text: str | None
    replaced_by: str | None
    undone: bool


@dataclass(frozen=True, slots=True)
class MessageRow:
    """One message as appended; `json` is its exact JSON text, None once erased."""

    conversation: str
    seq: int
    message_id: str
    role: str
    tokens: int
    counter: str
    at: str
    json: str | None


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What one generation cost: tokens, bytes of KV cache, milliseconds; fields as in `ports.Usage`."""

    conversation: str
    seq: int
    at: str
    prompt_tokens: int
    completion_tokens: int
    prefilled: int | None
    reused: int | None
    peak_tokens: int | None
    kv_bytes: int | None
    peak_kv_bytes: int | None
    ttft_ms: float | None
    tpot_ms: float | None
    why: str | None


@dataclass(frozen=True, slots=True)
class Hit:
    """A span that matches a search, best first. `snippet` marks the words in [brackets]; lower `rank` is better."""

    span_id: str
    conversation: str
    decision: int
    message_id: str
    path: str
    snippet: str
    rank: float


@dataclass(frozen=True, slots=True)
class Problem:
    """One place where the file disagrees with itself. `row` is the row's key as text, `column` None for all of it."""

    table: str
    row: str
    column: str | None
    message: str

    def __str__(self) -> str:
        column = f".{self.column}" if self.column else ""
        row = f" row {self.row}" if self.row else ""
        return f"{self.table}{column}{row}: {self.message}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found. `head` is the newest event's hash.

    `unanchored` counts the events after the newest outside head: only a head kept outside shows that a tail was cut
    off. None where no head was given.
    """

    ok: bool
    events: int
    problems: tuple[Problem, ...]
    head: str
    unanchored: int | None
