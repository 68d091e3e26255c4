"""What ClearToolResults and ClampOversized cut out of messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from compaction.budget import Target
from compaction.errors import InvalidPolicy
from compaction.messages import resolve
from compaction.plan import Clamp, Plan
from compaction.policies import ClampOversized, ClearToolResults
from compaction.testing import FakeAnswers
from compaction.view import Pin, View
from tests.builders import assistant, call, image, system, tool, tool_batch, user
from tests.policies.views import agent_run, make_view


def edited(plan: Plan) -> list[str]:
    """Ids of the messages a plan edits."""
    return [action.message_id for action in plan.actions if isinstance(action, Clamp)]


def shown(view: View, plan: Plan, id: str) -> Any:
    """A message as the model sees it after the plan."""
    return next(e for e in view.after(plan).entries if e.id == id).render(view.messages)


def test_old_results_are_cleared_oldest_first_until_the_target_is_reached() -> None:
    """One result less would not do; the messages themselves stay."""
    view = make_view([*agent_run(10), assistant("done"), user("next")])
    want = view.tokens - 250

    plan = ClearToolResults().plan(view, Target(view.tokens, want))

    assert edited(plan) == ["m3", "m5", "m7"]
    assert shown(view, plan, "m3") == tool("call_0", "[400 characters removed]")
    assert view.after(plan).tokens <= want
    assert view.after(Plan(plan.actions[:-1])).tokens > want


def test_the_newest_results_stay() -> None:
    """Neither the newest `keep_last` nor any result of the batch the model has not answered is cleared."""
    view = make_view(agent_run(4, parallel=3))

    plan = ClearToolResults(keep_last=1).plan(view, Target(view.tokens, 0))

    assert len(edited(plan)) == 9
    assert not set(edited(plan)) & view.keep


def test_excluded_tools_are_told_by_the_batch_they_belong_to() -> None:
    """Ids repeat: the call just before decides which tool a result is of."""
    batches = [
        [assistant(None, calls=[call("c", name)]), tool("c", "x" * 400)] for name in ("grep", "read", "grep", "read")
    ]
    view = make_view([user("go"), *(message for batch in batches for message in batch), assistant("done")])

    plan = ClearToolResults(keep_last=0, exclude=("read",)).plan(view, Target(view.tokens, 0))

    assert edited(plan) == ["m2", "m6"]


def test_what_is_small_pinned_or_cleared_already_stays() -> None:
    """A clear that gains nothing is not planned."""
    view = make_view(
        [*agent_run(4), *tool_batch([("c", "short")]), assistant("done")], pins=[Pin("m3", "/content", 0, 4)]
    )
    policy = ClearToolResults(keep_last=0)

    once = policy.plan(view, Target(view.tokens, 0))
    twice = policy.plan(view.advance(once), Target(view.tokens, 0))

    assert edited(once) == ["m5", "m7", "m9"]
    assert twice == Plan()


def test_the_longest_text_part_of_a_result_is_cleared() -> None:
    """Pictures and shorter parts stay."""
    parts = [{"type": "text", "text": "short"}, image(), {"type": "text", "text": "x" * 400}]
    result = {"role": "tool", "tool_call_id": "c", "content": parts}
    view = make_view([user("go"), assistant(None, calls=[call("c")]), result, assistant("done")])

    plan = ClearToolResults(keep_last=0).plan(view, Target(view.tokens, 0))

    (clamp,) = plan.actions
    assert isinstance(clamp, Clamp)
    assert (clamp.path, clamp.start, clamp.end) == ("/content/2/text", 0, 400)


def test_an_oversized_message_keeps_head_and_tail() -> None:
    """The middle goes, and the message then takes no more than its share."""
    text = "HEAD " + "x" * 40_000 + " TAIL"
    view = make_view([system("s"), user("go"), assistant(text), user("next")])
    must = 4_000

    plan = ClampOversized(max_fraction=0.25).plan(view, Target(must, must // 2))

    content = shown(view, plan, "m2")["content"]
    assert content.startswith("HEAD ")
    assert content.endswith(" TAIL")
    assert 700 < dict(view.after(plan).changed)["m2"] <= 1_000


def test_a_message_of_ten_megabytes_is_never_encoded() -> None:
    """Only what stays of it is counted, at most three times, even where its head is denser than the rest."""
    answers = FakeAnswers()
    view = make_view([user("go"), assistant("x" * 10_000_000), user("next")])
    view = replace(view, answers=answers)

    plan = ClampOversized().plan(view, Target(8_000, 4_000))

    assert edited(plan) == ["m1"]
    assert answers.asked <= 3
    assert answers.characters < 100_000


def test_an_oversized_message_may_be_one_that_was_clamped_before() -> None:
    """A second clamp takes only what is still live."""
    view = make_view([user("go"), assistant("x" * 40_000), user("next")])
    policy = ClampOversized(max_fraction=0.5)
    once = view.advance(policy.plan(view, Target(8_000, 4_000)))

    plan = policy.plan(once, Target(4_000, 2_000))

    gone = sum(d.span.end - d.span.start for d in once.after(plan).discards)
    assert dict(once.after(plan).changed)["m1"] <= 2_000
    assert 5_000 < gone < 16_000


def test_the_newest_batch_is_cut_only_where_it_does_not_fit() -> None:
    """What must stay is left alone while dropping others can help."""
    view = make_view([user("go"), *tool_batch([("a", "x" * 8_000), ("b", "y" * 400)])])

    fits = ClampOversized(0.1).plan(view, Target(view.floor.total, 10))
    does_not = ClampOversized(0.1).plan(view, Target(view.floor.total - 1, 10))

    assert fits == Plan()
    assert edited(does_not) == ["m2"]


def test_parallel_results_come_down_to_a_common_size() -> None:
    """A batch whose sum is too large fits afterwards, with a reply's slack; small results stay whole."""
    results = [(f"c{i}", "x" * 8_000) for i in range(4)] + [("c4", "small")]
    view = make_view([user("go"), *tool_batch(results)], slack=200)

    plan = ClampOversized().plan(view, Target(2_000, 1_000))

    assert edited(plan) == ["m2", "m3", "m4", "m5"]
    assert 1_500 < view.after(plan).tokens <= 1_800


@pytest.mark.parametrize(("clamp_user", "ids"), [(False, []), (True, ["m1"])])
def test_the_last_user_message_is_cut_only_where_the_budget_says_so(clamp_user: bool, ids: list[str]) -> None:
    """`Budget(clamp_user=True)` is the only way."""
    view = make_view([system("s"), user("x" * 8_000)], clamp_user=clamp_user)

    assert edited(ClampOversized().plan(view, Target(500, 250))) == ids


def test_the_middle_is_cut_out_of_the_longest_text_part() -> None:
    """Content parts are clamped like content."""
    parts = [{"type": "text", "text": "short"}, {"type": "text", "text": "x" * 8_000}]
    view = make_view([user(parts), user("next")])

    (clamp,) = ClampOversized().plan(view, Target(1_000, 500)).actions

    assert isinstance(clamp, Clamp)
    assert clamp.path == "/content/1/text"
    assert len(resolve(view.messages["m0"].data, clamp.path)) == 8_000


def test_parameters_that_cannot_be_are_refused() -> None:
    """The message names the parameter."""
    with pytest.raises(InvalidPolicy, match="exclude"):
        ClearToolResults(exclude="grep")  # type: ignore[arg-type]
    with pytest.raises(InvalidPolicy, match="max_fraction"):
        ClampOversized(max_fraction=1.5)
