"""Why tokens were prefilled again, as a running engine reports it."""

from __future__ import annotations

from typing import Any

import pytest

from compaction.engines import TransformersEngine
from compaction.engines.reasons import Held, Request, why_prefilled
from tests.builders import assistant, tool_schema, user
from tests.fixtures_models import tiny_model, tiny_tokenizer

Messages = list[dict[str, Any]]


def turn(engine: TransformersEngine, messages: Messages, **options: Any) -> str:
    """One turn in conversation "c"; returns its reason."""
    generation = engine.generate("c", messages, None, max_new_tokens=3, **options)
    for _ in generation:
        pass
    if generation.result is None:
        raise AssertionError("no result")
    return generation.result.usage.why


def test_the_first_turn(tiny: TransformersEngine, talk: Messages) -> None:
    """Nothing was there before."""
    assert turn(tiny, talk) == "first"


def test_a_retry(tiny: TransformersEngine, talk: Messages) -> None:
    """The same request again prefills one token, which has no reason: without it there are no logits."""
    turn(tiny, talk)

    assert turn(tiny, talk) == ""


def test_an_extension(tiny: TransformersEngine, talk: Messages) -> None:
    """After a forgotten reply, further messages are new and nothing else is."""
    turn(tiny, talk[:3])
    tiny.forget_reply("c")

    assert turn(tiny, talk) == ""


def test_a_gap_is_a_compaction(tiny: TransformersEngine, talk: Messages) -> None:
    """Messages missing from the middle, with later ones still there."""
    turn(tiny, talk)

    assert turn(tiny, talk[:1] + talk[5:]) == "compaction"


def test_another_ending_is_an_edit(tiny: TransformersEngine, talk: Messages) -> None:
    """A message that says something else, with nothing after it kept."""
    turn(tiny, talk)

    assert turn(tiny, [*talk[:4], user("something else")]) == "edited"


def test_the_caller_knows_best(tiny: TransformersEngine, talk: Messages) -> None:
    """A changed message may be a clamp or an edit: the caller's word decides."""
    turn(tiny, talk)

    assert turn(tiny, [*talk[:4], user("something else")], why="compaction") == "compaction"


def test_the_hint_alone_is_no_reason(tiny: TransformersEngine, talk: Messages) -> None:
    """Where nothing was prefilled again, there is nothing to explain."""
    turn(tiny, talk[:3])
    tiny.forget_reply("c")

    assert turn(tiny, talk, why="compaction") == ""


def test_another_reply_is_an_edit(tiny: TransformersEngine, talk: Messages) -> None:
    """A reply replaced by other words."""
    turn(tiny, talk)

    assert turn(tiny, [*talk, assistant("Quite other words."), user("Go on.")]) == "edited"


def test_a_template_that_rewrites_history(talk: Messages) -> None:
    """Unchanged messages whose ids change are the template's doing."""
    counting = "{{ messages | length }}" + tiny_tokenizer().chat_template
    tokenizer = tiny_tokenizer(counting)
    engine = TransformersEngine(tiny_model("llama"), tokenizer=tokenizer)
    turn(engine, talk[:3])
    engine.forget_reply("c")

    assert turn(engine, talk) == "template"


@pytest.mark.parametrize(
    ("again", "content", "expected"),
    [("abc!", "abc", "retokenized"), ("abx!", "abx", "edited"), ("bc!", "abc", "template")],
)
def test_the_reply_in_other_ids(again: str, content: str, expected: str) -> None:
    """The same text in other ids, other text, and a message that is the same but rendered otherwise."""
    request = Request.of([user("q")], None)
    held = Held([1, 2, 97, 98, 99], 2, 1, request, "abc")
    texts = {(97, 98, 99): "abc", (300, 33): again}
    messages = [user("q"), assistant(content)]

    reason = why_prefilled(
        held, [1, 2, 300, 33], 2, messages, Request.of(messages, None), hint="", decode=lambda ids: texts[tuple(ids)]
    )

    assert reason == expected


def test_a_dropped_reply_is_an_edit(tiny: TransformersEngine, talk: Messages) -> None:
    """A generated reply that the next request leaves out, without having been forgotten."""
    turn(tiny, talk[:3])

    assert turn(tiny, [*talk[:3], user("again?")]) == "edited"


def test_a_clamp_in_the_middle_is_a_compaction(tiny: TransformersEngine, talk: Messages) -> None:
    """An older message cut short, with later ones still there."""
    turn(tiny, talk)

    assert turn(tiny, [*talk[:2], user("[40 characters removed]"), *talk[3:]]) == "compaction"


def test_other_tools_are_an_edit(tiny: TransformersEngine, talk: Messages) -> None:
    """Tools stand in the prompt too."""
    turn(tiny, talk)
    generation = tiny.generate("c", talk, [tool_schema()], max_new_tokens=2)
    list(generation)

    assert generation.result is not None and generation.result.usage.why == "edited"
