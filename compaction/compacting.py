"""Deciding for one conversation, with all that is written on the way.

Invariant: the decision is durable before its spans leave the context, and it was made on the very state it changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from compaction.budget import Limits
from compaction.decide import Decision, Held, Recorder, decide
from compaction.errors import CompactionError, LogConflict
from compaction.events import NewEvent, Text
from compaction.fulfil import fulfil
from compaction.ledger import Ledger
from compaction.plan import Digest
from compaction.ports import Summary
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
        recorder = Recorder(ledger.settings.counter, ledger.tally.tools, _summarizer(ledger, limits))
        made.append(decide(ledger.state.view(), limits, ledger.settings.policy, recorder, trigger=trigger))
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
    summarizer = ledger.settings.summarizer
    if summarizer is None:
        return None

    def ask(action: Digest, view: View) -> Summary:
        started = {"tokens": view.tokens, "summarizer": summarizer.name, "entries": list(action.entries)}
        ledger.note("decision_started", started)
        return fulfil(summarizer, action, view, limit=limits.limit, count=ledger.settings.counter.text)

    return ask


def _events(ledger: Ledger, outcome: Decision | Held, recorder: Recorder) -> Written:
    notes: dict[str, Text] = {}

    def put(text: str) -> str:
        if text not in notes:
            notes[text] = ledger.seal(text)
        return notes[text].digest.hex()

    if isinstance(outcome, Decision):
        payload = with_refs(outcome.to_json(), put)
        payload |= {"answers": recorder.answers, "fulfilled": _fulfilled(recorder, put)}
        return [ledger.event("decision_committed", payload)], list(notes.values())
    if not outcome.failures:
        return [], []
    failures = [{**failure.to_json(), "detail": {"t": put(failure.detail)}} for failure in outcome.failures]
    failed = {"tokens": ledger.state.tokens, "failures": failures, "fulfilled": _fulfilled(recorder, put)}
    return [ledger.event("decision_failed", failed)], list(notes.values())


def _fulfilled(recorder: Recorder, put: Callable[[str], str]) -> list[dict[str, Any]]:
    return [
        {"text": {"t": put(s.text)}, "finish_reason": s.finish_reason, "usage": s.usage.to_json() if s.usage else None}
        for s in recorder.fulfilled
    ]
