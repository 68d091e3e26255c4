"""Every file of recorded conversations through `compact()`: budgets from the floor to the whole, all policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compaction import Budget, Compacted, compact
from compaction.errors import BudgetUnsatisfiable, PendingToolCalls
from compaction.manager import message_id
from compaction.messages import Message, dumps
from compaction.ports import Policy
from compaction.testing import FakeCounter, ScriptedSummarizer, check_conservation
from compaction.transcripts import read
from tests.oracle import illegal
from tests.properties.test_promises import POLICIES

FILES = (
    "tau_bench_airline_gpt4o",
    "bfcl_multi_turn_executed",
    "swe_agent_trajectories",
    "openhands_multi_swe_bench",
    "aider_chat_history",
    "memorybank_en",
)
A_FILE = 8
"""Conversations taken of each file: the longest, and others evenly spread."""
COUNTER = FakeCounter()


def _sample(path: Path) -> list[list[dict[str, Any]]]:
    found = [list(transcript.messages) for transcript in read(path)]
    longest = max(found, key=lambda messages: sum(len(str(m)) for m in messages))
    return [longest, *found[:: max(1, len(found) // (A_FILE - 1))]][:A_FILE]


def _budgets(messages: list[dict[str, Any]], policy: Policy) -> list[int]:
    """From what the error says is the least, to the whole and one more."""
    whole = COUNTER.request(messages, None)
    try:
        compact(messages, budget=Budget(tokens=1), counter=COUNTER, policy=policy, summarizer=ScriptedSummarizer())
        least = 1
    except BudgetUnsatisfiable as error:
        least = error.floor
    return sorted({least - 1, least, least + (whole - least) // 20, (least + whole) // 2, whole - 1, whole, whole + 1})


def _check(messages: list[dict[str, Any]], small: Compacted, tokens: int) -> None:
    history = {f"{i}": m for i, m in enumerate(messages)}
    assert small.tokens == COUNTER.request(small.messages, None) <= tokens
    assert not illegal(small.messages, list(history.values()))
    if small.decision is None:
        assert small.messages == messages
        return
    ids = list(dict.fromkeys(_ids(small, len(messages))))
    originals = {id: Message(id, dumps(m)) for id, m in zip(ids, messages, strict=True)}
    check_conservation(originals, small.decision.applied.entries, small.decision.spans)
    for span in small.decision.spans:
        if span.span.path == "":
            assert span.text == originals[span.span.message_id].text


def _ids(small: Compacted, length: int) -> list[str]:
    return [message_id("compact", seq) for seq in range(2, length + 2)]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", POLICIES)
def test_compact_keeps_its_promises_on_recorded_conversations(file: str, name: str, shared_data: Path) -> None:
    """No exception but the typed ones, no orphan tool result, a fit, and conservation."""
    policy, fitted = POLICIES[name], 0
    for messages in _sample(shared_data / f"{file}.jsonl.gz"):
        try:
            budgets = _budgets(messages, policy)
        except PendingToolCalls:
            messages = [*messages, {"role": "user", "content": "The run ended here."}]
            budgets = _budgets(messages, policy)
        for tokens in budgets:
            try:
                small = compact(
                    messages,
                    budget=Budget(tokens=max(1, tokens)),
                    counter=COUNTER,
                    policy=policy,
                    summarizer=ScriptedSummarizer(),
                )
            except BudgetUnsatisfiable as error:
                assert tokens < budgets[1] and error.floor > error.room
                continue
            fitted += 1
            _check(messages, small, tokens)
    assert fitted
