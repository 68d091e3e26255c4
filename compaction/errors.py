"""Every error the library raises on purpose.

    CompactionError
    ├── InvalidInput               what the caller handed in is not usable; nothing was changed
    │   ├── InvalidMessage         a message, or its place in the conversation
    │   ├── InvalidTranscript      a line of a transcript file
    │   ├── InvalidBudget          a budget, reserve or water mark
    │   ├── InvalidPolicy          unknown policy or parameter
    │   └── InvalidPlan            a plan that names what is not there
    ├── BudgetUnsatisfiable        the floor at its minimum exceeds the room
    ├── PendingToolCalls           the last batch still waits for results
    ├── CompactionCancelled        a `before_compaction` hook said no and the view does not fit
    ├── EngineError                a model that cannot be loaded, or a request it cannot take
    │   ├── ModelNotFound
    │   ├── CannotRotate           keys whose position cannot be changed in place
    │   ├── CannotScore            slots that cannot be scored by attention head
    │   ├── CannotSplice           an edit of a live cache that its layers do not allow; nothing was changed
    │   ├── CacheRefused           a parked cache that must not be used; it is prefilled instead
    │   └── PoolFull               a turn that does not fit the pool beside what cannot be parked
    ├── CounterUnavailable         a tokenizer vocabulary that is not at hand
    ├── SummaryFailed              a summariser returned nothing usable; the original stays
    ├── ScoresUnavailable          nobody can tell what the entries are worth; another plan is made
    └── LogError                   the log could not do what was asked; nothing left the context
        ├── LogLocked              another process holds the write lock
        ├── LogReadOnly            the file or folder cannot be written
        ├── LogFull                no space left on the device
        ├── LogNewer               written by a newer version of this package
        ├── NotALog                a file that is not a compaction log
        ├── LogConflict            somebody else wrote to this conversation first
        └── LogMissing             an id that the log does not know

Each message names the thing, the place and the next step in one line; each error carries the object it is about.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "BudgetUnsatisfiable",
    "CacheRefused",
    "CannotRotate",
    "CannotScore",
    "CannotSplice",
    "CompactionCancelled",
    "CompactionError",
    "CounterUnavailable",
    "EngineError",
    "InvalidBudget",
    "InvalidInput",
    "InvalidMessage",
    "InvalidPlan",
    "InvalidPolicy",
    "InvalidTranscript",
    "LogConflict",
    "LogError",
    "LogFull",
    "LogLocked",
    "LogMissing",
    "LogNewer",
    "LogReadOnly",
    "ModelNotFound",
    "NotALog",
    "PendingToolCalls",
    "PoolFull",
    "ScoresUnavailable",
    "SummaryFailed",
]


class CompactionError(Exception):
    """Root of all errors raised on purpose."""


class InvalidInput(CompactionError, ValueError):
    """What the caller handed in is not usable; nothing was changed."""


class InvalidMessage(InvalidInput):
    """A message that is no chat-completions message, or stands where it cannot.

    `index` is its position in the caller's list (None for a single `append`).
    """

    def __init__(self, reason: str, *, index: int | None = None) -> None:
        super().__init__(reason if index is None else f"message {index}: {reason}")
        self.reason = reason
        self.index = index


class InvalidTranscript(InvalidInput):
    """A transcript file, or a line of it, that cannot be read. `line` counts from 1; None: the whole file."""

    def __init__(self, path: str, line: int | None, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if line is None else f"{path}:{line}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


class InvalidBudget(InvalidInput):
    """A budget, reserve or water mark that cannot be."""


class InvalidPolicy(InvalidInput):
    """An unknown policy, or a parameter it does not have."""


class InvalidPlan(InvalidInput):
    """A plan that names entries or ranges that are not there."""


class BudgetUnsatisfiable(CompactionError):
    """The floor at its minimum exceeds the room: no plan whatever can fit.

    `floor` is the minimum floor in tokens, `room` the tokens a prompt may have, `parts` what the floor is made of.
    """

    def __init__(self, floor: int, room: int, parts: Mapping[str, int]) -> None:
        made_of = ", ".join(f"{name} {tokens:,}" for name, tokens in parts.items() if tokens)
        super().__init__(
            f"what must stay needs {floor:,} tokens ({made_of}) but the room for a prompt is {room:,}: "
            f"raise the budget by at least {floor - room:,}, lower the reserve, or unpin"
        )
        self.floor = floor
        self.room = room
        self.parts = dict(parts)


class PendingToolCalls(CompactionError):
    """The last batch still waits for results; `ids` are the tool call ids without one."""

    def __init__(self, ids: tuple[str, ...]) -> None:
        super().__init__(f"tool calls {', '.join(map(repr, ids))} have no result yet: append the results first")
        self.ids = ids


class CompactionCancelled(CompactionError):
    """A `before_compaction` hook said no, and without compaction the view does not fit."""


class EngineError(CompactionError):
    """A model that cannot be loaded, or a request it cannot take."""


class ModelNotFound(EngineError):
    """A model name that is neither a known name, a folder, nor reachable on a hub."""


class CannotRotate(EngineError):
    """Keys whose position is not a rotation that can be changed. `reason` says which layers, and why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"keys cannot be moved to other positions: {reason}; keep positions (gap) or prefill again")
        self.reason = reason


