"""A whole conversation on SmolLM2 under a budget of KV bytes: bytes first, words later, resumed as it stood."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compaction import Budget, Session, SessionManager
from compaction.engines import TransformersEngine
from compaction.plan import Drop
from compaction.plan import Quantize as ToStorage
from compaction.policies import Quantize, ScoredEviction, Truncate
from compaction.prepared import Reply
from compaction.replay import replay
from compaction.store import AuditLog, MemoryLog
from compaction.testing import check_conservation
from tests.fixtures_models import tiny_engine

PLAIN_TOKENS = 320
REPLY = 6


@pytest.fixture(scope="module")
def paragraphs() -> list[str]:
    """English prose: this project's own."""
    page = (Path(__file__).resolve().parents[2] / "docs/library.md").read_text("utf-8")
    return [part for part in page.split("\n\n") if 200 < len(part) < 420 and not part.startswith(("```", "|", "#"))]


def manager(engine: TransformersEngine, log: AuditLog) -> SessionManager:
    """A budget of so many tokens in SmolLM2's own number format."""
    budget = Budget(kv_bytes=PLAIN_TOKENS * engine.kv_bytes_per_token)
    return SessionManager(
        engine=engine, policy=Quantize("k8v4:window=0", ScoredEviction("keydiff")), budget=budget, log=log
    )


def turns(session: Session, texts: Iterator[str]) -> Iterator[Reply]:
    """Ask about paragraph after paragraph."""
    for text in texts:
        session.append({"role": "user", "content": text})
        yield session.generate(max_new_tokens=REPLY)


def test_bytes_first_words_later_and_resumed_as_it_stood(
    smollm2: TransformersEngine, paragraphs: list[str], tmp_path: Path
) -> None:
    """Measured bytes drop with all messages kept, generation goes on, later units go; verified, replayed, resumed."""
    log = AuditLog(tmp_path / "a.db", durability="normal")
    session, most = manager(smollm2, log).session("c"), PLAIN_TOKENS * smollm2.kv_bytes_per_token
    layer = most // 30
    texts = iter(paragraphs * 3)
    spans: list[Any] = []
    quantized: Reply | None = None
    before = 0
    for reply in turns(session, texts):
        assert (reply.usage.kv_bytes or 0) <= most and (reply.usage.peak_kv_bytes or 0) <= most + layer
        if quantized is None and reply.decision is not None:
            quantized = reply
            plan, shown = reply.decision.plan, [entry.id for entry in session.entries]
            assert [type(action) for action in plan.actions] == [ToStorage] and shown == list(session.state.history)
            found = session.divergence()
            assert 0 < found.kl < 0.01 and (found.top1, found.tokens) == (1, 1)
            continue
        if reply.decision is not None:
            spans += reply.decision.spans
            assert [type(action) for action in reply.decision.plan.actions] == [Drop] and reply.decision.rung == 1
            break
        before = max(before, reply.usage.prompt_tokens)

    assert quantized is not None and spans and quantized.usage.applied is not None
    done = quantized.usage.applied["quantize"]
    assert quantized.usage.why == ""
    assert done["storage"] == "k8v4:window=0" and done["bytes_after"] < 0.75 * done["bytes_before"]
    assert 0 < done["key_error"] < 0.02 and 0.02 < done["value_error"] < 0.12
    assert quantized.usage.prefilled < 150 < quantized.usage.reused, "nothing was prefilled again for it"
    assert before > PLAIN_TOKENS, "more tokens than the plain cache could hold"
    check_conservation(session.state.history, session.entries, spans)

    smollm2.release("c")
    again = manager(smollm2, log).session("c")
    again.append({"role": "user", "content": "Is all of it still there?"})
    reply = again.generate(max_new_tokens=REPLY)

    assert again.state.storage == session.state.storage and again.state.storage is not None
    assert again.state.storage.name == "k8v4:window=0" == smollm2._conversations["c"].live.storage
    assert reply.usage.reused == 0 and (reply.usage.kv_bytes or 0) <= most
    assert log.verify().ok
    result = replay(log, ["c"])
    assert result.count("identical") == len(result.verdicts) == 2, result.to_json()
    log.close()


def test_splicing_goes_on_in_a_quantized_cache() -> None:
    """What is dropped later is evicted from the codes, only what is new is prefilled, and all of it replays."""
    engine, log = tiny_engine("llama", window=4000), MemoryLog()
    most = 1000 * engine.kv_bytes_per_token
    policy, budget = Quantize("k8v4:window=16", Truncate()), Budget(kv_bytes=most)
    session = SessionManager(engine=engine, policy=policy, budget=budget, log=log, apply="splice").session("c")
    done: list[Reply] = []
    for number in range(60):
        session.append({"role": "user", "content": f"message {number} says the quick brown fox {number**2}, thank you"})
        reply = session.generate(max_new_tokens=2)
        assert (reply.usage.kv_bytes or 0) <= most
        done += [reply] if reply.decision else []
        if len(done) == 3:
            break

    applied = [dict(reply.usage.applied or {}) for reply in done]
    assert [[type(a) for a in reply.decision.plan.actions] for reply in done if reply.decision] == [
        [ToStorage],
        [Drop],
        [Drop],
    ]
    assert "quantize" in applied[0] and [item["how"] for item in applied[1:]] == ["splice", "splice"]
    assert all(
        reply.usage.prefilled < 60 and item["evicted"] > 100 for reply, item in zip(done[1:], applied[1:], strict=True)
    )
    assert session.divergence().kl < 0.2
    result = replay(log, ["c"])
    assert result.count("identical") == len(result.verdicts) == 3 and log.verify().ok
