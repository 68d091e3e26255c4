"""What the model will be sent now, and what a plan makes of it.

Invariant: a view is read-only; applying a plan gives new entries and the spans that leave, and every code point of a
message is at any time either live or in exactly one span. This module knows nothing about policies, logs or engines.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Protocol

from compaction.errors import InvalidPlan
from compaction.grammar import LEADING, CutRule, UserFirst, WholeUnits, editable, legal_cuts
from compaction.messages import Message, apply_edits, resolve
from compaction.plan import Clamp, Digest, Drop, Edit, Plan, Replace, Span, marker, summary_text

__all__ = ["Answers", "Applied", "Discard", "Entry", "Failure", "Floor", "Pin", "Unit", "View", "apply_plan"]


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
    """What a plan makes of a view. `changed` holds the tokens of new and edited entries, in order."""

    entries: tuple[Entry, ...]
    discards: tuple[Discard, ...]
    changed: tuple[tuple[str, int], ...]
    tokens: int
    first_changed: int


class Answers(Protocol):
    """Who counts for a view: a live counter that is recorded, or the recording."""

    def message(self, message: Mapping[str, Any]) -> int:
        """Tokens one message adds."""

    def request(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Tokens of a whole request of these messages."""

    def text(self, text: str) -> int:
        """Tokens of bare text."""


Count = Callable[[Entry], int]


