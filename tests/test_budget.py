"""Budgets: what may be asked for, and what it comes to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction import Budget
from compaction.budget import Window, parse_bytes
from compaction.errors import InvalidBudget


@pytest.mark.parametrize(
    ("text", "expected"), [(7, 7), ("7", 7), ("8GiB", 8 << 30), ("1.5 MiB", 3 << 19), ("2kb", 2000), ("1e6", 10**6)]
)
def test_bytes_are_read_as_people_write_them(text: Any, expected: int) -> None:
    """Binary and decimal units, fractions, exponents."""
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "many", "8 GiBs", "-1MiB", "1 2", None, "0x10"])
def test_what_is_no_number_of_bytes_is_refused(text: Any) -> None:
    """One line with an example of what would be right."""
    with pytest.raises(InvalidBudget, match="such as '8GiB'"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs tokens=, kv_bytes=, or both"),
        ({"tokens": 0}, "holds nothing"),
        ({"tokens": 1.5}, "must be an integer"),
        ({"tokens": True}, "must be an integer"),
        ({"kv_bytes": "0"}, "holds nothing"),
        ({"tokens": 9, "reserve": -1}, "cannot be negative"),
        ({"tokens": 9, "high": 0.5, "low": 0.5}, "water marks need"),
        ({"tokens": 9, "high": 1.1}, "water marks need"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(options: Any, said: str) -> None:
    """At construction, before anything is lost."""
    with pytest.raises(InvalidBudget, match=said):
        Budget(**options)


def test_the_smallest_bound_wins_and_says_so() -> None:
    """Tokens, bytes and the model's window; the source stands beside the limit."""
    budget = Budget(tokens=4096, kv_bytes="1MiB")
    window = Window(8192, "model config")

    found = [budget.limits(window=window, max_new_tokens=0, kv_bytes_per_token=size) for size in (1024, 64)] + [
        budget.limits(window=Window(512, "server"), max_new_tokens=0, kv_bytes_per_token=64)
    ]

    assert [(limits.limit, limits.source) for limits in found] == [
        (1024, "budget kv_bytes"),
        (4096, "budget tokens"),
        (512, "window (server)"),
    ]


def test_a_reply_needs_its_room() -> None:
    """The larger of reserve and reply is kept free; where that is all, it is an error."""
    budget = Budget(tokens=100, reserve=30)

    assert budget.limits(window=None, max_new_tokens=10, kv_bytes_per_token=None).room == 70
    assert budget.limits(window=None, max_new_tokens=50, kv_bytes_per_token=None).room == 50
    with pytest.raises(InvalidBudget, match="the reply may take 100 tokens but the limit is 100"):
        budget.limits(window=None, max_new_tokens=100, kv_bytes_per_token=None)


@given(room=st.integers(1, 10_000), floor=st.integers(0, 12_000), low=st.floats(0, 0.9), step=st.floats(0.01, 0.1))
def test_marks_lie_between_floor_and_room(room: int, floor: int, low: float, step: float) -> None:
    """low mark <= high mark <= room; where nothing is free, both are room."""
    limits = Budget(tokens=room, low=low, high=low + step).limits(
        window=None, max_new_tokens=0, kv_bytes_per_token=None
    )

    low_mark, high_mark = limits.low_mark(floor), limits.high_mark(floor)

    assert low_mark <= high_mark <= room
    assert floor <= low_mark or floor >= room
    assert (low_mark, high_mark) == (room, room) or floor < room


def test_a_budget_survives_json() -> None:
    """What an `opened` event holds makes the budget again."""
    budget = Budget(tokens=5, kv_bytes="2MiB", reserve=1, clamp_user=True)

    assert Budget.from_json(budget.to_json()) == budget
