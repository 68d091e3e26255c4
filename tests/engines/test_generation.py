"""The decode loop: cancelling, streaming, stopping, drawing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from compaction.engines import Sampling, TransformersEngine
from compaction.engines.detokenize import Detokenizer
from compaction.engines.sampling import greedy
from compaction.errors import EngineError, InvalidInput
from tests.fixtures_models import tiny_engine, tiny_tokenizer

ASK = [{"role": "user", "content": "Tell me about the quick brown fox."}]


@contextmanager
def failing_at(engine: TransformersEngine, call: int, error: type[BaseException]) -> Iterator[None]:
    """Raise in the middle of a forward pass: layers before the third have been written, later ones have not."""
    calls = iter(range(1, 10_000))

    def hook(*_: Any) -> None:
        if next(calls) == call:
            raise error("injected")

    handle = engine.model.model.layers[2].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def prompt_only(engine: TransformersEngine) -> bool:
    """Whether the cache holds exactly the prompt, in every layer."""
    wanted = engine.template.ids(ASK, None)
    live = engine._conversations["c"].live
    lengths = {(layer.keys.shape[-2], layer.values.shape[-2]) for layer in live.layers}
    return live.ids == wanted and lengths == {(len(wanted), len(wanted))}


def test_close_crops_to_the_prompt(tiny: TransformersEngine) -> None:
    """A closed reply leaves the prompt in the cache, and its partial text in the result."""
    generation = tiny.generate("c", ASK, None, max_new_tokens=20)
    pieces = iter(generation)
    said = next(pieces) + next(pieces)

    generation.close()

    assert generation.result is not None
    assert (generation.result.finish_reason, generation.result.text) == ("cancelled", said) and prompt_only(tiny)


def test_leaving_the_loop_cancels(tiny: TransformersEngine) -> None:
    """`break` is a cancel."""
    generation = tiny.generate("c", ASK, None, max_new_tokens=20)
    for _ in generation:
        break

    assert generation.result is not None and generation.result.finish_reason == "cancelled" and prompt_only(tiny)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_inside_a_pass_cancels(tiny: TransformersEngine, error: type[BaseException]) -> None:
    """Ctrl-C while layers are being written leaves all of them at the prompt."""
    generation = tiny.generate("c", ASK, None, max_new_tokens=20)

    with failing_at(tiny, 3, error), pytest.raises(error):
        list(generation)

    assert generation.result is not None and generation.result.finish_reason == "cancelled" and prompt_only(tiny)


def test_an_interrupted_prefill_is_made_good(tiny: TransformersEngine) -> None:
    """A prefill that broke half way is no obstacle: the next turn's logits are right."""
    with failing_at(tiny, 1, RuntimeError), pytest.raises(RuntimeError):
        tiny.generate("c", ASK, None, max_new_tokens=2)

    generation = tiny.generate("c", ASK, None, max_new_tokens=2)

    assert torch.allclose(generation.prompt_logits, tiny.logits(ASK), atol=1e-5)


def test_an_interrupted_window_is_dropped() -> None:
    """A sliding layer that was being written may be wrong in ways nobody sees: the cache is dropped, not trusted."""
    engine = tiny_engine("gemma3_hybrid")
    generation = engine.generate("c", ASK, None, max_new_tokens=20)

    with failing_at(engine, 2, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        list(generation)

    assert engine.kv_bytes("c") == 0


def test_one_reply_at_a_time(tiny: TransformersEngine) -> None:
    """A second turn while a reply is running is refused, not interleaved."""
    generation = tiny.generate("c", ASK, None, max_new_tokens=20)

    with pytest.raises(EngineError, match="still generating"):
        tiny.generate("c", ASK, None, max_new_tokens=2)

    generation.close()


def test_forgetting_cancels_a_running_reply(tiny: TransformersEngine) -> None:
    """`forget_reply` and `release` may come while a reply runs; it then says so."""
    generation = tiny.generate("c", ASK, None, max_new_tokens=20)
    pieces = iter(generation)
    next(pieces)

    tiny.forget_reply("c")

    assert generation.result is not None and generation.result.finish_reason == "cancelled" and prompt_only(tiny)


def test_a_stop_token_ends_the_reply(tiny: TransformersEngine) -> None:
    """What ends a turn is kept as an id, not as text."""
    free = tiny.complete(ASK, max_new_tokens=6)
    engine = tiny_engine("llama")
    engine.model.generation_config.eos_token_id = [free.ids[2]]
    try:
        result = tiny_engine("llama").complete(ASK, max_new_tokens=6)
    finally:
        engine.model.generation_config.eos_token_id = engine.tokenizer.eos_token_id

    assert (result.finish_reason, result.ids) == ("stop", free.ids[: free.ids.index(free.ids[2]) + 1])


@pytest.mark.parametrize("text", ["中文 and 한국어", "🙂👩‍👩‍👧 family", "naïve café", "plain words, plain words", ""])
def test_no_piece_ends_in_half_a_character(text: str) -> None:
    """Characters of several tokens come out whole, and all pieces together are the text."""
    tokenizer = tiny_tokenizer()
    detokenizer = Detokenizer(tokenizer)

    pieces = [detokenizer.push(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    pieces.append(detokenizer.flush())

    assert "".join(pieces) == detokenizer.text == text and not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_left_out() -> None:
    """A reply cut in the middle of a character ends before it."""
    tokenizer = tiny_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    for token in tokenizer.encode("ok 🙂", add_special_tokens=False)[:-1]:
        detokenizer.push(token)
    detokenizer.flush()

    assert detokenizer.text == "ok "


def test_greedy_takes_the_first_of_equals() -> None:
    """Equal logits, frequent in bfloat16, are decided by the smaller id."""
    assert greedy(torch.tensor([0.0, 2.0, 2.0, 1.0])) == 1


def test_logits_that_are_no_numbers_are_an_error() -> None:
    """A model that has gone astray does not generate silently."""
    with pytest.raises(EngineError, match="not numbers"):
        greedy(torch.tensor([float("nan"), 1.0]))


def test_a_seed_is_a_reply() -> None:
    """The same seed draws the same reply, another seed another one."""
    texts = [
        tiny_engine("llama", sampling=Sampling(temperature=1.5, seed=seed)).complete(ASK, max_new_tokens=12).ids
        for seed in (1, 1, 2)
    ]

    assert texts[0] == texts[1] != texts[2]


def test_a_small_nucleus_is_greedy() -> None:
    """Only the likeliest tokens are drawn from: where one of them suffices, it is taken."""
    choose = Sampling(top_p=0.5, seed=3).chooser()

    assert {choose(torch.tensor([0.1, 5.0, 0.2])) for _ in range(20)} == {1}


@pytest.mark.parametrize(
    "build", [lambda: Sampling(temperature=0), lambda: Sampling(top_p=0), lambda: Sampling(top_p=2)]
)
def test_impossible_sampling_is_refused(build: Callable[[], Sampling]) -> None:
    """Parameters that mean nothing raise when they are given, not in the middle of a reply."""
    with pytest.raises(InvalidInput):
        build()


def test_times_are_of_the_model_alone() -> None:
    """What the reader of a stream does between two pieces is in neither figure."""
    now = [0.0]
    engine = tiny_engine("llama", clock=lambda: now[0])
    generation = engine.generate("c", ASK, None, max_new_tokens=4)
    for _ in generation:
        now[0] += 100

    assert generation.result is not None
    assert (generation.result.usage.ttft_ms, generation.result.usage.tpot_ms) == (0.0, 0.0)
