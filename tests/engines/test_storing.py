"""Live caches in narrower storages: bytes promised and measured, errors, and turns that go on."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from compaction.engines import TransformersEngine
from compaction.errors import CannotSplice, EngineError, InvalidInput
from compaction.kv.quantization.layer import QuantizedLayer
from compaction.kv.residency.pool import Pool
from tests.fixtures_models import FAMILIES, shared_tiny_engine, tiny_engine, tiny_model, tiny_tokenizer

Messages = list[dict[str, Any]]
NAMES = ("k8v4", "tq4", "k4v2:sinks=2,window=16", "tqk5v3:window=0")


def long(count: int, start: int = 0) -> Messages:
    """A conversation of `count` messages, some 25 tiny tokens each."""
    return [
        {
            "role": "assistant" if n % 2 else "user",
            "content": f"message {n} says the quick brown fox {n * n}, thank you",
        }
        for n in range(start, start + count)
    ]


def turn(engine: TransformersEngine, messages: Messages, tokens: int = 4) -> Any:
    """A turn of conversation "c"; its result."""
    generation = engine.generate("c", messages, None, max_new_tokens=tokens)
    for _ in generation:
        pass
    return generation.result


def layers(engine: TransformersEngine) -> list[Any]:
    """The cache's layers."""
    return engine._conversations["c"].live.layers


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("messages", [1, 5, 17, 33])
def test_a_cache_never_has_more_bytes_than_promised(tiny: TransformersEngine, name: str, messages: int) -> None:
    """At rest and at the peak of each pass: prefilled in it, converted in place, cropped, decoded token by token."""
    cost = tiny.storage(name)
    for convert_first in (True, False):
        if convert_first:
            tiny.quantize("c", name)
        for count in (messages, messages + 2):
            tiny.quantize("c", name) if not convert_first and count > messages else None
            result = turn(tiny, long(count), 12)
            tokens = result.usage.peak_tokens
            if convert_first or count > messages:
                assert result.usage.kv_bytes == tiny.kv_bytes("c") <= cost.bytes(tokens)
                assert result.usage.peak_kv_bytes <= cost.bytes(tokens) + max(layer.nbytes() for layer in layers(tiny))
            tiny.forget_reply("c")
        tiny.release("c")


def test_a_token_costs_what_its_codes_do(tiny: TransformersEngine) -> None:
    """The promise is no guess: far into a conversation, measured bytes a token are nearly it."""
    cost = tiny.storage("k8v4:window=8")
    tiny.quantize("c", "k8v4:window=8")
    turn(tiny, long(9), 2)
    few, tokens = tiny.kv_bytes("c"), len(tiny.cached_ids("c"))
    turn(tiny, long(35), 2)

    per_token = (tiny.kv_bytes("c") - few) / (len(tiny.cached_ids("c")) - tokens)

    own = tiny.kv_bytes_per_token
    shared = own / 4 * 9 / 8 + 3 / 2 * (4 + 4 * 16)  # one layer of four decoded, cosines and sines
    assert cost.per_token - shared - 2 <= per_token <= cost.per_token < own / 2 + shared


def test_converting_keeps_the_conversation_and_says_what_it_cost(tiny: TransformersEngine) -> None:
    """Ids stay, nothing is prefilled again, bytes drop, and the errors are those of the codes."""
    turn(tiny, long(30))
    ids, before = tiny.cached_ids("c"), tiny.kv_bytes("c")
    exact = [layer.key_slice(0, layer.held).clone() for layer in layers(tiny)]

    done = tiny.quantize("c", "k8v4")

    assert done is not None and done.key_error is not None and done.value_error is not None
    assert (done.storage, done.bytes_before, done.bytes_after) == (
        "k8v4",
        before,
        tiny.kv_bytes("c"),
    )
    assert tiny.cached_ids("c") == ids and done.bytes_after < before / 1.8
    assert all(isinstance(layer, QuantizedLayer) for layer in layers(tiny))
    found = [layer.key_slice(0, layer.held) for layer in layers(tiny)]
    coded = slice(4, 4 + layers(tiny)[0].coded)
    error = sum(float((a - b)[:, :, coded].square().sum()) for a, b in zip(found, exact, strict=True))
    norm = sum(float(b[:, :, coded].square().sum()) for b in exact)
    assert done.key_error == pytest.approx((error / norm) ** 0.5, rel=1e-3) and 0 < done.key_error < 0.01
    assert 0.01 < done.value_error < 0.15
    assert tiny.quantize("c", "k8v4") is None
    usage = turn(tiny, long(31)).usage
    assert usage.prefilled < 80 and usage.reused > len(ids) - 40


@pytest.mark.parametrize(("name", "most"), [("k8v8", 1e-4), ("k8v4", 1e-2), ("k2v2", 10)])
def test_what_is_said_hardly_changes(tiny: TransformersEngine, name: str, most: float) -> None:
    """KL of the next token's distribution, full cache to this one: by name; measuring it changes nothing."""
    tiny.quantize("c", name)
    turn(tiny, long(30), 1)
    turn(tiny, long(31), 2)
    ids, weight = tiny.cached_ids("c"), tiny.kv_bytes("c")
    live = tiny._conversations["c"].logits
    full = tiny.logits(long(31)).double().log_softmax(-1)

    found = tiny.divergence("c")

    assert live is not None and found.tokens == 1 and 0 < found.kl < most
    assert found.kl == pytest.approx(
        float((full.exp() * (full - live.double().log_softmax(-1))).sum()), rel=1e-3, abs=1e-9
    )
    assert (tiny.cached_ids("c"), tiny.kv_bytes("c")) == (ids, weight)


