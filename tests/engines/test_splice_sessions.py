"""Sessions whose plans are applied in place: what is logged, what is kept, and what a summary costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from compaction import Budget, SessionManager
from compaction.engines import TransformersEngine
from compaction.engines.live_cache import _Parked
from compaction.errors import EngineError, InvalidInput
from compaction.policies import SlidingWindow, Summarize, Truncate
from compaction.ports import Apply, Policy
from compaction.replay import replay
from compaction.session import Session
from compaction.store import AuditLog, MemoryLog
from compaction.testing import FakeClock, FakeRng, ScriptedSummarizer, fake_ids
from tests.builders import assistant, system, user
from tests.crash.scripted_engine import ScriptedEngine
from tests.engines.test_splicing import check, tensors, trained
from tests.fixtures_models import tiny_engine

LIMIT = 300


def manager(
    engine: TransformersEngine, log: Any = None, *, policy: Policy | None = None, apply: Apply = "splice", **more: Any
) -> SessionManager:
    """A manager whose every source of chance is counted."""
    return SessionManager(
        engine,
        policy or SlidingWindow(),
        more.pop("budget", Budget(tokens=LIMIT)),
        MemoryLog() if log is None else log,
        apply=apply,
        clock=FakeClock(),
        ids=fake_ids,
        rng=FakeRng(),
        **more,
    )


def turns(session: Session, count: int, *, reply: int = 4) -> Iterator[dict[str, Any]]:
    """Recorded turns, as `compaction run` plays them; what each usage says was done."""
    if not session.state.history:
        session.append(system("Be brief."))
    for turn in range(count):
        session.append(user(f"question {turn}: the quick brown fox and the dog {turn * turn}"))
        used = session.probe(max_new_tokens=reply).usage
        if used.prefilled + used.reused != used.prompt_tokens or used.peak_tokens > LIMIT:
            raise AssertionError(f"figures that cannot be: {used}")
        yield {**(used.applied or {}), "prompt": used.prompt_tokens, "why": used.why}
        session.append(assistant(f"answer {turn}, thank you very much"))


def events(log: Any, kind: str, conversation: str = "c") -> list[Any]:
    """Payloads of one kind."""
    return [event.payload for event in log.events(conversation) if event.kind == kind]


def test_a_turn_says_how_its_cache_was_made() -> None:
    """The `usage` event holds what was evicted and in which mode, and the conversation opens in splice mode."""
    engine, log = tiny_engine(), MemoryLog()
    said = list(turns(manager(engine, log).session("c"), 12))

    spliced = [payload["applied"] for payload in events(log, "usage") if payload["applied"]["how"] == "splice"]
    assert events(log, "opened")[0]["apply"] == "splice"
    assert any(a["removal"] == "evicted" and a["evicted"] > 0 and a["mode"] == "gap" for a in spliced)
    assert [{k: a[k] for k in ("how", "removal")} for a in said] == [
        {k: p["applied"][k] for k in ("how", "removal")} for p in events(log, "usage")
    ]


def test_a_splice_prefills_less_than_exact() -> None:
    """The same conversation: fewer tokens go through the model, and every prompt is as long."""
    prefilled, prompts = {}, {}
    for apply in ("exact", "splice"):
        log = MemoryLog()
        mode: Apply = "splice" if apply == "splice" else "exact"
        prompts[apply] = [a["prompt"] for a in turns(manager(tiny_engine(), log, apply=mode).session("c"), 14)]
        prefilled[apply] = sum(payload["prefilled"] for payload in events(log, "usage"))

    assert prompts["exact"] == prompts["splice"] and prefilled["splice"] < 0.8 * prefilled["exact"]


def test_exact_sessions_say_so() -> None:
    """What leaves an exact cache is purged, never evicted, and nothing of splicing is written."""
    log = MemoryLog()
    list(turns(manager(tiny_engine(), log, apply="exact").session("c"), 12))

    said = [payload["applied"] for payload in events(log, "usage")]
    assert {a["how"] for a in said} == {"exact"} and {a["removal"] for a in said} == {"", "purged"}
    assert "apply" not in events(log, "opened")[0]


def test_the_cache_stands_for_the_view() -> None:
    """After each turn of a long session: ids, positions and layers agree, and bytes stay within the budget."""
    engine = tiny_engine()
    session = manager(engine, policy=Truncate()).session("c")
    with trained(engine, 700):
        for _ in turns(session, 30):
            check(engine, session.prepare(max_new_tokens=4).messages)
            assert engine.kv_bytes("c") <= LIMIT * engine.kv_bytes_per_token

    assert session.usage.kv_bytes == engine.kv_bytes("c")


def test_a_purge_is_logged_and_leaves_no_trace() -> None:
    """Evicted is not erased: purging prefills what carries traces, and the log says which was done."""
    engine, log = tiny_engine(), MemoryLog()
    session = manager(engine, log).session("c")
    list(turns(session, 12))
    before = session.divergence(4)

    tokens = session.purge()

    assert before.kl > 1e-6 > session.divergence(4).kl
    assert events(log, "reanchored")[-1] == {"reason": "purged", "tokens": tokens} and tokens > 0
    assert session.purge() == 0 and len(events(log, "reanchored")) == 1


def test_drift_is_bounded_and_logged() -> None:
    """Keys that were moved as often as allowed are computed afresh: a `reanchored` event with its tokens."""
    engine, log = tiny_engine(drift_budget=1), MemoryLog()
    session = manager(engine, log, policy=Truncate()).session("c")
    with trained(engine, 330):
        said = list(turns(session, 40))

    again = [payload for payload in events(log, "reanchored") if payload["reason"] == "drift"]
    assert again and sum(p["tokens"] for p in again) == sum(a.get("reanchored", 0) for a in said)
    assert max(a.get("drift", 0) for a in said) == 1


def test_divergence_is_sampled_as_the_rng_says() -> None:
    """Every spliced turn at rate 1, none at 0, and the same ones for the same seed in between."""

    class Dice:
        """Random bytes from a counter, spread."""

        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, size: int) -> bytes:
            self.calls += 1
            return bytes((self.calls * 97 + index * 31) % 256 for index in range(size))

    drawn = []
    for rate in (0.0, 0.5, 0.5, 1.0):
        log = MemoryLog()
        made = SessionManager(
            tiny_engine(), SlidingWindow(), Budget(tokens=LIMIT), log, apply="splice", divergence_rate=rate, rng=Dice()
        )
        list(turns(made.session("c"), 11, reply=1))
        said = [payload["applied"] for payload in events(log, "usage") if payload["applied"]["how"] == "splice"]
        drawn.append(["divergence" in a for a in said])
        assert all(a["divergence"]["kl"] >= 0 and a["divergence"]["tokens"] >= 1 for a in said if "divergence" in a)

    assert not any(drawn[0]) and all(drawn[3]) and drawn[1] == drawn[2] and len(set(drawn[1])) == 2


def test_no_reply_is_lost_to_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the divergence cannot be measured, the turn stands, and says why."""

    def refuse(*_: Any) -> None:
        raise EngineError("no room for a second cache")

    engine, log = tiny_engine(), MemoryLog()
    monkeypatch.setattr(engine, "divergence", refuse)
    list(turns(manager(engine, log, divergence_rate=1.0).session("c"), 12))

    said = [payload["applied"].get("divergence") for payload in events(log, "usage")]
    assert {"refused": "no room for a second cache"} in said


