"""Arenas hold what transformers' own cache holds, in place, within their capacity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from compaction.engines.forward import Forward
from compaction.errors import EngineError, InvalidInput
from compaction.kv.attention import GroupedDecode
from compaction.kv.cache import ArenaCache, ArenaLayer, ArenaSlidingLayer
from compaction.kv.measure import storage_bytes
from tests.fixtures_models import FAMILIES, SLIDING, STATEFUL, tiny_model, tiny_tokenizer

WINDOW = 24


def states(count: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [1, 2, count, 8] and values [1, 2, count, 4]."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, 2, count, 8, generator=generator).to(dtype)
    return keys, torch.randn(1, 2, count, 4, generator=generator).to(dtype)


def filled(count: int, **options: Any) -> ArenaLayer:
    """A full layer that holds `count` slots."""
    layer = ArenaLayer(**options)
    layer.update(*states(count))
    return layer


def ids(count: int) -> list[int]:
    """Token ids, always the same."""
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def chunks(family: str) -> list[int]:
    """How a prompt and a reply are fed: stateful layers continue by single tokens only."""
    return [60, *[1] * 60] if family in STATEFUL else [50, 1, 1, 7, 1, 40, 64, *[1] * 60]


def sizes(cache: Any, count: int) -> list[Any]:
    """Length and mask sizes of each layer that has them."""
    return [(layer.get_seq_length(), layer.get_mask_sizes(count)) for layer in cache.layers if hasattr(layer, "keys")]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_mask_sizes_are_those_of_dynamic_cache(family: str) -> None:
    """Chunks and single tokens, through full, sliding, latent and convolutional layers, in float32."""
    model = tiny_model(family)
    forward, at, worst = Forward(model), 0, 0.0
    theirs, ours = DynamicCache(config=model.config), ArenaCache(model.config, capacity=512, step=32)
    same_sizes = True
    for count in chunks(family):
        same_sizes &= sizes(theirs, count) == sizes(ours, count)
        tokens = ids(300)[at : at + count]
        worst = max(worst, float((forward(theirs, tokens, at) - forward(ours, tokens, at)).abs().max()))
        at += count

    assert same_sizes and worst < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma3_hybrid", "deepseek_mla"])
def test_bfloat16_states_are_stored_bit_for_bit(family: str) -> None:
    """What a bfloat16 model puts into its first layer comes back unchanged."""
    model = tiny_model(family)
    theirs: Any = DynamicCache(config=model.config)
    ours: Any = ArenaCache(model.config)
    keys, values = (t.expand(1, -1, -1, -1) for t in states(20, dtype=torch.bfloat16))
    for cache in (theirs, ours):
        for index in range(len(cache.layers)):
            cache.update(keys, values, index)

    assert all(
        torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        for a, b in zip(theirs.layers, ours.layers, strict=True)
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["append", "record", "rest", "crop"]), st.integers(1, 60)), max_size=20))
def test_a_sliding_arena_answers_as_transformers_layer_does(steps: list[tuple[str, int]]) -> None:
    """Any sequence of appending, recording the past and cutting back gives the same keys, values and mask sizes."""
    theirs, ours = DynamicSlidingWindowLayer(sliding_window=WINDOW), ArenaSlidingLayer(WINDOW, step=16)
    for seed, (action, count) in enumerate(steps):
        if action == "append":
            shown = zip(theirs.update(*states(count, seed=seed)), ours.update(*states(count, seed=seed)), strict=True)
            assert all(torch.equal(a, b) for a, b in shown)
        elif action == "crop":
            if not theirs.record_past or theirs.cumulative_length <= count or not ours.can_crop(count):
                continue
            theirs.crop(-count)
            ours.crop(-count)
        else:
            if action == "rest" and theirs.record_past and theirs.is_initialized:
                theirs.crop(0)  # else its next update returns more keys than its mask sizes say
            theirs.record_past = ours.record_past = action == "record"
        assert theirs.get_seq_length() == ours.get_seq_length()
        assert theirs.get_mask_sizes(3) == ours.get_mask_sizes(3)


def test_a_window_that_did_not_record_its_past_refuses_to_be_cut_back() -> None:
    """Nothing is guessed: the error comes before anything changes."""
    layer = ArenaSlidingLayer(WINDOW)
    layer.update(*states(60))

    with pytest.raises(EngineError, match="recorded"):
        layer.crop(-5)
    assert (layer.get_seq_length(), layer.held, layer.can_crop(5)) == (60, WINDOW - 1, False)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 200))
def test_moves_equal_list_slices(data: st.DataObject, held: int) -> None:
    """Slots move in either direction, over any overlap, keys and values alike; the rest stays."""
    layer = filled(held)
    keys, values = layer.key_slice(0, held).clone(), layer.value_slice(0, held).clone()
    length = data.draw(st.integers(0, held))
    src, dst = (data.draw(st.integers(0, held - length)) for _ in range(2))
    want = list(range(held))
    want[dst : dst + length] = range(src, src + length)

    layer.move(src, dst, length)

    assert torch.equal(layer.key_slice(0, held), keys[:, :, want])
    assert torch.equal(layer.value_slice(0, held), values[:, :, want])


def test_evicting_a_span_in_place_keeps_the_rest() -> None:
    """Move and truncate: no storage is replaced, and the next token follows the last kept one."""
    layer = filled(100, step=128)
    keys, storage = layer.key_slice(0, 100).clone(), layer.key_slice(0, 1).untyped_storage().data_ptr()

    layer.move(60, 20, 40)
    layer.truncate(60)
    shown, _ = layer.update(*states(1, seed=9))

    assert torch.equal(shown, torch.cat([keys[:, :, :20], keys[:, :, 60:], states(1, seed=9)[0]], 2))
    assert shown.untyped_storage().data_ptr() == storage


def test_slots_can_be_inserted() -> None:
    """Extend, move the tail back, write: what a spliced summary needs."""
    layer, (new_keys, new_values) = filled(30), states(5, seed=3)
    before = layer.key_slice(0, 30).clone()

    layer.extend(5)
    layer.move(10, 15, 20)
    layer.write_keys(10, new_keys)
    layer.write_values(10, new_values)

    assert torch.equal(layer.key_slice(0, 35), torch.cat([before[:, :, :10], new_keys, before[:, :, 10:]], 2))
    assert torch.equal(layer.value_slice(10, 15), new_values)


@pytest.mark.parametrize("bounds", [(-1, 3), (5, 2), (0, 11)])
def test_slots_that_are_not_held_are_refused(bounds: tuple[int, int]) -> None:
    """A slice beyond the held slots would show what nobody wrote."""
    with pytest.raises(InvalidInput, match="not among the 10 held"):
        filled(10).key_slice(*bounds)


def test_growth_goes_in_steps_and_ends_in_the_whole_budget() -> None:
    """Half as much again in whole steps; where two arenas no longer fit the budget, all of it at once."""
    layer, seen = ArenaLayer(capacity=1000, step=64), []
    for count in range(1000):
        layer.update(*states(1, seed=count))
        if layer.slots not in seen:
            seen.append(layer.slots)

    assert seen == [64, 128, 192, 320, 512, 1000]


def test_growth_holds_one_more_arena_at_most() -> None:
    """The peak is the budget at rest and the arena of the one layer that grows."""
    model = tiny_model("llama")
    cache, forward = ArenaCache(model.config, capacity=300, step=32), Forward(model)
    for at in range(300):
        forward(cache, ids(300)[at : at + 1], at)

    one = cache.arenas[0].nbytes()
    assert cache.nbytes() == cache.meter.held == 4 * one
    assert cache.meter.held < cache.meter.peak <= 4 * one + one


def test_two_thousand_tokens_stay_within_the_budget() -> None:
    """Measured after each decoded token; only while it grows does one layer have its keys or its values twice."""
    cache, one_slot = ArenaCache(tiny_model("llama").config, capacity=2048), 2 * 2 * 16 * 4
    budget, worst = 4 * 2048 * one_slot, 0
    new = torch.randn(1, 2, 1, 16)
    for _ in range(2048):
        for layer in range(4):
            cache.update(new, new, layer)
        worst = max(worst, cache.meter.held)

    assert cache.nbytes() == cache.meter.held == worst == budget
    assert cache.meter.peak <= budget + 2048 * one_slot // 2


def test_a_full_arena_refuses_before_it_writes() -> None:
    """The error names the capacity, and the layer is as it was."""
    layer = filled(10, capacity=10)
    before = layer.key_slice(0, 10).clone()

    with pytest.raises(EngineError, match="10 slots are full, 11 are needed"):
        layer.update(*states(1))
    assert layer.held == 10 and torch.equal(layer.key_slice(0, 10), before)


@pytest.mark.parametrize("family", ["llama", "gemma3_hybrid", "mistral_sliding", "deepseek_mla"])
def test_steady_state_allocates_nothing(family: str) -> None:
    """200 decoded tokens leave each layer in the storages it had."""
    model = tiny_model(family)
    cache, forward = ArenaCache(model.config, capacity=300), Forward(model)
    cache.reserve(300)
    forward(cache, ids(60), 0)
    forward(cache, ids(1), 60)

    def storages() -> list[int]:
        return [arena.key_slice(0, 1).untyped_storage().data_ptr() for arena in cache.arenas]

    before, allocations, held = storages(), cache.meter.allocations, cache.nbytes()
    for at in range(61, 261):
        forward(cache, ids(1), at)

    assert (storages(), cache.meter.allocations, cache.nbytes()) == (before, allocations, held)


def test_a_sliding_layer_holds_its_window_and_a_quarter() -> None:
    """However long the conversation and however large its chunks."""
    layer = ArenaSlidingLayer(512)
    for count in (300, 700, 2000, *[1] * 400):
        layer.update(*states(count))

    assert layer.held == 511 and layer.slots <= 511 + 128


def test_memory_is_allocated_and_given_back_to_the_slot() -> None:
    """Reserved once, then no growth; shrunk to what is asked, never below what is held."""
    layer = filled(10)
    found = []
    for change, slots in ((layer.reserve, 400), (layer.reserve, 300), (layer.shrink, 100), (layer.shrink, 3)):
        change(slots)
        found.append(layer.slots)

    assert found == [400, 400, 100, 10]
    assert layer.meter.held == layer.nbytes() == layer.logical_nbytes()


def test_bytes_are_those_of_the_storages() -> None:
    """Allocated bytes are measured, logical ones counted from the slots held, whatever kind the layers are."""
    for family in FAMILIES:
        model = tiny_model(family)
        ours, theirs, forward = ArenaCache(model.config, step=64), DynamicCache(config=model.config), Forward(model)
        forward(ours, ids(30), 0)
        forward(theirs, ids(30), 0)
        own = sum(arena.nbytes() for arena in ours.arenas)

        assert ours.nbytes() == storage_bytes(ours) >= own == ours.meter.held
        assert own >= sum(arena.logical_nbytes() for arena in ours.arenas)
        if family not in SLIDING:  # theirs are views of more than a window until the next token
            assert ours.logical_nbytes() == storage_bytes(theirs)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": False, "num_return_sequences": 1}])
@pytest.mark.parametrize("family", ["llama", "gemma3_hybrid"])
def test_generate_gives_the_same_tokens(family: str, options: dict[str, Any]) -> None:
    """transformers' own loop, a padded batch and beams included, takes cache and attention function as they are."""
    model, tokenizer = tiny_model(family), tiny_tokenizer()
    prompt = torch.tensor([ids(30), [tokenizer.pad_token_id] * 10 + ids(20)])
    mask = (torch.arange(30)[None] >= torch.tensor([[0], [10]])).long()

    def reply(cache: Any) -> torch.Tensor:
        options_ = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, **options}
        found: torch.Tensor = model.generate(prompt, attention_mask=mask, cache=cache, **options_)
        return found

    theirs = reply(DynamicCache(config=model.config))
    with GroupedDecode(model):
        ours = reply(ArenaCache(model.config))

    assert torch.equal(theirs, ours)


