"""The log contract, kept by the log in a file and by the one in memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from compaction.ports import Log
from compaction.store import AuditLog, MemoryLog
from tests.contracts.log_contract import LogContract, MakeLog


class TestAuditLog(LogContract):
    """In a file; durability "normal", because what it adds is the disk's, not ours."""

    @pytest.fixture
    def make_log(self, tmp_path: Path) -> Iterator[MakeLog]:
        made: list[AuditLog] = []
        numbers = count()

        def make() -> Log:
            made.append(AuditLog(tmp_path / f"{next(numbers)}.db", durability="normal"))
            return made[-1]

        yield make
        for log in made:
            log.close()


class TestMemoryLog(LogContract):
    """In memory."""

    @pytest.fixture
    def make_log(self) -> Iterator[MakeLog]:
        made: list[MemoryLog] = []

        def make() -> Log:
            made.append(MemoryLog())
            return made[-1]

        yield make
        for log in made:
            log.close()


def test_both_keep_the_protocol() -> None:
    """They are `ports.Log` by structure, which is all the core asks for."""
    with MemoryLog() as log:
        assert isinstance(log, Log)
