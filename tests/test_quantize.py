"""Bytes before words: targets in KV bytes, the quantize action, what a session makes of it, and scores of entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction import Budget, Session, SessionManager
from compaction.budget import KVStorage, Target
from compaction.decide import SCORE_DIGITS
from compaction.errors import BudgetUnsatisfiable, InvalidPlan, InvalidPolicy, PendingToolCalls
from compaction.plan import Drop, Plan
from compaction.plan import Quantize as ToStorage
from compaction.policies import (
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
from compaction.ports import Engine, Log, Policy
from compaction.replay import replay
from compaction.state import load, without_refs
from compaction.store import MemoryLog
from compaction.testing import FakeClock, FakeCounter, FakeRng, ScriptedSummarizer, check_conservation, fake_ids
from compaction.view import View
from tests.builders import assistant, system, user
from tests.crash.scripted_engine import ScriptedEngine
from tests.planned import Planned, kinds
from tests.policies.views import PLAIN, chat, make_view
from tests.scripted_kv import STORAGES, KVEngine
from tests.strategies import conversations

PER_TOKEN = 64


def manager(
    policy: Policy, budget: Budget, *, log: Log | None = None, engine: Engine | None = None, **more: Any
) -> SessionManager:
    """A manager over an engine that can quantize and score."""
    return SessionManager(
        engine=engine or KVEngine(),
        policy=policy,
        budget=budget,
        log=log or MemoryLog(),
        clock=FakeClock(),
        ids=fake_ids,
        rng=FakeRng(),
        **more,
    )


def fill(session: Session, tokens: int) -> None:
    """Turns until the next request has at least so many tokens."""
    turn = 0
    while session.state.tokens < tokens:
        turn += 1
        session.extend([user(f"question {turn} " * 4), assistant(f"answer {turn} " * 4)])
    session.append(user("and now?"))


def identical(log: Any, conversation: str = "c") -> int:
    """How many decisions replay, all of them the same bytes."""
    result = replay(log, [conversation])
    assert result.count("identical") == len(result.verdicts), result.to_json()
    assert log.verify().ok
    return len(result.verdicts)


# -- targets in bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [Truncate(), SlidingWindow(), default_policy(), Summarize(max_tokens=24)], ids=lambda policy: policy.name
)
@settings(max_examples=15)
@given(messages=conversations(max_blocks=10), part=st.integers(2, 8), spare=st.integers(0, 63))
def test_without_quantizing_bytes_decide_as_tokens_do(
    policy: Policy, messages: list[dict[str, Any]], part: int, spare: int
) -> None:
    """A budget of KV bytes discards what the budget of as many tokens discards, step by step."""
    tokens = max(8, FakeCounter().request(messages, None) // part)
    budgets = (Budget(tokens=tokens), Budget(kv_bytes=tokens * PER_TOKEN + spare))
    seen: list[list[Any]] = []
    for budget in budgets:
        session = manager(policy, budget, engine=ScriptedEngine(), summarizer=ScriptedSummarizer()).session("c")
        seen.append([])
        for message in messages:
            session.append(message)
            try:
                decision = session.prepare().decision
            except (BudgetUnsatisfiable, PendingToolCalls) as error:
                seen[-1].append(str(error))
                continue
            if decision is not None:
                failed = [failure.code for failure in decision.failures]
                shown = decision.to_json()
                seen[-1].append([shown[key] for key in ("plan", "spans", "changed", "rung")] + [failed])
        seen[-1].append([(entry.id, entry.tokens) for entry in session.entries])

    assert seen[0] == seen[1]


def test_a_decision_under_a_binding_kv_budget_is_told_in_bytes() -> None:
    """Target, figures before and after, and what a token costs: replay needs no geometry."""
    session = manager(Truncate(), Budget(kv_bytes=300 * PER_TOKEN)).session("c")
    fill(session, 290)

    decision = session.prepare().decision

    assert decision is not None and decision.target.unit == "kv_bytes"
    shown = decision.to_json()
    assert shown["target"] == {"must": 300 * 64, "want": decision.target.want, "unit": "kv_bytes", "cap": 100_000}
    assert shown["limits"]["kv_bytes"] == 300 * 64
    assert shown["before"]["kv_bytes"] == decision.tokens_before * 64
    assert shown["after"]["kv_bytes"] == decision.tokens_after * 64 <= decision.target.want


def test_where_tokens_bind_the_unit_is_tokens() -> None:
    """A KV budget that is larger than the budget of tokens leaves the log as it was: no bytes in the decision."""
    session = manager(Quantize(), Budget(tokens=200, kv_bytes=300 * PER_TOKEN)).session("c")
    fill(session, 200)

    decision = session.prepare().decision

    assert decision is not None and decision.target == Target(200, decision.target.want)
    assert "kv_bytes" not in decision.to_json()["limits"] and session.state.storage == PLAIN
    assert not decision.plan.quantizes


@pytest.mark.parametrize("unit", ["tokens", "kv_bytes"])
def test_a_policy_that_knows_no_bytes_is_asked_in_tokens(unit: str) -> None:
    """What a third party compares with `view.tokens` stays a number of tokens."""
    seen: list[Target] = []

    def plan(view: View, target: Target) -> Plan:
        seen.append(target)
        return Plan((Drop((view.entries[0].id,), "first"),))

    budget = Budget(tokens=300) if unit == "tokens" else Budget(kv_bytes=300 * PER_TOKEN + 5)
    session = manager(Planned(plan), budget).session("c")
    fill(session, 280)
    session.prepare()

    assert seen[0] == Target(300, seen[0].want) and 8 < seen[0].want < 300


# -- the action ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actions", "view", "says"),
    [
        ([ToStorage("k9", "r")], {"storage": PLAIN, "storages": STORAGES}, "unknown: the engine has k4v2, k8v4"),
        ([ToStorage("k8v4", "r")], {"storage": STORAGES["k8v4"], "storages": STORAGES}, "no narrower than 'k8v4'"),
        ([ToStorage("k8v4", "r")], {"storage": STORAGES["k4v2"], "storages": STORAGES}, "no narrower than 'k4v2'"),
        ([ToStorage("k8v4", "r")], {"storage": PLAIN}, "no engine here that can quantize"),
        ([ToStorage("k8v4", "r")], {}, "no engine here that can quantize"),
        ([ToStorage("k8v4", "r"), ToStorage("k4v2", "r")], {"storage": PLAIN, "storages": STORAGES}, "quantizes once"),
    ],
)
def test_a_storage_that_cannot_be_is_refused(actions: list[ToStorage], view: dict[str, Any], says: str) -> None:
    """Unknown, no narrower, twice, or without an engine for it: one line that says what there is."""
    with pytest.raises(InvalidPlan, match=says):
        make_view(chat(2), **view).after(Plan(tuple(actions)))


def test_quantizing_changes_bytes_and_nothing_else() -> None:
    """Entries, tokens and what is discarded stay; the plan survives JSON."""
    view = make_view(chat(9), storage=PLAIN, storages=STORAGES)
    plan = Plan((ToStorage("k8v4", "narrower"),))

    applied = view.after(plan)

    assert (applied.entries, applied.tokens, applied.discards) == (view.entries, view.tokens, ())
    assert applied.kv_bytes == 640 + 28 * view.tokens < (view.kv_bytes or 0)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(InvalidPlan, match="storage is a text"):
        Plan.from_json([{"do": "quantize", "storage": 4, "reason": "r"}])


def test_a_later_stage_sees_the_narrower_cache() -> None:
    """In a pipeline the target in tokens grows with it, and of two storages the narrower one holds."""
    seen: list[tuple[int, int]] = []

    def look(view: View, target: Target) -> Plan:
        seen.append((target.must, view.storage.per_token if view.storage else 0))
        return Plan()

    view = make_view(chat(20), storage=PLAIN, storages=STORAGES)
    stages = Pipeline([Quantize("k8v4", NoOp()), Planned(look), Quantize("k4v2", NoOp())])

    plan = stages.plan(view, Target(64 * 300, 64 * 100, "kv_bytes"))

    assert seen == [((64 * 300 - 640) // 28, 28)]
    assert [action.storage for action in plan.actions if isinstance(action, ToStorage)] == ["k4v2"]


# -- sessions ------------------------------------------------------------------------------------------------------


def test_bytes_go_before_words() -> None:
    """The first time all messages stay; later, as `then`; each request fits its bytes, and all of it replays."""
    log, engine = MemoryLog(), KVEngine()
    session = manager(Quantize(then=Truncate()), Budget(kv_bytes=300 * PER_TOKEN), log=log, engine=engine).session("c")
    fill(session, 290)
    first = session.generate(max_new_tokens=4)
    shown = [entry.id for entry in session.entries]
    spans: list[Any] = []
    while len(spans) == 0:
        session.append(user("more " * 40))
        reply = session.generate(max_new_tokens=4)
        spans += reply.decision.spans if reply.decision else []
        assert session.usage.kv_bytes is not None and session.usage.kv_bytes <= 300 * PER_TOKEN

    assert first.decision is not None and first.decision.plan == Plan((ToStorage("k8v4", "bytes before words"),))
    assert shown == list(session.state.history)[: len(shown)], "all messages kept"
    assert first.decision.to_json()["after"]["storage"] == "k8v4"
    assert first.decision.reusable_tokens == first.decision.tokens_before
    assert session.state.tokens > 300, "more tokens than the plain cache would hold"
    assert [call[0] for call in engine.calls].count("quantize") == 1
    assert identical(log) == 2
    check_conservation(session.state.history, session.entries, spans)


def test_the_engine_is_told_before_anything_is_fed_and_the_log_says_what_it_cost() -> None:
    """`usage` holds bytes before and after, measured, and the error of keys and values; once."""
    log, engine = MemoryLog(), KVEngine()
    session = manager(Quantize(), Budget(kv_bytes=300 * PER_TOKEN), log=log, engine=engine).session("c")
    session.append(user("hello"))
    session.generate(max_new_tokens=4)
    fill(session, 290)
    before = engine.kv_bytes("c")

    for _ in range(2):
        session.generate(max_new_tokens=4)
        session.append(user("go on"))

    applied = [event.payload.get("applied") for event in log.events("c") if event.kind == "usage"]
    assert [call[0] for call in engine.calls] == ["generate", "quantize", "generate", "generate"]
    assert applied[0] is None and applied[2] is None
    assert applied[1] == {
        "quantize": {
            "storage": "k8v4",
            "bytes_before": before,
            "bytes_after": KVStorage("k8v4", 28, 640).bytes(before // PER_TOKEN),
            "key_error": 0.005,
            "value_error": 0.07,
        }
    }


def test_what_bytes_do_not_solve_is_dropped_in_the_same_decision() -> None:
    """Far above the room: quantize, and as many drops as the narrower cache still needs."""
    log = MemoryLog()
    session = manager(Quantize(then=Truncate()), Budget(kv_bytes=300 * PER_TOKEN), log=log).session("c")
    fill(session, 2000)

    prepared = session.prepare()

    assert prepared.decision is not None
    assert [type(action) for action in prepared.decision.plan.actions] == [ToStorage, Drop]
    assert prepared.kv_bytes == 640 + 28 * prepared.tokens <= 300 * PER_TOKEN
    assert prepared.tokens <= session.limits().room
    assert identical(log) == 1


def test_a_budget_of_tokens_beside_the_bytes_is_kept_too() -> None:
    """What the narrower cache could hold does not count where the tokens are limited as well."""
    session = manager(Quantize(then=Truncate()), Budget(tokens=320, kv_bytes=300 * PER_TOKEN)).session("c")
    fill(session, 1000)

    prepared = session.prepare()

    assert prepared.decision is not None and prepared.decision.target.cap == 320
    assert prepared.tokens <= 320 and prepared.decision.rung == 1


def test_after_too_long_words_go() -> None:
    """A provider's "too long" is about tokens: quantizing would not help."""
    session = manager(Quantize(then=Truncate()), Budget(kv_bytes=300 * PER_TOKEN)).session("c")
    fill(session, 200)

    decision = session.prepare(trigger="overflow").decision

    assert decision is not None and decision.target.unit == "tokens" and not decision.plan.quantizes


