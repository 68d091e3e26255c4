"""What a summariser is given to read, and what its notes come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from compaction.fulfil import MAX_CHUNKS, fulfil, source_text
from compaction.plan import Digest, Plan
from compaction.ports import Summary
from compaction.testing import FakeCounter, ScriptedSummarizer
from compaction.tokens import EstimateCounter
from tests.builders import assistant, user
from tests.planned import Planned, kinds, make_manager
from tests.policies.views import make_view

Message = dict[str, Any]
TURNS = [message for n in range(20) for message in (user(f"Q{n} " + "a" * 100), assistant(f"A{n} " + "b" * 100))]
VIEW = make_view(TURNS)
COUNT = FakeCounter().text


def ask(
    script: ScriptedSummarizer,
    messages: Sequence[Message],
    *,
    max_tokens: int,
    limit: int,
    count: Callable[[str], int] = COUNT,
) -> Summary:
    """The summary of all these messages."""
    return fulfil(script, digest(messages, max_tokens), make_view(messages), limit=limit, count=count)


def digest(messages: Sequence[Message], max_tokens: int) -> Digest:
    """One summary of all of them."""
    return Digest(tuple(f"m{number}" for number in range(len(messages))), max_tokens, "Sum up.", "old")


def test_every_chunk_is_read_and_nothing_is_left_out() -> None:
    """The chunks are the source, in order; their notes are joined, and together take no more than was allowed."""
    script = ScriptedSummarizer(tuple(f"note {number}" for number in range(MAX_CHUNKS)))

    made = ask(script, TURNS, max_tokens=200, limit=500)

    assert "".join(source for source, _ in script.calls) == source_text(digest(TURNS, 200), VIEW)
    assert made.text == "\n".join(f"note {number}" for number in range(len(script.calls)))
    assert 1 < len(script.calls) <= MAX_CHUNKS
    assert sum(keywords["max_tokens"] for _, keywords in script.calls) <= 200


@pytest.mark.parametrize("script", [("", "fine"), ("fine", " \n"), ("one", "", "three")])
def test_an_empty_note_is_an_empty_summary(script: tuple[str, ...]) -> None:
    """Where one chunk comes back as nothing, what it held would be lost: the whole is no summary."""
    made = ask(ScriptedSummarizer(script), TURNS, max_tokens=200, limit=500)

    assert (made.text, made.finish_reason) == ("", "stop")


@pytest.mark.parametrize(("failed", "reason"), [(RuntimeError("down"), "error"), (Summary("cut", "length"), "length")])
def test_a_failed_chunk_fails_the_summary(failed: Any, reason: str) -> None:
    """No later chunk is asked for."""
    script = ScriptedSummarizer(("fine", failed))

    made = ask(script, TURNS, max_tokens=200, limit=500)

    assert made.finish_reason == reason and len(script.calls) == 2


def test_an_empty_note_takes_nothing_out_of_a_session() -> None:
    """The decision fails as `summary_empty`, and every message is still there."""
    script = ScriptedSummarizer(("", "fine"))
    planned = Planned(lambda view, target: Plan((Digest(tuple(e.id for e in view.entries[:4]), 60, "Sum up.", "old"),)))
    manager = make_manager(tokens=400, high=0.5, low=0.1, policy=planned, summarizer=script)
    session = manager.session("c")
    session.extend([user("a" * 300), assistant("b" * 300), user("c" * 300), assistant("d" * 300), user("e")])
    before = session.entries

    prepared = session.prepare()

    assert prepared.decision is None and session.entries == before
    assert kinds(manager.log)[-2:] == ["decision_started", "decision_failed"]


@pytest.mark.parametrize("allowed", [1, 8, 30, 47, 48, 100])
def test_a_small_allowance_is_not_exceeded(allowed: int) -> None:
    """Over all chunks no more is allowed than by the plan; there are fewer of them, and they still span the source."""
    script = ScriptedSummarizer()

    ask(script, TURNS, max_tokens=allowed, limit=allowed + 200)

    told, source = [keywords["max_tokens"] for _, keywords in script.calls], source_text(digest(TURNS, 1), VIEW)
    assert told and sum(told) <= allowed and (len(told) == 1 or min(told) >= 24)
    assert source.startswith(script.calls[0][0][:50]) and source.endswith(script.calls[-1][0][-50:])


DENSE = [user("lorem ipsum dolor " * 150), assistant("漢字文章" * 400), user("🙂" * 900)]


@pytest.mark.parametrize("messages", [TURNS, DENSE, DENSE[:2], [user("x" * 100_000)]])
@pytest.mark.parametrize(("max_tokens", "limit"), [(100, 1000), (400, 1000), (200, 700), (24, 130), (8, 400)])
def test_no_pass_is_above_the_limit(messages: list[Message], max_tokens: int, limit: int) -> None:
    """Instruction, source and reply fit together, also where some text takes more tokens a character than the rest."""
    script, count = ScriptedSummarizer(), EstimateCounter().text

    made = ask(script, messages, max_tokens=max_tokens, limit=limit, count=count)

    assert made.finish_reason == "stop" and 1 <= len(script.calls) <= MAX_CHUNKS
    for source, keywords in script.calls:
        assert count(source) + count(keywords["instruction"]) + keywords["max_tokens"] <= limit == keywords["limit"]


def test_a_source_that_is_too_long_keeps_its_beginning_and_end() -> None:
    """Where it does not fit in all the chunks there may be, each chunk is cut in its middle, visibly."""
    script = ScriptedSummarizer()

    ask(script, [user("first " + "x" * 50_000 + " last")], max_tokens=200, limit=400)

    sources = [source for source, _ in script.calls]
    assert len(sources) == MAX_CHUNKS and all("[…]" in source for source in sources)
    assert sources[0].startswith("user: first") and sources[-1].endswith(" last")


def test_without_room_for_a_source_nothing_is_asked() -> None:
    """A reply that would fill the window leaves nothing to read: that is the failure, in words."""
    script = ScriptedSummarizer()

    made = ask(script, TURNS, max_tokens=300, limit=370)

    assert made.finish_reason == "error" and "no room for a summary" in made.text and script.calls == []