def test_a_cache_from_inference_mode_can_be_written_outside_of_it() -> None:
    """Arenas are ordinary tensors wherever they were made, and hold no graph."""
    layer = ArenaLayer()
    with torch.inference_mode():
        layer.update(*states(5))
    keys, values = states(2)

    shown, _ = layer.update(keys.requires_grad_(), values)

    assert shown.shape[2] == 7 and not shown.requires_grad


def test_reset_and_crop_start_over() -> None:
    """After a reset a layer takes other shapes; after a crop to nothing it keeps its memory."""
    layer = filled(10)
    layer.crop(-10)
    cropped = (layer.held, layer.slots)
    layer.reset()
    layer.update(torch.zeros(2, 1, 3, 16), torch.zeros(2, 1, 3, 16))

    assert cropped == (0, 256)
    assert layer.keys is not None and layer.keys.shape == (2, 1, 3, 16)


@pytest.mark.parametrize("family", ["llama", "gemma3_hybrid"])
@pytest.mark.parametrize("record", [False, True])
def test_a_dump_comes_back_bit_by_bit(family: str, record: bool) -> None:
    """Into new arenas: same slots, same counters, same logits; and the copies own their memory."""
    model = tiny_model(family)
    forward, cache, restored = Forward(model), ArenaCache(model.config, capacity=512), ArenaCache(model.config)
    forward(cache, ids(60), 0)
    for layer in cache.arenas:
        if isinstance(layer, ArenaSlidingLayer):
            layer.record_past = record
    forward(cache, ids(7), 60)

    for layer, target in zip(cache.arenas, restored.arenas, strict=True):
        target.load(*layer.dump())
    tensors = [tensor for layer in cache.arenas for tensor in layer.dump()[0].values()]

    assert storage_bytes(tensors) == sum(layer.logical_nbytes() for layer in cache.arenas)
    assert sizes(restored, 3) == sizes(cache, 3)
    assert torch.equal(forward(cache, [5, 6], 67), forward(restored, [5, 6], 67))


