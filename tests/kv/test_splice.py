"""Editing a live cache in place: against masked attention, against the model itself, and through random sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from transformers import DynamicCache

from compaction.engines.forward import Forward
from compaction.errors import CannotRotate, CannotSplice, InvalidInput
from compaction.kv.cache import ArenaCache
from compaction.kv.measure import logical_bytes, storage_bytes
from compaction.kv.probe import probe
from compaction.kv.slot_map import Mode
from compaction.kv.splice import Block, Splicer
from tests.fixtures_rope import architecture_model

FULL = (
    "llama",
    "yarn",
    "qwen2",
    "phi_partial",
    "glm4_partial_pairs",
    "cohere_pairs",
    "smollm3_nope",
    "deepseek_v3_mla",
    "deepseek_v2_mla_pairs",
    "gptj_no_buffer",
    "mixtral",
)
SLIDING = "gemma3_dual_theta"  # a window of 24: layers hold 23 tokens
CACHES = ("dynamic", "arena")


class Talk:
    """A model, its cache and the splicer on it."""

    def __init__(self, name: str, kind: str = "dynamic", tokens: int = 0) -> None:
        self.model = architecture_model(name)
        self.forward = Forward(self.model)
        cache = DynamicCache(config=self.model.config) if kind == "dynamic" else ArenaCache(self.model.config, step=32)
        self.splicer = Splicer(cache, probe(self.model))
        if tokens:
            self.feed(text(tokens))

    @property
    def cache(self) -> Any:
        return self.splicer.cache

    @property
    def positions(self) -> list[int]:
        return self.splicer.slot_map.position

    def feed(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits of the last token, `[vocabulary]`."""
        return self.forward(self.cache, ids, self.splicer.append(ids)[0])

    def tensors(self) -> list[torch.Tensor]:
        """Copies of everything the layers show."""
        shown = [getattr(layer, name, None) for layer in self.cache.layers for name in ("keys", "values")]
        return [tensor.clone() for tensor in shown if isinstance(tensor, torch.Tensor)]


