"""A transcript and a finished log, written once for each test process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from compaction.policies import Summarize
from compaction.testing import ScriptedSummarizer
from tests.cli.harness import write_log, write_talk


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    """A transcript of one small conversation."""
    return write_talk(tmp_path)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of that conversation with some compactions."""
    path = tmp_path_factory.mktemp("finished") / "audit.db"
    write_log(path)
    return path


@pytest.fixture
def failing(tmp_path: Path) -> Path:
    """A log of that conversation whose summaries came to nothing."""
    path = tmp_path / "failing.db"
    write_log(path, Summarize(), ScriptedSummarizer([RuntimeError("down")] * 99))
    return path


@pytest.fixture
def db(finished: Path, tmp_path: Path) -> Path:
    """A log of one's own."""
    return Path(shutil.copy(finished, tmp_path / "audit.db"))
