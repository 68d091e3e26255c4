"""Deciding for one conversation, with all that is written on the way.

Invariant: the decision is durable before its spans leave the context, and it was made on the very state it changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from compaction.budget import Limits
from compaction.decide import Decision, Held, Recorder, decide
from compaction.errors import CompactionError, LogConflict
from compaction.events import NewEvent, Text
from compaction.fulfil import CacheSummarizer, EngineSummarizer, fulfil
from compaction.ledger import Ledger
from compaction.plan import Digest
from compaction.ports import ScoresEntries, Summary
from compaction.state import with_refs
from compaction.view import View

__all__ = ["compact_once"]

Written = tuple[list[NewEvent], list[Text]]


def compact_once(ledger: Ledger, limits: Limits, trigger: str) -> Decision | Held:
    """One decision, written and applied; where nothing is taken, why.

    Raises BudgetUnsatisfiable where no plan whatever can fit, and PendingToolCalls where another writer has opened a
    batch meanwhile; both with nothing written.
    """
    made: list[Decision | Held] = []

    def build() -> Written:
        ledger.check_answered()
        planned, overtaken = ledger.state.seq, ledger.overtaken
        view = ledger.state.view()
        recorder = Recorder(
            ledger.settings.counter,
            ledger.tally.tools,
            _summarizer(ledger, limits),
            view.entries,
            _scorer(ledger, view, limits),
        )
        made.append(decide(view, limits, ledger.settings.policy, recorder, trigger=trigger))
        if ledger.overtaken != overtaken:  # somebody appended while a summary was being written
            raise LogConflict(ledger.id, planned, ledger.state.seq)
        return _events(ledger, made[-1], recorder)

    started = time.perf_counter()
    try:
        ledger.commit(build)
    except CompactionError as exc:
        _tell(ledger, trigger, exc, started)
        raise
    _tell(ledger, trigger, made[-1], started)
    return made[-1]


def _tell(ledger: Ledger, trigger: str, outcome: object, started: float) -> None:
    if ledger.settings.observer is not None:
        ledger.settings.observer(ledger.id, trigger, outcome, time.perf_counter() - started)


def _summarizer(ledger: Ledger, limits: Limits) -> Callable[[Digest, View], Summary] | None:
    summarizer, splicing = ledger.settings.summarizer, ledger.settings.splicing
    if summarizer is None:
        return None
    if splicing is not None and isinstance(summarizer, EngineSummarizer):
        summarizer = CacheSummarizer(splicing, ledger.id, ledger.tally.tools)

    limit = _own_limit(ledger, limits)

    def ask(action: Digest, view: View) -> Summary:
        started = {"tokens": view.tokens, "summarizer": summarizer.name, "entries": list(action.entries)}
        ledger.note("decision_started", started)
        return fulfil(summarizer, action, view, limit=limit, count=ledger.settings.counter.text)

    return ask


def _own_limit(ledger: Ledger, limits: Limits) -> int:
    """Tokens a pass of the summariser may hold: its cache is kept in the model's own number format."""
    per_token = ledger.state.opened.get("kv_bytes_per_token")
    return min(limits.limit, limits.kv_bytes // per_token) if limits.kv_bytes and per_token else limits.limit


def _scorer(ledger: Ledger, view: View, limits: Limits) -> Callable[[str], Sequence[float | None]] | None:
    engine: object = ledger.settings.engine
    if not isinstance(engine, ScoresEntries):
        return None

    def ask(kind: str) -> Sequence[float | None]:
        messages = [entry.render(view.messages) for entry in view.entries]
        return engine.scores(ledger.id, kind, messages, ledger.tally.tools, limit=limits.limit)

    return ask


def _events(ledger: Ledger, outcome: Decision | Held, recorder: Recorder) -> Written:
    notes: dict[str, Text] = {}

    def put(text: str) -> str:
        if text not in notes:
            notes[text] = ledger.seal(text)
        return notes[text].digest.hex()

    if isinstance(outcome, Decision):
        payload = with_refs(outcome.to_json(), put)
        payload |= {"answers": recorder.answers, "fulfilled": _fulfilled(recorder, put), **_scored(recorder, put)}
        return [ledger.event("decision_committed", payload)], list(notes.values())
    if not outcome.failures:
        return [], []
    failures = [{**failure.to_json(), "detail": {"t": put(failure.detail)}} for failure in outcome.failures]
    failed = {"tokens": ledger.state.tokens, "failures": failures, "fulfilled": _fulfilled(recorder, put)}
    return [ledger.event("decision_failed", {**failed, **_scored(recorder, put)})], list(notes.values())


def _scored(recorder: Recorder, put: Callable[[str], str]) -> dict[str, Any]:
    """What the entries were said to be worth, where somebody asked."""
    if not recorder.scored:
        return {}
    scores = [
        {"kind": s.kind, "values": list(s.values), "error": None if s.error is None else {"t": put(s.error)}}
        for s in recorder.scored.values()
    ]
    return {"scores": scores}


def _fulfilled(recorder: Recorder, put: Callable[[str], str]) -> list[dict[str, Any]]:
    return [
        {"text": {"t": put(s.text)}, "finish_reason": s.finish_reason, "usage": s.usage.to_json() if s.usage else None}
        for s in recorder.fulfilled
    ]
