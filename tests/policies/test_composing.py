"""Pipelines and fallbacks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from compaction.budget import Target
from compaction.errors import InvalidPolicy
from compaction.plan import Action, Clamp, Digest, Drop, Plan, Replace
from compaction.plugins import parse_policy
from compaction.policies import (
    ClearToolResults,
    Fallback,
    NoOp,
    Pipeline,
    SlidingWindow,
    Summarize,
    Truncate,
    default_policy,
)
from compaction.ports import Policy
from compaction.testing import ScriptedSummarizer
from compaction.view import Pin, View
from tests.builders import assistant, user
from tests.policies.views import FAILURE, agent_run, chat, make_view

TEXT = "x" * 1000
LOW = Target(10_000, 0)


@dataclass(frozen=True)
class Fixed:
    """A policy that plans what it was told; a callable is asked with the view."""

    actions: Any
    name: str = "fixed"
    version: int = 1
    needs: frozenset[str] = frozenset({"prices"})
    params: dict[str, Any] = field(default_factory=dict)

    def plan(self, view: View, target: Target) -> Plan:
        """The fixed plan."""
        actions: Any = self.actions(view) if callable(self.actions) else self.actions
        return Plan(tuple(actions))


def clamp(start: int, end: int, id: str = "m1") -> Clamp:
    """A clamp of a content."""
    return Clamp(id, "/content", start, end, "r")


def merged(*stages: Any, pins: tuple[Pin, ...] = ()) -> tuple[Action, ...]:
    """What a pipeline of fixed stages makes of five messages."""
    view = make_view([user("task"), *[assistant(TEXT) for _ in range(3)], user("now")], pins=pins)
    plan = Pipeline([Fixed(stage) for stage in stages]).plan(view, LOW)
    view.after(plan)  # raises where an entry is touched twice
    return plan.actions


def test_a_later_drop_takes_the_place_of_an_earlier_edit() -> None:
    """Dropped entries are not edited first."""
    drop = Drop(("m1", "m2"), "d")

    assert merged([clamp(0, 500), clamp(0, 9, "m3")], [drop]) == (clamp(0, 9, "m3"), drop)


def test_a_later_digest_takes_the_place_of_an_earlier_edit() -> None:
    """A summary reads the original."""
    digest = Digest(("m1",), 9, "i", "d")

    assert merged([clamp(0, 500)], [digest]) == (digest,)


def test_two_edits_of_one_text_become_one() -> None:
    """The range that covers both, with the later one's text."""
    later = Replace("m1", "/content", 400, 900, "…", "r")

    assert merged([clamp(100, 500)], [later]) == (Replace("m1", "/content", 100, 900, "…", "r"),)


def test_two_edits_around_a_pin_do_not_meet() -> None:
    """Where the common range would hit what is pinned, the larger edit stays alone."""
    pin = Pin("m1", "/content", 300, 310)

    assert merged([clamp(0, 100)], [clamp(500, 900)], pins=(pin,)) == (clamp(500, 900),)


def test_dropping_a_planned_summary_drops_what_it_was_to_stand_for() -> None:
    """No summary is asked for that a later stage throws away."""
    digests = [Digest(("m2",), 9, "i", "d"), Digest(("m1",), 9, "i", "d")]

    def drop_first_summary(view: View) -> list[Action]:
        return [Drop((view.entries[1].id, "m3"), "d")]

    assert merged(digests, drop_first_summary) == (digests[0], Drop(("m1", "m3"), "d"))


def test_later_stages_are_not_asked_once_the_target_is_reached() -> None:
    """The gentlest stage that is enough is the only one."""
    view = make_view([*agent_run(10), assistant("done"), user("next")])
    target = Target(view.tokens, view.tokens - 200)

    plan = Pipeline([ClearToolResults(), Fixed([Drop(("nobody",), "d")])]).plan(view, target)

    assert plan == ClearToolResults().plan(view, target)


def test_a_stage_sees_what_the_stages_before_leave() -> None:
    """Cleared results leave less to drop."""
    view = make_view([*agent_run(20), assistant("done"), user("next")])
    target = Target(view.tokens, view.tokens // 5)

    alone = view.after(SlidingWindow().plan(view, target))
    behind = view.after(Pipeline([ClearToolResults(), SlidingWindow()]).plan(view, target))

    assert behind.tokens <= target.want
    assert len(behind.entries) > len(alone.entries)


def test_needs_are_those_of_all_stages() -> None:
    """The session measures what any of them needs."""
    assert Pipeline([NoOp(), Fixed([])]).needs == {"prices"}
    assert Fallback(NoOp(), Fixed([])).needs == {"prices"}


def test_a_summariser_inside_is_found() -> None:
    """The session asks the outermost policy for its callable."""
    fake = ScriptedSummarizer()
    inner = Fallback(Summarize(summarizer=fake), Truncate())

    assert Pipeline([NoOp(), inner]).summarizer_fn is fake
    assert Pipeline([NoOp(), Summarize()]).summarizer_fn is None


def test_fallback_takes_the_second_after_a_failure() -> None:
    """A failed plan is not tried again."""
    view = make_view(chat(10)).with_failures([FAILURE])
    target = Target(view.tokens, view.tokens // 2)

    assert Fallback(NoOp(), Truncate()).plan(view, target) == Truncate().plan(view, target)


def test_fallback_takes_the_second_where_the_first_does_not_fit() -> None:
    """`must` decides, `want` does not."""
    view = make_view(chat(10))

    fits = Fallback(NoOp(), Truncate()).plan(view, Target(view.tokens, 0))
    does_not = Fallback(NoOp(), Truncate()).plan(view, Target(view.tokens - 1, 0))

    assert fits == Plan()
    assert does_not.actions


def test_the_default_clears_results_before_it_drops_messages() -> None:
    """Where old results are enough, every message stays."""
    view = make_view([*agent_run(20), assistant("done"), user("next")])

    plan = default_policy().plan(view, Target(view.tokens, view.tokens // 2))

    assert plan.actions
    assert len(view.after(plan).entries) == len(view.entries)


@pytest.mark.parametrize("stages", [[], "noop", [1], None])
def test_a_pipeline_of_no_policies_is_refused(stages: Any) -> None:
    """It would do nothing, or fail later."""
    with pytest.raises(InvalidPolicy, match="pipeline"):
        Pipeline(stages)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("pipeline:stages=truncate+noop", Pipeline([Truncate(), NoOp()])),
        ("fallback:first=noop,second=truncate", Fallback(NoOp(), Truncate())),
        (
            'pipeline:{"stages": ["noop", {"name": "truncate", "params": {"keep_last": 2}}]}',
            Pipeline([NoOp(), Truncate(2)]),
        ),
    ],
)
def test_policies_of_policies_can_be_written_on_a_command_line(text: str, policy: Policy) -> None:
    """A bare name stands for the policy with its defaults."""
    assert parse_policy(text).params == policy.params