def test_a_reply_given_up_while_the_divergence_is_measured_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C there loses no word: what had come is kept, and the cache holds the prompt only."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    engine, log = tiny_engine(), MemoryLog()
    monkeypatch.setattr(engine, "divergence", stop)
    session = manager(engine, log, divergence_rate=1.0).session("c")
    with pytest.raises(KeyboardInterrupt):
        list(turns(session, 30))

    held = engine._conversations["c"]
    kinds = [event.kind for event in log.events("c")]
    assert kinds[-2:] == ["generation_started", "interrupted"] and len(held.live) == held.prompt
    assert held.reply is not None and held.reply.result is not None
    assert log.text(bytes.fromhex(events(log, "interrupted")[0]["text"])) == held.reply.result.text


def test_a_host_without_memory_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what is to wait on the host does not fit there after two layers, those are put back."""
    engine = tiny_engine()
    list(engine.generate("c", [user("the quick brown fox")], None, max_new_tokens=4))
    live, before, take = engine._conversations["c"].live, tensors(engine), _Parked.of
    left = iter(range(2))

    def of(layer: Any, count: int) -> _Parked:
        if next(left, None) is None:
            raise torch.OutOfMemoryError("no memory left")
        return take(layer, count)

    monkeypatch.setattr(_Parked, "of", of)
    with pytest.raises(EngineError, match="out of memory"), live.aside(5):
        pass

    assert len(live) > 5 and {layer.held for layer in live.layers} == {len(live)}
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(engine), strict=True))


def test_a_reply_closed_at_its_last_piece_leaves_the_prompt_only() -> None:
    """All had come and nobody asked for the end: interrupted like any other, text and cache alike."""
    engine, log = tiny_engine(), MemoryLog()
    session = manager(engine, log).session("c")
    session.append(user("Which order number?"))
    stream = session.stream(max_new_tokens=6)
    while engine._conversations.get("c") is None or engine._conversations["c"].running:
        next(stream)
    stream.close()

    held = engine._conversations["c"]
    assert len(events(log, "interrupted")) == 1 and len(session.state.history) == 1
    assert len(held.live) == held.prompt


def test_a_summary_is_written_by_the_live_cache_and_spliced_in() -> None:
    """The summariser reads only its instruction; the summary is encoded, the tail is not prefilled again."""
    engine, log = tiny_engine(), MemoryLog()
    policy = Summarize(max_tokens=24, keep_last=3, instruction="Sum up.")
    budget = Budget(tokens=500)
    made = SessionManager(engine, policy, budget, log, apply="splice", clock=FakeClock(), ids=fake_ids, rng=FakeRng())
    session = made.session("c")
    session.append(system("Be brief."))
    for turn in range(14):
        session.append(user(f"question {turn}: the quick brown fox and the dog {turn * turn}"))
        session.probe(max_new_tokens=4)
        session.append(assistant(f"answer {turn}, thank you very much"))

    decisions = [*events(log, "decision_committed"), *events(log, "decision_failed")]
    used = [f["usage"] for payload in decisions for f in payload["fulfilled"] if f["usage"]]
    assert used and all(u["applied"]["how"] == "splice" and u["reused"] > u["prefilled"] for u in used)
    assert all(u["peak_tokens"] <= 500 and u["prompt_tokens"] + u["completion_tokens"] <= 500 for u in used)


def test_a_given_summary_is_encoded_between_its_neighbours() -> None:
    """With a summariser of the caller's own: the turn after it inserts, and prefills the new message alone."""
    engine, log = tiny_engine(), MemoryLog()
    summarizer = ScriptedSummarizer(default="The fox asked, the dog answered.")
    session = manager(
        engine, log, policy=Summarize(max_tokens=64, keep_last=5), summarizer=summarizer, budget=Budget(tokens=400)
    ).session("c")
    session.append(system("Be brief."))
    said = []
    for turn in range(14):
        session.append(user(f"question {turn}: the quick brown fox and the dog {turn * turn}"))
        used = session.probe(max_new_tokens=4).usage
        said.append((used.applied or {}, used.prefilled))
        check(engine, session.prepare(max_new_tokens=4).messages)
        session.append(assistant(f"answer {turn}, thank you very much"))

    inserted = [(a["inserted"], prefilled) for a, prefilled in said if a.get("inserted")]
    assert inserted and all(new < prefilled < new + 100 for new, prefilled in inserted)


