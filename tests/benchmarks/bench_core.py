"""Appending, planning and preparing, at 10 thousand and at one million tokens.

The conversation is the aider history, all 984 sessions as one (1.1 M cl100k tokens). Comparators run in the same
process, alternating with ours; ratios are medians with their spread.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, trim_messages

from compaction import Budget, Session, SessionManager
from compaction.budget import Target
from compaction.decide import Recorder, decide
from compaction.policies import NoOp, SlidingWindow, Truncate
from compaction.ports import Log, Policy
from compaction.store import AuditLog, MemoryLog
from compaction.tokens import TiktokenCounter
from compaction.transcripts import read

__all__ = ["append", "idle_prepare", "planning", "run"]

AIDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "aider_chat_history.jsonl.gz"
LANGCHAIN = {"user": HumanMessage, "assistant": AIMessage, "system": SystemMessage}
COUNTER = TiktokenCounter()
Message = dict[str, Any]


def history() -> list[Message]:
    """The aider history as one conversation."""
    return [dict(message) for transcript in read(AIDER) for message in transcript.messages]


def first(messages: Sequence[Message], tokens: int) -> list[Message]:
    """The beginning of a conversation that holds about so many tokens."""
    total, count = 0, 0
    for message in messages:
        total += COUNTER.message(message)
        if total > tokens:
            break
        count += 1
    return list(messages[:count])


def session_of(messages: Sequence[Message], log: Log) -> Session:
    """A session that holds these messages and never compacts."""
    manager = SessionManager(policy=NoOp(), budget=Budget(tokens=10**9), counter=COUNTER, log=log)
    session = manager.session("aider")
    session.extend(messages)
    return session


def timed(work: Callable[[], object]) -> float:
    """Seconds one call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def summary(ratios: Sequence[float], **more: Any) -> dict[str, Any]:
    """A ratio as the benchmark states it."""
    return {"ratio": statistics.median(ratios), "spread": [min(ratios), max(ratios)], **more}


def append(messages: Sequence[Message], rounds: int = 9, batch: int = 60) -> dict[str, Any]:
    """Appending the same messages at 1 M tokens against at 10 k, each durable (`normal`) before the next."""
    new = [m for m in messages if 200 < len(m["content"]) < 2000][: rounds * batch]
    with tempfile.TemporaryDirectory() as name:
        logs = [AuditLog(Path(name) / f"{size}.db", durability="normal") for size in ("large", "small")]
        large, small = session_of(messages, logs[0]), session_of(first(messages, 10_000), logs[1])
        took: dict[str, list[float]] = {"large": [], "small": []}
        for at in range(0, len(new), batch):
            for message in new[at : at + batch]:
                took["large"].append(timed(lambda m=message: large.append(m)))  # type: ignore[misc]
                took["small"].append(timed(lambda m=message: small.append(m)))  # type: ignore[misc]
        for log in logs:
            log.close()
    ratios = [
        statistics.median(took["large"][at : at + batch]) / statistics.median(took["small"][at : at + batch])
        for at in range(0, len(new), batch)
    ]
    return summary(ratios, small_us=1e6 * statistics.median(took["small"]), large_tokens=large.usage.tokens)


def _langchain(messages: Sequence[Message]) -> list[BaseMessage]:
    return [LANGCHAIN[m["role"]](m["content"], id=str(i)) for i, m in enumerate(messages)]


def _exact(memo: dict[str, int] | None) -> Callable[[list[BaseMessage]], int]:
    """An exact tiktoken counter as users hand it to `trim_messages`; with `memo`, one count for each message."""

    def one(message: BaseMessage) -> int:
        return COUNTER.message({"role": "user", "content": message.content})

    def count(found: list[BaseMessage]) -> int:
        if memo is None:
            return sum(map(one, found))
        return sum(memo[str(m.id)] if str(m.id) in memo else memo.setdefault(str(m.id), one(m)) for m in found)

    return count


def planning(messages: Sequence[Message], rounds: int = 3, keep: int = 500_000) -> dict[str, Any]:
    """Planning down to half a million tokens: view and plan, against `trim_messages` on the same messages."""
    session = session_of(messages, MemoryLog())
    theirs = _langchain(messages)
    policies: dict[str, Policy] = {"truncate": Truncate(), "sliding_window": SlidingWindow()}
    memo: dict[str, int] = {}
    _exact(memo)(theirs)
    took: dict[str, list[float]] = {name: [] for name in (*policies, "decide", "exact", "memoised")}
    for _ in range(rounds):
        for name, policy in policies.items():
            times = [timed(lambda p=policy: _plan(session, p, keep)) for _ in range(15)]  # type: ignore[misc]
            took[name].append(statistics.median(times))
        took["decide"].append(statistics.median([timed(lambda: _decide(session, keep)) for _ in range(5)]))
        for name, counter in (("exact", _exact(None)), ("memoised", _exact(memo))):
            took[name].append(timed(lambda c=counter: trim_messages(theirs, max_tokens=keep, token_counter=c)))  # type: ignore[misc]
    found: dict[str, Any] = {}
    for ours in (*policies, "decide"):
        for other in ("exact", "memoised"):
            ratios = [b / a for a, b in zip(took[ours], took[other], strict=True)]
            found[f"{ours}_vs_trim_messages_{other}"] = summary(ratios, ours_ms=1e3 * statistics.median(took[ours]))
    return found


def _plan(session: Session, policy: Policy, keep: int) -> None:
    view = session.state.view()
    plan = policy.plan(view, Target(must=keep, want=keep))
    if not plan.actions:
        raise RuntimeError("the policy planned nothing: the benchmark would measure nothing")


def _decide(session: Session, keep: int) -> None:
    limits = Budget(tokens=keep * 2, low=0.5, high=0.9).limits(window=None, max_new_tokens=0, kv_bytes_per_token=None)
    decide(session.state.view(), limits, Truncate(), Recorder(COUNTER, None), trigger="manual")


def idle_prepare(messages: Sequence[Message], rounds: int = 9, calls: int = 300) -> dict[str, Any]:
    """A `prepare()` with nothing to do at 5,000 entries, against the same at 10."""
    large, small = (session_of(messages[:count], MemoryLog()) for count in (5_000, 10))
    ratios, times = [], []
    for _ in range(rounds):
        a = statistics.median(timed(large.prepare) for _ in range(calls))
        b = statistics.median(timed(small.prepare) for _ in range(calls))
        ratios.append(a / b)
        times.append(a)
    return summary(ratios, large_ms=1e3 * statistics.median(times))


def run() -> dict[str, Any]:
    """All figures by name."""
    messages = history()
    return {
        "append_1m_vs_10k": append(messages),
        **planning(messages),
        "idle_prepare_5000_vs_10_entries": idle_prepare(messages),
    }
