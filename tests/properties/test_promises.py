"""The design's promises, on generated conversations: every policy, additive counters and others, pins, tiny budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction import Budget, Session, SessionManager
from compaction.errors import BudgetUnsatisfiable, InvalidMessage, PendingToolCalls
from compaction.policies import (
    ClampOversized,
    ClearToolResults,
    Fallback,
    NoOp,
    Pipeline,
    Quantize,
    ScoredEviction,
    SlidingWindow,
    Summarize,
    Truncate,
    default_policy,
)
from compaction.ports import Policy, Summary
from compaction.replay import replay
from compaction.state import load
from compaction.store import MemoryLog
from compaction.testing import FakeClock, FakeCounter, FakeRng, ScriptedSummarizer, check_conservation, fake_ids
from tests.oracle import illegal, rendered_pins
from tests.scripted_kv import KVEngine
from tests.strategies import conversations, tool_schemas

POLICIES: dict[str, Policy] = {
    "noop": NoOp(),
    "truncate": Truncate(),
    "sliding_window": SlidingWindow(sinks=1),
    "clear_tool_results": ClearToolResults(keep_last=0, min_tokens=1),
    "clamp_oversized": ClampOversized(),
    "summarize": Summarize(max_tokens=24),
    "pipeline": Pipeline((ClearToolResults(keep_last=1, min_tokens=1), Summarize(max_tokens=24))),
    "fallback": Fallback(Summarize(max_tokens=24), Truncate()),
    "default": default_policy(),
    "quantize": Quantize(),
    "quantize_summarize": Quantize("k4v2", then=Summarize(max_tokens=24)),
    "quantize_twice": Pipeline((Quantize("k8v4", NoOp()), Quantize("k4v2", NoOp()), Truncate())),
    "scored_eviction": ScoredEviction("keydiff", keep_last=1),
    "quantize_scored": Quantize(then=Fallback(ScoredEviction("kvzip"), ScoredEviction("expected"))),
}
SCRIPT = ("They talked.", "", Summary("half a", "length"), RuntimeError("down"), "x" * 4000)


class _Run:
    """A conversation fed message by message, a request asked for after each."""

    def __init__(
        self, policy: Policy, budget: Budget, counter: FakeCounter, tools: list[dict[str, Any]] | None
    ) -> None:
        self.log = MemoryLog()
        self.counter = counter
        self.manager = SessionManager(
            engine=KVEngine(counter=counter),
            policy=policy,
            budget=budget,
            log=self.log,
            counter=counter,
            summarizer=ScriptedSummarizer(SCRIPT),
            clock=FakeClock(),
            ids=fake_ids,
            rng=FakeRng(),
        )
        self.session: Session = self.manager.session("c", tools)
        self.spans: list[Any] = []
        self.compactions = 0

    def step(self, message: dict[str, Any], pin: bool) -> None:
        """Append, perhaps pin, ask for a request, and check everything that must hold."""
        message_id = self.session.append(message)
        if pin:
            try:
                self.session.pin(message_id)
            except InvalidMessage:
                assert self.session.state.live[message_id].edits
        state = self.session.state
        before = (list(state.entries), state.tokens, state.seq)
        bytes_before, most = state.view().kv_bytes or 0, self.manager.settings.budget.kv_bytes
        try:
            prepared = self.session.prepare()
        except BudgetUnsatisfiable as error:
            assert error.floor > error.room
            assert (list(state.entries), state.tokens, state.seq) == before, "an effect before the error"
            return
        except PendingToolCalls:
            return
        assert prepared.tokens == self.counter.request(prepared.messages, prepared.tools)
        assert prepared.tokens <= self.session.limits().room
        assert not illegal(prepared.messages, [m.data for m in state.history.values()])
        if prepared.decision is not None:
            self.compactions += 1
            self.spans += prepared.decision.spans
            assert (prepared.kv_bytes or 0) < bytes_before, "no strict progress"
            assert prepared.tokens < before[1] or prepared.decision.target.unit == "kv_bytes", "no strict progress"
        assert most is None or (prepared.kv_bytes or 0) <= int(most)
        check_conservation(state.history, state.entries, self.spans)
        view = state.view()
        assert view.units == replace(view, known_units=None).units, "running units differ from counted ones"
        assert rendered_pins(state) == [True] * len(state.pins)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25)
@given(data=st.data())
def test_every_promise_holds_at_every_step(name: str, data: st.DataObject) -> None:
    """Fit or typed error, legal output, strict progress, conservation and pins, after each message."""
    messages = data.draw(conversations(max_blocks=10))
    tools = data.draw(tool_schemas())
    counter = FakeCounter(merge_roles=data.draw(st.booleans()))
    whole = max(8, counter.request(messages, tools))
    tokens = data.draw(st.integers(max(4, whole // 8), whole + 8))
    kv_bytes = data.draw(st.sampled_from([None, tokens * 64 + 63, (tokens // 2 + 4) * 64]))
    bounds = {"tokens": tokens} if kv_bytes is None or data.draw(st.booleans()) else {}
    budget = Budget(**bounds, kv_bytes=kv_bytes, clamp_user=data.draw(st.booleans()))
    run = _Run(POLICIES[name], budget, counter, tools)

    for message in messages:
        run.step(message, pin=data.draw(st.integers(0, 9)) == 0)

    again = load(run.log, "c")
    assert (again.entries, again.tokens, again.floor(), again.storage) == (
        run.session.state.entries,
        run.session.state.tokens,
        run.session.state.floor(),
        run.session.state.storage,
    )
    assert run.log.verify().ok
    result = replay(run.log, ["c"])
    assert result.count("identical") == len(result.verdicts) == run.compactions, result.to_json()


@settings(max_examples=60)
@given(messages=conversations(), tools=tool_schemas())
def test_messages_come_back_as_they_were_given(messages: list[dict[str, Any]], tools: Any) -> None:
    """With room for all, the request is the history: equal as JSON, key order kept, the caller's list untouched."""
    run = _Run(default_policy(), Budget(tokens=10**9), FakeCounter(), tools)
    run.session.extend(messages)

    shown = [entry.render(run.session.state.history) for entry in run.session.entries]

    assert shown == messages
    assert [list(a) for a in shown] == [list(b) for b in messages]


@settings(max_examples=60)
@given(messages=conversations(), cut=st.integers(0, 40))
def test_appending_in_pieces_counts_as_appending_at_once(messages: list[dict[str, Any]], cut: int) -> None:
    """One transaction or many: the same totals, entries and floor."""
    one, two = (_Run(NoOp(), Budget(tokens=10**9), FakeCounter(), None) for _ in range(2))
    one.session.extend(messages)
    for part in (messages[:cut], messages[cut:]):
        for message in part:
            two.session.append(message)

    assert one.session.state.tokens == two.session.state.tokens
    assert [e.tokens for e in one.session.entries] == [e.tokens for e in two.session.entries]
    assert one.session.state.floor() == two.session.state.floor()
