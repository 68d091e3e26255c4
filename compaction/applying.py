"""What a plan makes of a list of entries.

Invariant: every code point of a message is at any time either live or in exactly one span that is out. The same
function plans, applies and replays; who counts is for the caller to say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from compaction.budget import Goal, KVStorage, Target
from compaction.entries import Entry
from compaction.errors import InvalidPlan
from compaction.grammar import editable
from compaction.messages import Message, resolve
from compaction.plan import Clamp, Digest, Drop, Edit, Plan, Quantize, Replace, Span, marker, summary_text

__all__ = ["Applied", "Count", "Discard", "apply_plan"]

Count = Callable[[Entry], int]
"""Tokens of a new or edited entry."""


@dataclass(frozen=True, slots=True)
class Discard:
    """A span that leaves the view: its text verbatim, by which action of the plan, and the tokens that go with it."""

    span: Span
    action: int
    tokens: int
    text: str

    @property
    def id(self) -> str:
        """The span's id."""
        return self.span.id


@dataclass(frozen=True, slots=True)
class Applied:
    """What a plan makes of a view. `changed` holds the tokens of new and edited entries, in order.

    `storage` is how the cache is kept then; None: no geometry is known.
    """

    entries: tuple[Entry, ...]
    discards: tuple[Discard, ...]
    changed: tuple[tuple[str, int], ...]
    tokens: int
    first_changed: int
    storage: KVStorage | None = None

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of KV cache the request then fills; None where no geometry is known."""
        return None if self.storage is None else self.storage.bytes(self.tokens)

    def within(self, target: Target, goal: Goal = "want") -> bool:
        """Whether the plan brings the request down to the target, or to what it must be down to."""
        return target.met(self.tokens, self.storage, goal)


def apply_plan(
    entries: Iterable[Entry],
    messages: Mapping[str, Message],
    plan: Plan,
    summaries: Sequence[str | None],
    count: Count,
) -> Applied:
    """Entries after the plan, and what left. `summaries` are the texts of the plan's digests in order, None: not yet.

    Raises InvalidPlan for entries that are not there, twice touched, or ranges that cannot be edited.
    `tokens` of the result is 0 and `storage` None: the caller knows what the whole comes to.
    """
    before = list(entries)
    live = {entry.id: entry for entry in before}
    order = {entry.id: index for index, entry in enumerate(before)}
    step = _Step(live, order, messages, count)
    texts = iter(summaries)
    for number, action in enumerate(plan.actions):
        if isinstance(action, Drop):
            step.drop(number, action.entries)
        elif isinstance(action, Digest):
            step.digest(number, action, next(texts, None))
        elif not isinstance(action, Quantize):
            step.edit(number, action)
    after: list[Entry] = []
    for entry in before:
        after += step.inserted.get(entry.id, ())
        if entry.id in live:
            after.append(live[entry.id])
    discards = sorted(step.discards, key=lambda d: (order[d.span.message_id], d.span.path, d.span.start))
    first = min((order[i] for i in step.touched), default=len(before))
    return Applied(tuple(after), tuple(discards), tuple(step.changed), 0, first)


class _Step:
    """One application of a plan, action by action."""

    def __init__(
        self, live: dict[str, Entry], order: Mapping[str, int], messages: Mapping[str, Message], count: Count
    ) -> None:
        self.live, self.order, self.messages, self.count = live, order, messages, count
        self.discards: list[Discard] = []
        self.changed: list[tuple[str, int]] = []
        self.inserted: dict[str, list[Entry]] = {}
        self.touched: set[str] = set()

    def _take(self, entry_id: str) -> Entry:
        if entry_id not in self.live:
            state = "is dropped twice" if entry_id in self.touched else "is not in the view"
            raise InvalidPlan(f"entry {entry_id!r} {state}")
        return self.live[entry_id]

    def drop(self, number: int, ids: Sequence[str]) -> tuple[Span, ...]:
        """Take entries out; the spans that leave with them, and those derived ones stood for."""
        spans: list[Span] = []
        for entry_id in ids:
            entry = self._take(entry_id)
            if entry_id in self.touched:
                raise InvalidPlan(f"entry {entry_id!r} is edited and dropped by one plan")
            self.touched.add(entry_id)
            del self.live[entry_id]
            if entry.derived:
                spans += entry.stands_for
                continue
            span = Span(entry_id, "", 0, len(self.messages[entry_id].text))
            self.discards.append(Discard(span, number, entry.tokens, self.messages[entry_id].text))
            spans.append(span)
        return tuple(spans)

    def digest(self, number: int, action: Digest, summary: str | None) -> None:
        """Replace entries by a derived one at the place of the first."""
        if not action.entries or action.max_tokens < 1:
            raise InvalidPlan("a digest needs entries and at least one token")
        first = min(action.entries, key=lambda i: self.order.get(i, 0))
        spans = self.drop(number, action.entries)
        digest = hashlib.sha256("\x00".join(span.id for span in spans).encode()).hexdigest()[:15]
        text = "" if summary is None else summary_text(summary, len(action.entries))
        entry = Entry(f"s{digest}", "user", 0, f"s{digest}", (), text, spans)
        tokens = self.count(entry) + (action.max_tokens if summary is None else 0)
        self.inserted.setdefault(first, []).append(replace(entry, tokens=tokens))
        self.changed.append((entry.id, tokens))

    def edit(self, number: int, action: Clamp | Replace) -> None:
        """Replace a range; what of it was live leaves."""
        entry = self._take(action.message_id)
        message = self.messages.get(entry.id)
        if message is None or not editable(message, action.path):
            raise InvalidPlan(f"{action.path!r} of entry {entry.id!r} cannot be edited: only its content text can")
        string = resolve(message.data, action.path)
        if not 0 <= action.start < action.end <= len(string):
            raise InvalidPlan(f"range {action.start}..{action.end} is outside {action.path!r} of {entry.id!r}")
        edits, pieces = _merge(entry.edits, action)
        if not pieces and edits == entry.edits:
            raise InvalidPlan(f"range {action.start}..{action.end} of entry {entry.id!r} is out already")
        new = replace(entry, edits=edits)
        new = replace(new, tokens=self.count(new))
        self.live[entry.id] = new
        self.touched.add(entry.id)
        self.changed.append((entry.id, new.tokens))
        saved = max(0, entry.tokens - new.tokens)
        for index, (start, end) in enumerate(pieces):
            span = Span(entry.id, action.path, start, end)
            self.discards.append(Discard(span, number, saved if index == 0 else 0, string[start:end]))


def _merge(edits: tuple[Edit, ...], action: Clamp | Replace) -> tuple[tuple[Edit, ...], list[tuple[int, int]]]:
    """The edits with the action's range merged in, and the pieces of it that were live."""
    start, end = action.start, action.end
    inside = [e for e in edits if e.path == action.path and e.start <= end and start <= e.end]
    start = min([start, *(e.start for e in inside)])
    end = max([end, *(e.end for e in inside)])
    pieces, at = [], start
    for edit in sorted(inside, key=lambda e: e.start):
        if at < edit.start:
            pieces.append((at, edit.start))
        at = max(at, edit.end)
    if at < end:
        pieces.append((at, end))
    text = marker(end - start) if isinstance(action, Clamp) else action.text
    rest = [e for e in edits if e not in inside]
    merged = sorted([*rest, Edit(action.path, start, end, text)], key=lambda e: (e.path, e.start))
    return tuple(merged), pieces
