"""What the demos share: where they find their data, and where they write."""

from __future__ import annotations

import os
from pathlib import Path

from compaction.transcripts import Transcript, read

# Threads of torch that wait would otherwise spin, which on a machine with other work takes three times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

HERE = Path(__file__).resolve().parent
DATA = HERE / "data"


def output(name: str) -> Path:
    """A fresh path in `demo-output/` below the current folder; what an earlier run left there is gone.

    The folder tells git to ignore it.
    """
    folder = Path("demo-output")
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    for ending in ("", "-wal", "-shm"):
        (folder / f"{name}{ending}").unlink(missing_ok=True)
    return folder / name


def conversations(file: str) -> list[Transcript]:
    """The conversations of a file in `demos/data/`."""
    return list(read(DATA / file))
