"""Old tool results give way to the standard marker.

Invariant: calls, ids and roles stay, so that every pair stays whole; the newest results are never touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from compaction.budget import Target
from compaction.errors import InvalidPolicy
from compaction.plan import Clamp, Plan, marker
from compaction.policies._checks import need_integer
from compaction.policies._texts import longest_text
from compaction.view import Entry, View

__all__ = ["ClearToolResults"]

_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class _Candidate:
    clamp: Clamp
    tokens: int


@dataclass(frozen=True, slots=True)
class ClearToolResults:
    """Replaces the content of old tool results by the standard marker, oldest first, until the target is reached.

    Keeps: every message with its role, calls and ids; the `keep_last` newest results, those of the newest batch, of
    excluded tools and with a pin.
    Loses: what the cleared results said. A result of several text parts loses the longest one at a time.
    Costs: no model call; the request is prefilled again from the first cleared result on.
    Source: Anthropic's `clear_tool_uses_20250919`; LangChain's `ClearToolUsesEdit`.

    Args:
        keep_last: newest tool results that stay.
        min_tokens: smaller results stay: the marker would take about as much.
        exclude: names of tools whose results stay.
    """

    keep_last: int = 3
    min_tokens: int = 50
    exclude: tuple[str, ...] = ()

    name = "clear_tool_results"
    version = 1
    needs = frozenset[str]()

    def __post_init__(self) -> None:
        need_integer(self.name, "keep_last", self.keep_last, 0)
        need_integer(self.name, "min_tokens", self.min_tokens, 0)
        given: object = self.exclude  # a caller without a type checker may hand in anything
        if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
            raise InvalidPolicy(f"{self.name}: exclude must be a list of tool names, not {given!r}")
        object.__setattr__(self, "exclude", tuple(given))

    @property
    def params(self) -> dict[str, Any]:
        """What makes this policy again."""
        return {"keep_last": self.keep_last, "min_tokens": self.min_tokens, "exclude": list(self.exclude)}

    def plan(self, view: View, target: Target) -> Plan:
        """One clamp for each cleared result."""
        need = view.tokens - target.want
        candidates = self._candidates(view) if need > 0 else []
        if not candidates:
            return Plan()
        # The largest is cleared for a try: what a message costs besides its text cannot be known otherwise.
        longest = max(candidates, key=lambda candidate: candidate.clamp.end)
        left_over = view.after(Plan((longest.clamp,))).changed[0][1]
        taken, plan = 0, Plan()
        for _ in range(_ROUNDS):
            while taken < len(candidates) and need > 0:
                need -= candidates[taken].tokens - left_over
                taken += 1
            plan, need = _shrinking(view, candidates[:taken], target)
            if need <= 0 or taken == len(candidates):
                break
        return plan

    def _candidates(self, view: View) -> list[_Candidate]:
        """Results worth clearing, oldest first."""
        results = [(entry, tool) for entry, tool in self._results(view) if tool not in self.exclude]
        older = results[: -self.keep_last] if self.keep_last else results
        pinned = {pin.message_id for pin in view.pins}
        found: list[_Candidate] = []
        for entry, _ in older:
            if entry.tokens < self.min_tokens or entry.unit == view.newest_batch or entry.id in pinned:
                continue
            text = longest_text(entry, view.messages[entry.id])
            if text is not None and text.live > len(marker(len(text.string))):
                clamp = Clamp(entry.id, text.path, 0, len(text.string), "old tool result")
                found.append(_Candidate(clamp, entry.tokens))
        return found

    def _results(self, view: View) -> Iterator[tuple[Entry, str | None]]:
        """All tool results after the leading entries; the tool's name where somebody asks for it."""
        names: dict[str, str] = {}
        for entry in view.entries[view.leading :]:
            if entry.derived or (entry.role != "tool" and not self.exclude):
                continue
            if entry.role == "tool":
                message = view.messages[entry.id]
                yield entry, (message.data.get("name") or names.get(message.answers or "")) if self.exclude else None
            elif calls := view.messages[entry.id].data.get("tool_calls"):
                # Ids repeat in real runs: only the calls of the batch just before count.
                names = {call["id"]: str((call.get("function") or {}).get("name")) for call in calls}


def _shrinking(view: View, candidates: list[_Candidate], target: Target) -> tuple[Plan, int]:
    """The plan without clamps that would make their message no smaller, and the tokens it is short of the target."""
    applied = view.after(Plan(tuple(candidate.clamp for candidate in candidates)))
    after = dict(applied.changed)
    good = [c.clamp for c in candidates if after[c.clamp.message_id] < c.tokens]
    if len(good) < len(candidates):
        applied = view.after(Plan(tuple(good)))
    return Plan(tuple(good)), applied.tokens - target.want