def text(count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def masked(
    model: Any, ids: Sequence[int], hidden: Sequence[tuple[range, range]], positions: Sequence[int] | None = None
) -> torch.Tensor:
    """Logits of the last token of one forward pass where some queries do not see some keys: the oracle.

    `hidden` has pairs (queries, keys) by index.
    """
    count = len(ids)
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    for queries, unseen in hidden:
        seen[queries.start : queries.stop, unseen.start : unseen.stop] = False
    bias = torch.zeros(count, count).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    at = torch.tensor([list(positions) if positions is not None else list(range(count))])
    with torch.no_grad():
        out = model(input_ids=torch.tensor([list(ids)]), attention_mask=bias, position_ids=at, use_cache=False)
    return cast(torch.Tensor, out.logits[0, -1])


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference."""
    return float((a - b).abs().max())


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", [*FULL, "gpt2_learned"])
def test_gap_eviction_equals_masked_attention(name: str, kind: str) -> None:
    """After two spans went, further tokens get the logits of one pass in which they cannot see them."""
    talk, more = Talk(name, kind, tokens=60), text(4, seed=1)
    talk.splicer.evict([(7, 20), (31, 40)])

    logits = talk.feed(more)

    oracle = masked(talk.model, text(60) + more, [(range(60, 64), range(7, 20)), (range(60, 64), range(31, 40))])
    assert difference(logits, oracle) <= 1e-6 * max(1.0, float(oracle.abs().max()))


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", FULL)
def test_compact_eviction_of_a_prefix_is_exact(name: str, kind: str) -> None:
    """Positions are relative: with everything moved to the front, logits are those of masked attention."""
    talk, more = Talk(name, kind, tokens=60), text(4, seed=1)
    talk.splicer.evict([(0, 25)], "compact")

    logits = talk.feed(more)

    assert talk.positions == list(range(39))
    assert difference(logits, masked(talk.model, text(60) + more, [(range(60, 64), range(25))])) <= 1e-5


@pytest.mark.parametrize("kind", CACHES)
def test_compact_eviction_from_the_middle_moves_keys_to_their_new_positions(kind: str) -> None:
    """In the first layer, where keys know nothing of the text before, they equal a prefill of the shortened text."""
    talk, ids = Talk("llama", kind, tokens=60), text(60)
    talk.splicer.evict([(7, 20), (31, 40)], "compact")
    fresh: Any = DynamicCache(config=talk.model.config)
    Forward(talk.model)(fresh, ids[:7] + ids[20:31] + ids[40:], 0)

    assert talk.positions == list(range(38))
    assert torch.allclose(talk.cache.layers[0].keys, fresh.layers[0].keys, atol=1e-5)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("length", [5, 13])
def test_a_summary_in_the_hole_equals_one_masked_pass(kind: str, length: int) -> None:
    """The summary sees its prefix only, the tail keeps its keys, later tokens see prefix, summary and tail."""
    talk, summary, more = Talk("llama", kind, tokens=60), text(length, seed=2), text(4, seed=1)
    block = talk.splicer.encode(talk.forward, summary, at=7)
    done = talk.splicer.insert(block, 7, 20)

    logits = talk.feed(more)

    ids, s = text(60) + summary + more, range(60, 60 + length)
    after = range(s.stop, s.stop + 4)
    oracle = masked(
        talk.model, ids, [(s, range(7, 60)), (after, range(7, 20))], [*range(60), *range(7, 7 + length), *range(60, 64)]
    )
    assert difference(logits, oracle) <= 1e-4
    assert not done.rotated


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("mode", ["gap", "compact"])
def test_a_summary_that_moves_the_tail_equals_one_masked_pass(name: str, mode: Mode) -> None:
    """Longer than the hole, or without a hole left: where only a prefix went, the result is that of a shifted text."""
    talk, summary, more = Talk(name, tokens=60), text(15, seed=2), text(4, seed=1)
    block = talk.splicer.encode(talk.forward, summary, at=0)
    done = talk.splicer.insert(block, 0, 10, mode)

    logits = talk.feed(more)

    ids, s = text(60) + summary + more, range(60, 75)
    # The tail, encoded at 10…59, stands at 15…64 now: to itself, the summary and later tokens as in a text further on.
    positions = [*range(90, 150), *range(85, 100), *range(150, 154)]
    oracle = masked(talk.model, ids, [(s, range(60)), (range(75, 79), range(10))], positions)
    assert done.rotated and talk.positions == [*range(15), *range(15, 65), *range(65, 69)]
    assert difference(logits, oracle) <= 1e-4


@pytest.mark.parametrize("kind", CACHES)
def test_a_summary_after_an_eviction_finds_the_hole(kind: str) -> None:
    """Evicting first and inserting later gives the bits of doing both at once."""
    at_once, later, summary = Talk("llama", kind, tokens=60), Talk("llama", kind, tokens=60), text(6, seed=2)
    at_once.splicer.insert(at_once.splicer.encode(at_once.forward, summary, at=7), 7, 20)
    later.splicer.evict([(7, 20)])
    later.splicer.insert(later.splicer.encode(later.forward, summary, at=7), 7, 7)

    assert at_once.positions == later.positions
    assert all(map(torch.equal, at_once.tensors(), later.tensors()))


def test_encoding_changes_nothing() -> None:
    """The live cache has the same bits and the same slots while a summary is only a block."""
    talk = Talk("llama", tokens=30)
    before = talk.tensors()
    block = talk.splicer.encode(talk.forward, text(5), at=12)

    assert len(block.rows) == 5 and len(talk.positions) == 30
    assert all(map(torch.equal, before, talk.tensors()))


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", [*FULL, "gpt2_learned"])
def test_parked_slots_come_back_bit_equal(name: str, kind: str) -> None:
    """Gap mode: park two spans, restore them in the other order, and every bit and position is as before."""
    talk = Talk(name, kind, tokens=60)
    before, slot_map = talk.tensors(), talk.splicer.slot_map
    done = talk.splicer.evict([(7, 20), (31, 40)], park=True)
    for block in done.parked:
        talk.splicer.restore(block.to("cpu"))

    assert talk.splicer.slot_map == slot_map
    assert all(map(torch.equal, before, talk.tensors()))


def test_undo_in_compact_mode_turns_the_tail_back() -> None:
    """Positions are as before, keys to rounding, and the moves are counted."""
    talk = Talk("llama", tokens=60)
    before = talk.tensors()
    done = talk.splicer.evict([(7, 20)], "compact", park=True)
    talk.splicer.restore(done.parked[0], "compact")

    assert talk.positions == list(range(60)) and talk.splicer.slot_map.shifts == [0] * 20 + [2] * 40
    assert max(map(difference, before, talk.tensors())) < 1e-5


def test_a_block_whose_place_is_taken_is_refused() -> None:
    """After the tail moved up and its front was built over, a gap undo of an older span has no place."""
    talk = Talk("llama", tokens=60)
    parked = talk.splicer.evict([(7, 20)], park=True).parked[0]
    talk.splicer.insert(talk.splicer.encode(talk.forward, text(9), at=7), 7, 7)

    with pytest.raises(InvalidInput, match="has moved since"):
        talk.splicer.insert(parked, 17, 17)


def test_learned_positions_are_not_compacted() -> None:
    """GPT-2's cache is left as it was and the error says why."""
    talk = Talk("gpt2_learned", tokens=30)
    before = talk.tensors()
    with pytest.raises(CannotRotate, match="learned"):
        talk.splicer.evict([(3, 9)], "compact")

    assert all(map(torch.equal, before, talk.tensors())) and len(talk.positions) == 30


@pytest.mark.parametrize("name", ["bloom_alibi", "mpt_alibi"])
def test_a_bias_by_distance_lets_only_a_prefix_go(name: str) -> None:
    """With ALiBi a prefix goes exactly, and the middle is refused."""
    talk, more = Talk(name, tokens=40), text(3, seed=1)
    with pytest.raises(CannotSplice, match="ALiBi"):
        talk.splicer.evict([(5, 9)])
    talk.splicer.evict([(0, 9)])
    short, whole = talk.feed(more), Talk(name)
    whole.feed(text(40) + more)

    reference = Talk(name, tokens=40)
    for layer in reference.cache.layers:
        layer.keys, layer.values = layer.keys[..., 9:, :], layer.values[..., 9:, :]
    assert difference(short, reference.feed(more)) == 0


def test_states_are_refused() -> None:
    """A convolution's state has no slots to take out."""
    talk = Talk("lfm2_conv", tokens=20)

    with pytest.raises(CannotSplice, match="state"):
        talk.splicer.evict([(0, 5)])


@pytest.mark.parametrize("kind", CACHES)
def test_eviction_outside_of_the_window_is_exact_on_sliding_layers(kind: str) -> None:
    """Gap: masked attention over the whole text, with the window by position; the window's own slots stay."""
    talk, more = Talk(SLIDING, kind, tokens=60), text(1, seed=1)
    done = talk.splicer.evict([(5, 30)])
    logits = talk.feed(more)

    # One token sees the full layers' kept slots and the sliding layers' last 23: built by hand on a second cache.
    reference = Talk(SLIDING, tokens=60)
    for layer in reference.cache.layers:
        if not layer.is_sliding:
            for name in ("keys", "values"):
                whole = getattr(layer, name)
                setattr(layer, name, torch.cat([whole[..., :5, :], whole[..., 30:, :]], -2))
    assert done.underfilled == ()
    assert difference(logits, reference.forward(reference.cache, more, 60)) <= 1e-6


@pytest.mark.parametrize("kind", CACHES)
def test_eviction_inside_a_window_is_refused_or_said(kind: str) -> None:
    """What slid out cannot come back: refused with the reason; on demand the window stays short and is named."""
    talk = Talk(SLIDING, kind, tokens=60)
    with pytest.raises(CannotSplice, match="slides over the last 24 tokens"):
        talk.splicer.evict([(40, 50)])
    done = talk.splicer.evict([(40, 50)], "compact", underfill=True)
    held = [layer.keys.shape[-2] for layer in talk.cache.layers]
    talk.feed(text(30, seed=3))

    assert done.underfilled == (0, 2) and held == [13, 50, 13, 50]
    assert [layer.keys.shape[-2] for layer in talk.cache.layers] == [23, 80, 23, 80]


@pytest.mark.parametrize("kind", CACHES)
def test_a_window_that_still_holds_everything_is_edited_exactly(kind: str) -> None:
    """While a conversation is shorter than the window, sliding layers take evictions, summaries and undo."""
    talk, summary, more = Talk(SLIDING, kind, tokens=20), text(3, seed=2), text(2, seed=1)
    talk.splicer.insert(talk.splicer.encode(talk.forward, summary, at=4), 4, 9)
    logits = talk.feed(more)

    ids, s, after = text(20) + summary + more, range(20, 23), range(23, 25)
    oracle = masked(talk.model, ids, [(s, range(4, 20)), (after, range(4, 9))], [*range(20), 4, 5, 6, 20, 21])
    assert difference(logits, oracle) <= 1e-4


def test_a_summary_without_its_window_is_refused() -> None:
    """Sliding layers that no longer hold what stood in front of the summary cannot encode it."""
    talk = Talk(SLIDING, tokens=80)

    with pytest.raises(CannotSplice, match="no longer holds the window in front of slot 30"):
        talk.splicer.encode(talk.forward, text(5), at=30)


def test_layers_that_share_keys_are_skipped() -> None:
    """Gemma 3n's last layers read others' keys: nothing of their own is moved."""
    talk = Talk("gemma3n_shared_kv", tokens=20)
    talk.splicer.evict([(2, 8)], "compact")

    assert bool(talk.feed([5]).isfinite().all()) and len(talk.positions) == 15


@pytest.mark.parametrize("kind", CACHES)
def test_indexer_keys_move_with_their_slots(kind: str) -> None:
    """DeepSeek's sparse indexer keeps keys of its own, which are turned too: a prefix goes exactly."""
    talk, more = Talk("deepseek_v32_indexer", kind, tokens=40), text(3, seed=1)
    talk.splicer.evict([(0, 11)], "compact")

    assert difference(talk.feed(more), masked(talk.model, text(40) + more, [(range(40, 43), range(11))])) <= 1e-5


def test_memory_of_evicted_slots_is_given_back() -> None:
    """With transformers' own layers no byte stays behind a view."""
    talk = Talk("llama", tokens=60)
    before = storage_bytes(talk.cache)
    talk.splicer.evict([(7, 37)], "compact")

    assert storage_bytes(talk.cache) == logical_bytes(talk.cache) == before // 2


def test_arenas_stay_where_they_are() -> None:
    """An eviction from an arena allocates nothing."""
    talk = Talk("llama", "arena", tokens=60)
    allocations, held = talk.cache.meter.allocations, talk.cache.nbytes()
    talk.splicer.evict([(7, 37)], "compact")

    assert (talk.cache.meter.allocations, talk.cache.nbytes()) == (allocations, held)


@pytest.mark.parametrize("ranges", [[(5, 5000)], [(-1, 4)], [(3, 9), (8, 12)]])
def test_ranges_that_are_not_there_are_refused(ranges: list[tuple[int, int]]) -> None:
    """Beyond the end, negative, overlapping: refused before anything changes."""
    talk = Talk("llama", tokens=30)
    with pytest.raises(InvalidInput):
        talk.splicer.evict(ranges)

    assert len(talk.positions) == 30


def test_a_block_knows_its_bytes() -> None:
    """Parked bytes are what left the cache."""
    talk = Talk("llama", tokens=40)
    before = storage_bytes(talk.cache)
    parked: Block = talk.splicer.evict([(3, 13)], park=True).parked[0]

    assert parked.nbytes == before - storage_bytes(talk.cache)
