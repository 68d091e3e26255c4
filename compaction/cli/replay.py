"""`compaction replay`: decide every logged decision again, from the log alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from compaction.replay import Replay, Verdict
    from compaction.store import AuditLog

__all__ = ["replay"]


@click.command(short_help="Decide every decision of a log again and compare the bytes.")
@click.argument("db")
@click.option("--conversation", metavar="NAME", help="Only this conversation.")
@click.option("--allow-not-replayable", is_flag=True, help="Exit 0 although some decisions cannot be decided again.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def replay(db: str, conversation: str | None, allow_not_replayable: bool, as_json: bool) -> int:
    """Decide every committed decision of the log DB again and compare it byte for byte.

    No model and no tokenizer is loaded: counts and summaries are the recorded ones. A decision is `different` where the
    policy now plans something else (its code was changed without a new version), and `not_replayable` where a text was
    erased or the policy, or this version of it, is not installed.

    \b
    Examples:
      compaction replay a.db
      compaction replay a.db --conversation talk-1 --json

    \b
    JSON keys: decisions identical different not_replayable
               reasons: [{conversation, seq, result, reason}] for every decision that is not identical
    Exit code 1: a decision differs, or cannot be decided again (unless --allow-not-replayable).
    """
    from compaction.cli.opening import existing_log
    from compaction.cli.output import emit

    with existing_log(db) as log:
        result = _replayed(log, conversation)
    if as_json:
        emit(result.to_json())
    else:
        _show(result)
    failed = result.count("different") or (result.count("not_replayable") and not allow_not_replayable)
    return 1 if failed else 0


def _replayed(log: AuditLog, conversation: str | None) -> Replay:
    from compaction.cli.output import progress
    from compaction.errors import LogMissing
    from compaction.replay import replay as again

    known = {row.conversation: row.decisions for row in log.conversations()}
    if conversation is not None and conversation not in known:
        raise LogMissing(f"conversation {conversation!r} is not in the log: `compaction audit show` lists what is")
    names = list(known) if conversation is None else [conversation]
    with progress("decisions") as bar:
        task = bar.add_task("deciding again", total=sum(known[name] for name in names), note="")

        def step(verdict: Verdict) -> None:
            bar.update(task, advance=1, note=verdict.conversation)

        return again(log, names, on_decision=step)


def _show(result: Replay) -> None:
    from compaction.cli.output import console, plain

    out = console()
    bad = [verdict for verdict in result.verdicts if verdict.result != "identical"]
    out.print(
        f"{len(result.verdicts):,} decisions: {result.count('identical'):,} identical, "
        f"{result.count('different'):,} different, {result.count('not_replayable'):,} not replayable"
    )
    for verdict in sorted(bad, key=lambda verdict: verdict.result)[:1]:
        words = verdict.result.replace("_", " ")
        where = f"event {verdict.seq} of {plain(verdict.conversation)!r}"
        out.print(f"first {words}: {where}: {plain(verdict.reason)}", soft_wrap=True)
    if len(bad) > 1:
        out.print(f"{len(bad) - 1:,} more: see --json")
