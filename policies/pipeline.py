"""Policies one after another.

Invariant: the result is one plan against the view that came in, in which no entry is touched twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compaction.budget import Target
from compaction.errors import InvalidPolicy
from compaction.plan import Action, Clamp, Digest, Drop, Plan, Quantize, Replace
from compaction.ports import Policy, Summarizer, planned
from compaction.view import Pin, View

__all__ = ["Pipeline", "merge"]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Each stage plans on what the stages before it leave, until the target is reached.

    Keeps and loses what its stages keep and lose: put the gentlest first.
    Costs: one exact application of the plan after each stage but the last.
    Source: `TieredCompaction` of pydantic-ai-harness; `TokenBudgetComposedStrategy` of Microsoft's agent-framework.

    Args:
        stages: the policies, in order.
    """

    stages: Sequence[Policy]

    name = "pipeline"
    version = 1
    units = frozenset({"tokens", "kv_bytes"})

    def __post_init__(self) -> None:
        given: object = self.stages  # a caller without a type checker may hand in anything
        if not isinstance(given, list | tuple) or not given:
            raise InvalidPolicy(f"pipeline: stages must be a list of at least one policy, not {given!r}")
        for stage in self.stages:
            if not callable(getattr(stage, "plan", None)):
                raise InvalidPolicy(f"pipeline: {stage!r} is no policy: it has no plan(view, target)")
        object.__setattr__(self, "stages", tuple(self.stages))

    @property
    def needs(self) -> frozenset[str]:
        """What any stage needs."""
        return frozenset().union(*(stage.needs for stage in self.stages))

    @property
    def summarizer_fn(self) -> Summarizer | None:
        """The first callable any stage was given to summarise with."""
        functions = (getattr(stage, "summarizer_fn", None) for stage in self.stages)
        return next((function for function in functions if function is not None), None)

    @property
    def params(self) -> dict[str, Any]:
        """What makes this policy again: names and parameters of its stages."""
        return {"stages": [{"name": stage.name, "params": dict(stage.params)} for stage in self.stages]}

    def plan(self, view: View, target: Target) -> Plan:
        """The stages' plans, merged."""
        merged, left, made = Plan(), view, dict[str, Digest]()
        for stage in self.stages:
            if left.reaches(target):
                break
            then = planned(stage, left, target)
            if not then.actions:
                continue
            merged = merge(merged, then, made, view.pins)
            if stage is not self.stages[-1]:
                # On the merged plan, not on the stage's own: later stages see what really will be.
                left = view.advance(merged)
                made = _made(view, left, merged)
        return merged


def _made(view: View, left: View, plan: Plan) -> dict[str, Digest]:
    """Which digest each new derived entry comes from: both stand in the order of their first entries."""
    place = {entry.id: index for index, entry in enumerate(view.entries)}
    digests = sorted(plan.digests, key=lambda digest: min(place[i] for i in digest.entries))
    new = [entry.id for entry in left.entries if entry.id not in place]
    return dict(zip(new, digests, strict=True))


def merge(first: Plan, then: Plan, made: Mapping[str, Digest], pins: Sequence[Pin] = ()) -> Plan:
    """One plan for two: `then` was made for the view after `first`; `made` maps derived entries to their digests.

    What `then` drops or digests loses its earlier edit; a digest of `first` that goes again gives its entries to the
    action that takes it; two edits of one entry become one; of two storages the later, narrower one holds.
    """
    undone: list[Digest] = []
    taken: set[str] = set()
    later: list[Action] = []
    edits = {action.message_id: action for action in first.actions if isinstance(action, Clamp | Replace)}
    for action in then.actions:
        if isinstance(action, Drop | Digest):
            undone += [made[i] for i in action.entries if i in made]
            entries = tuple(j for i in action.entries for j in (made[i].entries if i in made else (i,)))
            taken.update(entries)
            later.append(replace(action, entries=entries))
        elif isinstance(action, Quantize):
            later.append(action)
        else:
            taken.add(action.message_id)
            earlier = edits.get(action.message_id)
            later.append(_one_edit(earlier, action, pins) if earlier else action)
    kept = [
        action
        for action in first.actions
        if action not in undone
        and not (isinstance(action, Clamp | Replace) and action.message_id in taken)
        and not (isinstance(action, Quantize) and then.quantizes)
    ]
    return Plan((*kept, *later))


def _one_edit(earlier: Clamp | Replace, later: Clamp | Replace, pins: Sequence[Pin]) -> Clamp | Replace:
    """The range that covers both; where that would hit a pin or they edit different strings, the larger of the two."""
    start, end = min(earlier.start, later.start), max(earlier.end, later.end)
    blocked = any(
        pin.message_id == later.message_id and pin.path == later.path and pin.start < end and start < pin.end
        for pin in pins
    )
    if earlier.path == later.path and not blocked:
        return replace(later, start=start, end=end)
    return later if later.end - later.start >= earlier.end - earlier.start else earlier
