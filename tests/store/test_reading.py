"""Typed rows and full-text search."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction.errors import LogMissing
from compaction.events import NewEvent
from compaction.store import MemoryLog
from tests.contracts.log_contract import AT, LONG, append, committed, story


@pytest.fixture
def log() -> Iterator[MemoryLog]:
    with MemoryLog() as log:
        story(log)
        yield log


def dropped(log: MemoryLog, conversation: str, texts: dict[str, str]) -> None:
    """Messages that are appended and dropped again at once."""
    for message_id, text in texts.items():
        append(log, conversation, message_id, {"role": "user", "content": text})
    spans = [[message_id, "/content", 0, len(text), 0, 1] for message_id, text in texts.items()]
    log.commit(conversation, log.seq(conversation), [committed(spans)])


def test_conversations_come_in_the_order_they_began(log: MemoryLog) -> None:
    """With their totals."""
    assert [(row.conversation, row.messages) for row in log.conversations()] == [("c", 5), ("d", 1), ("f", 0)]


def test_decisions_say_how_they_were_made(log: MemoryLog) -> None:
    """Policy, figures and actions as plain values."""
    decision = log.decisions("c")[0]

    assert (decision.params, decision.after["tokens"], decision.actions[0], decision.spans) == (
        {"keep": 3},
        40,
        "drop",
        5,
    )


def test_decisions_of_all_conversations(log: MemoryLog) -> None:
    """Without a conversation, all of them in the order they were written."""
    assert [(row.conversation, row.seq) for row in log.decisions()] == [("c", 8), ("f", 2)]


def test_spans_of_one_decision(log: MemoryLog) -> None:
    """Spans can be asked for by conversation and by the decision's seq."""
    assert ([s.message_id for s in log.spans("f", 2)], len(log.spans("c")), log.spans("c", 3)) == (["c.1"], 5, [])


def test_failures_are_told_by_their_codes() -> None:
    """A decision names what did not work before it, in order."""
    failures = [{"rung": 1, "code": code} for code in ("illegal", "summary_empty")]
    with MemoryLog() as log:
        log.commit("c", 0, [committed([], failures=[])])
        log.commit("c", 1, [committed([], failures=failures)])

        assert [row.failures for row in log.decisions()] == [(), ("illegal", "summary_empty")]


def test_a_rewind_takes_decisions_back(log: MemoryLog) -> None:
    """Decisions and spans after the point rewound to are undone, unless that rewind is itself taken back."""
    first = log.decisions("c")[0].seq
    dropped(log, "c", {"late": "zebra crossing"})
    late = log.decisions("c")[-1].seq

    def undone() -> tuple[list[int], set[int]]:
        decisions, spans = log.decisions("c"), log.spans("c")
        return [row.seq for row in decisions if row.undone], {span.decision for span in spans if span.undone}

    def rewind(to: int) -> int:
        return log.commit("c", log.seq("c"), [NewEvent("rewound", AT, {"to": to})])[0].seq

    assert undone() == ([], set())
    rewind(late - 1)
    assert undone() == ([late], {late})
    rewound = rewind(first - 1)
    assert undone() == ([first, late], {first, late})
    rewind(rewound - 2)
    assert undone() == ([], set())
    assert not any(row.undone for row in log.decisions("f")) and not any(row.undone for row in log.spans("f"))


def test_span_text_is_exact_where_the_view_cannot_be(log: MemoryLog) -> None:
    """A range with a NUL and a lone surrogate comes out whole, and so does a reason that quotes one."""
    span = log.spans("c")[4]

    assert (span.text, log.spans("c")[1].reason) == ("l \x00 lone \udfff"[:10], "quotes \ud800\x00")


def test_messages_and_usage(log: MemoryLog) -> None:
    """Messages as JSON text in order, usage with None where nothing was measured."""
    usage = log.usage("c")[0]

    assert ([m.message_id for m in log.messages("c")][-1], usage.kv_bytes, usage.tpot_ms) == ("c.5", 1024, None)


def test_an_unknown_span_is_missing(log: MemoryLog) -> None:
    """Nothing is restored for an id that no decision has."""
    with pytest.raises(LogMissing):
        log.restore("0" * 16)


def test_search_finds_what_was_discarded(log: MemoryLog) -> None:
    """Words are found in spans only, not in what is still in the view."""
    assert ([hit.message_id for hit in log.search("order 7712")], log.search("please")) == (["c.1"], [])


def test_search_marks_the_words(log: MemoryLog) -> None:
    """The snippet shows the match in brackets, from the verbatim text."""
    assert log.search("7712")[0].snippet == "order [7712]"


def test_search_sees_decisions_made_since(log: MemoryLog) -> None:
    """The index is brought up to date by each search."""
    log.search("order")
    dropped(log, "c", {"new": "zebra crossing"})

    assert [hit.span_id for hit in log.search("zebra")] == [log.spans("c")[-1].id]


def test_search_ranks_the_better_match_first() -> None:
    """bm25: a short text full of the word comes before a long one that mentions it."""
    with MemoryLog() as log:
        dropped(log, "c", {"a": "apple " + LONG, "b": "apple apple", "c": "pear"})

        assert [hit.message_id for hit in log.search("apple")] == ["b", "a"]


def test_search_can_stay_in_one_conversation(log: MemoryLog) -> None:
    """What another conversation discarded is not shown."""
    dropped(log, "d", {"d.2": "order of d"})

    assert [hit.conversation for hit in log.search("order", conversation="d")] == ["d"]


def test_search_stops_at_the_limit(log: MemoryLog) -> None:
    """At most `limit` hits."""
    dropped(log, "d", {f"x{i}": "same words" for i in range(9)})

    assert len(log.search("same", limit=4)) == 4


def test_identifiers_are_searched_as_phrases(log: MemoryLog) -> None:
    """Parts of a word with punctuation must stand side by side."""
    dropped(log, "d", {"p": "id ORD-77-12 here", "q": "12 then 77 and ORD"})

    assert [hit.message_id for hit in log.search("ord-77-12")] == ["p"]


@settings(max_examples=150)
@given(query=st.text(max_size=20) | st.text(st.sampled_from("\"'*^()-+:{}\x00\ud800 aORNEAT"), max_size=20))
def test_no_query_is_a_syntax_error(query: str) -> None:
    """Operators, quotes and control characters are text like any other."""
    with MemoryLog() as log:
        dropped(log, "c", {"a": "a OR b NEAR c"})

        assert len(log.search(query)) <= 1


def test_many_spans_are_indexed_in_several_transactions() -> None:
    """A first search over more spans than one transaction takes finds the oldest and the newest."""
    with MemoryLog() as log:
        for block in range(3):
            dropped(log, "c", {f"{block}-{i}": f"block{block} item{i}" for i in range(1500)})

        assert [log.search(f"block{block} item7")[0].message_id for block in range(3)] == ["0-7", "1-7", "2-7"]
