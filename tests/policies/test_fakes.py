"""The shipped fakes keep the promises they stand for, and the conservation check sees what is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compaction.plan import Clamp, Drop, Edit, Plan, Span
from compaction.ports import Summary
from compaction.testing import (
    ConservationError,
    FakeClock,
    FakeCounter,
    FakeRng,
    ScriptedSummarizer,
    check_conservation,
    fake_ids,
)
from tests.builders import image, user
from tests.policies.views import agent_run, chat, make_view

VIEW = make_view(chat(3))
PLAN = Plan((Drop(("m1", "m2"), "d"), Clamp("m3", "/content", 5, 50, "c")))


def test_the_additive_counter_adds_up() -> None:
    """A request is its head and its messages, always."""
    counter, messages = FakeCounter(), agent_run(3, parallel=2)

    whole = counter.request(messages, [{"type": "function"}])

    assert whole == counter.head(messages[:1], [{"type": "function"}]) + sum(map(counter.message, messages[1:]))


def test_merged_roles_make_neighbours_cheaper() -> None:
    """Counts that do not add up are there to test with."""
    counter, messages = FakeCounter(merge_roles=True), [user("a"), user("b")]

    assert not counter.additive
    assert counter.request(messages, None) == 3 + 2 * counter.message(user("a")) - counter.around


def test_a_picture_is_not_counted_as_text() -> None:
    """Base64 has a flat price."""
    assert FakeCounter().message(user([image("A" * 10_000)])) == 8


def test_clock_ids_and_bytes_repeat() -> None:
    """Two fakes made alike give the same."""
    clock, again = FakeClock(), FakeClock()

    assert [clock(), clock()] == [again(), "2026-01-01T00:00:01.000000+00:00"]
    assert fake_ids("c", 3) == "c:3"
    assert FakeRng()(16) == FakeRng()(16)


def test_the_summariser_follows_its_script() -> None:
    """Texts, summaries and errors in order, then the default; every call is kept."""
    fake = ScriptedSummarizer(["one", Summary("", "length"), OSError("down")])
    ask = {"instruction": "i", "max_tokens": 9, "limit": 99}

    first, second = fake("a", **ask), fake("b", **ask)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="down"):
        fake("c", **ask)  # type: ignore[arg-type]

    assert (first, second.finish_reason) == (Summary("one"), "length")
    assert fake("d", **ask).text == "They talked."  # type: ignore[arg-type]
    assert [source for source, _ in fake.calls] == ["a", "b", "c", "d"]


def test_what_an_applied_plan_leaves_is_conserved() -> None:
    """Live text and spans partition every message."""
    applied = VIEW.after(PLAN)

    check_conservation(VIEW.messages, applied.entries, applied.discards)
    check_conservation(VIEW.messages.values(), applied.entries, [d.span for d in applied.discards])


def test_every_kind_of_loss_is_seen() -> None:
    """The error names the message."""
    applied = VIEW.after(PLAN)
    entries, spans = applied.entries, [d.span for d in applied.discards]
    edit = replace(entries[1], edits=(Edit("/content", 5, 60, "…"),))
    faulty = {
        "m1": (entries, spans[1:]),
        "m2": (entries, [*spans, spans[1]]),
        "m3": ((entries[0], edit, *entries[2:]), spans),
        "m4": (entries, [*spans, Span("m4", "", 0, 1)]),
        "m5": ([e for e in entries if e.id != "m5"], spans),
        "m6": (entries, [*spans, Span("m6", "/content", 0, 9_999)]),
        "nobody": (entries, [*spans, Span("nobody", "", 0, 1)]),
    }

    for message_id, (shown, out) in faulty.items():
        with pytest.raises(ConservationError) as caught:
            check_conservation(VIEW.messages, shown, out)
        assert caught.value.message_id == message_id


def test_a_summary_of_what_is_still_live_is_seen() -> None:
    """A summary stands only for what left."""
    summary = replace(VIEW.entries[1], id="s", text="gist", stands_for=(Span("m1", "", 0, 9),))

    with pytest.raises(ConservationError, match="never left"):
        check_conservation(VIEW.messages, [*VIEW.entries, summary], [])
