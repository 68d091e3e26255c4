"""The quality harness: a full cache costs nothing, a smaller one what it costs, and pairs are compared in pairs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from compaction.kv.cache import ArenaCache
from compaction.kv.ragged import RaggedCache
from compaction.kv.scoring import keep_masks, keydiff
from tests.benchmarks.bench_eviction import kept_slots
from tests.benchmarks.documents import DATA, Document, documents, passkeys
from tests.benchmarks.quality import Harness, Measured, paired, streaming
from tests.fixtures_models import shared_smollm2_engine, tiny_model


def document(seed: int, answer: int = 0) -> Document:
    """48 random tokens and 9 more."""
    ids = torch.randint(3, 300, (57,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Document(f"random {seed}", tuple(ids[:48]), tuple(ids[48:]), ((0, 48),), ((0, 20), (20, 48)), answer)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """On a tiny model, with a scratch folder of its own."""
    return Harness(tiny_model("llama"), tokenizer=object(), scratch=tmp_path)


def test_kl_is_that_of_the_models_own_distributions(harness: Harness) -> None:
    """By hand, from one forward pass over the whole text and one in which the evicted slots are masked."""
    text, keep = document(0), [0, 1, *range(24, 48)]
    ids = torch.tensor([[*text.context, *text.tail]])
    mask = torch.ones(57, 57, dtype=torch.bool).tril()
    mask[48:, [slot for slot in range(48) if slot not in keep]] = False
    with torch.no_grad():
        full, ours = (
            torch.log_softmax(harness.model(input_ids=ids, **options).logits[0, 48:].double(), -1)
            for options in ({}, {"attention_mask": mask[None, None]})
        )
    expected = float((full.exp() * (full - ours)).sum(-1).mean())

    assert harness.kl(text, streaming(26, sinks=2)) == pytest.approx(expected, rel=1e-3)
    assert expected > 1e-4


def test_a_full_cache_costs_nothing_in_any_shape(harness: Harness) -> None:
    """Arenas, transformers' own layers, and ragged heads that dropped nothing."""

    def ragged(reference: Any) -> Any:
        cache = RaggedCache.of(reference.arena(), [torch.ones(2, 48, dtype=torch.bool)] * 4)
        return cache, cache.attention(harness.model)

    builds = (
        lambda reference: reference.arena(),
        lambda reference: reference.fill(DynamicCache(config=reference.config)),
        ragged,
    )
    assert all(abs(harness.kl(document(1), build)) < 1e-6 for build in builds)


def test_references_are_computed_once_and_belong_to_their_weights(harness: Harness, tmp_path: Path) -> None:
    """A second harness reads the file of the first; another model has files of its own."""
    first = harness.reference(document(2))
    files = sorted(tmp_path.iterdir())
    again = Harness(tiny_model("llama"), tokenizer=object(), scratch=tmp_path).reference(document(2))
    Harness(tiny_model("qwen3"), tokenizer=object(), scratch=tmp_path).reference(document(2))

    assert torch.equal(first.log_probs, again.log_probs) and torch.equal(first.keys[1], again.keys[1])
    assert len(files) == 1 and len(list(tmp_path.iterdir())) == 2


def test_an_answer_is_found_where_each_token_comes_first(harness: Harness) -> None:
    """Rank and log-probability are those of the tokens in front of which they are predicted."""
    text = document(3)
    full = harness.reference(text).log_probs
    greedy = [int(full[row].argmax()) for row in range(5, 8)]
    asked = [Document(text.name, text.context, (*text.tail[:6], *answer), text.messages, text.lines, 3) for answer in
             (text.tail[6:], (greedy[0], text.tail[7], text.tail[8]))]  # fmt: skip

    first, second = (harness.measure("full", [each], lambda reference: reference.arena()) for each in asked)

    assert second.rank[0] <= first.rank[0] and first.found == [False]
    expected = sum(float(full[row][token]) for row, token in zip(range(5, 8), text.tail[6:], strict=True)) / 3
    assert first.log_prob[0] == pytest.approx(expected, rel=1e-4)


def test_pairs_are_compared_document_by_document() -> None:
    """The error is that of the differences, not of the two means."""
    a, b = [1.0, 5.0, 9.0, 20.0], [1.5, 5.7, 9.4, 20.8]
    found = paired(a, b)

    assert found.difference == pytest.approx(-0.6)
    assert found.error == pytest.approx(math.sqrt(sum((x - 0.6) ** 2 for x in (0.5, 0.7, 0.4, 0.8)) / 3 / 4))
    assert found.errors == pytest.approx(found.difference / found.error)
    assert Measured("x", kl=a).mean == 8.75


def test_spans_go_whole_until_the_budget_is_met() -> None:
    """The cheapest per token first; the first and the last span stay."""
    worth = torch.zeros(1, 100)
    for start, value in ((0, 0.0), (20, 5.0), (35, 1.0), (40, 3.0), (80, 0.0)):
        worth[:, start:] = value
    ranges = [(0, 20), (20, 35), (35, 40), (40, 60), (60, 80), (80, 100)]

    kept = [kept_slots([worth], ranges, keep) for keep in (0.96, 0.8, 0.7)]

    gone = [sorted({*range(100)} - {*slots}) for slots in kept]
    assert gone == [[*range(35, 40)], [*range(35, 60)], [*range(20, 60)]]


@pytest.mark.skipif(not DATA.exists(), reason="no recorded conversations beside the repository")
@pytest.mark.model
def test_documents_are_real_text_in_parts() -> None:
    """Always the same ones, of all sources, their parts complete; each key stands twice in its sentence."""
    tokenizer = shared_smollm2_engine("float32").tokenizer
    texts, hidden = documents(tokenizer, 12), passkeys(tokenizer, 2)

    assert texts == documents(tokenizer, 12) and len({text.context for text in texts}) == 12
    assert len({text.name.split()[0] for text in texts}) == 6
    for each in (*texts, *hidden):
        for ranges in (each.messages, each.lines):
            assert [slot for start, end in ranges for slot in range(start, end)] == [*range(1024)]
        assert max(end - start for start, end in each.lines) <= 64
    for each in hidden:
        key = tokenizer.decode(each.tail[-each.answer :])
        assert len(key) == 5 and tokenizer.decode(each.context).count(key) == 2


def test_keydiff_costs_less_than_nothing_kept(harness: Harness) -> None:
    """A sanity check of the whole path: more slots kept, less lost."""

    def build(keep: float) -> Any:
        def make(reference: Any) -> Any:
            arenas: ArenaCache = reference.arena()
            masks = keep_masks(keydiff(arenas, 48), keep, pool="head", sinks=1, recent=2)
            cache = RaggedCache.of(arenas, masks)
            return cache, cache.attention(harness.model)

        return make

    costs = [sum(harness.kl(document(seed), build(keep)) for seed in range(4)) for keep in (0.95, 0.6, 0.1)]
    assert costs == sorted(costs)
