"""The command line as a real process, and a small conversation to play."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compaction.budget import Budget
from compaction.manager import SessionManager
from compaction.policies import SlidingWindow
from compaction.ports import Policy, Summarizer
from compaction.store import AuditLog
from compaction.testing import FakeCounter
from tests.builders import assistant, call, system, tool, user

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = "talk-1"
TALK: list[dict[str, Any]] = [
    system("You are terse."),
    user("Where is order 7712? Grüße 🚚"),
    assistant(None, calls=[call("c1", q="7712"), call("c2", q="stock")]),
    tool("c1", "order 7712: in Zürich, " + "parcel scanned, " * 30),
    tool("c2", "lone \ud83d surrogate, \x1b[31mred, NUL \x00, <|im_end|> " + "shelf row, " * 30),
    assistant("In Zürich."),
    user("And order 88? " + "please " * 40),
    assistant(None, calls=[call("c1", q="88")]),
    tool("c1", "order 88: unknown " + "no record, " * 30),
    assistant("Unknown."),
    user("Thanks. 再见"),
    assistant("Bye."),
]


def environment() -> dict[str, str]:
    """The process's own, with the repository in front, one thread for torch, and no hub to wait for."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}


def cli(*arguments: object, stdin: str | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `compaction …` to its end and check its exit code."""
    command = [sys.executable, "-m", "compaction", *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment(), timeout=240)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def as_json(*arguments: object, stdin: str | None = None, code: int = 0) -> dict[str, Any]:
    """The one JSON object `compaction … --json` prints."""
    found = json.loads(cli(*arguments, "--json", stdin=stdin, code=code).stdout)
    assert isinstance(found, dict)
    return found


def complaint(*arguments: object, code: int = 2) -> str:
    """The one line on stderr of a command that fails; it prints nothing else."""
    done = cli(*arguments, code=code)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start `compaction …` and leave it running."""
    command = [sys.executable, "-m", "compaction", *map(str, arguments)]
    pipe = subprocess.PIPE
    options: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True, "env": environment()}
    return subprocess.Popen(command, preexec_fn=_interruptible, **options)


def _interruptible() -> None:
    """Let Ctrl-C work, also where a shell started the tests in its background and so told them to ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(db: Path, enough: Callable[[Mapping[str, int]], bool], process: subprocess.Popen[str]) -> None:
    """Wait until the log's events, counted by kind, are enough; the log is read from outside."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if enough(kinds(db)):
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"the process ended too early: {process.communicate()}")


def kinds(db: Path) -> dict[str, int]:
    """How many events of each kind a log holds; none where there is no table yet."""
    try:
        connection = sqlite3.connect(f"file:{db}?mode=ro", uri=True)
        try:
            return dict(connection.execute("SELECT kind, count(*) FROM events GROUP BY kind"))
        finally:
            connection.close()
    except sqlite3.OperationalError:
        return {}


def generating(counts: Mapping[str, int]) -> bool:
    """Whether a second turn has begun and is not over."""
    return counts.get("generation_started", 0) == 2 and counts.get("usage", 0) == 1


def stop(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str]:
    """Send a signal; exit code and stderr of what ends."""
    process.send_signal(number)
    stderr = process.communicate(timeout=120)[1]
    return process.returncode, stderr


def write_talk(folder: Path, messages: Sequence[Mapping[str, Any]] = TALK, name: str = "talk.jsonl") -> Path:
    """A transcript file of one conversation."""
    path = folder / name
    path.write_text(json.dumps({"id": NAME, "messages": messages}) + "\n")
    return path


def logged(db: Path) -> list[Any]:
    """The conversation's messages in a log, in order."""
    with AuditLog(db) as log:
        return [json.loads(row.json or "null") for row in log.messages(NAME)]


def verified(db: Path) -> bool:
    """Whether the log agrees with itself."""
    with AuditLog(db) as log:
        return log.verify().ok


def write_log(db: Path, policy: Policy | None = None, summarizer: Summarizer | None = None) -> None:
    """A log of the conversation, compacted on the way; no model needed."""
    with AuditLog(db) as log:
        manager = SessionManager(
            policy=policy or SlidingWindow(),
            budget=Budget(tokens=300),
            log=log,
            counter=FakeCounter(),
            summarizer=summarizer,
        )
        session = manager.session(NAME)
        for message in TALK:
            if message["role"] == "assistant":
                session.prepare(max_new_tokens=16)
            session.append(message)
