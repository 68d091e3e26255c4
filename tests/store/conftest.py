"""Temporary folders in RAM where there is one: these tests open hundreds of files, and a disk only adds fsyncs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

RAM = Path("/dev/shm")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """As pytest's own, in RAM."""
    place = RAM if RAM.is_dir() and os.access(RAM, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as name:
        yield Path(name)
