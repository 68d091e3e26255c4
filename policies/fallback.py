"""A policy, and what to do where it does not help.

Invariant: its plan is the plan of exactly one of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compaction.budget import Target
from compaction.errors import InvalidPolicy
from compaction.plan import Plan
from compaction.ports import Policy, Summarizer, planned
from compaction.view import View

__all__ = ["Fallback"]


@dataclass(frozen=True, slots=True)
class Fallback:
    """Plans as `first`; as `second` after a failure, or where the first's plan does not fit.

    Keeps and loses what the chosen one keeps and loses. Costs one exact application of the first's plan.
    Source: `FallbackCompaction` of pydantic-ai-harness.

    Args:
        first: the policy to try.
        second: the one for when an earlier plan failed (`view.failures`) or the first does not reach `target.must`.
    """

    first: Policy
    second: Policy

    name = "fallback"
    version = 1
    units = frozenset({"tokens", "kv_bytes"})

    def __post_init__(self) -> None:
        for field, policy in (("first", self.first), ("second", self.second)):
            if not callable(getattr(policy, "plan", None)):
                raise InvalidPolicy(f"fallback: {field} must be a policy, not {policy!r}")

    @property
    def needs(self) -> frozenset[str]:
        """What either needs."""
        return self.first.needs | self.second.needs

    @property
    def summarizer_fn(self) -> Summarizer | None:
        """The callable the first, else the second was given to summarise with."""
        function: Summarizer | None = getattr(self.first, "summarizer_fn", None)
        return function if function is not None else getattr(self.second, "summarizer_fn", None)

    @property
    def params(self) -> dict[str, Any]:
        """What makes this policy again: names and parameters of the two."""
        return {
            "first": {"name": self.first.name, "params": dict(self.first.params)},
            "second": {"name": self.second.name, "params": dict(self.second.params)},
        }

    def plan(self, view: View, target: Target) -> Plan:
        """The plan of one of the two."""
        if view.failures:
            return planned(self.second, view, target)
        plan = planned(self.first, view, target)
        fits = view.after(plan).within(target, "must") if plan.actions else view.reaches(target, "must")
        return plan if fits else planned(self.second, view, target)