@pytest.mark.parametrize("then", [Truncate(), NoOp()], ids=["truncate", "noop"])
@pytest.mark.parametrize("size", [150, 280, 400, 600, 620, 660, 900])
def test_a_floor_that_fits_only_a_narrower_cache_fits(size: int, then: Policy) -> None:
    """The request is sent if and only if what must stay fits some storage the policy may choose."""
    log, engine = MemoryLog(), KVEngine()
    session = manager(Quantize(then=then), Budget(kv_bytes=300 * PER_TOKEN), log=log, engine=engine).session("c")
    session.extend([user("a" * 80), assistant("b" * 80), user("c" * 4 * (size - 7))])
    narrow = STORAGES["k8v4"]
    fits = narrow.tokens(300 * PER_TOKEN) >= size

    if fits:
        assert session.prepare().tokens <= session.limits().room
        assert identical(log) == (session.state.decisions)
    else:
        with pytest.raises(BudgetUnsatisfiable, match=f"the room for a prompt is {narrow.tokens(300 * PER_TOKEN)}"):
            session.prepare()
        assert session.state.decisions == 0


@pytest.mark.parametrize("floor", [280, 400])
def test_the_last_rung_quantizes_only_where_the_floor_needs_it(floor: int) -> None:
    """Where a policy names a storage and plans nothing, the core drops; it quantizes where dropping cannot suffice."""
    log, lazy = MemoryLog(), Planned(lambda view, target: Plan(), needs=frozenset({"storage:k8v4"}))
    session = manager(lazy, Budget(kv_bytes=300 * PER_TOKEN), log=log).session("c")
    session.extend([user("a" * 1600), assistant("b" * 80), user("c" * 4 * (floor - 7))])

    prepared = session.prepare()

    assert prepared.decision is not None and prepared.decision.rung == 3
    assert prepared.decision.plan.quantizes == (floor > 300)
    assert (prepared.kv_bytes or 0) <= 300 * PER_TOKEN and prepared.tokens <= session.limits().room


