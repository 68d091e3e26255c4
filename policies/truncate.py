"""Dropping the oldest.

Invariant: one contiguous run of units, from the oldest on, less those that must stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compaction.budget import Target
from compaction.plan import Plan
from compaction.policies._checks import need_integer
from compaction.policies._cuts import drop_oldest
from compaction.view import View

__all__ = ["Truncate"]


@dataclass(frozen=True, slots=True)
class Truncate:
    """Drops the oldest units until the target is reached.

    Keeps: the newest units, word for word, and whatever must stay. `keep_last` of them go only where the request
    would not fit otherwise.
    Loses: the beginning, the task that was set there included; earlier summaries like anything else that is old.
    Costs: no model call; the prefix is stable up to the leading messages, everything behind is prefilled again.
    Source: the rolling buffer of every chat client; `trim_messages(strategy="last")` of langchain-core.

    Args:
        keep_last: newest units (a message, or a batch of calls and results) that go only for `target.must`.
    """

    keep_last: int = 0

    name = "truncate"
    version = 1
    needs = frozenset[str]()

    def __post_init__(self) -> None:
        need_integer(self.name, "keep_last", self.keep_last, 0)

    @property
    def params(self) -> dict[str, Any]:
        """What makes this policy again."""
        return {"keep_last": self.keep_last}

    def plan(self, view: View, target: Target) -> Plan:
        """At most one drop, of a run of the oldest units."""
        return drop_oldest(view, target, self.keep_last)
