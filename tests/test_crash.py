"""The quick crash tests: every place of the design's picture once, no model. `make crash` does all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="kill -9 and fork are POSIX")

ARROWS = {
    "create the log: in the transaction",
    "append → measure",
    "above the high mark",
    "view → plan",
    "plan → fulfil",
    "fulfil, asked",
    "fulfil → check",
    "failed → plan again",
    "apply → engine",
    "engine, mid-stream",
    "engine → record usage",
    *(
        f"log {event}: {when}"
        for event in ("message", "decision", "decision started", "decision failed", "generation started")
        for when in ("before commit", "in the transaction", "in a statement", "after commit")
    ),
}


def crash(root: Path, folder: Path, part: str) -> dict[str, Any]:
    """One part in a process of its own: it forks, which a test runner with threads must not."""
    command = [sys.executable, "-m", "tests.crash", "--quick", "--only", part, "--json", str(folder / "crash.json")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, encoding="utf-8")
    if done.returncode not in (0, 1) or not (folder / "crash.json").exists():
        pytest.fail(done.stderr or done.stdout)
    result: dict[str, Any] = json.loads((folder / "crash.json").read_text("utf-8"))
    return result


def test_a_kill_at_every_arrow(root: Path, tmp_path: Path) -> None:
    """Wherever the process dies, the log verifies, holds the old state or the new one, and the story goes on."""
    result = crash(root, tmp_path, "failpoints")

    assert (result["failures"], ARROWS - {row["name"] for row in result["rows"]}) == ([], set())


@pytest.mark.parametrize("part", ["story", "writers", "disk"])
def test_nothing_is_lost_or_doubled(part: str, root: Path, tmp_path: Path) -> None:
    """Kills at random moments, two writers at once, and a disk that fills up leave every message in the log once."""
    result = crash(root, tmp_path, part)

    assert (result["failures"], result["tries"] > 0) == ([], True)
