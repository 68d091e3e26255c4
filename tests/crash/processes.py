"""Children by fork: cheap enough that a process can be killed a thousand times.

Invariant: the parent is single-threaded and holds no open log when it forks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Child", "spawn"]

PATIENCE = 120.0
"""Seconds after which a child that does not end is taken for stuck."""


@dataclass
class Child:
    """A child process; `report` is where it says what went wrong."""

    pid: int
    report: Path

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> str:
        """How it ended: "done", "killed", or the last line of its traceback."""
        deadline = time.monotonic() + PATIENCE
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                self.kill()
                os.waitpid(self.pid, 0)
                return f"stuck for {PATIENCE:.0f} s"
            time.sleep(0.001)
        if os.WIFSIGNALED(status):
            return "killed" if os.WTERMSIG(status) == signal.SIGKILL else f"signal {os.WTERMSIG(status)}"
        if os.WEXITSTATUS(status) == 0:
            return "done"
        lines = self.report.read_text("utf-8").strip().splitlines() if self.report.exists() else []
        return f"failed: {lines[-1]}" if lines else f"exit {os.WEXITSTATUS(status)}"


def spawn(work: Callable[[], None], report: Path) -> Child:
    """Do `work` in a child process."""
    report.unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Child(pid, report)
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001  nothing may climb out of a forked child into its parent's code
        report.write_text(traceback.format_exc(), "utf-8", "backslashreplace")
    finally:
        os._exit(code)
