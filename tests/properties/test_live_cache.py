"""Promises 3, 6, 10 and 12 where plans are applied in place: random talks, spliced, quantized and cancelled."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction import Budget, SessionManager
from compaction.policies import Quantize, SlidingWindow, Truncate
from compaction.replay import replay
from compaction.store import MemoryLog
from tests.fixtures_models import shared_tiny_engine

LIMIT, REPLY = 160, 6
POLICIES: dict[str, Any] = {
    "truncate": lambda: Truncate(),
    "sliding_window": lambda: SlidingWindow(),
    "quantize": lambda: Quantize(storage="k8v4:window=8", then=SlidingWindow()),
}
TURNS = st.lists(
    st.tuples(st.integers(1, 60), st.sampled_from(["reply", "reply", "cancel", "probe", "purge"])),
    min_size=4,
    max_size=9,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=30, deadline=None)
@given(turns=TURNS, in_bytes=st.booleans())
def test_a_spliced_conversation_keeps_its_budget_and_stands_for_its_request(
    policy: str, turns: list[tuple[int, str]], in_bytes: bool
) -> None:
    """At each turn: prompt + reply within the limit, the cache holds exactly the wanted ids, replay decides alike."""
    engine = shared_tiny_engine()
    most = LIMIT * engine.kv_bytes_per_token
    budget = Budget(kv_bytes=most) if in_bytes else Budget(tokens=LIMIT)
    log = MemoryLog()
    session = SessionManager(engine, POLICIES[policy](), budget, log, apply="splice").session("c")
    session.append({"role": "system", "content": "Be brief."})
    try:
        for size, what in turns:
            session.append({"role": "user", "content": "w" * size})
            if what == "cancel":
                stream = session.stream(max_new_tokens=REPLY)
                next(stream, None)
                stream.close()
            elif what == "purge":
                session.purge()
            else:
                act = session.generate if what == "reply" else session.probe
                usage = act(max_new_tokens=REPLY).usage
                held = list(engine.cached_ids("c"))
                assert usage.prompt_tokens + REPLY <= session.limits(REPLY).limit
                assert usage.peak_tokens <= session.limits(REPLY).limit
                assert not in_bytes or engine.kv_bytes("c") <= most
                shown = [entry.render(session.state.history) for entry in session.entries]
                asked = shown[:-1] if what == "reply" else shown
                assert held[: usage.prompt_tokens] == list(engine.template.ids(asked, None))
                assert what == "reply" or len(held) == usage.prompt_tokens
            if session.entries[-1].role == "user":
                session.append({"role": "assistant", "content": "ok"})
    finally:
        engine.release("c")
    assert all(verdict.result == "identical" for verdict in replay(log, ["c"]).verdicts)