def test_a_policy_that_did_not_ask_for_it_is_never_quantized() -> None:
    """The last rung does not either: fidelity is the user's to give."""
    session = manager(Truncate(), Budget(kv_bytes=300 * PER_TOKEN)).session("c")
    session.extend([user("a" * 80), assistant("b" * 80), user("c" * 4 * 400)])

    with pytest.raises(BudgetUnsatisfiable):
        session.prepare()


def test_a_resumed_conversation_goes_on_in_its_storage() -> None:
    """Another process, another engine: told before its first prefill; the limit is the narrower cache's."""
    log = MemoryLog()
    one = manager(Quantize(), Budget(kv_bytes=300 * PER_TOKEN), log=log).session("c")
    fill(one, 290)
    one.generate(max_new_tokens=4)
    engine = KVEngine()
    other = manager(Quantize(), Budget(kv_bytes=300 * PER_TOKEN), log=log, engine=engine).session("c")
    other.append(user("still there?"))

    reply = other.generate(max_new_tokens=4)

    assert other.state.storage == one.state.storage == STORAGES["k8v4"]
    assert engine.calls == [("quantize", "c", "k8v4"), ("generate", "c", "k8v4")]
    assert reply.decision is None and other.limits().limit == (300 * PER_TOKEN - 640) // 28
    assert [e.payload["storages"] for e in log.events("c") if e.kind == "opened"] == [{"k8v4": [28, 640]}]


