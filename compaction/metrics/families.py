"""The counters and histograms, by what they count; each is fed with event payloads as the log writes them.

Invariant: labels are fixed words, or names of models, policies and actions: never conversations, never text.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compaction.decide import Decision
from compaction.errors import BudgetUnsatisfiable, CompactionError, LogError
from compaction.events import Event

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Histogram

__all__ = ["Compaction", "Generation", "Writes"]

# vLLM's, so that its dashboards and alerts fit. Seconds.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TPOT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_WRITE = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_DECIDE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_MODEL = ("model_name",)


class _Makers:
    """Makes metrics of one registry, all under one prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        from prometheus_client import Counter

        return Counter(f"compaction_{name}", help, labels, registry=self._registry)

    def histogram(self, name: str, help: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
        from prometheus_client import Histogram

        return Histogram(f"compaction_{name}", help, labels, buckets=buckets, registry=self._registry)


class Generation:
    """What replies cost: names, meaning and buckets as in vLLM."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = _Makers(registry)
        self.ttft = make.histogram(
            "time_to_first_token_seconds",
            "Prefill and first token; a compaction before it is not part of it.",
            _MODEL,
            _TTFT,
        )
        self.tpot = make.histogram(
            "time_per_output_token_seconds", "Mean of each reply, first token left out.", _MODEL, _TPOT
        )
        self.prompt = make.counter("prompt_tokens", "Prompt tokens of all replies.", _MODEL)
        self.generated = make.counter("generation_tokens", "Generated tokens.", _MODEL)
        self.queries = make.counter("prefix_cache_queries", "Prompt tokens looked for in a live KV cache.", _MODEL)
        self.hits = make.counter("prefix_cache_hits", "Prompt tokens that stood there and were used again.", _MODEL)
        self.prefilled = make.counter(
            "prefilled_tokens", "Prompt tokens that went through the model.", (*_MODEL, "why")
        )
        self.interrupted = make.counter("interrupted", "Replies that were cut off.", _MODEL)

    def used(self, model: str, usage: Mapping[str, Any]) -> None:
        """Take a `usage` event; a provider's own figures have no cache and no times."""
        self.prompt.labels(model).inc(usage["prompt_tokens"])
        self.generated.labels(model).inc(usage["completion_tokens"])
        if usage.get("reported"):
            return
        self.queries.labels(model).inc(usage["prompt_tokens"])
        self.hits.labels(model).inc(usage["reused"])
        self.prefilled.labels(model, usage["why"] or "new").inc(usage["prefilled"])
        for times, name in ((self.ttft, "ttft_ms"), (self.tpot, "tpot_ms")):
            if usage[name] is not None:
                times.labels(model).observe(usage[name] / 1000)


class Compaction:
    """What left the context, by whose decision, and what could not be decided."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = _Makers(registry)
        what = ("policy", "action")
        self.decisions = make.counter("compactions", "Committed decisions.", ("policy", "rung", "trigger"))
        self.tokens = make.counter("discarded_tokens", "Tokens that left the context; the log has their text.", what)
        self.spans = make.counter("discarded_spans", "Spans that left the context; the log has their text.", what)
        self.summary = make.counter("summary_tokens", "Prompt and reply tokens of summaries, used or not.")
        self.failures = make.counter("plan_failures", "Plans that were refused.", ("rung", "code"))
        self.unsatisfiable = make.counter("unsatisfiable", "What must stay exceeds the room.", ("trigger",))
        outcome = ("outcome",)
        self.seconds = make.histogram("decision_seconds", "Attempts to compact, summaries included.", outcome, _DECIDE)

    def decided(self, payload: Mapping[str, Any]) -> None:
        """Take a `decision_committed` or `decision_failed` event."""
        for failure in payload["failures"]:
            self.failures.labels(failure["rung"], failure["code"]).inc()
        for usage in (item["usage"] for item in payload.get("fulfilled", ()) if item["usage"]):
            self.summary.inc(usage["prompt_tokens"] + usage["completion_tokens"])
        if "plan" not in payload:
            return
        policy = payload["policy"]["name"]
        self.decisions.labels(policy, payload["rung"], payload["trigger"]).inc()
        for *_, index, tokens in payload["spans"]:
            action = payload["plan"][index]["do"]
            self.spans.labels(policy, action).inc()
            self.tokens.labels(policy, action).inc(tokens)

    def attempted(self, trigger: str, outcome: object, seconds: float) -> None:
        """Take what the observer hears; what cannot fit is told nowhere else, because nothing is written then."""
        if isinstance(outcome, BudgetUnsatisfiable):
            self.unsatisfiable.labels(trigger).inc()
            name = "unsatisfiable"
        elif isinstance(outcome, CompactionError):
            name = "error"
        else:
            name = "committed" if isinstance(outcome, Decision) else "held"
        self.seconds.labels(name).observe(seconds)


class Writes:
    """What the log does."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = _Makers(registry)
        self.seconds = make.histogram("log_write_seconds", "Commits to the log, until durable.", (), _WRITE)
        self.events = make.counter("log_events", "Events written.", ("kind",))
        self.failures = make.counter("log_write_failures", "Commits the log refused.", ("error",))

    def written(self, events: Sequence[Event], seconds: float) -> None:
        """Take a commit."""
        self.seconds.observe(seconds)
        for kind, number in Tally(event.kind for event in events).items():
            self.events.labels(kind).inc(number)

    def failed(self, error: LogError) -> None:
        """Take a commit that was refused; LogConflict is a race that is tried again."""
        self.failures.labels(type(error).__name__).inc()
