"""Heads that keep slots of their own: masked attention's logits, and bytes that are really gone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from compaction.engines.forward import Forward
from compaction.errors import CannotSplice, EngineError, InvalidInput
from compaction.kv.attention import AttentionSwitch
from compaction.kv.cache import ArenaCache
from compaction.kv.measure import storage_bytes
from compaction.kv.ragged import RaggedCache, RaggedLayer
from compaction.kv.slots import slots_of
from tests.fixtures_models import tiny_model
from tests.kv.architectures import model_of

# GQA, MQA, MHA, query norms, partial and interleaved rotation, learned positions, no rotation in some layers, windows,
# chunks, states and experts beside full attention.
ARCHITECTURES = (
    "llama",
    "qwen2, MQA",
    "qwen3 moe",
    "gemma",
    "gemma3, hybrid",
    "gpt2",
    "gpt bigcode, MQA",
    "gpt-j",
    "phi",
    "cohere",
    "olmo2",
    "stablelm",
    "granite",
    "smollm3",
    "glm4",
    "llama4, chunked",
    "lfm2, convolution",
    "qwen3-next, linear",
)
CONTEXT = 40
# What the reference masks now, by layer: not every model hands its attention keywords of the caller's.
KEEP: dict[int, torch.Tensor | None] = {}


def _masked(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    """The reference: SDPA over the full cache, each head's dropped slots masked."""
    keep = KEEP.get(module.layer_idx)
    if keep is not None:
        count, slots, group = query.shape[2], key.shape[2], query.shape[1] // keep.shape[0]
        sees = torch.ones(count, slots, dtype=torch.bool).tril(slots - count).repeat(query.shape[1], 1, 1)
        sees[:, :, : keep.shape[1]] &= keep.repeat_interleave(group, 0)[:, None]
        attention_mask = sees[None]
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


ALL_ATTENTION_FUNCTIONS.register("test_masked_by_head", _masked)
ALL_MASK_ATTENTION_FUNCTIONS.register("test_masked_by_head", sdpa_mask)


def ids(count: int, seed: int = 0) -> list[int]:
    """Token ids below 60."""
    return torch.randint(3, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def some_slots(cache: Any, seed: int = 0) -> list[torch.Tensor | None]:
    """About half of the slots of each head, never the same two; layers that are no arena of all slots stay."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.rand(layer.keys.shape[1], layer.held, generator=generator) < 0.5
        if type(layer).__name__ == "ArenaLayer"
        else None
        for layer in cache.layers
    ]


def full(model: Any) -> ArenaCache:
    """The context in arenas."""
    cache = ArenaCache(model.config)
    Forward(model)(cache, ids(CONTEXT), 0)
    return cache


@contextmanager
def masked(model: Any, keep: Sequence[torch.Tensor | None]) -> Iterator[Any]:
    """A forward function over full caches that masks each head's dropped slots."""

    def forward(cache: Any, tokens: list[int], start: int) -> torch.Tensor:
        positions = torch.arange(start, start + len(tokens))[None]
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), cache=cache, position_ids=positions).logits
        return logits[0, -1]

    KEEP.update(enumerate(keep))
    with torch.no_grad(), AttentionSwitch(model, "test_masked_by_head"):
        yield forward
    KEEP.clear()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_attention_masked_by_head(name: str) -> None:
    """One token, several, one again, behind heads of different lengths, in float32."""
    model = model_of(name, "float32")
    forward, reference = Forward(model), DynamicCache(config=model.config)
    forward(reference, ids(CONTEXT), 0)
    arenas = full(model)
    keep = some_slots(arenas)
    ours, at, worst = RaggedCache.of(arenas, keep), CONTEXT, 0.0
    for count in (1, 3, 1, 5):
        tokens = ids(count, seed=at)
        with masked(model, keep) as by_mask:
            expected = by_mask(reference, tokens, at)
        with ours.attention(model):
            worst = max(worst, float((forward(ours, tokens, at) - expected).abs().max()))
        at += count

    assert len({count for layer in ours.ragged for count in layer.held()}) > 1 and worst <= 1e-5