def test_an_engine_that_cannot_quantize_takes_it_over_in_full() -> None:
    """The conversation is counted at full price again, and compacted where that no longer fits."""
    log = MemoryLog()
    one = manager(Quantize(), Budget(kv_bytes=300 * PER_TOKEN), log=log).session("c")
    fill(one, 400)
    one.prepare()
    other = manager(Quantize(), Budget(kv_bytes=300 * PER_TOKEN), log=log, engine=ScriptedEngine()).session("c")

    prepared = other.prepare()

    assert one.state.tokens > 300 >= prepared.tokens
    assert other.state.storage == PLAIN and prepared.decision is not None and not prepared.decision.plan.quantizes
    assert identical(log) == 2


def test_a_rewind_takes_quantizing_back_and_a_fork_keeps_it() -> None:
    """The engine is told both: the rewound conversation in full, the fork narrower."""
    log, engine = MemoryLog(), KVEngine()
    session = manager(Quantize(), Budget(kv_bytes=300 * PER_TOKEN), log=log, engine=engine).session("c")
    fill(session, 290)
    at = session.state.seq
    session.generate(max_new_tokens=4)
    fork = session.fork("d")
    fork.append(user("here"))
    fork.generate(max_new_tokens=4)
    session.rewind(at - 20)

    session.generate(max_new_tokens=4)

    assert fork.state.storage == STORAGES["k8v4"]
    assert [call for call in engine.calls if call[0] == "quantize"] == [
        ("quantize", "c", "k8v4"),
        ("quantize", "d", "k8v4"),
        ("quantize", "c", ""),
    ]
    assert load(log, "c").storage == PLAIN and load(log, "d").storage == STORAGES["k8v4"]
    assert identical(log) + identical(log, "d") >= 1


