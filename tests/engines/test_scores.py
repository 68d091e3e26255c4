"""What messages are worth, read from a live cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compaction import Budget, SessionManager
from compaction.engines import TransformersEngine
from compaction.engines.scoring import KINDS, REPEAT
from compaction.errors import CannotScore, EngineError
from compaction.policies.scored_eviction import SCORES, ScoredEviction
from compaction.replay import replay
from compaction.store import MemoryLog
from tests.fixtures_models import shared_tiny_engine

Messages = list[dict[str, Any]]


def run(engine: TransformersEngine, messages: Messages, tokens: int = 2) -> None:
    """A turn of conversation "c"."""
    for _ in engine.generate("c", messages, None, max_new_tokens=tokens):
        pass


def held(engine: TransformersEngine) -> list[torch.Tensor]:
    """Copies of all keys and values of conversation "c"."""
    layers = engine._conversations["c"].live.layers
    return [part.clone() for layer in layers for part in (layer.keys, layer.values)]


def test_engine_and_policy_know_the_same_scores() -> None:
    """The policy is importable without torch, so it has a list of its own."""
    assert KINDS == SCORES


@pytest.mark.parametrize("kind", KINDS)
def test_scoring_leaves_the_cache_as_it_was(tiny: TransformersEngine, talk: Messages, kind: str) -> None:
    """Bit for bit, bytes too; asked twice it says the same, and each message has a figure of its own."""
    run(tiny, talk)
    before, weight, ids = held(tiny), tiny.kv_bytes("c"), tiny.cached_ids("c")

    found = [tiny.scores("c", kind, talk, None, limit=1024) for _ in range(2)]

    assert all(torch.equal(a, b) for a, b in zip(before, held(tiny), strict=True))
    assert (tiny.kv_bytes("c"), tiny.cached_ids("c")) == (weight, ids)
    assert found[0] == found[1] and len(set(found[0])) == len(talk)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_cache_does_not_hold_has_no_worth(tiny: TransformersEngine, talk: Messages, kind: str) -> None:
    """Messages appended since, and those behind one that was changed; the figures of the others stay."""
    run(tiny, talk[:5])
    whole = tiny.scores("c", kind, talk[:5], None, limit=1024)

    longer = tiny.scores("c", kind, talk, None, limit=1024)
    edited = tiny.scores("c", kind, [*talk[:2], {"role": "user", "content": "other"}, *talk[3:]], None, limit=1024)

    assert longer == [*whole, None, None, None, None] and None not in whole
    assert edited == [*whole[:2], *[None] * 7]


def test_keydiff_is_what_its_formula_says(tiny: TransformersEngine, talk: Messages) -> None:
    """Minus the cosine between each key and the mean direction, averaged over a message's tokens, layers and heads."""
    run(tiny, talk)
    ids = tiny.template.ids(talk, None)
    with torch.no_grad():
        cache = tiny.model(torch.tensor([list(tiny.cached_ids("c"))]), use_cache=True).past_key_values
    total = torch.zeros(len(tiny.cached_ids("c")))
    for layer in cache.layers:
        directions = torch.nn.functional.normalize(layer.keys[0], dim=-1)
        total -= torch.cosine_similarity(layer.keys[0], directions.mean(1, keepdim=True), dim=-1).sum(0)
    start, expected = 0, []
    for count in range(1, len(talk) + 1):
        end = len(tiny.template.ids(talk[:count], None, generation_prompt=False))
        expected.append(float(total[start:end].mean()))
        start = end

    found = tiny.scores("c", "keydiff", talk, None, limit=1024)

    assert found == pytest.approx(expected, rel=1e-3) and len(ids) > start


def test_repeating_stays_within_the_limit(tiny: TransformersEngine, talk: Messages) -> None:
    """No pass is longer than it allows, whatever the chunks come to; where nothing can be repeated, it says so."""
    run(tiny, talk)
    lengths: list[int] = []
    hook = tiny.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(int(kwargs["position_ids"][0, -1]) + 1), with_kwargs=True
    )
    held = len(tiny.cached_ids("c"))
    try:
        for room in (120, 160, 400):
            tiny.scores("c", "kvzip", talk, None, limit=held + room)
            assert held < max(lengths) <= held + room
            lengths.clear()
        with pytest.raises(CannotScore, match="leave no room to repeat"):
            tiny.scores("c", "kvzip", talk, None, limit=held + 20)
    finally:
        hook.remove()
    assert lengths == []


