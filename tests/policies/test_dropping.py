"""What Truncate, SlidingWindow and Summarize take away, and what they leave."""

from __future__ import annotations

from dataclasses import replace
from time import process_time

import pytest

from compaction.budget import Target
from compaction.errors import InvalidPolicy
from compaction.plan import Digest, Drop, Plan
from compaction.policies import SlidingWindow, Summarize, Truncate
from compaction.ports import Policy
from compaction.testing import FakeCounter, ScriptedSummarizer
from compaction.view import View
from tests.builders import assistant, system, user
from tests.policies.views import FAILURE, agent_run, chat, make_view


def left(view: View, plan: Plan) -> list[str]:
    """Ids after the plan."""
    return [entry.id for entry in view.after(plan).entries]


def test_truncate_drops_no_more_than_the_target_asks_for() -> None:
    """With one unit less dropped, the target would be missed."""
    view = make_view(chat(10))
    want = view.tokens // 2

    (drop,) = Truncate().plan(view, Target(view.tokens, want)).actions

    assert isinstance(drop, Drop)
    assert view.after(Plan((drop,))).tokens <= want
    assert view.after(Plan((replace(drop, entries=drop.entries[:-1]),))).tokens > want


def test_truncate_gives_up_its_tail_only_for_what_must_fit() -> None:
    """`keep_last` limits the wish, not the need."""
    view = make_view(chat(10))

    wished = Truncate(keep_last=6).plan(view, Target(must=view.tokens, want=0))
    needed = Truncate(keep_last=6).plan(view, Target(must=150, want=0))

    assert len(left(view, wished)) == 1 + 6
    assert view.after(needed).tokens <= 150


