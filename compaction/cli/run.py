"""`compaction run`: recorded conversations through a live session, the model included."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

    from compaction.budget import Budget
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
@click.option("--apply", type=click.Choice(["exact", "splice"]), default="exact", show_default=True,
              help="exact: prefill what follows a cut; splice: edit the KV cache in place.")  # fmt: skip
@click.option("--device", help="cpu, cuda, mps; default: the best there is.")
@click.option("--plot", metavar="FILE.png", help="Draw tokens and KV bytes over the turns.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def run(transcripts: tuple[str, ...], as_json: bool, plot: str | None, **options: Any) -> int:
    """Play recorded conversations through a live session with a real model and a real KV cache.

    The recorded messages are the conversation (teacher forcing): at each recorded assistant message the session
    compacts where it must and generates --max-new-tokens, the usage is logged, the generated ids leave the cache
    again, and the recorded message is appended. What was generated stays in the log as a `probe` event.

    TRANSCRIPT is .json, .jsonl or .jsonl.gz: one conversation a line, {"id": …, "messages": […]}, or a list of
    messages.

    Run it again with the same --log to RESUME: what the log holds is matched and not doubled, so a run that was
    killed at any moment ends complete. The figures are read from the log and cover those conversations whole, also what
    another policy did before; another budget is refused.

    \b
    Examples:
      compaction run talk.jsonl --budget 2048 --log a.db
      compaction run talks.jsonl.gz --limit 5 --budget 2048 --policy sliding_window:keep_last=4 --log a.db --plot a.png
      compaction run talk.json --kv-budget 64MiB --policy quantize --log a.db --json
      compaction run talk.jsonl --budget 2048 --apply splice --policy scored_eviction:score=keydiff --log a.db

    \b
    JSON keys:
      conversations messages turns         what was played; turns: recorded assistant messages
      compactions discarded_spans discarded_tokens
      budget_tokens peak_tokens            the limit, and the largest forward pass (summaries' passes included)
      budget_kv_bytes                      of --kv-budget, else null; budget_tokens is then what it comes to in the
                                           model's own number format: a quantized cache holds more
      kv_bytes                             largest KV cache after a turn, measured from the tensors
      peak_kv_bytes                        the same at any allocation: a growing arena stands beside the old one
      prefilled_tokens reused_tokens       fed to the model, and found in its cache
      generated_tokens summary_tokens      of the turns; read and written by the summariser
      failed_summaries                     that came to nothing; the policy, or the core, went on without them
      unsatisfiable skipped interrupted    turns that could not fit; that stand among unanswered calls; cut off
      ttft_ms_p50 ttft_ms_p95 tpot_ms_p50  milliseconds
      reuse_violations                     turns of this run that prefilled more than what is new (0 expected)
      resumed_messages                     messages the log held already
      apply spliced_turns refused_splices  exact or splice; turns on an edited cache; turns exact instead
      model policy log                     log: null where it was in memory

    Exit code 3: some turns could not fit the budget (their messages are in the log all the same).
    """
    from compaction.cli.opening import budget_of, check_budget, engine_of, log_of, policy_of
    from compaction.cli.output import emit, say
    from compaction.cli.plot import draw
    from compaction.cli.recordings import read_all
    from compaction.cli.summary import Played, show

    policy = policy_of(options["policy"])
    budget = budget_of(options["budget"], options["kv_budget"], options["reserve"])
    _check_plot(plot)
    recordings = read_all(transcripts, options["limit"])
    with log_of(options["log_path"], options["durability"]) as log:
        check_budget(log, [recording.id for recording in recordings], budget)
        engine = engine_of(options["model"], options["device"])
        limit = _limit(budget, engine, options["max_new_tokens"])
        began = time.monotonic()
        player = _play(recordings, engine, policy, budget, log, options)
        played = Played(
            recordings,
            engine,
            options["policy"] or "default",
            limit,
            None if budget.kv_bytes is None else int(budget.kv_bytes),
            options["log_path"],
            player,
            time.monotonic() - began,
        )
        figures = played.figures(log)
    result = played.to_json(figures)
    if plot:
        draw(plot, figures, limit=limit, bytes_per_token=engine.kv_bytes_per_token, title=played.title(result))
    emit(result) if as_json else show(played, result, plot)
    if result["unsatisfiable"]:
        say(_misfits(result["unsatisfiable"], player))
    return UNSATISFIABLE if result["unsatisfiable"] else 0


def _misfits(count: int, player: Player) -> str:
    """One line; the reason is at hand only where it happened in this run."""
    from compaction.cli.output import counted

    line = f"{counted(count, 'turn')} could not fit the budget"
    if player.misfits:
        first = player.misfits[0]
        line += f"; first before message {first.index} of {first.conversation!r}: {first.reason}"
    return line


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
    options: Mapping[str, Any],
) -> Player:
    """All recordings, with a progress bar; Ctrl-C says what is safe."""
    from compaction.cli.forced import OneWriter, Player
    from compaction.cli.output import counted, plain, progress
    from compaction.manager import SessionManager

    manager = SessionManager(engine=engine, policy=policy, budget=budget, log=OneWriter(log), apply=options["apply"])
    asked = [{"role": "user", "content": "a"}]
    opening = len(engine.template.ids(asked, None)) - len(engine.template.ids(asked, None, generation_prompt=False))
    total = sum(len(recording.messages) for recording in recordings)
    with progress("messages") as bar:
        task = bar.add_task("", total=total, note="")

        def step(tokens: int, compactions: int) -> None:
            bar.update(task, advance=1, note=f"{tokens:,} tokens · {counted(compactions, 'compaction')}")

        player = Player(manager, options["max_new_tokens"], max(0, opening), step)
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


def _check_plot(plot: str | None) -> None:
    """What would make the plot fail is said before the run, not after it."""
    from importlib.util import find_spec
    from pathlib import Path

    if plot is None:
        return
    if find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'kv-compaction[plot]'")
    if not plot.endswith((".png", ".svg", ".pdf")):
        raise click.UsageError(f"--plot {plot}: give a name that ends in .png, .svg or .pdf")
    if not Path(plot).absolute().parent.is_dir():
        raise click.UsageError(f"--plot {plot}: its folder does not exist: create it first")