def test_half_precision_stays_near_masked_attention() -> None:
    """bfloat16 keys, float32 softmax: the difference is that of the number format."""
    model = model_of("llama", "bfloat16")
    forward, reference, arenas = Forward(model), DynamicCache(config=model.config), full(model)
    forward(reference, ids(CONTEXT), 0)
    keep = some_slots(arenas)
    ours = RaggedCache.of(arenas, keep)
    with masked(model, keep) as by_mask:
        expected = by_mask(reference, [7], CONTEXT)
    with ours.attention(model):
        found = forward(ours, [7], CONTEXT)

    assert float((found - expected).abs().max()) <= 2e-2 * float(expected.abs().max())


def test_bytes_go_down_by_what_was_dropped() -> None:
    """From storages: the kept keys and values, four bytes a kept slot for its position, nothing else."""
    arenas = full(tiny_model("llama"))
    before, keep = arenas.logical_nbytes(), some_slots(arenas)
    kept = sum(int(mask.sum()) for mask in keep if mask is not None)
    of_a_slot = 2 * 16 * 4

    ours = RaggedCache.of(arenas, keep)

    assert before == 4 * 2 * CONTEXT * of_a_slot
    assert storage_bytes(ours) == ours.nbytes() == ours.logical_nbytes() == kept * (of_a_slot + 4)
    assert storage_bytes(arenas) == 0


def test_kept_slots_are_bit_equal_and_at_their_positions() -> None:
    """What a head keeps is what stood in the cache, at the position it had."""
    model = tiny_model("llama")
    arenas, keep = full(model), some_slots(full(model))
    keys = [layer.key_slice(0, CONTEXT)[0].clone() for layer in arenas.arenas]
    positions = [*range(10), *range(20, 20 + CONTEXT - 10)]

    ours = RaggedCache.of(arenas, keep, positions)

    for layer, whole, mask in zip(ours.ragged, keys, keep, strict=True):
        assert mask is not None
        for head in range(2):
            assert torch.equal(layer.keys_of[head], whole[head][mask[head]])
            assert layer.positions_of[head].tolist() == [p for p, k in zip(positions, mask[head], strict=True) if k]


def test_later_tokens_can_be_taken_back_and_earlier_ones_cannot() -> None:
    """A cropped reply leaves the logits as they were, bit for bit; the cut heads are beyond reach."""
    model = tiny_model("llama")
    arenas, forward = full(model), Forward(model)
    ours = RaggedCache.of(arenas, some_slots(arenas))
    with ours.attention(model):
        first = forward(ours, [5, 6], CONTEXT)
        ours.crop(-2)
        again = forward(ours, [5, 6], CONTEXT)

    assert torch.equal(first, again)
    with pytest.raises(EngineError, match="3 tokens cannot be taken back: 2 came after"):
        ours.crop(-3)


def test_heads_can_be_cut_again() -> None:
    """A second compression, over what was kept and what came since, equals one mask over the full text."""
    model = tiny_model("llama")
    forward, reference, arenas = Forward(model), DynamicCache(config=model.config), full(model)
    forward(reference, ids(CONTEXT), 0)
    keep = some_slots(arenas)
    ours = RaggedCache.of(arenas, keep)
    with masked(model, keep) as by_mask, torch.no_grad():
        by_mask(reference, [5, 6, 7], CONTEXT)
    with ours.attention(model):
        forward(ours, [5, 6, 7], CONTEXT)
    generator, again, both = torch.Generator().manual_seed(9), [], []
    for layer, mask in zip(ours.ragged, keep, strict=True):
        assert mask is not None
        chosen = [torch.rand(count, generator=generator) < 0.6 for count in layer.held()]
        whole = torch.cat([mask, torch.ones(2, 3, dtype=torch.bool)], 1)
        for head, kept in enumerate(chosen):
            whole[head, whole[head].nonzero()[:, 0]] = kept
        again.append(chosen)
        both.append(whole)

    with pytest.raises(InvalidInput, match="give their positions"):
        RaggedCache.of(ours, again)
    twice = RaggedCache.of(ours, again, positions=[40, 41, 42])
    with masked(model, both) as by_mask:
        expected = by_mask(reference, [9], CONTEXT + 3)
    with twice.attention(model):
        found = forward(twice, [9], CONTEXT + 3)

    assert float((found - expected).abs().max()) <= 1e-5
    assert [p[-1].item() for p in twice.ragged[0].positions_of] == [
        [*torch.arange(43)[both[0][head]]][-1].item() for head in range(2)
    ]