def test_truncate_keeps_the_task_where_a_user_must_come_first() -> None:
    """An agent's run of batches is cut anywhere, behind the only user entry there is."""
    view = make_view([*agent_run(20), user("go on")], user_first=True)

    plan = Truncate().plan(view, Target(view.tokens, view.tokens // 2))

    ids = left(view, plan)
    assert ids[:2] == ["m0", "m1"]
    assert view.tokens // 3 < view.after(plan).tokens <= view.tokens // 2


def test_truncate_holds_a_user_back_before_a_pinned_answer() -> None:
    """A pinned assistant message stays behind the user message it answers."""
    view = make_view(chat(6), pins=[4], user_first=True)

    plan = Truncate().plan(view, Target(view.tokens, 0))

    assert left(view, plan) == ["m0", "m3", "m4", "m13"]


def test_sliding_window_drops_the_middle() -> None:
    """Sinks and tail stay, what lies between goes, oldest first."""
    view = make_view(chat(10))

    plan = SlidingWindow(sinks=2).plan(view, Target(view.tokens, view.tokens // 2))

    ids = left(view, plan)
    assert ids[:3] == ["m0", "m1", "m2"]
    assert ids[3:] == [f"m{i}" for i in range(22 - len(ids) + 3, 22)]


def test_sliding_window_gives_up_sinks_last() -> None:
    """Only where everything else is gone and the request does not fit, the sinks go, the first of them last."""
    view = make_view(chat(10))
    floor, unit = view.floor.total, view.units[0].tokens
    window = SlidingWindow(sinks=2, sink_share=1.0)

    kept = [left(view, window.plan(view, Target(floor + n * unit, 0))) for n in (2, 1, 0)]

    assert kept == [["m0", "m1", "m2", "m21"], ["m0", "m1", "m21"], ["m0", "m21"]]


def test_a_sink_that_fills_the_room_is_no_sink() -> None:
    """A huge first message does not cost the recent ones their place."""
    view = make_view([system("s"), user("paste " * 400), *chat(6)[1:]])
    must = view.tokens - 100

    plan = SlidingWindow().plan(view, Target(must, must // 2))

    assert "m1" not in left(view, plan)
    assert view.after(plan).tokens > must // 3


def test_counts_that_do_not_add_up_are_checked() -> None:
    """Where neighbours share tokens, the plan still reaches the target."""
    view = make_view(
        [system("s"), *[assistant("x" * 8) for _ in range(60)], user("?")], counter=FakeCounter(merge_roles=True)
    )
    want = view.tokens - 40

    plans = [policy.plan(view, Target(view.tokens, want)) for policy in (Truncate(), SlidingWindow())]

    assert all(view.after(plan).tokens <= want for plan in plans)


@pytest.mark.parametrize("policy", [Truncate(), SlidingWindow(), Summarize()], ids=lambda p: p.name)
@pytest.mark.parametrize("user_first", [False, True])
def test_a_plan_asks_nothing_of_the_counter_per_entry(policy: Policy, user_first: bool) -> None:
    """Over thousands of entries the sums are enough: a question or none, and milliseconds."""
    view = make_view([*agent_run(1400, 1040, parallel=3), user("go on")], user_first=user_first)
    asked, times = view.answers, []
    for _ in range(5):
        fresh, start = replace(view), process_time()
        policy.plan(fresh, Target(view.tokens, view.tokens // 2))
        times.append(process_time() - start)

    assert asked is not None
    assert getattr(asked, "asked") <= 5  # noqa: B009 - the fake's own counter
    assert min(times) < 0.05  # the benchmark has the real figure; this catches what is quadratic


def test_summarize_puts_a_digest_in_place_of_the_oldest() -> None:
    """The oldest units become one entry of the allowance; the newest stay."""
    view = make_view(chat(20))
    want = view.tokens // 2

    plan = Summarize(max_tokens=100, keep_last=2).plan(view, Target(view.tokens, want))

    (digest,) = plan.digests
    assert digest.entries[0] == "m1"
    assert digest.max_tokens == 100
    assert view.after(plan).tokens <= want


def test_summarize_leaves_earlier_summaries_alone() -> None:
    """A second digest stands behind the first summary and does not read it."""
    view = make_view(chat(20))
    policy = Summarize(max_tokens=64, keep_last=2)
    once = view.advance(policy.plan(view, Target(view.tokens, view.tokens // 2)))
    once = replace(once, entries=tuple(replace(e, text="gist") if e.text == "" else e for e in once.entries))

    plan = policy.plan(once, Target(once.tokens, once.tokens * 2 // 3))

    first = once.entries[1].id
    assert once.entries[1].derived
    assert first not in plan.digests[0].entries
    assert left(once, plan)[1] == first


def test_summaries_that_alone_stand_in_the_way_go_oldest_first() -> None:
    """Where nothing else may go, the oldest summary makes room."""
    view = make_view(chat(4))
    summaries = tuple(replace(view.entries[i], id=f"s{i}", unit=f"s{i}", role="user", text="gist") for i in (1, 2, 3))
    entries = (view.entries[0], *summaries, view.entries[-1])
    held = replace(view, entries=entries, tokens=view.head + sum(e.tokens for e in entries[1:]))

    plan = Summarize(keep_last=1).plan(held, Target(held.tokens, held.tokens - 60))

    assert plan == Plan((Drop(("s1", "s2"), "oldest summaries"),))


def test_after_a_failure_summarize_plans_without_a_model() -> None:
    """The rung behind a failed summary drops, as Truncate does."""
    view = make_view(chat(20)).with_failures([FAILURE])
    target = Target(view.tokens, view.tokens // 2)

    plan = Summarize(keep_last=2).plan(view, target)

    assert plan == Truncate(keep_last=2).plan(view, target)
    assert not plan.digests


def test_a_summary_takes_only_what_is_free_and_worth_it() -> None:
    """The allowance is at most half of what is summarised, and with it the request fits."""
    view = make_view(chat(20))
    must = view.floor.total + 150

    plan = Summarize(max_tokens=4000, keep_last=0).plan(view, Target(must, must))

    (digest,) = plan.digests
    assert isinstance(digest, Digest)
    assert digest.max_tokens < 150
    assert view.after(plan).tokens <= must


def test_a_summariser_of_ones_own_is_known_by_its_name() -> None:
    """The callable stays outside parameters and equality; its name is written down."""
    fake = ScriptedSummarizer(name="mine")

    policy = Summarize(summarizer=fake)

    assert policy.params["summarizer"] == "mine"
    assert policy.summarizer_fn is fake
    assert policy == Summarize(summarizer="mine")
    assert Summarize(summarizer="mine").summarizer_fn is None


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Truncate(keep_last=-1), "keep_last"),
        (lambda: SlidingWindow(sinks=-1), "sinks"),
        (lambda: SlidingWindow(sink_share=0), "sink_share"),
        (lambda: Summarize(max_tokens=0), "max_tokens"),
        (lambda: Summarize(instruction=" "), "instruction"),
        (lambda: Summarize(summarizer=lambda *a, **k: None), "name"),  # type: ignore[arg-type]
    ],
)
def test_parameters_that_cannot_be_are_refused(make: object, field: str) -> None:
    """A policy with an impossible parameter is never made, and the message names it."""
    with pytest.raises(InvalidPolicy, match=field):
        make()  # type: ignore[operator]
