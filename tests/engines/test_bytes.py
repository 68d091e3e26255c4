"""Bytes of a live conversation: measured, true, and what the geometry says."""

from __future__ import annotations

from typing import Any

import pytest

from compaction.engines import TransformersEngine
from compaction.engines.forward import Forward
from compaction.engines.live_cache import LiveCache
from compaction.errors import EngineError
from compaction.kv.measure import logical_bytes, storage_bytes
from tests.fixtures_models import CROPPABLE, SLIDING, STATEFUL, tiny_engine

Messages = list[dict[str, Any]]


@pytest.mark.parametrize("family", CROPPABLE)
def test_predicted_equals_measured(family: str, talk: Messages) -> None:
    """After a prompt, and after every shorter and longer one, the formula gives the bytes that the storages have."""
    engine = tiny_engine(family)
    differences = []
    for length in (1, 3, 5, 9):
        list(engine.generate("c", talk[:length], None, max_new_tokens=1))
        differences.append(engine.kv_bytes("c") - engine.geometry.bytes(len(engine.cached_ids("c"))))

    assert differences == [0, 0, 0, 0]


@pytest.mark.parametrize("family", SLIDING)
def test_a_window_shows_what_is_predicted_and_holds_little_more(family: str, talk: Messages) -> None:
    """Sliding arenas have a few slots beyond their window of 24, so that it moves once in many tokens."""
    engine = tiny_engine(family)
    shown, more = [], []
    for length in (1, 3, 5, 9):
        list(engine.generate("c", talk[:length], None, max_new_tokens=1))
        layers = engine._conversations["c"].live.layers
        predicted = engine.geometry.bytes(len(engine.cached_ids("c")))
        shown.append(sum(layer.logical_nbytes() for layer in layers) - predicted)
        more.append(
            (engine.kv_bytes("c") - predicted) // sum(layer.slot_nbytes for layer in layers if layer.is_sliding)
        )

    assert shown == [0, 0, 0, 0] and all(0 <= slots <= 16 for slots in more)


def test_a_reply_that_ends_early_leaves_what_was_allocated_for_it(tiny: TransformersEngine, talk: Messages) -> None:
    """Bytes are those of the arenas: the prompt and the longest reply, whatever of it came."""
    generation = tiny.generate("c", talk[:3], None, max_new_tokens=30)
    next(iter(generation))
    generation.close()

    assert generation.result is not None
    slots = generation.result.usage.prompt_tokens + 29
    assert tiny.kv_bytes("c") == generation.result.usage.peak_kv_bytes == tiny.geometry.bytes(slots)


def test_a_reply_that_became_much_shorter_gives_memory_back(tiny: TransformersEngine, talk: Messages) -> None:
    """Where less than half of what was allocated is used, a conversation at rest holds exactly its tokens."""
    generation = tiny.generate("c", talk[:1], None, max_new_tokens=500)
    next(iter(generation))
    generation.close()

    assert tiny.kv_bytes("c") == tiny.geometry.bytes(len(tiny.cached_ids("c")))


def test_growth_counts_what_stands_twice(tiny: TransformersEngine, talk: Messages) -> None:
    """A longer turn reallocates: one layer's old keys or values are there beside the new ones, and in the peak."""
    list(tiny.generate("c", talk[:3], None, max_new_tokens=1))
    before = tiny.kv_bytes("c")

    generation = tiny.generate("c", talk, None, max_new_tokens=1)
    list(generation)

    assert generation.result is not None
    assert generation.result.usage.peak_kv_bytes == tiny.kv_bytes("c") + before // 8  # four layers, keys or values


@pytest.mark.parametrize("family", STATEFUL)
def test_fixed_states_come_on_top(family: str, talk: Messages) -> None:
    """Layers with a running state hold a constant that the formula leaves out."""
    engine = tiny_engine(family)
    extra = set()
    for length in (3, 9):
        list(engine.generate(str(length), talk[:length], None, max_new_tokens=1))
        held = engine.kv_bytes(str(length))
        extra.add(held - engine.geometry.bytes(len(engine.cached_ids(str(length)))))

    assert len(extra) == 1 and extra.pop() > 0


def test_a_crop_gives_memory_back(tiny: TransformersEngine, talk: Messages) -> None:
    """After a compaction the storages have shrunk, not only what shows of them."""
    list(tiny.generate("c", talk, None, max_new_tokens=1))
    before = tiny.kv_bytes("c")

    list(tiny.generate("c", talk[:1], None, max_new_tokens=1))

    cache = tiny._conversations["c"].live.layers
    assert storage_bytes(cache) == logical_bytes(cache) == tiny.kv_bytes("c") < before / 3


def test_the_peak_is_the_longest_cache(tiny: TransformersEngine, talk: Messages) -> None:
    """Peaks are of this turn alone: prompt + reply, less the last token, which has no keys and values."""
    list(tiny.generate("c", talk, None, max_new_tokens=8))

    generation = tiny.generate("c", talk[:1], None, max_new_tokens=4)
    list(generation)

    assert generation.result is not None
    usage = generation.result.usage
    tokens = usage.prompt_tokens + usage.completion_tokens - 1
    assert (usage.peak_tokens, usage.peak_kv_bytes) == (tokens, tokens * tiny.kv_bytes_per_token)


def test_conversations_hold_separate_bytes(tiny: TransformersEngine, talk: Messages) -> None:
    """What one conversation holds does not depend on another."""
    list(tiny.generate("a", talk[:1], None, max_new_tokens=1))
    alone = tiny.kv_bytes("a")

    list(tiny.generate("b", talk, None, max_new_tokens=1))

    assert tiny.kv_bytes("a") == alone < tiny.kv_bytes("b")


@pytest.mark.model
def test_smollm2_costs_45_kib_a_token_in_float32(smollm2: TransformersEngine) -> None:
    """22.5 KiB at two bytes an element, twice that at four, predicted and measured."""
    generation = smollm2.generate("c", [{"role": "user", "content": "Hello."}], None, max_new_tokens=3)
    list(generation)

    assert smollm2.kv_bytes_per_token == 45 * 1024
    assert smollm2.kv_bytes("c") == len(smollm2.cached_ids("c")) * 45 * 1024


def test_memory_that_is_not_there_is_one_clear_line(tiny: TransformersEngine) -> None:
    """Also on the CPU, where torch raises no error of its own; what stood in the cache stays."""
    live = LiveCache(Forward(tiny.model), 10**13)
    live.feed([5, 6, 7])

    with pytest.raises(EngineError, match="out of memory at 10,000,000,000,000 tokens: lower the budget"):
        live.start_turn(10**13)

    assert live.ids == [5, 6, 7] and live.layers[0].held == 3
