"""Applying a plan by longest common prefix + prefill equals a fresh prefill of the same view."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compaction.engines import TransformersEngine
from tests.builders import assistant, system, user
from tests.fixtures_models import SLIDING, tiny_engine

Messages = list[dict[str, Any]]
SUMMARY = user("[Summary of earlier messages (4), for reference only] the fox said thank you [End of summary]")


def views(talk: Messages) -> list[Messages]:
    """What policies make of a conversation: whole, cut in the middle, summarised, clamped, cut at the front, grown."""
    clamped = {**talk[2], "content": talk[2]["content"][:8] + "[26 characters removed]"}
    return [
        talk[:5],
        talk,
        talk[:1] + talk[5:],
        [talk[0], SUMMARY, *talk[6:]],
        [*talk[:2], clamped, *talk[3:]],
        talk[4:],
        [*talk, assistant("Yes."), user("And the dog?")],
    ]


def divergence(engine: TransformersEngine, conversation: str, view: Messages, *, reply: int = 6) -> float:
    """The largest difference between the live conversation's logits and a fresh prefill's; a reply follows."""
    generation = engine.generate(conversation, view, None, max_new_tokens=reply)
    for _ in generation:
        pass
    return float((generation.prompt_logits - engine.logits(view)).abs().max())


def test_every_plan_gives_the_logits_of_a_fresh_prefill(any_tiny: TransformersEngine, talk: Messages) -> None:
    """Through a whole conversation of plans, with replies in between, on every family of models."""
    worst = max(divergence(any_tiny, "c", view) for view in views(talk))

    assert worst < 2e-5


def test_forgotten_replies_leave_no_trace(any_tiny: TransformersEngine, talk: Messages) -> None:
    """A recorded message in place of a generated one gives the logits of a conversation where nothing was generated."""
    worst = 0.0
    for length in (1, 3, 5, 7, 9):
        worst = max(worst, divergence(any_tiny, "c", talk[:length]))
        any_tiny.forget_reply("c")

    assert worst < 2e-5


def test_logits_tell_views_apart(tiny: TransformersEngine, talk: Messages) -> None:
    """The comparison has teeth: other views differ by far more than the tolerance."""
    base = tiny.logits(talk)

    assert all((base - tiny.logits(view)).abs().max() > 1e-2 for view in views(talk) if view != talk)


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
@pytest.mark.parametrize("family", ["llama", "gpt2", *SLIDING])
def test_chunks_do_not_matter(family: str, chunk: int, talk: Messages) -> None:
    """A prompt fed in pieces of any size gives the same logits."""
    whole = tiny_engine(family, prefill_chunk=100_000)
    pieces = tiny_engine(family, prefill_chunk=chunk)

    assert torch.allclose(whole.logits(talk), pieces.logits(talk), atol=2e-5)


def test_a_sliding_window_reuses_what_it_still_holds(talk: Messages) -> None:
    """A growing conversation on a windowed model reuses its prompt, although the window is long full."""
    engine = tiny_engine("gemma3_hybrid")
    first = engine.generate("c", talk, None, max_new_tokens=9)
    text = "".join(first)

    second = engine.generate("c", [*talk, assistant(text), user("And the dog?")], None, max_new_tokens=2)
    list(second)

    fresh = engine.logits([*talk, assistant(text), user("And the dog?")])
    assert second.result is not None and first.result is not None
    assert second.result.usage.reused >= first.result.usage.prompt_tokens
    assert torch.allclose(second.prompt_logits, fresh, atol=2e-5)


def test_what_left_a_sliding_window_is_prefilled_again(talk: Messages) -> None:
    """A cut behind a full window cannot be undone in place: everything is prefilled, and the usage says so."""
    engine = tiny_engine("mistral_sliding")
    list(engine.generate("c", talk, None, max_new_tokens=2))

    generation = engine.generate("c", talk[:1] + talk[5:], None, max_new_tokens=2)
    list(generation)

    assert generation.result is not None
    assert (generation.result.usage.reused, generation.result.usage.why) == (0, "uncroppable")


@pytest.mark.model
def test_smollm2_gives_the_logits_of_a_fresh_prefill(smollm2: TransformersEngine) -> None:
    """On the real model: after dropping and summarising, logits equal a fresh prefill within float32 tolerance."""
    talk = [
        system("You answer briefly."),
        user("My order number is 7712. " + "It was late. " * 20),
        assistant("Noted: 7712."),
        user("The parcel was green, and the street is Elm Street."),
        assistant("Green, Elm Street."),
        user("What is my order number?"),
    ]
    plans = [talk, talk[:1] + talk[3:], [talk[0], SUMMARY, *talk[3:]]]

    worst = max(divergence(smollm2, "c", view) for view in plans)

    assert worst < 1e-3
