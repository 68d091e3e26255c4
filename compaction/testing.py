"""Fakes for tests, shipped: a counter, a clock, ids and a summariser that do what they are told.

Invariant: everything here is deterministic and free of dependencies. Hand-written fakes, no mocks: each one keeps the
promises of the protocol it stands for. `check_conservation` is the library's first promise as a function.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from compaction.errors import ScoresUnavailable
from compaction.messages import Message, dumps, leaves, resolve
from compaction.plan import Span
from compaction.ports import Summary
from compaction.view import Discard, Entry

__all__ = [
    "ConservationError",
    "FakeAnswers",
    "FakeClock",
    "FakeCounter",
    "FakeRng",
    "ScriptedSummarizer",
    "check_conservation",
    "fake_ids",
]


@dataclass(frozen=True)
class FakeCounter:
    """Counts `characters` code points as one token, and `around` tokens for each message.

    With `merge_roles` neighbours of one role share what is around them, as many chat templates do: counts then no
    longer add up, and `additive` is False. Text inside blobs is not counted: a picture takes `around` tokens.
    """

    characters: int = 4
    around: int = 4
    merge_roles: bool = False
    name: str = "fake"
    exact: bool = True

    @property
    def additive(self) -> bool:
        """Whether a request is the sum of its messages."""
        return not self.merge_roles

    def head(self, leading: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> int:
        """Three tokens of generation prompt, the leading messages, and the tools as JSON."""
        return 3 + sum(map(self.message, leading)) + (self.text(dumps(list(tools))) if tools else 0)

    def message(self, message: Mapping[str, Any]) -> int:
        """All strings of the message but its role."""
        tokens = self.around
        for key, value in message.items():
            if key == "content" and isinstance(value, list):
                tokens += sum(self._part(part) for part in value)
            elif isinstance(value, str):
                tokens += self.text(value) if key != "role" else 0
            elif value is not None:
                tokens += sum(self.text(text) for _, text in leaves(value))
        return tokens

    def _part(self, part: Mapping[str, Any]) -> int:
        return self.text(part["text"]) if isinstance(part.get("text"), str) else self.around

    def request(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> int:
        """The whole request."""
        lead = next((i for i, m in enumerate(messages) if m["role"] not in {"system", "developer"}), len(messages))
        rest = messages[lead:]
        shared = sum(a["role"] == b["role"] for a, b in itertools.pairwise(rest)) if self.merge_roles else 0
        return self.head(messages[:lead], tools) + sum(map(self.message, rest)) - self.around * shared

    def text(self, text: str) -> int:
        """Bare text, rounded up."""
        return -(-len(text) // self.characters)


@dataclass
class FakeAnswers:
    """A counter as a view asks it; `asked` counts the questions, `characters` the text that was encoded for them.

    `worth` holds the scores of entries, by kind and then by id.
    """

    counter: FakeCounter = field(default_factory=FakeCounter)
    tools: Sequence[Mapping[str, Any]] | None = None
    worth: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    asked: int = 0
    characters: int = 0

    def message(self, message: Mapping[str, Any]) -> int:
        """Tokens one message adds."""
        self._note(text for _, text in leaves(message))
        return self.counter.message(message)

    def request(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Tokens of a whole request."""
        self._note(text for message in messages for _, text in leaves(message))
        return self.counter.request(messages, self.tools)

    def text(self, text: str) -> int:
        """Tokens of bare text."""
        self._note((text,))
        return self.counter.text(text)

    def scores(self, kind: str) -> Mapping[str, float]:
        """What was given as `worth`."""
        if kind not in self.worth:
            raise ScoresUnavailable(kind, "none were given")
        return self.worth[kind]

    def _note(self, texts: Iterable[str]) -> None:
        self.asked += 1
        self.characters += sum(map(len, texts))


@dataclass
class FakeClock:
    """A clock that moves one `step` each time it is read. Starts at 2026-01-01 00:00 UTC."""

    now: datetime = datetime(2026, 1, 1, tzinfo=timezone.utc)
    step: timedelta = timedelta(seconds=1)

    def __call__(self) -> str:
        """Now, as UTC ISO 8601 text with microseconds."""
        text = self.now.isoformat(timespec="microseconds")
        self.now += self.step
        return text


@dataclass
class FakeRng:
    """Bytes that count up: each call gives the next number."""

    calls: int = 0

    def __call__(self, size: int) -> bytes:
        """`size` bytes, different for each call."""
        self.calls += 1
        return (self.calls % (1 << (8 * size))).to_bytes(size, "big")


