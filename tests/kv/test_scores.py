"""Scores of slots: what naive code computes from the model's own attention weights, and masks that fit a budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cosine_similarity
from transformers import DynamicCache

from compaction.engines.forward import Forward
from compaction.errors import CannotScore, EngineError, InvalidInput
from compaction.kv.cache import ArenaCache
from compaction.kv.probe import probe
from compaction.kv.rope import rotate
from compaction.kv.scoring import (
    Pool,
    Scores,
    expected_attention,
    keep_masks,
    keydiff,
    knorm,
    query_statistics,
    random_scores,
    repeat_scores,
    span_scores,
    streaming,
)
from tests.fixtures_models import tiny_model
from tests.kv.architectures import model_of

IDS = torch.randint(3, 60, (50,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPT = [7, 8, 9]
POOLS: tuple[Pool, ...] = ("model", "layer", "head")


def full(model: Any, **options: Any) -> ArenaCache:
    """The text in arenas."""
    cache = ArenaCache(model.config, **options)
    Forward(model)(cache, IDS, 0)
    return cache


def content(cache: ArenaCache) -> list[torch.Tensor]:
    """Copies of everything the arenas show."""
    return [t.clone() for a in cache.arenas for t in (a.key_slice(0, a.held), a.value_slice(0, a.held))]


def eager_attentions(name: str, tokens: list[int]) -> list[torch.Tensor]:
    """The model's own attention weights by transformers' eager path, `[heads, positions, positions]` by layer."""
    model = model_of(name, "float32")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(input_ids=torch.tensor([tokens]), output_attentions=True)
    model.set_attn_implementation("sdpa")  # models of a name share their config
    return [weights[0] for weights in out.attentions]


@pytest.mark.parametrize("name", ["llama", "qwen2, MQA", "qwen3", "gpt2", "gpt-j", "phi", "cohere", "gemma3, hybrid"])
def test_repeat_scores_are_the_models_own_weights(name: str) -> None:
    """The largest weight that eager attention gives a slot while prompt and text follow, by head."""
    model = model_of(name, "float32")
    weights = eager_attentions(name, [*IDS, *PROMPT, *IDS])

    scores = repeat_scores(model, full(model), IDS, position=len(IDS), prompt=PROMPT).most

    scored = [(layer, whole) for layer, whole in zip(scores, weights, strict=True) if layer is not None]
    assert scored
    for layer, whole in scored:
        expected = whole[:, len(IDS) :, : len(IDS)].amax(1).view(layer.shape[0], -1, len(IDS)).amax(1)
        torch.testing.assert_close(layer, expected, atol=1e-5, rtol=1e-4)


def test_later_chunks_are_led_in_by_the_last_ids() -> None:
    """Each chunk is repeated behind the whole text by itself, and the best of all counts."""
    model = model_of("llama", "float32")
    expected: torch.Tensor | None = None
    for start, end in ((0, 20), (20, 40), (40, 50)):
        tokens = [*IDS, *PROMPT, *IDS[max(0, start - 8) : start], *IDS[start:end]]
        part = eager_attentions("llama", tokens)[2][:, len(IDS) :, : len(IDS)].amax(1).view(2, -1, len(IDS)).amax(1)
        expected = part if expected is None else torch.maximum(expected, part)

    scores = repeat_scores(model, full(model), IDS, position=len(IDS), prompt=PROMPT, chunk=20).most

    assert scores[2] is not None and expected is not None
    torch.testing.assert_close(scores[2], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("name", "projection"), [("llama", "o_proj"), ("qwen2, MQA", "o_proj"), ("gpt2", "c_proj")])
def test_error_is_what_a_slot_adds_to_the_stream(name: str, projection: str) -> None:
    """Squared weight, value through the head's output projection, relative to what enters the layer: query by query."""
    model = model_of(name, "float32")
    whole, cache = [*IDS, *PROMPT, *IDS], full(model)
    weights = eager_attentions(name, whole)
    with torch.no_grad():
        stream = model(input_ids=torch.tensor([whole]), output_hidden_states=True).hidden_states
    outputs = [getattr(m, projection) for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, projection)]
    outputs = [m for m in outputs if m.weight.shape == (64, 64)]  # GPT-2's MLP has a c_proj of its own

    scores = repeat_scores(model, cache, IDS, position=len(IDS), prompt=PROMPT).error

    for index, layer in enumerate(cache.arenas):
        found = scores[index]
        assert found is not None and layer.values is not None
        new = slice(len(IDS), None)
        inverse = (1 / stream[index][0, new].double().norm(dim=-1) ** 2).mean()
        size, group = layer.values.shape[3], 4 // layer.values.shape[1]
        expected = torch.zeros_like(found, dtype=torch.float64)
        for head in range(4):
            alone = torch.zeros(len(IDS), 4, size)
            alone[:, head] = layer.values[0, head // group]
            with torch.no_grad():
                added = outputs[index](alone.flatten(1)) - outputs[index](torch.zeros(1, 4 * size))
            squared = weights[index][head, new, : len(IDS)].double() ** 2
            expected[head // group] += squared.mean(0) * added.double().norm(dim=-1) ** 2 * inverse
        torch.testing.assert_close(found.double(), expected, atol=1e-8, rtol=1e-3)


@pytest.mark.parametrize("name", ["llama", "smollm3", "phi"])
def test_expected_attention_is_the_formula_over_the_models_own_queries(name: str) -> None:
    """Mean and covariance of queries before rotation, turned by each coming position, times the values' norm."""
    model, position, sample, future = model_of(name, "float32"), len(IDS), 30, 7
    cache, plan = full(model), probe(model)
    queries: dict[int, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(
            lambda _m, _i, out, at=module_name: queries.__setitem__(int(at.split(".")[2]), out[0])
        )
        for module_name, module in model.named_modules()
        if module_name.endswith("q_proj")
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([IDS]))
    for hook in hooks:
        hook.remove()

    statistics = query_statistics(model, cache, IDS, plan, position=position, sample=sample)
    scores = expected_attention(cache, statistics, position=position, future=future)
    plain = expected_attention(cache, statistics, position=position, future=future, covariance=False)

    for index, layer in enumerate(cache.arenas):
        found, rough, rotation = scores[index], plain[index], plan.layers[index].of("keys")
        assert found is not None and rough is not None and layer.keys is not None and layer.values is not None
        heads = queries[index].view(len(IDS), 4, 16).transpose(0, 1)[:, -sample:].double()
        parts, means = [], []
        for head in range(4):
            rows, keys = heads[head], layer.keys[0, head // 2].double()
            mean, covariance = rows.mean(0), torch.cov(rows.T, correction=0)
            if rotation is not None:
                unit = torch.eye(16).double()
                turn = torch.stack([rotate(unit, position + at, rotation) for at in range(future)]).mean(0)
                mean, covariance = mean @ turn, turn.T @ covariance @ turn
            logits = torch.stack([k @ mean / 4 + k @ covariance @ k / 32 for k in keys])
            parts.append(torch.softmax(logits, 0))
            means.append(torch.softmax(torch.stack([k @ mean / 4 for k in keys]), 0))
        for ours, naive in ((found, parts), (rough, means)):
            expected = torch.stack(naive).view(2, 2, -1).mean(1) * layer.values[0].double().norm(dim=-1)
            torch.testing.assert_close(ours.double(), expected, atol=1e-6, rtol=1e-4)


def test_scores_from_keys_are_the_formulas() -> None:
    """KeyDiff and the norm, slot by slot."""
    model = tiny_model("llama")
    cache = full(model)
    differences, norms = keydiff(cache, len(IDS)), knorm(cache, len(IDS))
    for index, layer in enumerate(cache.arenas):
        difference, norm = differences[index], norms[index]
        assert layer.keys is not None and difference is not None and norm is not None
        for head, keys in enumerate(layer.keys[0]):
            mean = torch.stack([key / key.norm() for key in keys]).mean(0)
            expected = torch.stack([-cosine_similarity(key, mean, dim=0) for key in keys])
            torch.testing.assert_close(difference[head], expected)
            torch.testing.assert_close(norm[head], -keys.norm(dim=-1))


@pytest.mark.parametrize("name", ["llama", "gemma3, hybrid"])
def test_scoring_leaves_the_cache_as_it_was(name: str) -> None:
    """Bit for bit, lengths, allocations and window included; and the next logits are those of a cache nobody scored."""
    model = model_of(name, "float32")
    cache, untouched, plan, forward = full(model), full(model), probe(model), Forward(model)
    before, sizes = content(cache), [(layer.get_seq_length(), layer.nbytes()) for layer in cache.arenas]

    repeat_scores(model, cache, IDS, position=len(IDS), prompt=PROMPT, chunk=30)
    if name == "llama":
        query_statistics(model, cache, IDS, plan, position=len(IDS))
    keydiff(cache, len(IDS))

    assert all(torch.equal(a, b) for a, b in zip(before, content(cache), strict=True))
    assert sizes == [(layer.get_seq_length(), layer.nbytes()) for layer in cache.arenas]
    assert torch.equal(forward(cache, [5], len(IDS)), forward(untouched, [5], len(IDS)))


def test_a_pass_that_fails_leaves_the_cache_as_it_was() -> None:
    """Here an arena without room for the repetition."""
    model = tiny_model("llama")
    cache = full(model, capacity=60)
    before = content(cache)

    with pytest.raises(EngineError, match="full"):
        repeat_scores(model, cache, IDS, position=len(IDS))
    assert all(torch.equal(a, b) for a, b in zip(before, content(cache), strict=True))
    assert all(layer is not None for layer in repeat_scores(model, cache, IDS, position=len(IDS), chunk=2).most)


def test_what_cannot_be_scored_is_refused_by_name() -> None:
    """Another attention, keywords that do not arrive, latents, states, windows only, other slots, unknown positions."""
    for name, reason in (
        ("bloom", "Bloom"),
        ("stablelm", "StableLm"),
        ("deepseek v3, MLA", "latent"),
        ("mistral, sliding", "no layer"),
        ("lfm2, convolution", "taken out"),
    ):
        model = model_of(name, "float32")
        with pytest.raises(CannotScore, match=reason):
            repeat_scores(model, full(model), IDS, position=len(IDS))
    learned = model_of("gpt2", "float32")
    with pytest.raises(CannotScore, match="layer 0"):
        query_statistics(learned, full(learned), IDS, probe(learned), position=len(IDS))
    hybrid = model_of("gemma3, hybrid", "float32")
    with pytest.raises(CannotScore, match="go back"):
        query_statistics(hybrid, full(hybrid), IDS, probe(hybrid), position=len(IDS))
    with pytest.raises(CannotScore, match="not 49"):
        keydiff(full(tiny_model("llama")), 49)
    with pytest.raises(CannotScore, match="no layer"):
        keydiff(DynamicCache(config=learned.config), 10)


def made(layers: int, heads: int, slots: int, seed: int) -> Scores:
    """Random scores with many ties, one layer without any."""
    generator = torch.Generator().manual_seed(seed)
    scores: Scores = [torch.randint(0, 9, (heads, slots), generator=generator).float() for _ in range(layers)]
    return [*scores, None]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(20, 60),
    st.floats(0.3, 1),
    st.sampled_from(POOLS),
    st.floats(0, 1),
    st.integers(0, 99),
)
def test_masks_keep_the_budget_exactly(
    layers: int, heads: int, slots: int, keep: float, pool: Any, safeguard: float, seed: int
) -> None:
    """Over the pool, protected slots and every head's own share included; what is kept is worth no less."""
    scores = made(layers, heads, slots, seed)
    masks = keep_masks(scores, keep, pool=pool, safeguard=safeguard, sinks=2, recent=3)
    share = int(keep * slots)
    kept = torch.stack([mask for mask in masks if mask is not None])
    pools = {"model": kept.flatten()[None], "layer": kept.flatten(1), "head": kept.flatten(0, 1)}[pool]

    assert masks[-1] is None and kept.shape == (layers, heads, slots)
    assert pools.sum(-1).tolist() == [share * pools.shape[1] // slots] * pools.shape[0]
    assert bool(kept[..., :2].all() and kept[..., -3:].all())
    assert int(kept.sum(-1).min()) >= int(safeguard * share)
    if pool == "head":
        values = torch.stack([layer for layer in scores if layer is not None])[..., 2:-3]
        inner = kept[..., 2:-3]
        assert bool((values.masked_fill(~inner, 9).amin(-1) >= values.masked_fill(inner, -1).amax(-1)).all())


def test_ties_go_to_the_older_slot() -> None:
    """And differences that another order of summation makes are no differences."""
    scores: Scores = [torch.full((2, 10), 1 / 3) * (1 + 1e-7 * torch.arange(10))]

    for pool in POOLS:
        masks = keep_masks(scores, 0.5, sinks=0, recent=0, pool=pool)
        assert masks[0] is not None and masks[0].tolist() == [[True] * 5 + [False] * 5] * 2


@pytest.mark.parametrize("options", [{"keep": 0.0}, {"keep": 1.1}, {"keep": 0.2}, {"keep": 0.5, "safeguard": 2.0}])
def test_budgets_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    """Nothing at all, more than all, less than what is protected, a safeguard beyond an even share."""
    with pytest.raises(InvalidInput):
        keep_masks([torch.rand(2, 100)], **options, sinks=4, recent=32)


def test_span_scores_sum_over_slots_heads_and_layers() -> None:
    """One figure a span, whatever order it is asked in."""
    scores: Scores = [torch.rand(2, 12), None, torch.rand(3, 12)]
    ranges = [(0, 5), (5, 6), (6, 12)]
    expected = [sum(float(layer[:, a:b].sum()) for layer in scores if layer is not None) for a, b in ranges]

    assert span_scores(scores, ranges) == pytest.approx(expected, rel=1e-4)
    assert span_scores(scores, ranges[::-1]) == span_scores(scores, ranges)[::-1]
    assert span_scores(scores, []) == []
    for wrong in ([(0, 13)], [(3, 3)], [(-1, 2)]):
        with pytest.raises(InvalidInput, match="ranges"):
            span_scores(scores, wrong)


def test_everything_is_the_same_twice() -> None:
    """Scores, masks and spans, whatever the number of threads."""
    model = tiny_model("llama")
    threads, found = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        cache = full(model)
        for scores in (
            repeat_scores(model, cache, IDS, position=len(IDS), prompt=PROMPT).most,
            repeat_scores(model, cache, IDS, position=len(IDS)).error,
            expected_attention(cache, query_statistics(model, cache, IDS, probe(model), position=50), position=50),
            random_scores(cache, len(IDS), seed=3),
            streaming(cache, len(IDS)),
        ):
            masks = keep_masks(scores, 0.5, recent=8)
            found.append(
                ([mask.tolist() for mask in masks if mask is not None], span_scores(scores, [(0, 20), (20, 50)]))
            )
    torch.set_num_threads(threads)

    assert found[:5] == found[5:]
