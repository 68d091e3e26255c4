"""The rules over a cache's slots: whole turns, enough at once, gap before compact, and when to compute keys afresh."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction.errors import InvalidInput
from compaction.kv.slot_map import SlotMap, choose_mode, chunk_to_evict


def slot_map(tokens: int) -> SlotMap:
    """A slot_map of so many tokens at their first positions."""
    made = SlotMap()
    made.append(range(tokens))
    return made


def test_appended_tokens_get_the_next_positions() -> None:
    """Positions continue where the last ones ended, whatever was evicted before."""
    made = slot_map(5)
    made.next_position = 40

    assert made.append([7, 8]) == [40, 41] and made.next_position == 42


def test_a_crop_gives_positions_back() -> None:
    """The next token goes where the first cropped one stood."""
    made = slot_map(5)
    made.crop(2)

    assert (made.ids, made.next_position) == ([0, 1], 2)


def test_a_crop_beyond_the_end_is_refused() -> None:
    """More slots than there are, or fewer than none."""
    for length in (6, -1):
        with pytest.raises(InvalidInput):
            slot_map(5).crop(length)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(1, 900), st.integers(0, 300))
def test_chunks_are_whole_turns_and_no_smaller_than_asked(turns: list[int], need: int, start: int) -> None:
    """The first boundary that is allowed, the first end that frees enough, at least 64 slots; None only if none is."""
    cuts = [sum(turns[:i]) for i in range(len(turns) + 1)]
    chunk = chunk_to_evict(cuts, need, start=start)

    allowed = [cut for cut in cuts if cut >= start]
    if chunk is None:
        assert not allowed or allowed[-1] - allowed[0] < max(64, need)
    else:
        a, b = chunk
        assert a == allowed[0] and b in cuts and b - a >= max(64, need)
        assert all(cut - a < max(64, need) for cut in allowed if a < cut < b)


def test_boundaries_must_ascend() -> None:
    """Two turns cannot begin in one slot."""
    with pytest.raises(InvalidInput):
        chunk_to_evict([0, 5, 5], 1)


def test_gap_is_chosen_until_positions_run_out() -> None:
    """Compact only where the coming tokens would pass what the model was trained for, and the reason is given."""
    made = slot_map(900)

    assert choose_mode(made, coming=100, trained=1000).mode == "gap"
    assert choose_mode(made, coming=10**6, trained=None).mode == "gap"
    assert choose_mode(made, coming=101, trained=1000).mode == "compact"
    assert "1,001" in choose_mode(made, coming=101, trained=1000).why


def test_where_neither_mode_is_possible_prefilling_is_advised() -> None:
    """Positions run out on a model whose keys cannot be moved."""
    with pytest.raises(InvalidInput, match="prefill again"):
        choose_mode(slot_map(900), coming=200, trained=1000, refusal="layer 0: learned positions")


def test_drift_is_counted_and_says_where_to_begin_again() -> None:
    """The first slot that moved more often than the budget is where keys should be computed afresh."""
    made = slot_map(4)
    made.shifts = [0, 2, 5, 5]

    assert not made.needs_reanchor(5) and made.reanchor_from(5) is None
    assert made.needs_reanchor(4) and made.reanchor_from(4) == 2
