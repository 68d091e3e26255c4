"""What the model will be sent now, as a policy sees it.

Invariant: a view is read-only; asking it what a plan would do changes nothing but its memory of counts. This module
knows nothing about policies, logs or engines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

from compaction.applying import Applied, Discard, apply_plan
from compaction.budget import Goal, KVStorage, Target
from compaction.entries import Entry, Failure, Floor, Pin, Unit
from compaction.errors import InvalidPlan
from compaction.grammar import LEADING, CutRule, UserFirst, WholeUnits, legal_cuts
from compaction.messages import Message
from compaction.plan import Clamp, Digest, Drop, Edit, Plan, Quantize, Replace, summary_text

__all__ = ["Answers", "Applied", "Discard", "Entry", "Failure", "Floor", "Pin", "Unit", "View"]


class Answers(Protocol):
    """Who counts for a view: a live counter that is recorded, or the recording."""

    def message(self, message: Mapping[str, Any]) -> int:
        """Tokens one message adds."""

    def request(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Tokens of a whole request of these messages."""

    def text(self, text: str) -> int:
        """Tokens of bare text."""

    def scores(self, kind: str) -> Mapping[str, float]:
        """What the cache says each entry is worth, by entry id; higher is worth more.

        Raises ScoresUnavailable where nobody can tell.
        """


@dataclass(frozen=True)
class View:
    """What a policy sees. Lists are in sending order; token figures are of the rendered request.

    `messages` holds the originals by id; `head` is the tokens of everything but the entries after the leading ones;
    `keep` the ids that must stay; `leading` how many entries lead; `failures` why earlier plans were not taken;
    `known_units` are the units where somebody has counted them already. `storage` is how the conversation's keys and
    values are kept (None: no geometry is known), `storages` the narrower ones the engine could turn it into, by name.
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
    storage: KVStorage | None = None
    storages: Mapping[str, KVStorage] = field(default_factory=dict)
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
        return None if self.storage is None else self.storage.bytes(self.tokens)

    def reaches(self, target: Target, goal: Goal = "want") -> bool:
        """Whether the request is down to the target already, or to what it must be down to."""
        return target.met(self.tokens, self.storage, goal)

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

    def droppable(self, start: int, end: int, *, opener: bool = True) -> tuple[str, ...]:
        """Ids of entries [start, end) that may go; with `opener`, less the user entry that has to come first then."""
        gone = [u for u in self.units if start <= u.start and u.end <= end and not u.kept]
        held = self._opener(gone) if opener else None
        return tuple(e.id for unit in gone if unit is not held for e in self.entries[unit.start : unit.end])

    def _opener(self, gone: Sequence[Unit]) -> Unit | None:
        """The user unit of `gone` that has to stay, where the template wants a user before what stays."""
        if not gone or not self.user_first or self.entries[self.leading].role != "user":
            return None
        starts = {unit.start for unit in gone}
        first = next((unit for unit in self.units if unit.start not in starts), None)
        if first is None or self.entries[first.start].role == "user":
            return None
        return [u for u in gone if u.start < first.start and self.entries[u.start].role == "user"][-1]

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
        storage = self._stored(plan)
        if self.additive and not (self._leads(self.entries) or self._leads(applied.entries)):
            old = {entry.id: entry.tokens for entry in self.entries}
            tokens = self.tokens + sum(entry.tokens for entry in applied.entries) - sum(old.values())
        elif any(e.text == "" for e in applied.entries):  # summaries not written yet, of this plan or of earlier stages
            rendered = [e.render(self.messages) for e in applied.entries if e.text != ""]
            held = [e.tokens for e in applied.entries if e.text == ""]
            tokens = self._asked.request(rendered) + sum(held)
        else:
            tokens = self._asked.request([entry.render(self.messages) for entry in applied.entries])
        return replace(applied, tokens=tokens, storage=storage)

    def _leads(self, entries: Sequence[Entry]) -> bool:
        """Whether a later system message stands first: rendered as a leading one, its count does not add up."""
        return len(entries) > self.leading and entries[self.leading].role in LEADING

    def advance(self, plan: Plan) -> View:
        """The view as it would be after a plan; summaries not written yet are entries with the text ""."""
        applied = self.after(plan)
        return replace(self, entries=applied.entries, tokens=applied.tokens, storage=applied.storage, known_units=None)

    def scores(self, kind: str) -> Mapping[str, float]:
        """What the cache says each entry is worth, by entry id; higher is worth more. Measured once for a decision.

        A policy that asks names `scores:KIND` among its `needs`. Raises ScoresUnavailable where nobody can tell.
        """
        return self._asked.scores(kind)

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

    def _stored(self, plan: Plan) -> KVStorage | None:
        """How the cache is kept after the plan. Raises InvalidPlan for a storage that cannot be, or is no narrower."""
        wanted = [action.storage for action in plan.actions if isinstance(action, Quantize)]
        if not wanted:
            return self.storage
        if len(wanted) > 1:
            raise InvalidPlan(f"a plan quantizes once, not to {', '.join(map(repr, wanted))}")
        found = self.storages.get(wanted[0])
        if self.storage is None or not self.storages:
            raise InvalidPlan(f"storage {wanted[0]!r}: there is no engine here that can quantize its cache")
        if found is None:
            raise InvalidPlan(f"storage {wanted[0]!r} is unknown: the engine has {', '.join(sorted(self.storages))}")
        if found.per_token >= self.storage.per_token:
            held = repr(self.storage.name) if self.storage.name else "the model's own number format"
            raise InvalidPlan(f"storage {found.name!r} is no narrower than {held}, in which the cache is kept")
        return found

    def _check_allowed(self, plan: Plan) -> None:
        gone = [i for action in plan.actions if isinstance(action, Drop | Digest) for i in action.entries]
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
