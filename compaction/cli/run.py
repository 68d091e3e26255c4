"""`compaction run`: recorded conversations through a live session, the model included."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from compaction.budget import Budget
    from compaction.cli.figures import Figures
    from compaction.cli.forced import Player
    from compaction.cli.recordings import Recording
    from compaction.engines import TransformersEngine
    from compaction.ports import Policy
    from compaction.store import AuditLog, MemoryLog

__all__ = ["run"]

UNSATISFIABLE = 3


@click.command(short_help="Recorded conversations through a real model, inside a budget.")
@click.argument("transcripts", nargs=-1, required=True, metavar="TRANSCRIPT…")
@click.option("--model", default="smollm2", show_default=True, help="smollm2, a local folder, or a hub id.")
@click.option("--budget", type=click.IntRange(min=1), metavar="N", help="Tokens for prompt + reply.")
@click.option("--kv-budget", metavar="BYTES", help="KV-cache bytes, such as 64MiB; with or instead of --budget.")
@click.option("--policy", metavar="P", help="name or name:param=value,… (default: default; see `compaction policies`).")
@click.option("--log", "log_path", metavar="DB", help="The audit log; an existing one is resumed. Default: in memory.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N conversations, of all files.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Tokens a turn.")
@click.option("--reserve", type=click.IntRange(min=0), metavar="N", help="Tokens kept free for the reply, at least.")
@click.option("--durability", type=click.Choice(["full", "normal"]), default="full", show_default=True,
              help="full survives a power failure, normal a crash of the process.")  # fmt: skip
@click.option("--device", help="cpu, cuda, mps; default: the best there is.")
@click.option("--plot", metavar="FILE.png", help="Draw tokens and KV bytes over the turns.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def run(transcripts: tuple[str, ...], as_json: bool, plot: str | None, **options: Any) -> int:
    """Play recorded conversations through a live session with a real model and a real KV cache.

    The recorded messages are the conversation (teacher forcing): at each recorded assistant message the session compacts
    where it must and generates --max-new-tokens, the usage is logged, the generated ids leave the cache again, and the
    recorded message is appended. What was generated stays in the log as a `probe` event.

    TRANSCRIPT is .json, .jsonl or .jsonl.gz: one conversation a line, {"id": …, "messages": […]}, or a list of messages.

    Run it again with the same --log to RESUME: what the log holds is matched and not doubled, so a run that was killed at
    any moment ends complete. The figures are read from the log and cover those conversations whole.

    \b
    Examples:
      compaction run talk.jsonl --budget 2048 --log a.db
      compaction run talks.jsonl.gz --limit 5 --budget 2048 --policy sliding_window:keep_last=4 --log a.db --plot a.png
      compaction run talk.json --kv-budget 64MiB --policy truncate --log a.db --json

    \b
    JSON keys:
      conversations messages turns         what was played; turns: recorded assistant messages
      compactions discarded_spans discarded_tokens
      budget_tokens peak_tokens            the limit, and the largest forward pass (summaries' passes included)
      peak_kv_bytes                        largest KV cache of one pass, measured from the tensors
      prefilled_tokens reused_tokens       fed to the model, and found in its cache
      generated_tokens summary_tokens      of the turns; read and written by the summariser
      unsatisfiable skipped interrupted    turns that could not fit; that stand among unanswered calls; cut off
      ttft_ms_p50 ttft_ms_p95 tpot_ms_p50  milliseconds
      reuse_violations                     turns of this run that prefilled more than what is new (0 expected)
      resumed_messages                     messages the log held already
      model policy log                     log: null where it was in memory

    Exit code 3: some turns could not fit the budget (their messages are in the log all the same).
    """
    from compaction.cli.opening import budget_of, engine_of, log_of, policy_of
    from compaction.cli.output import emit, say
    from compaction.cli.recordings import read_all

    policy = policy_of(options["policy"])
    budget = budget_of(options["budget"], options["kv_budget"], options["reserve"])
    _check_plot(plot)
    recordings = read_all(transcripts, options["limit"])
    with log_of(options["log_path"], options["durability"]) as log:
        engine = engine_of(options["model"], options["device"])
        limit = _limit(budget, engine, options["max_new_tokens"])
        began = time.monotonic()
        player = _play(recordings, engine, policy, budget, log, options["max_new_tokens"])
        played = _Run(recordings, engine, policy, limit, options["log_path"], player, time.monotonic() - began)
        figures = played.figures(log)
    result = played.to_json(figures)
    if plot:
        _draw(plot, played, figures, result)
    emit(result) if as_json else _show(played, result, plot)
    if player.misfits:
        first = player.misfits[0]
        say(f"{len(player.misfits)} turns cannot fit; first message {first.index} of {first.conversation!r}: {first.reason}")
    return UNSATISFIABLE if result["unsatisfiable"] else 0


def _limit(budget: Budget, engine: TransformersEngine, max_new_tokens: int) -> int:
    """Tokens of prompt + reply the budget comes to. Raises InvalidBudget before anything is written."""
    per_token = engine.kv_bytes_per_token
    return budget.limits(window=engine.window, max_new_tokens=max_new_tokens, kv_bytes_per_token=per_token).limit


def _play(
    recordings: list[Recording],
    engine: TransformersEngine,
    policy: Policy,
    budget: Budget,
    log: AuditLog | MemoryLog,
    max_new_tokens: int,
) -> Player:
    """All recordings, with a progress bar; Ctrl-C says what is safe."""
    from compaction.cli.forced import OneWriter, Player
    from compaction.cli.output import plain, progress
    from compaction.manager import SessionManager

    manager = SessionManager(engine=engine, policy=policy, budget=budget, log=OneWriter(log))
    asked = [{"role": "user", "content": "a"}]
    opening = len(engine.template.ids(asked, None)) - len(engine.template.ids(asked, None, generation_prompt=False))
    player = Player(manager, max_new_tokens, max(0, opening))
    total = sum(len(recording.messages) for recording in recordings)
    with progress("messages") as bar:
        task = bar.add_task("", total=total, note="")
        player.on_message = lambda tokens, compactions: bar.update(
            task, advance=1, note=f"{tokens:,} tokens · {compactions} compactions"
        )
        for number, recording in enumerate(recordings, 1):
            bar.update(task, description=f"{number}/{len(recordings)} {plain(recording.id, 24)}")
            try:
                player.play(recording)
            except KeyboardInterrupt as exc:
                raise KeyboardInterrupt(_where(log, recording)) from exc
    return player


def _where(log: AuditLog | MemoryLog, recording: Recording) -> str:
    path = getattr(log, "path", None)
    if path is None:
        return f"in conversation {recording.id!r}; the log was in memory and is gone: give --log to be able to go on"
    held = len(log.messages(recording.id)) if log.seq(recording.id) else 0
    return (
        f"{path} holds the first {held} of {len(recording.messages)} messages of {recording.id!r} and all before; "
        "run the same command again to go on"
    )


@dataclass(frozen=True)
class _Run:
    """What was played, and how; `limit` in tokens."""

    recordings: list[Recording]
    engine: TransformersEngine
    policy: Policy
    limit: int
    log_path: str | None
    player: Player
    seconds: float

    def figures(self, log: AuditLog | MemoryLog) -> Figures:
        """The figures of these conversations, out of the log."""
        from compaction.cli.figures import Figures

        figures = Figures()
        for recording in self.recordings:
            figures.add(log.events(recording.id))
        return figures

    def to_json(self, figures: Figures) -> dict[str, Any]:
        """The documented keys, in their order."""
        from compaction.cli.figures import percentile, skipped_turns

        skipped = min(figures.silent, sum(skipped_turns(recording.messages) for recording in self.recordings))
        return {
            "conversations": figures.conversations,
            "messages": figures.messages,
            "turns": figures.turns,
            "compactions": len(figures.cuts),
            "discarded_spans": figures.discarded_spans,
            "discarded_tokens": figures.discarded_tokens,
            "budget_tokens": self.limit,
            "peak_tokens": figures.peak_tokens,
            "peak_kv_bytes": figures.peak_kv_bytes,
            "prefilled_tokens": figures.prefilled_tokens,
            "reused_tokens": figures.reused_tokens,
            "generated_tokens": figures.generated_tokens,
            "summary_tokens": figures.summary_tokens,
            "unsatisfiable": figures.silent - skipped,
            "skipped": skipped,
            "interrupted": figures.interrupted,
            "ttft_ms_p50": percentile(figures.ttft_ms, 50),
            "ttft_ms_p95": percentile(figures.ttft_ms, 95),
            "tpot_ms_p50": percentile(figures.tpot_ms, 50),
            "reuse_violations": len(self.player.violations),
            "resumed_messages": self.player.resumed,
            "model": self.engine.name,
            "policy": self.policy.name,
            "log": self.log_path,
        }


def _check_plot(plot: str | None) -> None:
    """What would make the plot fail is said before the run, not after it."""
    from importlib.util import find_spec
    from pathlib import Path

    if plot is None:
        return
    if find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'kv-compaction[plot]'")
    if not Path(plot).absolute().parent.is_dir():
        raise click.UsageError(f"--plot {plot}: its folder does not exist: create it first")


def _draw(plot: str, played: _Run, figures: Figures, result: dict[str, Any]) -> None:
    from compaction.cli.plot import draw

    title = f"{result['model']} · {result['policy']} · {result['conversations']} conversations"
    draw(plot, figures, limit=played.limit, bytes_per_token=played.engine.kv_bytes_per_token, title=title)


def _show(played: _Run, result: dict[str, Any], plot: str | None) -> None:
    from compaction.cli.output import console, mib, pairs, plain

    fed = result["prefilled_tokens"] + result["reused_tokens"]
    reused = f" ({result['reused_tokens'] / fed:.0%} of all prompt tokens)" if fed else ""
    resumed = f", {result['resumed_messages']:,} of them in the log before" if result["resumed_messages"] else ""
    kv_limit = mib(played.limit * played.engine.kv_bytes_per_token)
    rows: list[tuple[str, object]] = [
        ("model", f"{result['model']} on {played.engine.model.device}"),
        ("policy", result["policy"]),
        ("played", f"{result['conversations']:,} conversations, {result['messages']:,} messages{resumed}"),
        ("turns", f"{result['turns']:,} in {played.seconds:,.1f} s"),
        ("compactions", f"{result['compactions']:,}: {result['discarded_spans']:,} spans, "
                        f"{result['discarded_tokens']:,} tokens, all of them in the log"),  # fmt: skip
        ("peak tokens", f"{result['peak_tokens']:,} of {result['budget_tokens']:,}"),
        ("peak KV cache", f"{mib(result['peak_kv_bytes'])} measured (the budget comes to {kv_limit})"),
        ("prefilled", f"{result['prefilled_tokens']:,} tokens"),
        ("reused", f"{result['reused_tokens']:,} tokens{reused}"),
        ("generated", f"{result['generated_tokens']:,} tokens"),
        ("time to first token", f"{_ms(result['ttft_ms_p50'])} median, {_ms(result['ttft_ms_p95'])} p95"),
        ("time per token", f"{_ms(result['tpot_ms_p50'])} median"),
    ]
    if result["summary_tokens"]:
        rows.append(("summaries", f"{result['summary_tokens']:,} tokens read and written for them"))
    for key, words in (("unsatisfiable", "turns could not fit the budget"), ("skipped", "turns among unanswered calls")):
        if result[key]:
            rows.append((key, f"{result[key]:,} {words}"))
    violations = played.player.violations
    rows.append(("reuse", f"{len(violations)} violations; first: {violations[0]}" if violations else "as promised, each turn"))
    rows.append(("log", result["log"] or "in memory, gone now: give --log DB to keep it"))
    if plot:
        rows.append(("plot", plot))
    console().print(pairs("", [(name, plain(str(value))) for name, value in rows]))


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f} ms"