def test_a_resumed_session_prefills_and_goes_on(tmp_path: Any) -> None:
    """The cache is gone with the process: the first turn is exact, and the mode is not opened again."""
    with AuditLog(tmp_path / "a.db") as log:
        list(turns(manager(tiny_engine(), log).session("c"), 10))
        said = list(turns(manager(tiny_engine(), log).session("c"), 8))

        assert said[0]["how"] == "exact" and "splice" in {a["how"] for a in said[1:]}
        assert [payload["reason"] for payload in events(log, "reanchored")] == ["resumed"]
        assert log.verify().ok and len(events(log, "opened")) == 1


def test_spliced_decisions_replay() -> None:
    """How a decision reached the cache is no part of it: replay decides the same."""
    log = MemoryLog()
    list(turns(manager(tiny_engine(), log).session("c"), 14))

    found = replay(log, ["c"])

    assert 0 < len(found.verdicts) == found.count("identical")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"apply": "guess"}, "'exact' or 'splice'"),
        ({"apply": "splice"}, "needs an engine that holds live caches"),
        ({"apply": "exact", "divergence_rate": 2}, "a fraction of turns"),
        ({"apply": "exact", "divergence_rate": "1"}, "a fraction of turns"),
        ({"apply": "exact", "divergence_rate": 0.1}, "give apply='splice' too"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(more: dict[str, Any], said: str) -> None:
    """A mode that is none, an engine without a cache to edit, a rate above all or of turns that are never spliced."""
    with pytest.raises(InvalidInput, match=said):
        SessionManager(ScriptedEngine(), budget=Budget(tokens=100), **more)


def test_nothing_to_purge_where_nothing_is_spliced() -> None:
    """An exact session says so."""
    session = manager(tiny_engine(), apply="exact").session("c")

    with pytest.raises(InvalidInput, match="nothing is spliced here"):
        session.purge()


def test_replies_of_generate_stay_in_the_cache() -> None:
    """A chat in splice mode: what was sampled is kept where it can be, and every turn's bits are its own."""
    engine = tiny_engine()
    session = manager(engine).session("c")
    session.append(system("Be brief."))
    for turn in range(7):
        session.append(user(f"question {turn}: the quick brown fox and the dog"))
        session.generate(max_new_tokens=6)

    one = tensors(engine)
    again = tiny_engine()
    other = manager(again).session("c")
    other.append(system("Be brief."))
    for turn in range(7):
        other.append(user(f"question {turn}: the quick brown fox and the dog"))
        other.generate(max_new_tokens=6)
    assert all((a == b).all() for a, b in zip(one, tensors(again), strict=True))
