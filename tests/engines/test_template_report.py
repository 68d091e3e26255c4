"""At load an engine says what its chat template costs a cache, and the log keeps it."""

from __future__ import annotations

import logging

import pytest

from compaction import Budget, SessionManager
from compaction.engines import TransformersEngine
from compaction.store import MemoryLog
from tests.fixtures_models import tiny_engine, tiny_model, tiny_tokenizer
from tests.tokens.families import TEMPLATES


def test_what_makes_tokens_go_in_again_is_said_at_load_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A template that drops reasoning and rewrites history is named, once a finding, with what is done about it."""
    with caplog.at_level(logging.WARNING, logger="compaction"):
        engine = TransformersEngine(tiny_model("llama"), tokenizer=tiny_tokenizer(TEMPLATES["qwen"]))
    codes = [finding.code for finding in engine.template_report.costs]
    assert codes == ["prefix_unstable", "history_unstable", "drops_reasoning"]
    assert len(caplog.records) == len(codes)
    assert "reasoning of earlier turns" in caplog.text
    log = MemoryLog()
    SessionManager(engine=engine, budget=Budget(tokens=200), log=log).session("c")
    opened = next(iter(log.events("c"))).payload
    assert opened["template"] == engine.template_lint
    assert opened["template"]["findings"] == codes
    assert not opened["template"]["prefix_stable"]


def test_a_stable_template_is_not_remarked_on(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is said where nothing is prefilled again."""
    with caplog.at_level(logging.WARNING, logger="compaction"):
        engine = tiny_engine()
    assert engine.template_lint["findings"] == []
    assert not caplog.records
