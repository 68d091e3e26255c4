"""Arithmetic of cuts that the dropping policies share.

Invariant: what is dropped are whole units that may go, never more than once, and where the view begins with a user
entry and the template wants that, what remains does too. Everything is a sum over `view.units`: nothing is counted
anew, so that a plan costs the same for long and for short messages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from compaction.budget import Target
from compaction.plan import Drop, Plan
from compaction.view import Unit, View

__all__ = ["Cuts", "cuts_from", "drop_oldest", "drop_units", "settle", "tail_start", "units_between"]

_ASKS = 6


@dataclass(frozen=True, slots=True)
class Cuts:
    """Legal ends of a drop that begins at `ends[0]`, and how many tokens go with each; both never fall."""

    ends: Sequence[int]
    freed: Sequence[int]

    def reaching(self, tokens: int) -> int:
        """Index of the first cut that frees so many tokens; the last one where none does."""
        return min(bisect_left(self.freed, tokens), len(self.ends) - 1)

    def before(self, end: int) -> int:
        """Index of the last cut that does not go beyond `end`."""
        return max(bisect_right(self.ends, end) - 1, 0)


def cuts_from(view: View, start: int, *, summaries: bool = True) -> Cuts:
    """Where a drop that begins at entry `start` may end; without `summaries`, derived entries count as staying."""
    units = view.units
    if start > view.leading:
        units = units[bisect_left([unit.start for unit in units], start) :]
    if summaries:
        gains = [0 if unit.kept else unit.tokens for unit in units]
    else:
        entries = view.entries
        gains = [0 if unit.kept or entries[unit.start].text is not None else unit.tokens for unit in units]
    freed = [0, *accumulate(gains)]
    ends = [start, *(unit.end for unit in units)]
    if not view.user_first:
        return Cuts(ends, freed)
    legal = {start, *view.legal_cuts}
    pairs = [(end, gone) for end, gone in zip(ends, freed, strict=True) if end in legal]
    return Cuts([end for end, _ in pairs], [gone for _, gone in pairs])


def tail_start(view: View, keep_last: int) -> int:
    """Index of the first entry of the newest `keep_last` units."""
    units = view.units
    if keep_last == 0:
        return len(view.entries)
    return units[-keep_last].start if keep_last < len(units) else view.leading


def units_between(view: View, start: int, end: int) -> list[Unit]:
    """Units of entries [start, end) that may go."""
    return [unit for unit in view.units if unit.start >= start and unit.end <= end and not unit.kept]


def drop_units(view: View, gone: Sequence[Unit], reason: str) -> Plan:
    """A plan that drops these units, less the one that has to stay so that a user entry comes first."""
    entries = view.entries
    ids: list[str] = []
    for unit in _user_first(view, gone):
        if unit.end - unit.start == 1:
            ids.append(entries[unit.start].id)
        else:
            ids += [entry.id for entry in entries[unit.start : unit.end]]
    return Plan((Drop(tuple(ids), reason),)) if ids else Plan()


def _user_first(view: View, gone: Sequence[Unit]) -> Sequence[Unit]:
    """`gone` without the user unit that has to come before a pinned assistant or batch.

    Legal cuts say where a drop may end, but a pinned unit before the cut stays as well and may then stand first.
    """
    entries = view.entries
    if not gone or not view.user_first or entries[view.leading].role != "user":
        return gone
    starts = {unit.start for unit in gone}
    first = next((unit for unit in view.units if unit.start not in starts), None)
    if first is None or entries[first.start].role == "user":
        return gone
    back = [unit for unit in gone if unit.start < first.start and entries[unit.start].role == "user"][-1]
    return [unit for unit in gone if unit is not back]


def drop_oldest(view: View, target: Target, keep_last: int) -> Plan:
    """The oldest units dropped until the target is reached; `keep_last` newest ones only for `target.must`."""
    if view.tokens <= target.want:
        return Plan()
    return settle(view, target, lambda goal: _oldest(view, goal, keep_last))


def _oldest(view: View, target: Target, keep_last: int) -> Plan:
    cuts = cuts_from(view, view.leading)
    wanted = min(cuts.reaching(view.tokens - target.want), cuts.before(tail_start(view, keep_last)))
    needed = cuts.reaching(view.tokens - target.must)
    return drop_units(view, units_between(view, view.leading, cuts.ends[max(wanted, needed)]), "oldest first")


def settle(view: View, target: Target, build: Callable[[Target], Plan]) -> Plan:
    """The plan for the target; where counts do not add up it is asked for exactly and tightened, at most six times."""
    plan = build(target)
    if view.additive or not plan.actions:
        return plan
    tokens, shift = view.after(plan).tokens, 0
    for _ in range(_ASKS - 1):
        if tokens <= target.want:
            return plan
        shift += max(tokens - target.want, shift)
        must = target.must if tokens <= target.must else target.must - shift
        tighter = build(Target(must=must, want=target.want - shift, unit=target.unit))
        if tighter != plan:
            plan, tokens = tighter, view.after(tighter).tokens
    return plan if tokens <= target.must else build(Target(must=0, want=0, unit=target.unit))
