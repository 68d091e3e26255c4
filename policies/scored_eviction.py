"""What the model's own cache says matters least goes first.

Invariant: whole units, lowest score first, the older of equals; scores come from the view, rounded and recorded, so
that the plan is a pure function of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compaction.budget import Target
from compaction.errors import InvalidPolicy
from compaction.plan import Plan
from compaction.policies._checks import need_integer
from compaction.policies._cuts import drop_oldest, drop_units, settle, tail_start, with_opener
from compaction.view import Unit, View

__all__ = ["SCORES", "ScoredEviction"]

SCORES = ("expected", "keydiff", "kvzip")


@dataclass(frozen=True, slots=True)
class ScoredEviction:
    """Drops the units the model's cache says are worth least, wherever they stand, until the target is reached.

    Keeps: what scores highest, the `keep_last` newest units, and whatever must stay. A batch of calls and results goes
    or stays as one; its score is the mean over its tokens.
    Loses: the rest, word for word; what remains may no longer read like a conversation.
    Costs: `keydiff` reads the keys that are there; `expected` and `kvzip` run the conversation through the model once
    more. What follows the first dropped unit is prefilled again, or spliced.
    Needs an engine that scores. Where none does, or after any failure (`view.failures`), it plans as `Truncate` does.
    The scores look at no question: later turns may ask for anything.
    Source: KVzip (arXiv:2505.23416), ExpectedAttention (arXiv:2510.00636), KeyDiff (arXiv:2504.15364), each aggregated
    to units so that what goes is readable.

    Args:
        score: "kvzip", "expected" or "keydiff".
        keep_last: newest units that go only for `target.must`.
    """

    score: str = "kvzip"
    keep_last: int = 2

    name = "scored_eviction"
    version = 1

    def __post_init__(self) -> None:
        need_integer(self.name, "keep_last", self.keep_last, 0)
        if self.score not in SCORES:
            raise InvalidPolicy(f"{self.name}: score must be one of {', '.join(SCORES)}, not {self.score!r}")

    @property
    def needs(self) -> frozenset[str]:
        """The score, measured before it plans."""
        return frozenset({f"scores:{self.score}"})

    @property
    def params(self) -> dict[str, Any]:
        """What makes this policy again."""
        return {"score": self.score, "keep_last": self.keep_last}

    def plan(self, view: View, target: Target) -> Plan:
        """At most one drop."""
        if view.tokens <= target.want:
            return Plan()
        if view.failures:
            return drop_oldest(view, target, self.keep_last)
        worth = view.scores(self.score)
        return settle(view, target, lambda goal: self._lowest(view, goal, worth))

    def _lowest(self, view: View, target: Target, worth: Mapping[str, float]) -> Plan:
        tail = tail_start(view, self.keep_last)
        ranked = sorted((unit for unit in view.units if not unit.kept), key=lambda unit: _rank(view, unit, worth))
        older = [unit for unit in ranked if unit.end <= tail]
        gone = _freeing(view, older, view.tokens - target.want)
        if _tokens(gone) < view.tokens - target.must:
            newer = [unit for unit in ranked if unit.end > tail]
            gone = _freeing(view, [*older, *newer], view.tokens - target.must)
        return drop_units(view, gone, f"lowest {self.score} score")


def _rank(view: View, unit: Unit, worth: Mapping[str, float]) -> tuple[float, int]:
    """The unit's mean score over its tokens; what has none (a summary not written yet) goes last."""
    entries = view.entries[unit.start : unit.end]
    if any(entry.id not in worth for entry in entries):
        return float("inf"), unit.start
    tokens = [max(1, entry.tokens) for entry in entries]
    mean = sum(worth[entry.id] * count for entry, count in zip(entries, tokens, strict=True)) / sum(tokens)
    return mean, unit.start


def _freeing(view: View, ranked: Sequence[Unit], tokens: int) -> Sequence[Unit]:
    """The first of these that free so many tokens together, in the order of the view, less the user entry held back."""
    taken, freed = 0, 0
    while taken < len(ranked) and freed < tokens:
        freed += ranked[taken].tokens
        taken += 1
    while True:
        gone = with_opener(view, sorted(ranked[:taken], key=lambda unit: unit.start))
        if taken == len(ranked) or _tokens(gone) >= tokens:
            return gone
        taken += 1


def _tokens(units: Sequence[Unit]) -> int:
    return sum(unit.tokens for unit in units)