def test_nothing_is_said_of_a_cache_that_has_not_answered_yet(tiny: TransformersEngine) -> None:
    """Just after it was converted there are no logits of its own, and it cannot be asked and put back."""
    turn(tiny, long(20))
    tiny.quantize("c", "k8v4")

    with pytest.raises(CannotSplice, match="quantized layers"):
        tiny.divergence("c")


def test_from_one_storage_to_another_it_is_prefilled_again(tiny: TransformersEngine) -> None:
    """Codes are made once: what was coded is dropped, to a narrower storage or back to the model's own."""
    turn(tiny, long(20))
    tiny.quantize("c", "k8v4")

    for name in ("k4v2", "", "k8v4"):
        done = tiny.quantize("c", name)
        emptied = name != "k8v4"
        assert done is not None and (done.storage, done.key_error is None) == (name, emptied)
        assert (tiny.cached_ids("c") == ()) == emptied
        usage = turn(tiny, long(20)).usage
        assert (usage.why == "first") == emptied
        assert isinstance(layers(tiny)[0], QuantizedLayer) == bool(name)
        tiny.forget_reply("c")


def test_one_storage_under_two_spellings_is_one(tiny: TransformersEngine) -> None:
    """Nothing is dropped for an upper-case letter or an option that is the default."""
    turn(tiny, long(30))
    tiny.quantize("c", "k8v4")
    ids = tiny.cached_ids("c")

    assert tiny.quantize("c", "K8V4:window=64") is None and tiny.cached_ids("c") == ids


def test_a_conversation_that_is_not_there_yet_begins_so(tiny: TransformersEngine) -> None:
    """After a resume the storage is told before the first prefill; "" of nobody is nothing to do."""
    assert tiny.quantize("c", "") is None
    done = tiny.quantize("c", "k8v4")

    turn(tiny, long(20))

    assert done is not None and (done.bytes_before, done.bytes_after) == (0, 0)
    assert isinstance(layers(tiny)[0], QuantizedLayer) and layers(tiny)[0].coded > 200
    tiny.release("c")
    turn(tiny, long(3))
    assert not isinstance(layers(tiny)[0], QuantizedLayer)


def test_what_makes_no_sense_is_refused(tiny: TransformersEngine) -> None:
    """A name that is none; a reply that is still running; the cache is as it was."""
    with pytest.raises(InvalidInput, match="'k9' is unknown"):
        tiny.storage("k9")
    with pytest.raises(InvalidInput):
        tiny.quantize("c", "half")
    generation = tiny.generate("c", long(3), None, max_new_tokens=8)
    with pytest.raises(EngineError, match="still generating"):
        tiny.quantize("c", "k8v4")
    generation.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_its_promise_or_says_why_not(family: str) -> None:
    """Partial rotation, learned positions, latents, windows and states: what is promised holds, and turns go on."""
    engine = shared_tiny_engine(family)
    try:
        try:
            cost = engine.storage("k8v4")
        except EngineError as error:
            assert family == "mistral_sliding" and "no layer" in str(error)
            return
        turn(engine, long(20))
        done = engine.quantize("c", "k8v4")
        usage = turn(engine, long(21)).usage
        assert done is not None and engine._conversations["c"].live.storage == "k8v4"
        state = sum(layer.state_bytes or 0 for layer in engine.geometry.layers)
        assert (usage.kv_bytes or 0) <= cost.bytes(usage.peak_tokens) + state
        assert usage.completion_tokens >= 1
    finally:
        engine.close()


def test_a_quantized_cache_is_parked_and_comes_back_quantized() -> None:
    """Under a pool it says what it says without one, at its own price, and nothing is prefilled again."""
    said: list[tuple[Any, ...]] = []
    for pooled in (True, False):
        engine = tiny_engine("llama")
        pool = engine.use_pool(Pool(1_240_000, 4_000_000)) if pooled else None
        turn(engine, long(20))
        engine.quantize("c", "k8v4")
        turn(engine, long(21))
        for _ in engine.generate("other", long(37), None, max_new_tokens=2):
            pass
        if pool is not None:
            assert (pool.where("c"), engine.kv_bytes("c")) == ("host", 0)
        result = turn(engine, long(22))
        said.append((result.ids, result.usage.reused, result.usage.kv_bytes))
        assert isinstance(layers(engine)[0], QuantizedLayer) and layers(engine)[0].coded > 400
        engine.close()

    assert said[0] == said[1] and said[0][1] > 500


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiling_engine_reads_codes_by_compiled_code(tiny: TransformersEngine) -> None:
    """Whether the cache was converted or began so: the same replies, from layers that are read compiled."""
    fresh = tiny_model.__wrapped__("llama")  # the shared one may have hooks left of hidden states once asked for
    compiling = TransformersEngine(fresh, tokenizer=tiny_tokenizer(), decode="compiled")
    assert compiling.step is not None and (compiling.step.kind, compiling.step.refusal) == ("compiled", "")
    for begins_so in (False, True):
        replies = []
        for engine in (tiny, compiling):
            if not begins_so:
                turn(engine, long(30))
            engine.quantize("c", "k8v4:window=8")
            replies.append(turn(engine, long(31), 8).text)
            assert [layer.compiled for layer in layers(engine)] == [engine is compiling] * len(layers(engine))
            engine.release("c")
        assert replies[0] == replies[1]