def test_a_storage_the_engine_does_not_have_is_refused_at_once() -> None:
    """When the manager is made, not deep inside a turn; where the model, or the engine, cannot, `then` plans."""
    with pytest.raises(InvalidPolicy, match="'k2v1' is unknown: use one of k4v2, k8v4"):
        manager(Fallback(Quantize("k2v1"), Truncate()), Budget(kv_bytes=10_000))

    for engine in (ScriptedEngine(), KVEngine()):
        session = manager(Quantize("k0v0", Truncate()), Budget(kv_bytes=300 * PER_TOKEN), engine=engine).session("c")
        fill(session, 500)
        decision = session.prepare().decision
        assert decision is not None and decision.rung == 1 and not decision.plan.quantizes


def test_a_conversation_stays_quantized_under_another_policy() -> None:
    """Changing the policy gives no fidelity back, and costs no prefill."""
    log = MemoryLog()
    one = manager(Quantize(), Budget(kv_bytes=300 * PER_TOKEN), log=log).session("c")
    fill(one, 290)
    one.prepare()

    other = manager(Truncate(), Budget(kv_bytes=300 * PER_TOKEN), log=log).session("c")
    fill(other, 800)

    prepared = other.prepare()
    assert other.state.storage == STORAGES["k8v4"] and prepared.tokens > 300
    assert (prepared.kv_bytes or 0) <= 300 * PER_TOKEN and identical(log) == 2


def test_a_summarizers_own_pass_stays_within_the_plain_cache() -> None:
    """Its cache is not the conversation's: what quantizing gained is none of its."""
    script = ScriptedSummarizer(default="ok")
    policy = Quantize(then=Summarize(max_tokens=24, keep_last=2))
    session = manager(policy, Budget(kv_bytes=300 * PER_TOKEN), summarizer=script).session("c")
    fill(session, 290)
    session.prepare()
    fill(session, 700)
    session.prepare()

    assert session.limits().limit > 600 and script.calls
    assert all(call["limit"] == 300 for _, call in script.calls)


# -- scores --------------------------------------------------------------------------------------------------------


def by_length(kind: str, message: Mapping[str, Any]) -> float:
    """Short messages are worth nothing."""
    return len(message["content"]) / 1000 + 1e-9


def test_what_scores_lowest_goes_first() -> None:
    """Wherever it stands; scores are rounded, written into the decision, and replayed without an engine."""
    log, engine = MemoryLog(), KVEngine(score=by_length)
    session = manager(ScoredEviction("keydiff"), Budget(tokens=300), log=log, engine=engine).session("c")
    for size in (200, 20, 180, 30, 160, 40, 140, 50, 120, 60):
        session.append(user("x" * size))

    decision = session.compact_now()

    assert decision is not None and decision.rung == 1
    gone = {len(session.state.history[span.span.message_id].data["content"]) for span in decision.spans}
    assert gone == {20, 30, 40, 50, 140, 160}, "120 and 60 are the newest"
    payload = next(event.payload for event in log.events("c") if event.kind == "decision_committed")
    assert payload["scores"][0]["kind"] == "keydiff" and payload["scores"][0]["error"] is None
    assert payload["scores"][0]["values"] == [0.2, 0.02, 0.18, 0.03, 0.16, 0.04, 0.14, 0.05, 0.12, 0.06]
    assert [call[0] for call in engine.calls] == ["scores"]
    assert identical(log) == 1


