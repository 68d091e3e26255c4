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

__all__ = ["Cuts", "cuts_from", "drop_oldest", "drop_units", "settle", "tail_start", "units_between", "with_opener"]

_ASKS = 6


@dataclass(frozen=True, slots=True)
class Cuts:
    """Ends of a drop that begins at `ends[0]`, and how many tokens are free after each.

    `best[i]` is the most that any of the first i + 1 frees: with a user entry held back, a later end may free less.
    """

    ends: Sequence[int]
    freed: Sequence[int]
    best: Sequence[int]

    def reaching(self, tokens: int) -> int:
        """Index of the first cut that frees so many tokens; the last one where none does."""
        return min(bisect_left(self.best, tokens), len(self.ends) - 1)

    def before(self, end: int) -> int:
        """Index of the last cut that does not go beyond `end`."""
        return max(bisect_right(self.ends, end) - 1, 0)


def cuts_from(view: View, start: int, *, summaries: bool = True) -> Cuts:
    """Where a drop that begins at entry `start` may end; without `summaries`, derived entries count as staying.

    For a drop behind something that stays, or with a summary in its place: who comes first does not change.
    """
    units = view.units
    if start > view.leading:
        units = units[bisect_left([unit.start for unit in units], start) :]
    if summaries:
        gains = [0 if unit.kept else unit.tokens for unit in units]
    else:
        entries = view.entries
        gains = [0 if unit.kept or entries[unit.start].text is not None else unit.tokens for unit in units]
    freed = [0, *accumulate(gains)]
    return Cuts([start, *(unit.end for unit in units)], freed, freed)


def _oldest_cuts(view: View) -> Cuts:
    """Where a drop of everything after the leading entries may end.

    Where a user entry has to come first, the one nearest before what stays is held back: an agent's run of batches
    after one task can then be cut anywhere, not only before the next user entry.
    """
    entries = view.entries
    if not view.user_first or len(entries) == view.leading or entries[view.leading].role != "user":
        return cuts_from(view, view.leading)
    ends, freed = [view.leading], [0]
    gone, anchor = 0, 0
    held: int | None = None
    units = view.units
    for index, unit in enumerate(units):
        is_user = entries[unit.start].role == "user"
        if unit.kept:
            held = (0 if is_user else anchor) if held is None else held
        else:
            gone += unit.tokens
            anchor = unit.tokens if is_user else anchor
        following = index + 1 == len(units) or entries[unit.end].role == "user"
        back = held if held is not None else (0 if following else anchor)
        ends.append(unit.end)
        freed.append(gone - back)
    return Cuts(ends, freed, list(accumulate(freed, max)))


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
    for unit in with_opener(view, gone):
        if unit.end - unit.start == 1:
            ids.append(entries[unit.start].id)
        else:
            ids += [entry.id for entry in entries[unit.start : unit.end]]
    return Plan((Drop(tuple(ids), reason),)) if ids else Plan()


def with_opener(view: View, gone: Sequence[Unit]) -> Sequence[Unit]:
    """`gone` without the user unit that has to come before what stays.

    That may stand behind the cut, or before it, where it is pinned.
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
    cuts = _oldest_cuts(view)
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