def test_a_dump_replaces_what_was_held_and_a_stranger_is_refused() -> None:
    """Nothing changes where the dump came from another kind of layer, is too long, or misses slots."""
    layer, small = filled(30), ArenaLayer(capacity=10)
    tensors, meta = layer.dump()
    target = filled(40)
    target.load(tensors, meta)
    shown = target.dump()[0]

    for refusing, wrong in (
        (ArenaSlidingLayer(WINDOW), meta),
        (small, meta),
        (filled(3), {**meta, "held": 29}),
    ):
        before = refusing.held
        with pytest.raises((InvalidInput, EngineError)):
            refusing.load(tensors, wrong)
        assert refusing.held == before
    assert all(torch.equal(shown[name], tensors[name]) for name in tensors) and target.held == 30


def test_an_empty_layer_dumps_nothing() -> None:
    """And takes it back."""
    layer = filled(3)
    layer.load(*ArenaLayer().dump())

    assert (layer.held, layer.is_initialized, layer.nbytes(), layer.meter.held) == (0, False, 0, 0)


def test_keys_are_not_assigned() -> None:
    """Somebody who assigns keys wants to write them; dropping them is a reset."""
    with pytest.raises(InvalidInput, match="write_keys"):
        filled(3).keys = torch.zeros(1, 2, 3, 8)


@pytest.mark.parametrize("options", [{"capacity": 0}, {"step": 0}])
def test_arenas_of_nothing_are_refused(options: dict[str, Any]) -> None:
    """A capacity or step below one slot makes no sense."""
    with pytest.raises(InvalidInput, match="at least 1"):
        ArenaLayer(**options)
