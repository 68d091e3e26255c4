"""Killing at random moments, from outside: a real `compaction run` with a model, or a story without one.

Invariant: moments are drawn from a seeded generator; after every kill the log is judged, and the process is started
again on the same log until it comes to its end.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from compaction.messages import dumps
from compaction.transcripts import read
from tests.crash.checks import Told, problems, snapshot, state_of, told
from tests.crash.failpoints import Reference
from tests.crash.processes import spawn
from tests.crash.results import Outcome
from tests.crash.scenarios import CONVERSATION, tell
from tests.crash.traps import Trap

__all__ = ["RunKiller", "kill_story", "transcript"]

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDED = ROOT.parent / "shared" / "data" / "bfcl_multi_turn_executed.jsonl.gz"
CONVERSATIONS = 3
BUDGET = 448
STUCK = 600.0


def transcript(folder: Path) -> Path:
    """A few short conversations: recorded ones where they are at hand, else made-up ones."""
    path = folder / "talks.jsonl"
    if RECORDED.exists():
        with gzip.open(RECORDED, "rt", encoding="utf-8") as file:
            path.write_text("".join(islice(file, CONVERSATIONS)), "utf-8")
        return path
    talks = [
        {"id": f"talk-{n}", "messages": [
            {"role": ("user", "assistant")[turn % 2], "content": f"{n}.{turn} " + "word and word " * 12}
            for turn in range(20)
        ]}
        for n in range(CONVERSATIONS)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks), "utf-8")
    return path


@dataclass
class RunKiller:
    """Runs `compaction run` on a transcript and kills it; a run that comes to its end is judged and started over."""

    folder: Path
    rng: random.Random

    def __post_init__(self) -> None:
        self.file = transcript(self.folder)
        self.stories = {talk.id: [dumps(message) for message in talk.messages] for talk in read(self.file)}
        self.expected: Told = {}
        self.seconds = 0.0
        self.rounds = 0

    def measure(self) -> Outcome:
        """The run in one go: what it comes to and how long it plays."""
        log = self.folder / "whole.db"
        process = self._start(log)
        self._wait_for_growth(process, log)
        began = time.monotonic()
        _finish(process)
        self.seconds = time.monotonic() - began
        found = self._ended(process) + problems(log, self.stories, complete=True)
        self.expected = told(log)
        decisions = sum(len(made) for _, made in self.expected.values())
        if not decisions:
            found.append("the run does not compact")
        messages = sum(map(len, self.stories.values()))
        return Outcome("run, in one go", f"{messages} messages, {decisions} decisions", "", tuple(found))

    def kills(self, count: int) -> Iterator[Outcome]:
        """So many kills; the run in hand then comes to its end."""
        log, killed = self._next_log(), 0
        while killed < count:
            process = self._start(log)
            moment = self._sleep(process, log)
            process.kill()
            _finish(process)
            if process.returncode >= 0:
                yield self._whole(process, log)
                if process.returncode:
                    return
                log = self._next_log()
                continue
            killed += 1
            found = problems(log, self.stories, complete=False)
            held = sum(len(messages) for messages, _ in told(log).values()) if log.exists() else 0
            yield Outcome("run, kill -9 at random", f"{moment}: {held} messages held", "", tuple(found))
        process = self._start(log)
        _finish(process)
        yield self._whole(process, log)

    def _whole(self, process: subprocess.Popen[str], log: Path) -> Outcome:
        found = self._ended(process) + problems(log, self.stories, complete=True)
        held = told(log)
        if held != self.expected:
            found.append("messages or decisions are not those of the run in one go")
        return Outcome("run, after its kills", log.name, "", tuple(found))

    def _next_log(self) -> Path:
        self.rounds += 1
        return self.folder / f"round-{self.rounds}.db"

    def _start(self, log: Path) -> subprocess.Popen[str]:
        command = f"run {self.file} --log {log} --budget {BUDGET} --policy sliding_window --device cpu --json"
        with (self.folder / "stderr.txt").open("w") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "compaction", *command.split(), "--max-new-tokens", "4"],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def _ended(self, process: subprocess.Popen[str]) -> list[str]:
        if process.returncode == 0:
            return []
        lines = (self.folder / "stderr.txt").read_text("utf-8").strip().splitlines()
        return [f"the run exits {process.returncode}: {lines[-1] if lines else ''}"]

    def _sleep(self, process: subprocess.Popen[str], log: Path) -> str:
        """To the moment of the kill: now and then while it starts, mostly while it plays."""
        if self.rng.random() < 0.2:
            seconds = self.rng.uniform(0.0, 3.0)
            time.sleep(seconds)
            return f"{seconds:.2f} s after it was started"
        self._wait_for_growth(process, log)
        seconds = self.rng.uniform(0.0, self.seconds / 4)
        time.sleep(seconds)
        return f"{seconds:.2f} s after its first event"

    def _wait_for_growth(self, process: subprocess.Popen[str], log: Path) -> None:
        """Until the process writes to the log for the first time, or ends."""
        wal = log.with_name(f"{log.name}-wal")
        before = _size(wal)
        opened = False
        while process.poll() is None:
            size = _size(wal)
            # Opening a log that was killed empties or keeps its WAL: what counts is growth after that.
            if size != before:
                if opened and size > 0:
                    return
                opened, before = True, size
            time.sleep(0.01)


def _finish(process: subprocess.Popen[str]) -> None:
    """Wait for its end; a process that is stuck is killed, which its exit code then says."""
    try:
        process.wait(STUCK)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def kill_story(ref: Reference, path: Path, rng: random.Random, kills: int) -> Outcome:
    """A story without a model, killed from outside until it has died so many times, then told to its end."""
    stories = {CONVERSATION: ref.story}
    report, killed, found = path.with_suffix(".txt"), 0, list[str]()
    work: Callable[[], None] = lambda: tell(ref.scenario, path, Trap(), lambda _: time.sleep(0.002))  # noqa: E731
    for _ in range(kills):
        child = spawn(work, report)
        time.sleep(rng.uniform(0.0, 0.25))
        child.kill()
        ended = child.wait()
        killed += ended == "killed"
        if ended.startswith("failed"):
            found.append(ended)
        found += problems(path, stories, complete=False)
    if (ended := spawn(work, report).wait()) != "done":
        found.append(f"does not go on: {ended}")
    found += problems(path, stories, complete=True)
    if path.exists() and told(path)[CONVERSATION] != (list(ref.story), list(ref.decisions)):
        found.append("messages or decisions are not those of the story told in one go")
    if snapshot(state_of(path, CONVERSATION)) != ref.states[-1]:
        found.append("the last state is not that of the story told in one go")
    return Outcome("story, kill -9 at random", f"{ref.scenario.name}: {killed} kills", "", tuple(found))
