"""What a run says when it is over: the documented JSON keys, and a table for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compaction.cli.figures import Figures, percentile
from compaction.cli.forced import Player
from compaction.cli.output import console, counted, mib, pairs, plain
from compaction.cli.recordings import Recording
from compaction.engines import TransformersEngine
from compaction.store import AuditLog, MemoryLog

__all__ = ["Played", "show"]


@dataclass(frozen=True)
class Played:
    """What was played, and how; `limit` in tokens, `kv_limit` in bytes where those are limited."""

    recordings: list[Recording]
    engine: TransformersEngine
    policy: str
    limit: int
    kv_limit: int | None
    log_path: str | None
    player: Player
    seconds: float

    def figures(self, log: AuditLog | MemoryLog) -> Figures:
        """The figures of these conversations, out of the log."""
        figures = Figures()
        for recording in self.recordings:
            figures.add(log.events(recording.id))
        return figures

    def title(self, result: dict[str, Any]) -> str:
        """What a picture of the run is called."""
        return f"{self.engine.name} · {self.policy} · {counted(result['conversations'], 'conversation')}"

    def to_json(self, figures: Figures) -> dict[str, Any]:
        """The documented keys, in their order."""
        skipped = min(figures.silent, sum(recording.skipped_turns() for recording in self.recordings))
        return {
            "conversations": figures.conversations,
            "messages": figures.messages,
            "turns": figures.turns,
            "compactions": len(figures.cuts),
            "discarded_spans": figures.discarded_spans,
            "discarded_tokens": figures.discarded_tokens,
            "budget_tokens": self.limit,
            "peak_tokens": figures.peak_tokens,
            "budget_kv_bytes": self.kv_limit,
            "kv_bytes": figures.kv_bytes,
            "peak_kv_bytes": figures.peak_kv_bytes,
            "prefilled_tokens": figures.prefilled_tokens,
            "reused_tokens": figures.reused_tokens,
            "generated_tokens": figures.generated_tokens,
            "summary_tokens": figures.summary_tokens,
            "failed_summaries": figures.failed_summaries,
            "unsatisfiable": figures.silent - skipped,
            "skipped": skipped,
            "interrupted": figures.interrupted,
            "ttft_ms_p50": percentile(figures.ttft_ms, 50),
            "ttft_ms_p95": percentile(figures.ttft_ms, 95),
            "tpot_ms_p50": percentile(figures.tpot_ms, 50),
            "reuse_violations": len(self.player.violations),
            "resumed_messages": self.player.resumed,
            "apply": self.player.manager.settings.apply,
            "spliced_turns": figures.spliced_turns,
            "refused_splices": figures.refused_splices,
            "model": self.engine.name,
            "policy": self.policy,
            "log": self.log_path,
        }


def show(played: Played, result: dict[str, Any], plot: str | None) -> None:
    """The summary a person wants to read."""
    fed = result["prefilled_tokens"] + result["reused_tokens"]
    reused = f" ({result['reused_tokens'] / fed:.0%} of all prompt tokens)" if fed else ""
    resumed = f", {result['resumed_messages']:,} of them in the log before" if result["resumed_messages"] else ""
    kv_limit = mib(played.kv_limit or played.limit * played.engine.kv_bytes_per_token)
    kept = "; all in the log" if result["log"] else ""
    rows: list[tuple[str, object]] = [
        ("model", f"{result['model']} on {played.engine.model.device}"),
        ("policy", result["policy"]),
        ("played", f"{counted(result['conversations'], 'conversation')}, {result['messages']:,} messages{resumed}"),
        ("turns", f"{result['turns']:,} in {played.seconds:,.1f} s"),
        ("compactions", f"{result['compactions']:,}"),
        ("discarded", f"{result['discarded_spans']:,} spans, {result['discarded_tokens']:,} tokens{kept}"),
        ("peak tokens", _peak_tokens(result)),
        ("KV cache", f"{mib(result['kv_bytes'])} measured at rest, of {kv_limit}"),
        ("peak KV cache", f"{mib(result['peak_kv_bytes'])}, while a layer's arena grew"),
        ("prefilled", f"{result['prefilled_tokens']:,} tokens"),
        ("reused", f"{result['reused_tokens']:,} tokens{reused}"),
        ("generated", f"{result['generated_tokens']:,} tokens"),
        ("time to first token", f"{_ms(result['ttft_ms_p50'])} median, {_ms(result['ttft_ms_p95'])} p95"),
        ("time per token", f"{_ms(result['tpot_ms_p50'])} median"),
    ]
    if result["apply"] == "splice":
        refused = f"; refused in {counted(result['refused_splices'], 'turn')}" if result["refused_splices"] else ""
        rows.append(("spliced", f"{counted(result['spliced_turns'], 'turn')} on a cache edited in place{refused}"))
    if result["summary_tokens"]:
        rows.append(("summaries", f"{result['summary_tokens']:,} tokens read and written for them"))
    if result["failed_summaries"]:
        rows.append(("failed summaries", f"{result['failed_summaries']:,}: `audit show` says what was done instead"))
    if result["unsatisfiable"]:
        rows.append(("unsatisfiable", f"{counted(result['unsatisfiable'], 'turn')} could not fit the budget"))
    if result["skipped"]:
        rows.append(("skipped", f"{counted(result['skipped'], 'turn')} among unanswered tool calls"))
    violations = played.player.violations
    first = f"{counted(len(violations), 'violation')}; first: {violations[0]}" if violations else ""
    rows.append(("reuse check", first or "no turn prefilled more than what is new or follows a change"))
    rows.append(("log", result["log"] or "in memory, gone now: give --log DB to keep it"))
    if plot:
        rows.append(("plot", plot))
    console().print(pairs("", [(name, plain(str(value))) for name, value in rows]))


def _peak_tokens(result: dict[str, Any]) -> str:
    """Beside the budget; a quantized cache holds more tokens than the budget's bytes come to in full precision."""
    peak, budget = result["peak_tokens"], result["budget_tokens"]
    if result["budget_kv_bytes"] is not None and peak > budget:
        return f"{peak:,}; in full precision the bytes come to {budget:,}"
    return f"{peak:,} of {budget:,}"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f} ms"