class CannotSplice(EngineError):
    """An edit that this cache does not allow; nothing was changed. `reason` is one sentence for the log."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; keep it, or crop and prefill again")
        self.reason = reason


class CacheRefused(EngineError):
    """A parked cache that must not be used, or a cache that cannot be parked.

    `code` is one of `fingerprint` (of another model, tokenizer, conversation, …, or stale), `corrupted`, `missing`,
    `unsupported` (a kind of layer that nobody knows how to take apart); `reason` says what and where.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{reason}; prefill it again")
        self.code = code
        self.reason = reason


class PoolFull(EngineError):
    """A turn that does not fit the pool, even with everything parked that may be; nothing was changed.

    Bytes: `needed` for this turn, `budget` of the pool on the device, `busy` held by running replies and pins.
    """

    def __init__(self, needed: int, budget: int, busy: int) -> None:
        beside = f" beside {busy:,} of running replies and pinned conversations" if busy else ""
        super().__init__(
            f"this turn may need {needed:,} bytes of KV cache and the pool has {budget:,}{beside}: "
            + ("finish or close() replies, unpin, or raise the pool" if busy else "raise the pool, or compact first")
        )
        self.needed = needed
        self.budget = budget
        self.busy = busy


class CannotScore(EngineError):
    """Slots of a live cache that cannot be scored by attention head; nothing was changed. `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"slots cannot be scored: {reason}; evict by age, or whole messages, instead")
        self.reason = reason


class CounterUnavailable(CompactionError):
    """A tokenizer vocabulary that is not at hand."""


class SummaryFailed(CompactionError):
    """A summariser returned nothing usable; the original stays.

    `code` is one of `empty`, `oversized`, `refused`, `unfinished`, `error`.
    """

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"summary {code}" + (f": {detail}" if detail else ""))
        self.code = code
        self.detail = detail


class ScoresUnavailable(CompactionError):
    """Nobody can tell what the entries are worth. `kind` is the score asked for, `reason` one sentence for the log."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"no {kind} scores: {reason}")
        self.kind = kind
        self.reason = reason


class LogError(CompactionError):
    """The log could not do what was asked; nothing left the context."""


class LogLocked(LogError):
    """Another process holds the write lock."""


class LogReadOnly(LogError):
    """The file or its folder cannot be written."""


class LogFull(LogError):
    """No space left on the device."""


class LogNewer(LogError):
    """The file was written by a newer version of this package."""


class NotALog(LogError):
    """The file is not a compaction log."""


class LogConflict(LogError):
    """Somebody else wrote to this conversation first: read again, then decide again."""

    def __init__(self, conversation: str, expected: int, found: int) -> None:
        super().__init__(
            f"conversation {conversation!r} has moved on to event {found} (expected {expected}): "
            "another writer appended to it; read it again and retry"
        )
        self.conversation = conversation
        self.expected = expected
        self.found = found


class LogMissing(LogError):
    """An id that the log does not know."""
