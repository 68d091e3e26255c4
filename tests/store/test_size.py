"""How much room a log takes."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.bench_store import bytes_ratio


def test_a_log_is_little_larger_than_its_messages(tmp_path: Path, shared_data: Path) -> None:
    """The 200 airline conversations with events, hashes and indexes: at most 1.6 times their compact JSON."""
    assert bytes_ratio(tmp_path) <= 1.6
