"""Replay: every decision again, from the log alone."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compaction import Budget, SessionManager
from compaction.budget import Target
from compaction.plan import Plan
from compaction.plugins import make_policy
from compaction.policies import SlidingWindow, Summarize, Truncate
from compaction.ports import Policy
from compaction.replay import replay
from compaction.store import AuditLog, MemoryLog
from compaction.testing import FakeClock, FakeCounter, FakeRng, ScriptedSummarizer, fake_ids
from compaction.view import View
from tests.builders import assistant, system, tool_batch, user

TALK = [system("be brief")] + [
    message
    for turn in range(12)
    for message in (
        user(f"question {turn} " * 9),
        *tool_batch([(f"c{turn % 3}", "row " * 30)]),
        assistant("answer " * 7),
    )
]


def talk(policy: Policy, log: Any, tokens: int = 300) -> int:
    """A conversation with a request before each assistant message; how many decisions that took."""
    manager = SessionManager(
        policy=policy,
        budget=Budget(tokens=tokens),
        log=log,
        counter=FakeCounter(),
        summarizer=ScriptedSummarizer(("first summary", "", RuntimeError("down"))),
        clock=FakeClock(),
        ids=fake_ids,
        rng=FakeRng(),
    )
    session = manager.session("c")
    decisions = 0
    for message in TALK:
        if message["role"] == "assistant":
            decisions += session.prepare().decision is not None
        session.append(message)
    return decisions


@pytest.mark.parametrize("policy", [Truncate(), SlidingWindow(), Summarize(max_tokens=20, keep_last=2)])
def test_replay_is_identical(policy: Policy) -> None:
    """Summaries, failures and all: the same bytes from recorded answers."""
    log = MemoryLog()
    decisions = talk(policy, log)

    result = replay(log, ["c"])

    assert decisions > 2
    assert result.to_json() == {
        "decisions": decisions,
        "identical": decisions,
        "different": 0,
        "not_replayable": 0,
        "reasons": [],
    }


@dataclass(frozen=True)
class Tweaked(Truncate):
    """Truncate with one constant changed and, wrongly, the same version."""

    def plan(self, view: View, target: Target) -> Plan:
        """Aims a little lower than it should."""
        return Truncate.plan(self, view, Target(target.must, target.want - 40))


def test_a_changed_constant_is_found_and_the_decision_named() -> None:
    """A policy that plans otherwise under the same version is `different`, with sequence number and field."""
    log = MemoryLog()
    talk(Truncate(), log)

    def make(name: str, params: Mapping[str, Any]) -> Policy:
        return Tweaked() if name == "truncate" else make_policy(name, params)

    result = replay(log, ["c"], make=make)

    first = next(verdict for verdict in result.verdicts if verdict.result == "different")
    assert result.count("different") > 0
    assert log.decisions("c")[result.verdicts.index(first)].seq == first.seq
    assert first.reason.startswith(("plan: recorded", "spans: recorded", "answers: recorded"))


@dataclass(frozen=True)
class Newer(Truncate):
    """A later version of a policy."""

    version = 2


def test_another_version_is_not_replayable() -> None:
    """What another version decided cannot be decided again, and is not called different."""
    log = MemoryLog()
    decisions = talk(Truncate(), log)

    result = replay(log, ["c"], make=lambda name, params: Newer())

    assert (result.count("not_replayable"), result.count("different")) == (decisions, 0)


def test_a_missing_policy_is_not_replayable() -> None:
    """A policy that is not installed is named."""
    log = MemoryLog()
    talk(Tweaked(), log)

    result = replay(log, ["c"], make=lambda name, params: make_policy("no_such", params))

    assert result.count("not_replayable") == len(result.verdicts) > 0
    assert "no_such" in result.verdicts[0].reason


def test_rewinds_and_forks_are_followed() -> None:
    """Decisions after a rewind, and of a fork, are decided on the history they saw."""
    log = MemoryLog()
    manager = SessionManager(policy=Truncate(), budget=Budget(tokens=200), log=log, counter=FakeCounter())
    session = manager.session("c")
    for turn in range(8):
        session.append(user(f"question {turn} " * 8))
        session.prepare()
    session.rewind(session.state.seq // 2)
    fork = session.fork("d")
    for branch in (session, fork):
        for turn in range(6):
            branch.append(user(f"another {turn} " * 8))
            branch.prepare()

    result = replay(log, ["c", "d"])

    assert result.count("identical") == len(result.verdicts) >= 3
    assert log.verify().ok


@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_logs_are_the_same_bytes_under_any_hash_seed(seed: str, tmp_path: Path, root: Path) -> None:
    """Clock, ids and salts injected: the chain's head is equal whatever PYTHONHASHSEED says, and it replays."""
    script = (
        "import sys; from tests.test_replay import *\n"
        "log = AuditLog(sys.argv[1]); talk(Summarize(max_tokens=20, keep_last=2), log); print(log.head())\n"
        "print(replay(log, ['c']).count('identical'))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
    found = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a.db")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    log = MemoryLog()
    decisions = talk(Summarize(max_tokens=20, keep_last=2), log)

    assert found == [log.head(), str(decisions)]


def test_nothing_heavy_is_loaded(tmp_path: Path, root: Path) -> None:
    """Replaying a file loads no tokenizer and no model."""
    with AuditLog(tmp_path / "a.db") as log:
        talk(Truncate(), log)
    script = (
        "import sys; from compaction.replay import replay; from compaction.store import AuditLog\n"
        "print(replay(AuditLog(sys.argv[1]), ['c']).count('identical'))\n"
        "print(sorted({'torch', 'transformers', 'tiktoken', 'tokenizers'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a.db")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.splitlines()[1] == "[]"


def test_a_log_written_before_targets_were_in_bytes_replays(tmp_path: Path, root: Path) -> None:
    """Its decisions under a budget of KV bytes were judged in tokens, and come out the same bytes again."""
    path = tmp_path / "old.db"
    path.write_bytes(gzip.decompress((root / "tests/recorded/kv_budget_0_1.db.gz").read_bytes()))

    with AuditLog(path, readonly=True) as log:
        result, decisions = replay(log, [row.conversation for row in log.conversations()]), log.decisions()

    assert {row.limits["source"] for row in decisions} == {"budget kv_bytes"}
    assert {row.target["unit"] for row in decisions} == {"tokens"}
    assert result.count("identical") == len(decisions) == 18, result.to_json()
