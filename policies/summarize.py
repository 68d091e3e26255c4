"""A summary in place of the oldest.

Invariant: the plan is pure. It says what to summarise and how large the summary may be; the session calls the model,
and after any failure the policy plans without one. Earlier summaries are frozen: never summarised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from compaction.budget import Target
from compaction.errors import InvalidPolicy
from compaction.plan import Action, Digest, Drop, Plan, summary_text
from compaction.policies._checks import need_integer, need_text
from compaction.policies._cuts import cuts_from, drop_oldest, settle, tail_start
from compaction.ports import Summarizer
from compaction.view import Unit, View

__all__ = ["INSTRUCTION", "Summarize"]

INSTRUCTION = (
    "Summarise the conversation below for somebody who continues the work and cannot see it. Keep names, numbers, "
    "identifiers, paths, decisions with their reasons, constraints the user stated, and what is still open, exactly as "
    "written. Say what was done and what failed. Add nothing that is not in the text. Do not address anybody."
)
_AROUND = 8  # tokens of role and separators around the frame
_SMALLEST = 64  # a smaller summary says too little to pay for


@dataclass(frozen=True, slots=True)
class Summarize:
    """Replaces the oldest units by one summary of them.

    Keeps: earlier summaries as they are, the `sinks` first and `keep_last` newest units word for word, whatever must
    stay, and the gist of the rest. Where summaries alone stand between the view and the target, the oldest go.
    Loses: the wording, and facts with it: use pins for what must survive. The log keeps every word.
    Costs: one model call of up to `max_tokens` output; what follows the summary is prefilled again.
    After a failure (`view.failures`), or where a summary would not fit, it plans as `Truncate` does.
    Source: the handoff summaries of Codex, OpenHands and LangChain; frozen ones after "Lost in Compaction" (2026).

    Args:
        max_tokens: the most a summary may take; less where less is free, or where less is summarised.
        keep_last: newest units that stay, unless `target.must` needs them to go.
        instruction: what the summariser is told.
        summarizer: a name the session knows ("engine": its own model), or a callable with a `name` or `__name__`.
        sinks: units after the leading ones that stay.
    """

    max_tokens: int = 512
    keep_last: int = 4
    instruction: str = INSTRUCTION
    summarizer: str | Summarizer | None = "engine"
    sinks: int = 0
    _fn: Summarizer | None = field(default=None, init=False, compare=False, repr=False)

    name = "summarize"
    version = 1
    needs = frozenset({"summarizer"})

    def __post_init__(self) -> None:
        need_integer(self.name, "max_tokens", self.max_tokens, 1)
        need_integer(self.name, "keep_last", self.keep_last, 0)
        need_integer(self.name, "sinks", self.sinks, 0)
        need_text(self.name, "instruction", self.instruction)
        if callable(self.summarizer):
            object.__setattr__(self, "_fn", self.summarizer)
            object.__setattr__(self, "summarizer", _name_of(self.summarizer))
        elif self.summarizer is None:
            object.__setattr__(self, "summarizer", "engine")
        need_text(self.name, "summarizer", self.summarizer)

    @property
    def summarizer_fn(self) -> Summarizer | None:
        """The callable that was handed in; None where the session has to know the name."""
        return self._fn

    @property
    def params(self) -> dict[str, Any]:
        """What makes this policy again; a callable is written down by its name."""
        return {
            "max_tokens": self.max_tokens,
            "keep_last": self.keep_last,
            "instruction": self.instruction,
            "summarizer": cast(str, self.summarizer),
            "sinks": self.sinks,
        }

    def plan(self, view: View, target: Target) -> Plan:
        """At most one digest, and a drop of earlier summaries that stand in the way."""
        if view.tokens <= target.want:
            return Plan()
        if view.failures:
            return drop_oldest(view, target, self.keep_last)
        return settle(view, target, lambda goal: self._digest(view, goal))

    def _digest(self, view: View, target: Target) -> Plan:
        units = view.units
        head = units[: self.sinks]
        cuts = cuts_from(view, head[-1].end if head else view.leading, summaries=False)
        frame = view.count(summary_text("", len(view.entries))) + _AROUND
        cost = frame + self.max_tokens
        wanted = min(cuts.reaching(view.tokens + cost - target.want), cuts.before(tail_start(view, self.keep_last)))
        at = max(wanted, cuts.reaching(view.tokens + cost - target.must) if view.tokens > target.must else 0)
        freed = cuts.freed[at]
        if freed == 0:
            frame = 0
        allowance = min(self.max_tokens, freed // 2)
        stale = _in_the_way(view, view.tokens - freed + frame + allowance, target)
        left = view.tokens - freed + frame + allowance - sum(unit.tokens for unit in stale)
        allowance -= max(0, left - target.must)
        actions: list[Action] = []
        if stale:
            actions.append(Drop(_ids(view, stale), "oldest summaries"))
        if allowance >= min(_SMALLEST, self.max_tokens):
            run = [unit for unit in units if cuts.ends[0] <= unit.start and unit.end <= cuts.ends[at]]
            ids = _ids(view, [unit for unit in run if not unit.kept and not _is_summary(view, unit)])
            actions.append(Digest(ids, allowance, self.instruction, "oldest first"))
        elif view.tokens > target.must or left > target.must:
            return drop_oldest(view, target, self.keep_last)
        return Plan(tuple(actions))


def _in_the_way(view: View, left: int, target: Target) -> list[Unit]:
    """The oldest summaries whose going reaches `want`; where all of them would not, those that `must` needs."""
    summaries = [unit for unit in view.units if not unit.kept and _is_summary(view, unit)]
    held = sum(unit.tokens for unit in summaries)
    need = left - target.want if left - target.want <= held else left - target.must
    gone: list[Unit] = []
    for unit in summaries:
        if need <= 0:
            break
        need -= unit.tokens
        gone.append(unit)
    return gone


def _is_summary(view: View, unit: Unit) -> bool:
    return view.entries[unit.start].derived


def _ids(view: View, units: Sequence[Unit]) -> tuple[str, ...]:
    return tuple(entry.id for unit in units for entry in view.entries[unit.start : unit.end])


def _name_of(summarizer: object) -> str:
    name = getattr(summarizer, "name", None) or getattr(summarizer, "__name__", None)
    if not isinstance(name, str) or name == "<lambda>":
        raise InvalidPolicy(f"summarize: {summarizer!r} needs a name for the log: give it a `name` attribute")
    return name
