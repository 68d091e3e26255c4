"""Why tokens were prefilled again, as a running engine reports it."""

from __future__ import annotations

from typing import Any

import pytest

from compaction.engines import TransformersEngine
from compaction.engines.reasons import Request, why_prefilled
from tests.builders import assistant, user
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


@pytest.mark.parametrize(("again", "expected"), [("abc!", "retokenized"), ("abx!", "edited")])
def test_same_text_other_ids(again: str, expected: str) -> None:
    """A reply whose text stands there again in other ids was retokenized; other text was edited."""
    request = Request.of([user("q")], None)
    held, wanted = [1, 2, 97, 98, 99], [1, 2, 300, 33]
    texts = {(97, 98, 99): "abc", (300, 33): again}

    reason = why_prefilled(
        held, wanted, 2, prompt=2, opening=1, before=request, now=request, hint="", decode=lambda ids: texts[tuple(ids)]
    )

    assert reason == expected
