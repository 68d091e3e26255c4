"""One message must not fill the room.

Invariant: only the middle of a text goes; head and tail stay. A 10 MB text is never encoded: only what stays of it is,
at most three times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compaction.budget import Target
from compaction.plan import Clamp, Plan, marker
from compaction.policies._checks import need_share
from compaction.policies._texts import Text, longest_text
from compaction.view import Entry, View

__all__ = ["ClampOversized"]

_COUNTS = 3
_SMALLEST = 16
_AROUND = 8  # tokens of role, ids and separators that are not in the text


@dataclass(frozen=True, slots=True)
class ClampOversized:
    """Cuts the middle out of messages larger than a share of the room, oldest first, until the target is reached.

    Keeps: head and tail of the text, about equally; every other message as it is.
    Loses: the middle of oversized messages. The newest batch's results (and the last user message, where the budget
    allows that) are cut only where what must stay exceeds the room, and then to a common size, so that many parallel
    results together fit too.
    Costs: no model call; up to three counts of what stays of each text; prefilled again from the first cut on.
    Source: `ClampOversizedMessages` of pydantic-ai-harness; the incident class "one result larger than the window".

    Args:
        max_fraction: the largest share of `target.must` one message may take.
    """

    max_fraction: float = 0.25

    name = "clamp_oversized"
    version = 1
    needs = frozenset[str]()

    def __post_init__(self) -> None:
        need_share(self.name, "max_fraction", self.max_fraction)

    @property
    def params(self) -> dict[str, Any]:
        """What makes this policy again."""
        return {"max_fraction": self.max_fraction}

    def plan(self, view: View, target: Target) -> Plan:
        """One clamp for each oversized message."""
        need = view.tokens - target.want
        if need <= 0:
            return Plan()
        share = max(int(self.max_fraction * target.must), _SMALLEST)
        squeezed = _squeezed(view, target)
        pinned = {pin.message_id for pin in view.pins}
        clamps: list[Clamp] = []
        for entry in view.entries[view.leading :]:
            limit = squeezed.get(entry.id) if entry.id in view.keep else share
            if limit is None or entry.tokens <= limit or entry.derived or entry.id in pinned:
                continue
            if entry.id not in view.keep and need <= 0:
                continue
            clamp = _clamp(view, entry, limit)
            if clamp is not None:
                clamps.append(clamp)
                need -= entry.tokens - limit
        return Plan(tuple(clamps))


def _squeezed(view: View, target: Target) -> dict[str, int]:
    """For entries that must stay but may be cut: the size they have to come down to; empty where the floor fits."""
    excess = view.floor.total - max(target.must - view.slack, 0)
    if view.floor.total <= target.must or excess <= 0:
        return {}
    pinned = {pin.message_id for pin in view.pins}
    may = [
        entry
        for entry in view.entries[view.leading :]
        if entry.id not in pinned
        and (
            (entry.unit == view.newest_batch and entry.role == "tool")
            or (entry.id == view.last_user and view.clamp_user)
        )
    ]
    level = _level([entry.tokens for entry in may], excess)
    return {entry.id: level for entry in may}


def _level(sizes: Sequence[int], excess: int) -> int:
    """The common size to which all larger ones come down so that `excess` goes in all."""
    ordered = sorted(sizes, reverse=True)
    total = 0
    for count, size in enumerate(ordered, start=1):
        total += size
        level = (total - excess) // count
        if count == len(ordered) or level >= ordered[count]:
            return max(level, _SMALLEST)
    return _SMALLEST


def _clamp(view: View, entry: Entry, limit: int) -> Clamp | None:
    """The middle range that brings the entry to about `limit` tokens; None where there is nothing to gain."""
    text = longest_text(entry, view.messages[entry.id])
    if text is None:
        return None
    goal = max(limit - _AROUND, 0)
    keep = min(int(text.live * goal / entry.tokens), text.live)
    start, end = _middle(text, keep)
    for _ in range(_COUNTS):
        shown = text.string[:start] + marker(end - start) + text.string[end:]
        tokens = view.count(shown)
        if tokens <= goal or keep == 0:
            break
        # Measured on what stays: the density of head and tail may differ from the whole's.
        keep = max(int(keep * goal / tokens * 0.9) - 1, 0)
        start, end = _middle(text, keep)
    held = any(edit.path == text.path and edit.start <= start and end <= edit.end for edit in entry.edits)
    if held or end - start <= len(marker(end - start)):
        return None
    return Clamp(entry.id, text.path, start, end, "larger than its share of the room")


def _middle(text: Text, keep: int) -> tuple[int, int]:
    """The range that leaves `keep` code points, half before and half behind it."""
    head = keep - keep // 2
    return head, len(text.string) - keep // 2