def test_the_repetition_is_asked_for_as_a_user_would(tiny: TransformersEngine) -> None:
    """In the template's own words, with the beginning of an answer."""
    text = tiny.tokenizer.decode(tiny._scoring._asking())

    assert text.startswith("<|im_start|>user") and REPEAT in text and text.endswith("<|im_start|>assistant\n")


def test_what_cannot_be_scored_is_refused_by_name(tiny: TransformersEngine, talk: Messages) -> None:
    """An unknown kind, an empty cache, another conversation's."""
    with pytest.raises(EngineError, match="the cache holds none of these messages"):
        tiny.scores("c", "keydiff", talk, None, limit=1024)
    run(tiny, talk)
    with pytest.raises(EngineError, match="unknown score 'h2o': use one of expected, keydiff, kvzip"):
        tiny.scores("c", "h2o", talk, None, limit=1024)
    with pytest.raises(EngineError, match="holds none of these"):
        tiny.scores("c", "keydiff", [{"role": "user", "content": "elsewhere"}], None, limit=1024)


@pytest.mark.parametrize("family", ["deepseek_mla", "mistral_sliding", "lfm2_conv"])
def test_layers_that_cannot_be_cut_are_not_scored_by_halves(family: str, talk: Messages) -> None:
    """Latents, windows and states: refused, or scored on the layers that hold every token; never a wrong figure."""
    engine = shared_tiny_engine(family)
    run(engine, talk)
    try:
        if family == "lfm2_conv":
            assert None not in engine.scores("c", "keydiff", talk, None, limit=1024)
        else:
            with pytest.raises(CannotScore):
                engine.scores("c", "keydiff", talk, None, limit=1024)
        with pytest.raises(CannotScore):
            engine.scores("c", "kvzip", talk, None, limit=1024)
    finally:
        engine.close()


def test_of_a_quantized_cache_keys_are_read_and_nothing_is_fed(tiny: TransformersEngine, talk: Messages) -> None:
    """KeyDiff is nearly what it was; what would have to feed tokens is refused, since codes are made once."""
    long = [{"role": m["role"], "content": f"{m['content']} {n}"} for n in range(3) for m in talk]
    run(tiny, long)
    exact = [value or 0.0 for value in tiny.scores("c", "keydiff", long, None, limit=4000)]
    tiny.quantize("c", "k8v4")
    before = held(tiny)

    found = [value or 0.0 for value in tiny.scores("c", "keydiff", long, None, limit=4000)]

    assert found == pytest.approx(exact, rel=5e-3) and found != exact
    assert all(torch.equal(a, b) for a, b in zip(before, held(tiny), strict=True))
    for kind in ("expected", "kvzip"):
        with pytest.raises(CannotScore):
            tiny.scores("c", kind, long, None, limit=4000)


def test_a_fact_among_phrases_stays(smollm2: TransformersEngine) -> None:
    """On SmolLM2, what the conversation cannot do without outlives what is said again and again, old as it is."""
    phrases = ["I see, that makes sense, thank you for telling me.", "Right, thanks a lot for telling me about this."]
    fact = "The vault code is 7731-ZETA and the courier is called Marisol Okonkwo, gate 14."
    log = MemoryLog()
    policy, budget = ScoredEviction("kvzip"), Budget(tokens=420, low=0.25)
    session = SessionManager(engine=smollm2, policy=policy, budget=budget, log=log).session("c")
    for number in range(7):
        said = fact if number == 1 else f"So, what about the weather today? {phrases[number % 2]}"
        session.extend([{"role": "user", "content": said}, {"role": "assistant", "content": phrases[(number + 1) % 2]}])
    session.append({"role": "user", "content": "Anything else?"})
    first = session.generate(max_new_tokens=2)
    session.append({"role": "user", "content": f"And tomorrow? {phrases[0]} {phrases[1]} {phrases[0]}"})

    decision = session.generate(max_new_tokens=2).decision

    assert first.decision is None and decision is not None and decision.rung == 1 and len(decision.spans) > 5
    shown = [entry.render(session.state.history)["content"] for entry in session.entries]
    assert fact in shown and len(shown) < 11
    assert replay(log, ["c"]).count("identical") == 1
