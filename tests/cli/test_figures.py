"""What a run counts, and what it reads, without a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from compaction.cli.figures import Figures, percentile
from compaction.cli.output import counted, figure, plain
from compaction.cli.recordings import read_all
from compaction.cli.summary import _peak_tokens
from compaction.store import AuditLog
from tests.builders import assistant, call, user
from tests.cli.harness import NAME, TALK, write_talk


def test_figures_come_from_the_log(finished: Path) -> None:
    """Messages, turns, compactions and discarded tokens are those of the log's events."""
    figures = Figures()
    with AuditLog(finished) as log:
        figures.add(log.events(NAME))
        decisions = log.decisions(NAME)

    assert (figures.messages, figures.turns, figures.silent) == (len(TALK), 5, 5)
    assert [(cut.before, cut.after) for cut in figures.cuts] == [
        (row.before["tokens"], row.after["tokens"]) for row in decisions
    ]
    assert figures.discarded_tokens == sum(row.discarded_tokens for row in decisions)


def test_failed_summaries_are_counted(failing: Path) -> None:
    """A decision that went on without a summary says so, and the run's figures count it."""
    figures = Figures()
    with AuditLog(failing) as log:
        figures.add(log.events(NAME))
        codes = [code for row in log.decisions() for code in row.failures]

    assert figures.failed_summaries == len(codes) > 0
    assert set(codes) == {"summary_error"}


def test_turns_among_unanswered_calls_are_counted(tmp_path: Path) -> None:
    """A reply recorded while calls wait for results cannot be generated."""
    talk = [user("a"), assistant(None, calls=[call("x")]), assistant("b"), user("c"), assistant("d")]

    assert read_all([str(write_talk(tmp_path, talk))], None)[0].skipped_turns() == 1


def test_the_limit_counts_conversations_of_all_files(tmp_path: Path) -> None:
    """--limit takes the first conversations in all, and reads no further."""
    first, second = write_talk(tmp_path, name="a.jsonl"), tmp_path / "b.jsonl"
    second.write_text("not JSON")

    assert [recording.id for recording in read_all([str(first), str(second)], 1)] == [NAME]


@pytest.mark.parametrize(
    ("values", "percent", "expected"), [([], 50, None), ([3.0], 95, 3.0), ([4.0, 1.0, 2.0, 3.0], 50, 2.0)]
)
def test_percentiles(values: list[float], percent: int, expected: float | None) -> None:
    """Nearest rank; nothing of nothing."""
    assert percentile(values, percent) == expected


def test_text_is_made_safe() -> None:
    """Control characters and lone surrogates are shown as escapes, long text ends in an ellipsis."""
    assert plain("a\n b\x1b[31m \ud83d") == "a b\\x1b[31m \\ud83d"
    assert plain("word " * 20, 10) == "word word…"
    assert [figure(None), figure(1234567), figure(True), counted(1, "turn"), counted(2, "turn")] == [
        "–",
        "1,234,567",
        "yes",
        "1 turn",
        "2 turns",
    ]


def test_a_quantized_peak_is_not_held_against_full_precision() -> None:
    """Under a budget of bytes a quantized cache holds more tokens than they come to: the table says so."""
    result = {"peak_tokens": 926, "budget_tokens": 728, "budget_kv_bytes": 2**24}

    assert _peak_tokens(result) == "926; in full precision the bytes come to 728"
    assert _peak_tokens({**result, "budget_kv_bytes": None}) == "926 of 728"