def test_a_head_may_keep_nothing_of_the_old_text() -> None:
    """Then it sees the new tokens only."""
    model = tiny_model("llama")
    arenas, forward = full(model), Forward(model)
    keep = some_slots(arenas)
    assert keep[1] is not None
    keep[1][0] = False
    ours, reference = RaggedCache.of(arenas, keep), DynamicCache(config=model.config)
    forward(reference, ids(CONTEXT), 0)
    with masked(model, keep) as by_mask:
        expected = by_mask(reference, [9], CONTEXT)
    with ours.attention(model):
        found = forward(ours, [9], CONTEXT)

    assert float((found - expected).abs().max()) <= 1e-5


def test_nobody_else_reads_a_ragged_cache() -> None:
    """Outside of its own attention a pass is refused; so is a model that cannot be switched, and editing by slot."""
    model = tiny_model("llama")
    arenas = full(model)
    ours = RaggedCache.of(arenas, some_slots(arenas))

    with pytest.raises(EngineError, match="attention"):
        Forward(model)(ours, [5], CONTEXT)
    with pytest.raises(EngineError, match="does not attend by SDPA"), ours.attention(model_of("bloom", "float32")):
        pass
    with pytest.raises(CannotSplice, match="RaggedLayer"):
        slots_of(ours)


def test_what_cannot_be_cut_by_head_is_refused_and_stays() -> None:
    """Latents, windows, shared keys, masks of another shape: the cache is as it was."""
    for name, match in (("deepseek v3, MLA", "latent"), ("mistral, sliding", "ArenaSlidingLayer")):
        cache: Any = full(model_of(name, "float32"))
        keep = [torch.ones(layer.keys.shape[1], layer.keys.shape[2], dtype=torch.bool) for layer in cache.layers]
        before = cache.nbytes()
        with pytest.raises(CannotSplice, match=match):
            RaggedCache.of(cache, keep)
        assert cache.nbytes() == before
    shared = full(model_of("gemma3n, shared", "float32"))
    with pytest.raises(CannotSplice, match="another layer's keys"):
        RaggedCache.of(shared, [None] * len(shared.layers))
    cache = full(tiny_model("llama"))
    with pytest.raises(InvalidInput, match="by head"):
        RaggedCache.of(cache, [torch.ones(2, 7, dtype=torch.bool)] * 4)
    whole = [torch.ones(2, CONTEXT, dtype=torch.bool)] * 4
    with pytest.raises(InvalidInput, match="3 masks for 4 layers"):
        RaggedCache.of(cache, whole[:3])
    with pytest.raises(InvalidInput, match="7 positions"):
        RaggedCache.of(cache, whole, positions=range(7))
    assert all(layer.held == CONTEXT for layer in cache.arenas)


def test_moving_to_the_host_and_back_changes_nothing() -> None:
    """Offload, prefetch, reset."""
    model = tiny_model("llama")
    arenas, forward = full(model), Forward(model)
    ours = RaggedCache.of(arenas, some_slots(arenas))
    layer: RaggedLayer = ours.ragged[0]
    before = [head.clone() for head in layer.keys_of]
    layer.offload()
    layer.prefetch()

    assert all(torch.equal(a, b) for a, b in zip(before, layer.keys_of, strict=True))
    with ours.attention(model):
        forward(ours, [5], CONTEXT)
    for each in ours.ragged:
        each.reset()
    assert ours.nbytes() == 0
