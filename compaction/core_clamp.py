"""The core's own last rung: drop what may go, then clear what must fit.

Invariant: whenever the floor at its minimum fits, this plan fits; it needs no effects. Clamping serves only what must
fit, never the wish to reach the low mark, and leaves room for one more reply where it can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from compaction.budget import Target
from compaction.grammar import editable
from compaction.messages import Message, leaves
from compaction.plan import Clamp, Drop, Edit, Plan, Quantize, marker
from compaction.view import Entry, View

__all__ = ["CoreClamp", "clearable"]

HEAD_SHARE = 0.6
"""Of what a clamped text keeps, this much is its head, the rest its tail."""


@dataclass(frozen=True)
class CoreClamp:
    """Drops oldest first; then clamps the newest batch's results (and the last user message if allowed), largest first.

    Keeps: the floor. Loses: everything else where needed. Costs: no model call.
    `storage` names a narrower storage without which the floor does not fit; None: the cache is kept as it is.
    """

    storage: str | None = None

    name = "core_clamp"
    version = 1
    needs = frozenset[str]()
    units = frozenset({"tokens", "kv_bytes"})

    @property
    def params(self) -> Mapping[str, Any]:
        """It has none of its own choosing."""
        return {}

    def plan(self, view: View, target: Target) -> Plan:
        """A plan that fits `target.must` whenever anything does."""
        if self.storage is None:
            return self._drops(view, target.in_tokens(view.storage))
        first = Plan((Quantize(self.storage, "must fit"),))
        left = view.advance(first)
        return Plan((*first.actions, *self._drops(left, target.in_tokens(left.storage)).actions))

    def _drops(self, view: View, target: Target) -> Plan:
        if view.tokens <= target.must and self.storage is not None:
            return Plan()
        end = len(view.entries)
        everything = [view.droppable(view.leading, end, opener=opener) for opener in (True, False)]
        for ids in (view.droppable(view.leading, view.cut_to(target.want)), everything[0]):
            plan = Plan((Drop(ids, "oldest first"),)) if ids else Plan()
            if view.after(plan).tokens <= target.must:
                return plan
        for ids in dict.fromkeys(everything):  # where the opener does not fit either, fitting wins
            drops = (Drop(ids, "oldest first"),) if ids else ()
            for gentle in (True, False):
                plan = Plan((*drops, *_clamps(view, view.after(Plan(drops)).tokens, target.must, gentle=gentle)))
                if view.after(plan).tokens <= target.must:
                    return plan
        return plan


def _texts(message: Message) -> list[tuple[str, str]]:
    content = {"content": message.data.get("content")}
    found = leaves(content)
    return [(path, text) for path, text in found if len(text) > len(marker(len(text))) and editable(message, path)]


def _may_clear(view: View, entry: Entry) -> bool:
    if entry.derived or any(pin.message_id == entry.id for pin in view.pins):
        return False
    if entry.id == view.last_user:
        return view.clamp_user
    return entry.unit == view.newest_batch and entry.role == "tool"


def clearable(view: View, entry: Entry) -> Entry | None:
    """The entry with each text replaced by the standard marker where that is fewer tokens; None where it may not be."""
    if not _may_clear(view, entry):
        return None
    texts = _texts(view.messages[entry.id])
    edits = tuple(Edit(path, 0, len(text), marker(len(text))) for path, text in texts)
    if not edits or edits == entry.edits:
        return None
    cleared = view.recount(replace(entry, edits=edits))
    now = entry if view.additive else view.recount(entry)  # a share cannot be compared with a count
    return cleared if cleared.tokens < now.tokens else None


def _clamps(view: View, tokens: int, must: int, *, gentle: bool) -> list[Clamp]:
    """Clamps of the largest texts first until `must` less one reply is reached; not gentle: clear each wholly."""
    found = [(view_entry, cleared) for view_entry in view.entries if (cleared := clearable(view, view_entry))]
    found.sort(key=lambda pair: (-pair[0].tokens, view.position(pair[0].id)))
    goal = must - view.slack
    clamps: list[Clamp] = []
    for entry, cleared in found:
        if tokens <= (goal if gentle else must) and (gentle or view.additive):  # else what clearing saves is a guess
            break
        save = tokens - goal
        most = entry.tokens - cleared.tokens
        keep = 0.0 if not gentle or entry.edits else max(0.0, 0.9 * (1 - (save + 16) / max(1, entry.tokens)))
        for path, text in _texts(view.messages[entry.id]):
            kept = int(len(text) * keep)
            head = int(kept * HEAD_SHARE)
            start, end = (head, len(text) - (kept - head)) if kept > 40 else (0, len(text))
            if Edit(path, start, end, marker(end - start)) not in entry.edits:
                clamps.append(Clamp(entry.id, path, start, end, "must fit"))
        tokens -= min(save, most) if gentle else most
    return clamps