@dataclass(frozen=True)
class View:
    """What a policy sees. Lists are in sending order; token figures are of the rendered request.

    `messages` holds the originals by id; `head` is the tokens of everything but the entries after the leading ones;
    `keep` the ids that must stay; `leading` how many entries lead; `failures` why earlier plans were not taken;
    `known_units` are the units where somebody has counted them already.
    """

    entries: tuple[Entry, ...]
    messages: Mapping[str, Message]
    tokens: int
    head: int
    floor: Floor
    leading: int
    keep: frozenset[str]
    pins: tuple[Pin, ...] = ()
    last_user: str | None = None
    newest_batch: str | None = None
    additive: bool = True
    user_first: bool = False
    clamp_user: bool = False
    kv_bytes_per_token: int | None = None
    slack: int = 0
    failures: tuple[Failure, ...] = ()
    answers: Answers | None = None
    known_units: tuple[Unit, ...] | None = None

    @property
    def overhead(self) -> int:
        """Tokens of a request without any entry after the leading ones."""
        return self.head

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of KV cache the request fills; None where no geometry is known."""
        return None if self.kv_bytes_per_token is None else self.tokens * self.kv_bytes_per_token

    @cached_property
    def rules(self) -> tuple[CutRule, ...]:
        """The rules a cut has to obey."""
        return (WholeUnits(), UserFirst()) if self.user_first else (WholeUnits(),)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """What goes or stays together, after the leading entries."""
        if self.known_units is not None:
            return self.known_units
        entries, keep, units = self.entries, self.keep, []
        start, end = self.leading, len(self.entries)
        while start < end:
            first = entries[start]
            unit, tokens, kept, stop = first.unit, first.tokens, first.id in keep, start + 1
            while stop < end and entries[stop].unit == unit:
                tokens += entries[stop].tokens
                kept = kept or entries[stop].id in keep
                stop += 1
            units.append(Unit(start, stop, tokens, kept))
            start = stop
        return tuple(units)

    @cached_property
    def legal_cuts(self) -> tuple[int, ...]:
        """Indices i such that all that may go of entries[leading:i] can go at once."""
        return tuple(self.leading + i for i in legal_cuts(self.entries[self.leading :], self.rules))

    def cut_to(self, tokens: int) -> int:
        """The first legal cut that leaves at most so many tokens; the last one where none does.

        What must stay is not counted as going. Exact where counts add up, else an estimate.
        """
        freed = [0, *accumulate(0 if unit.kept else unit.tokens for unit in self.units)]
        cuts = [self.leading, *(unit.end for unit in self.units)]
        if self.user_first:
            legal = set(self.legal_cuts)
            pairs = [(gone, cut) for gone, cut in zip(freed, cuts, strict=True) if cut in legal]
            freed, cuts = [gone for gone, _ in pairs], [cut for _, cut in pairs]
        at = bisect_left(freed, self.tokens - tokens)
        return cuts[min(at, len(cuts) - 1)]

    def droppable(self, start: int, end: int) -> tuple[str, ...]:
        """Ids of entries [start, end) that may go."""
        ids: list[str] = []
        for unit in self.units:
            if unit.start >= end:
                break
            if unit.start >= start and unit.end <= end and not unit.kept:
                ids += [entry.id for entry in self.entries[unit.start : unit.end]]
        return tuple(ids)

    def count(self, text: str) -> int:
        """Tokens of bare text: an estimate of what it adds to a message."""
        return self._asked.text(text)

    def after(self, plan: Plan) -> Applied:
        """What the plan makes of this view, counted exactly; summaries not written yet count their full allowance.

        Raises InvalidPlan for a plan that names what is not there or may not go.
        """
        return self.apply(plan, [None] * len(plan.digests))

    def apply(self, plan: Plan, summaries: Sequence[str | None]) -> Applied:
        """As `after`, with the summaries' texts, in the order of the plan's digests."""
        applied = apply_plan(self.entries, self.messages, plan, summaries, self._count)
        self._check_allowed(plan)
        if self.additive:
            old = {entry.id: entry.tokens for entry in self.entries}
            tokens = self.tokens + sum(entry.tokens for entry in applied.entries) - sum(old.values())
        elif any(summary is None for summary in summaries):
            rendered = [e.render(self.messages) for e in applied.entries if e.text != ""]
            held = [dict(applied.changed)[e.id] for e in applied.entries if e.text == ""]
            tokens = self._asked.request(rendered) + sum(held)
        else:
            tokens = self._asked.request([entry.render(self.messages) for entry in applied.entries])
        return replace(applied, tokens=tokens)

    def advance(self, plan: Plan) -> View:
        """The view as it would be after a plan; summaries not written yet are entries with the text ""."""
        applied = self.after(plan)
        return replace(self, entries=applied.entries, tokens=applied.tokens, known_units=None)

    def by_id(self, entry_id: str) -> Entry:
        """The entry of that id. Raises InvalidPlan where there is none."""
        return self.entries[self.position(entry_id)]

    def position(self, entry_id: str) -> int:
        """Index of an entry. Raises InvalidPlan where there is none."""
        try:
            return self._positions[entry_id]
        except KeyError:
            raise InvalidPlan(f"entry {entry_id!r} is not in the view") from None

    def recount(self, entry: Entry) -> Entry:
        """An edited entry with its own tokens, counted exactly."""
        return replace(entry, tokens=self._count(entry))

    def ask_request(self, entries: Sequence[Entry]) -> int:
        """Tokens of a request of just these entries, rendered as a whole."""
        return self._asked.request([entry.render(self.messages) for entry in entries])

    def with_failures(self, failures: Sequence[Failure]) -> View:
        """The same view after these failures."""
        return replace(self, failures=tuple(failures))

    @property
    def _asked(self) -> Answers:
        if self.answers is None:
            raise InvalidPlan("this view cannot count: it was made without answers")
        return self.answers

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {entry.id: index for index, entry in enumerate(self.entries)}

    @cached_property
    def _counted(self) -> dict[tuple[str, tuple[Edit, ...], str | None], int]:
        return {}

    def _count(self, entry: Entry) -> int:
        """Tokens of a new or edited entry; asked once for each."""
        key = (entry.id, entry.edits, entry.text)
        if key not in self._counted:
            shown = replace(entry, text=summary_text("", len(entry.stands_for))) if entry.text == "" else entry
            self._counted[key] = self._asked.message(shown.render(self.messages))
        return self._counted[key]

    def _check_allowed(self, plan: Plan) -> None:
        gone = {i for action in plan.actions if isinstance(action, Drop | Digest) for i in action.entries}
        if kept := next((i for i in gone if i in self.keep), None):
            raise InvalidPlan(f"entry {kept!r} must stay (leading, pinned, last user message or newest batch)")
        for action in plan.actions:
            if isinstance(action, Clamp | Replace):
                self._check_edit(action)

    def _check_edit(self, action: Clamp | Replace) -> None:
        if any(entry.id == action.message_id for entry in self.entries[: self.leading]):
            raise InvalidPlan(f"leading message {action.message_id!r} is fixed and cannot be edited")
        if action.message_id == self.last_user and not self.clamp_user:
            raise InvalidPlan("the last user message is clamped only with Budget(clamp_user=True)")
        for pin in self.pins:
            if pin.message_id == action.message_id and (
                pin.path == "" or (pin.path == action.path and pin.start < action.end and action.start < pin.end)
            ):
                raise InvalidPlan(f"message {action.message_id!r} is pinned there and cannot be edited")


def apply_plan(
    entries: Iterable[Entry],
    messages: Mapping[str, Message],
    plan: Plan,
    summaries: Sequence[str | None],
    count: Count,
) -> Applied:
    """Entries after the plan, and what left. `summaries` are the texts of the plan's digests in order, None: not yet.

    Raises InvalidPlan for entries that are not there, twice touched, or ranges that cannot be edited.
    `tokens` of the result is 0: the caller knows what the whole comes to.
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
        else:
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
        if not pieces:
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


def readonly(messages: dict[str, Message]) -> Mapping[str, Message]:
    """A read-only face of the history."""
    return MappingProxyType(messages)


def is_leading(role: str) -> bool:
    """Whether a message of this role belongs to the leading ones while nothing else came before."""
    return role in LEADING
