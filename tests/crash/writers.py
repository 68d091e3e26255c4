"""Two real processes on one conversation of one log: everything is kept once, nobody sees the other's conflict.

Invariant: each writer only appends and prepares; a lost race is the session's business.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compaction import Budget, SessionManager
from compaction.errors import LogConflict
from compaction.events import Event, NewEvent, Text
from compaction.policies import SlidingWindow, Summarize
from compaction.ports import Policy
from compaction.store import AuditLog
from compaction.testing import FakeCounter
from tests.builders import assistant, user
from tests.crash.checks import problems, told
from tests.crash.processes import spawn
from tests.crash.results import Outcome
from tests.crash.scenarios import CONVERSATION, ContentSummarizer

__all__ = ["POLICIES", "two_writers"]

POLICIES: tuple[Policy, ...] = (SlidingWindow(), Summarize(max_tokens=64, keep_last=2))

PAUSE = 0.004
"""Seconds between two messages of one writer, at most: without a pause the two do not meet, but take turns."""


class _Counting(AuditLog):
    """A log that counts the conflicts it raised."""

    conflicts = 0

    def commit(
        self, conversation: str, after: int, events: Sequence[NewEvent], texts: Sequence[Text] = ()
    ) -> tuple[Event, ...]:
        try:
            return super().commit(conversation, after, events, texts)
        except LogConflict:
            self.conflicts += 1
            raise


@dataclass(frozen=True)
class _Writer:
    """One of the two: `count` turns under a name of its own."""

    name: str
    policy: Policy
    count: int

    def story(self) -> list[dict[str, Any]]:
        """What it says."""
        said: list[dict[str, Any]] = []
        for turn in range(self.count):
            said += [user(f"{self.name}.{turn} " + "please " * 12), assistant(f"{self.name}.{turn} " + "say " * 12)]
        return said

    def write(self, path: Path, start: Path) -> None:
        """Say it, with a request after each message; waits for the sign to start."""
        with _Counting(path, timeout=30.0) as log:
            manager = SessionManager(
                policy=self.policy,
                budget=Budget(tokens=400),
                log=log,
                counter=FakeCounter(),
                summarizer=ContentSummarizer(),
            )
            session = manager.session(CONVERSATION)
            rng = random.Random(self.name)
            while not start.exists():
                time.sleep(0.001)
            for message in self.story():
                time.sleep(rng.uniform(0.0, PAUSE))
                session.append(message)
                prepared = session.prepare(max_new_tokens=8)
                if prepared.tokens > 392:
                    raise AssertionError(f"a request of {prepared.tokens} tokens where 392 fit")
            path.with_suffix(f".{self.name}").write_text(str(log.conflicts), "utf-8")


def two_writers(policy: Policy, folder: Path, *, turns: int) -> Outcome:
    """Let two processes write at the same time, then look."""
    path, start = folder / f"writers-{policy.name}.db", folder / f"start-{policy.name}"
    AuditLog(path).close()
    pair = [_Writer(name, policy, turns) for name in ("a", "b")]
    children = [spawn(lambda w=w: w.write(path, start), folder / f"{w.name}.txt") for w in pair]  # type: ignore[misc]
    start.touch()
    ends = [(writer.name, child.wait()) for writer, child in zip(pair, children, strict=True)]
    found = [f"writer {name} {end}" for name, end in ends if end != "done"]
    if found:
        return Outcome("two writers", policy.name, "", tuple(found))
    held, decisions = told(path)[CONVERSATION]
    found += problems(path, {CONVERSATION: held}, complete=True)
    for writer in pair:
        own = [m for m in map(json.loads, held) if m["content"].startswith(f"{writer.name}.")]
        if own != writer.story():
            found.append(f"writer {writer.name}: {len(own)} of {2 * turns} messages, or not in order")
    conflicts = sum(int(path.with_suffix(f".{writer.name}").read_text("utf-8")) for writer in pair)
    if not conflicts or not decisions:
        found.append(f"nothing was tried: {conflicts} conflicts, {len(decisions)} decisions")
    name = f"{policy.name}: {len(held)} messages, {len(decisions)} decisions, {conflicts} conflicts"
    return Outcome("two writers", name, "", tuple(found))
