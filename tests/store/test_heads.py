"""The head file: what is kept outside so that a cut tail shows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from compaction.errors import LogError
from compaction.store import AuditLog
from compaction.store.anchors import HeadFile
from tests.contracts.log_contract import append

USER = {"role": "user", "content": "x"}


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "a.db", tmp_path / "head"


def write(paths: tuple[Path, Path], count: int, first: int = 0) -> None:
    with AuditLog(paths[0], head_file=paths[1], durability="normal") as log:
        for number in range(first, first + count):
            append(log, "c", f"m{number}", USER)


def test_the_newest_events_are_recorded(paths: tuple[Path, Path]) -> None:
    """The head file names the newest event and the one before it, for its owner only."""
    write(paths, 3)
    with AuditLog(paths[0]) as log:
        head = log.head()

    records = HeadFile(str(paths[1])).records()
    assert ([id for id, _ in records], records[0][1], oct(paths[1].stat().st_mode & 0o777)) == ([3, 2], head, "0o600")


def test_a_recorded_log_verifies(paths: tuple[Path, Path]) -> None:
    """Nothing is unanchored right after a commit."""
    write(paths, 3)

    with AuditLog(paths[0], head_file=paths[1]) as log:
        assert (log.verify().ok, log.verify().unanchored) == (True, 0)


def test_events_written_without_it_are_counted(paths: tuple[Path, Path]) -> None:
    """A head file that lags behind proves the log up to its record."""
    write(paths, 3)
    with AuditLog(paths[0], durability="normal") as log:
        append(log, "c", "more", USER)

    with AuditLog(paths[0], head_file=paths[1]) as log:
        assert (log.verify().ok, log.verify().unanchored) == (True, 1)


@pytest.mark.parametrize("head_file", ["none/head", "."])
def test_an_unusable_head_file_is_named(head_file: str, paths: tuple[Path, Path]) -> None:
    """A head file whose folder is missing, or that is a folder, is refused by name."""
    with pytest.raises(LogError, match="head file cannot be opened"):
        AuditLog(paths[0], head_file=paths[0].parent / head_file)


def test_a_log_that_was_cut_is_refused(paths: tuple[Path, Path]) -> None:
    """A log shorter than its head file remembers is not opened: the next commit would overwrite the proof."""
    write(paths, 2)
    shutil.copy(paths[0], paths[0].with_suffix(".old"))
    write(paths, 2, first=2)
    shutil.copy(paths[0].with_suffix(".old"), paths[0])

    with pytest.raises(LogError, match="event 4"):
        AuditLog(paths[0], head_file=paths[1])


def test_a_torn_record_leaves_the_one_before(paths: tuple[Path, Path]) -> None:
    """Half a line, as a power failure may leave it, is ignored."""
    write(paths, 3)
    raw = bytearray(paths[1].read_bytes())
    raw[85 + 40 :] = b"\x00" * (85 - 40)
    paths[1].write_bytes(raw)

    assert [id for id, _ in HeadFile(str(paths[1])).records()] == [2]


def test_a_strangers_file_is_not_overwritten(paths: tuple[Path, Path]) -> None:
    """A head file that is none is refused, and so it stays as it was."""
    paths[1].write_text("my diary\n")

    with pytest.raises(LogError, match="not a head file"):
        AuditLog(paths[0], head_file=paths[1])

    assert paths[1].read_text() == "my diary\n"


def test_a_closed_head_file_can_be_closed_again(paths: tuple[Path, Path]) -> None:
    """Closing twice is fine, and an unused head file is empty."""
    log = AuditLog(paths[0], head_file=paths[1])
    log.close()
    log.close()

    assert paths[1].read_bytes() == b""