@pytest.mark.parametrize(
    ("engine", "kind", "says"),
    [
        (ScriptedEngine(), "keydiff", "no keydiff scores: there is no engine here that scores"),
        (KVEngine(), "kvzip", "no kvzip scores: EngineError: this model cannot repeat its context"),
        (KVEngine(score=lambda kind, message: float("nan")), "expected", "or no numbers"),
    ],
)
@pytest.mark.parametrize("second", [None, SlidingWindow(sinks=2)], ids=["alone", "fallback"])
def test_where_nobody_scores_the_next_rung_plans(engine: Engine, kind: str, says: str, second: Policy | None) -> None:
    """The failure is recorded with its reason, once measured; the request fits, and it replays."""
    log = MemoryLog()
    policy: Policy = ScoredEviction(kind) if second is None else Fallback(ScoredEviction(kind), second)
    session = manager(policy, Budget(tokens=300), log=log, engine=engine).session("c")
    fill(session, 500)

    prepared = session.prepare()

    assert prepared.decision is not None and prepared.decision.rung == 2 and prepared.tokens <= 300
    (failure,) = prepared.decision.failures
    assert failure.code == "no_scores" and says in failure.detail
    assert identical(log) == 1


def test_scores_are_measured_only_where_somebody_asks() -> None:
    """Quantizing comes first and needs none: nothing is run through the model for it."""
    log, engine = MemoryLog(), KVEngine()
    policy = Quantize(then=ScoredEviction("expected"))
    session = manager(policy, Budget(kv_bytes=300 * PER_TOKEN), log=log, engine=engine).session("c")
    fill(session, 290)
    session.prepare()
    asked = list(engine.calls)
    fill(session, 700)
    session.prepare()

    assert asked == [] and engine.calls == [("scores", "c", "expected")]
    assert identical(log) == 2


def test_a_policy_that_asks_for_other_scores_is_different() -> None:
    """Replay feeds back what was recorded and nothing else."""
    log = MemoryLog()
    session = manager(ScoredEviction("expected"), Budget(tokens=300), log=log).session("c")
    fill(session, 500)
    session.prepare()

    recorded = Plan.from_json(_plans(log)[0])
    other = replay(log, ["c"], make=lambda name, params: _Tweaked("expected"))
    deaf = replay(log, ["c"], make=lambda name, params: _Deaf("expected", planned=recorded))

    assert [verdict.result for verdict in other.verdicts] == ["different"]
    assert deaf.verdicts[0].reason == "policy 'scored_eviction' does not ask for the expected scores recorded"


@dataclass(frozen=True)
class _Tweaked(ScoredEviction):
    """Says that it goes by one score, and goes by another."""

    def plan(self, view: View, target: Target) -> Plan:
        return ScoredEviction("keydiff").plan(view, target)


@dataclass(frozen=True)
class _Deaf(ScoredEviction):
    """Plans the same without looking."""

    planned: Plan = field(default_factory=Plan)

    def plan(self, view: View, target: Target) -> Plan:
        return self.planned


def _plans(log: MemoryLog) -> list[Any]:
    """The committed plans of conversation "c", as JSON."""
    events = [event for event in log.events("c") if event.kind == "decision_committed"]
    return [without_refs(event.payload, log.text)["plan"] for event in events]


def test_scores_are_rounded_before_they_rank() -> None:
    """Two machines that add in another order discard the same."""

    def noisy(noise: float) -> KVEngine:
        return KVEngine(score=lambda kind, message: len(message["content"]) * (1 + noise) / 7)

    gone = []
    for noise in (0.0, 1e-9, -1e-9):
        log = MemoryLog()
        session = manager(ScoredEviction("keydiff"), Budget(tokens=300), log=log, engine=noisy(noise)).session("c")
        fill(session, 500)
        session.prepare()
        gone.append([event.payload for event in log.events("c") if event.kind == "decision_committed"])

    assert gone[0] == gone[1] == gone[2] and SCORE_DIGITS == 4


def test_no_event_of_another_kind_is_written() -> None:
    """A log with quantizing and scores holds the kinds that were there before."""
    log = MemoryLog()
    policy = Quantize(then=ScoredEviction("expected"))
    session = manager(policy, Budget(kv_bytes=300 * PER_TOKEN), log=log).session("c")
    session.append(system("be brief"))
    fill(session, 700)
    session.generate(max_new_tokens=4)

    assert set(kinds(log)) == {"opened", "appended", "decision_committed", "generation_started", "usage"}
