"""What a run comes to, read from the log's events.

Invariant: the figures are those of the conversations as the log has them, so that a run that was stopped and repeated
ends with the same totals as one that went through. Of an interrupted turn the log has no usage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compaction.events import Event

__all__ = ["Cut", "Figures", "Turn", "percentile"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: tokens of its prompt and of its largest pass, KV bytes, and that pass had nothing been discarded."""

    conversation: str
    prompt_tokens: int
    peak_tokens: int
    kv_bytes: int | None
    history_tokens: int


@dataclass(frozen=True, slots=True)
class Cut:
    """One compaction, before turn `turn` (counted from 0 over the whole run), in tokens of the request."""

    turn: int
    before: int
    after: int


@dataclass
class Figures:
    """Totals and series of some conversations of a log."""

    conversations: int = 0
    messages: int = 0
    turns: int = 0
    silent: int = 0
    discarded_spans: int = 0
    discarded_tokens: int = 0
    peak_tokens: int = 0
    kv_bytes: int | None = None
    peak_kv_bytes: int | None = None
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    summary_tokens: int = 0
    failed_summaries: int = 0
    interrupted: int = 0
    spliced_turns: int = 0
    refused_splices: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    series: list[Turn] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Take the events of one conversation, in order. `silent` counts replies nothing was generated for."""
        self.conversations += 1
        history = head = 0
        spoken = False
        for event in events:
            payload = event.payload
            match event.kind:
                case "opened":
                    history, head = history - head + sum(payload["head"]), sum(payload["head"])
                case "appended":
                    if "head" in payload:
                        history, head = history - head + sum(payload["head"]), sum(payload["head"])
                    else:
                        history += payload["tokens"]
                    self._message(payload["role"], spoken)
                    spoken = False
                case "decision_committed":
                    self._decision(payload)
                case "decision_failed":
                    self._passes(payload)
                case "usage":
                    self._usage(event.conversation, payload, history)
                    spoken = True
                case "interrupted":
                    self.interrupted += 1
                case _:
                    pass

    def _message(self, role: str, spoken: bool) -> None:
        self.messages += 1
        if role == "assistant":
            self.turns += 1
            self.silent += not spoken

    def _decision(self, payload: Mapping[str, Any]) -> None:
        self.discarded_spans += len(payload["spans"])
        self.discarded_tokens += sum(span[5] for span in payload["spans"])
        self.cuts.append(Cut(len(self.series), payload["before"]["tokens"], payload["after"]["tokens"]))
        self._passes(payload)

    def _passes(self, payload: Mapping[str, Any]) -> None:
        """The summariser's own passes: they count for the peaks, and have totals of their own."""
        self.failed_summaries += sum(item["code"].startswith("summary_") for item in payload.get("failures", ()))
        for item in payload.get("fulfilled", ()):
            usage = item["usage"]
            if usage is not None:
                self._peak(usage)
                self.summary_tokens += usage["prompt_tokens"] + usage["completion_tokens"]

    def _usage(self, conversation: str, usage: Mapping[str, Any], history: int) -> None:
        self._peak(usage)
        self.prefilled_tokens += usage.get("prefilled") or 0
        self.reused_tokens += usage.get("reused") or 0
        self.generated_tokens += usage["completion_tokens"]
        applied = usage.get("applied") or {}
        self.spliced_turns += applied.get("how") == "splice"
        self.refused_splices += "refused" in applied
        for name, values in (("ttft_ms", self.ttft_ms), ("tpot_ms", self.tpot_ms)):
            if usage.get(name) is not None:
                values.append(usage[name])
        if usage.get("kv_bytes") is not None:
            self.kv_bytes = max(self.kv_bytes or 0, usage["kv_bytes"])
        peak = usage.get("peak_tokens") or usage["prompt_tokens"]
        prompt = usage["prompt_tokens"]
        self.series.append(Turn(conversation, prompt, peak, usage.get("kv_bytes"), history + peak - prompt))

    def _peak(self, usage: Mapping[str, Any]) -> None:
        self.peak_tokens = max(self.peak_tokens, usage.get("peak_tokens") or 0)
        if usage.get("peak_kv_bytes") is not None:
            self.peak_kv_bytes = max(self.peak_kv_bytes or 0, usage["peak_kv_bytes"])


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The nearest-rank percentile, rounded to a microsecond where the values are milliseconds; None of nothing."""
    if not values:
        return None
    return round(sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)], 3)
