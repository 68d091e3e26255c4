"""An attention-sink head and a recent tail.

Invariant: the middle goes, oldest first; the sinks go only where the request would not fit without that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compaction.budget import Target
from compaction.plan import Plan
from compaction.policies._checks import need_integer, need_share
from compaction.policies._cuts import cuts_from, drop_oldest, drop_units, settle, tail_start, units_between
from compaction.view import View

__all__ = ["SlidingWindow"]


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Keeps the first units after the leading ones and the newest; drops between them, oldest first.

    Keeps: the leading messages, `sinks` units after them (most often the task), as much of the newest as the target
    allows, and whatever must stay.
    Loses: the middle. For `target.must` alone, then the `keep_last` newest, then the sinks, the first of them last.
    Costs: no model call; the prefix stays stable through the sinks, which is also what keeps attention stable.
    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453).

    Args:
        sinks: units after the leading ones that are kept.
        keep_last: newest units (a message, or a batch of calls and results) that go only for `target.must`.
        sink_share: the sinks end where they would take more than this share of `target.must`: a first message that
            fills the room would leave no place for the recent ones.
    """

    sinks: int = 1
    keep_last: int = 2
    sink_share: float = 0.25

    name = "sliding_window"
    version = 1
    needs = frozenset[str]()

    def __post_init__(self) -> None:
        need_integer(self.name, "sinks", self.sinks, 0)
        need_integer(self.name, "keep_last", self.keep_last, 0)
        need_share(self.name, "sink_share", self.sink_share)

    @property
    def params(self) -> dict[str, Any]:
        """What makes this policy again."""
        return {"sinks": self.sinks, "keep_last": self.keep_last, "sink_share": self.sink_share}

    def plan(self, view: View, target: Target) -> Plan:
        """At most one drop, of units between the sinks and the tail."""
        if view.tokens <= target.want:
            return Plan()
        sinks = self._sinks(view, target)
        if sinks == 0:
            return drop_oldest(view, target, self.keep_last)
        return settle(view, target, lambda goal: self._cut(view, goal, sinks))

    def _sinks(self, view: View, target: Target) -> int:
        """How many units are sinks: those that stay anyway take nothing of the share."""
        allowed, taken = self.sink_share * target.must, 0
        for count, unit in enumerate(view.units[: self.sinks]):
            taken += 0 if unit.kept else unit.tokens
            if taken > allowed:
                return count
        return min(self.sinks, len(view.units))

    def _cut(self, view: View, target: Target, sinks: int) -> Plan:
        start = view.units[sinks - 1].end
        cuts = cuts_from(view, start)
        wanted = min(cuts.reaching(view.tokens - target.want), cuts.before(tail_start(view, self.keep_last)))
        needed = cuts.reaching(view.tokens - target.must)
        at = max(wanted, needed)
        left = view.tokens - cuts.freed[at]
        gone = units_between(view, start, cuts.ends[at])
        for unit in reversed(view.units[:sinks]):
            if left <= target.must:
                break
            if not unit.kept:
                left -= unit.tokens
                gone.insert(0, unit)
        return drop_units(view, gone, "between sinks and tail")