def fake_ids(conversation: str, seq: int) -> str:
    """The id of the message that event `seq` appends: readable, and unique in a log."""
    return f"{conversation}:{seq}"


@dataclass
class ScriptedSummarizer:
    """A summariser that answers from a script, in order, and then with `default`.

    A string is a finished summary, a `Summary` is handed out as it is, an exception is raised. `calls` holds what it
    was asked: the source, and the keyword arguments.
    """

    script: Sequence[str | Summary | Exception] = ()
    default: str = "They talked."
    name: str = "scripted"
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __call__(self, source: str, *, instruction: str, max_tokens: int, limit: int) -> Summary:
        """The next answer of the script."""
        number = len(self.calls)
        self.calls.append((source, {"instruction": instruction, "max_tokens": max_tokens, "limit": limit}))
        answer = self.script[number] if number < len(self.script) else self.default
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Summary) else Summary(answer)


class ConservationError(AssertionError):
    """A message of which something is lost, or both live and out; `message_id` says which."""

    def __init__(self, message_id: str, reason: str) -> None:
        super().__init__(f"message {message_id!r}: {reason}")
        self.message_id = message_id


def check_conservation(
    messages: Mapping[str, Message] | Iterable[Message],
    entries: Iterable[Entry],
    spans: Iterable[Span | Discard],
) -> None:
    """Check that what is live of each message and the spans that are out partition it.

    `entries` is the view, `spans` everything that left it so far, over all decisions. A message in the view has
    exactly the spans its edits replace; one that is not has one span of the whole, and before that any of its parts.
    A summary stands only for what is out.

    Raises ConservationError with the message's id.
    """
    known = dict(messages) if isinstance(messages, Mapping) else {message.id: message for message in messages}
    shown = list(entries)
    live = {entry.id: entry for entry in shown if not entry.derived}
    out: dict[str, list[Span]] = {}
    for item in spans:
        span = item.span if isinstance(item, Discard) else item
        out.setdefault(span.message_id, []).append(span)
    for stranger in [*live, *out]:
        if stranger not in known:
            raise ConservationError(stranger, "is not in the history")
    for message in known.values():
        gone = out.get(message.id, [])
        parts = [span for span in gone if span.path]
        _check_ranges(message, parts)
        whole = [span for span in gone if not span.path]
        if message.id in live:
            if whole:
                raise ConservationError(message.id, "is in the view and out as a whole")
            _check_live(live[message.id], parts)
        elif len(whole) != 1:
            raise ConservationError(message.id, f"is not in the view, and {len(whole)} spans hold it as a whole")
    _check_summaries(shown, out)


def _check_ranges(message: Message, parts: Sequence[Span]) -> None:
    """Spans lie inside their strings and do not overlap."""
    data = json.loads(message.text)
    ordered = sorted(parts, key=lambda span: (span.path, span.start))
    for span in ordered:
        try:
            string = resolve(data, span.path)
        except KeyError:
            string = None
        if not isinstance(string, str) or not 0 <= span.start < span.end <= len(string):
            raise ConservationError(message.id, f"has no text {span.path}[{span.start}:{span.end}]")
    for one, two in itertools.pairwise(ordered):
        if one.path == two.path and two.start < one.end:
            raise ConservationError(message.id, f"{two.path}[{two.start}:{one.end}] is out twice")


def _check_live(entry: Entry, parts: Sequence[Span]) -> None:
    """What the edits replace is exactly what is out."""
    replaced = _covered([(edit.path, edit.start, edit.end) for edit in entry.edits])
    missing = _covered([(span.path, span.start, span.end) for span in parts])
    if replaced != missing:
        raise ConservationError(entry.id, f"the view replaces {replaced} but {missing} is out")


def _covered(ranges: Iterable[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The ranges in order, neighbours joined."""
    joined: list[tuple[str, int, int]] = []
    for path, start, end in sorted(ranges):
        if joined and joined[-1][0] == path and joined[-1][2] == start:
            joined[-1] = (path, joined[-1][1], end)
        else:
            joined.append((path, start, end))
    return joined


def _check_summaries(entries: Sequence[Entry], out: Mapping[str, Sequence[Span]]) -> None:
    """No span is stood for that is still live, and none twice."""
    seen: set[str] = set()
    for entry in entries:
        for span in entry.stands_for:
            if span not in out.get(span.message_id, ()):
                raise ConservationError(span.message_id, f"summary {entry.id!r} stands for what never left the view")
            if span.id in seen:
                raise ConservationError(span.message_id, "two summaries stand for it")
            seen.add(span.id)
