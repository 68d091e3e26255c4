"""`compaction audit`: look into a log, prove it, take text back."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from compaction.store import AuditLog, DecisionRow, SpanRow

__all__ = ["audit"]

EXCERPT = 60
_NUMBERS = ("seq", "before", "after", "gone", "spans", "budget")
_DECISION = ("conversation", "seq", "trigger", "policy", "did", "why", *_NUMBERS[1:])
_UNDONE = " (undone)"
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
_conversation = click.option("--conversation", metavar="NAME", help="Only this conversation.")


@click.group(short_help="Look into a log, prove it, take text back.")
def audit() -> None:
    """What was thrown away, when and why; proof that the log is whole; and every word of it back.

    \b
    Examples:
      compaction audit show a.db
      compaction audit spans a.db --conversation talk-1
      compaction audit search a.db "order 7712"
      compaction audit restore a.db 5f0c8e1d2b3a4c5d
      compaction audit verify a.db
    """


@audit.command()
@click.argument("db")
@_conversation
@_as_json
def show(db: str, conversation: str | None, as_json: bool) -> None:
    """Conversations of the log DB, and each decision: what it did, why, and how many tokens went.

    \b
    Examples:
      compaction audit show a.db
      compaction audit show a.db --conversation talk-1 --json

    \b
    JSON keys: conversations: [{conversation, events, messages, tokens, decisions, first_at, last_at}]
               decisions: [{conversation, seq, at, trigger, policy, version, params, rung, limits, target, before,
               after, actions, reasons, failures, undone, spans, discarded_tokens, event}]
               before and after hold kv_bytes and storage too where the budget of KV bytes was what limited
               rung: 1 the policy, 2 the policy told what failed, 3 the core's own clamp; failures: codes of what
               did not work before; undone: the session was rewound past it, so its spans are live again
    """
    from compaction.cli.opening import existing_log
    from compaction.cli.output import console, emit, table

    with existing_log(db) as log:
        rows = [row for row in log.conversations() if conversation in (None, row.conversation)]
        _check_known(log, conversation)
        decisions = [_with_reasons(log, row) for row in log.decisions(conversation)]
    if as_json:
        emit({"conversations": [asdict(row) for row in rows], "decisions": decisions})
        return
    columns = ("conversation", "messages", "tokens", "decisions", "events", "last event")
    cells = [(r.conversation, r.messages, r.tokens, r.decisions, r.events, r.last_at[:19]) for r in rows]
    console().print(table("Conversations", columns, cells, right=columns[1:5]))
    if decisions:
        console().print(table("Decisions (in tokens)", _DECISION, map(_decision_cells, decisions), right=_NUMBERS))


def _with_reasons(log: AuditLog, row: DecisionRow) -> dict[str, Any]:
    reasons = [span.reason for span in log.spans(row.conversation, row.seq) if span.reason]
    reasons += _reasons_without_spans(log, row)
    return {**asdict(row), "params": dict(row.params), "reasons": list(dict.fromkeys(reasons))}


def _reasons_without_spans(log: AuditLog, row: DecisionRow) -> list[str]:
    """Why a decision quantized: nothing left the view, so no span says it."""
    from compaction.errors import LogMissing

    if "quantize" not in row.actions:
        return []
    plan = next(log.events(row.conversation, row.seq - 1)).payload["plan"]
    try:
        return [log.text(bytes.fromhex(a["reason"]["t"])) for a in plan if a["do"] == "quantize"]
    except LogMissing:  # erased
        return []


def _decision_cells(row: dict[str, Any]) -> tuple[object, ...]:
    did = ", ".join(dict.fromkeys(row["actions"])) + _UNDONE * row["undone"]
    return (
        row["conversation"], row["seq"], row["trigger"], row["policy"], did, _why(row),
        row["before"].get("tokens"), row["after"].get("tokens"), row["discarded_tokens"], row["spans"],
        row["limits"].get("limit"),
    )  # fmt: skip


def _why(row: dict[str, Any]) -> str:
    """The reasons of what was done, what became of the bytes, and what else it took: a later rung, failures before."""
    from compaction.cli.output import mib

    notes = []
    if "quantize" in row["actions"]:
        after = row["after"]
        notes.append(f"{after['storage']}, KV {mib(row['before']['kv_bytes'])} to {mib(after['kv_bytes'])}")
    if row["rung"] > 1:
        notes.append("the core's own clamp" if row["rung"] == 3 else f"rung {row['rung']}")
    if row["failures"]:
        notes.append(f"after {', '.join(dict.fromkeys(row['failures']))}")
    reasons = "; ".join(row["reasons"])
    return f"{reasons} ({', '.join(notes)})".lstrip() if notes else reasons


@audit.command()
@click.argument("db")
@_conversation
@click.option("--decision", type=int, metavar="SEQ", help="Only what this decision discarded (the seq `show` prints).")
@_as_json
def spans(db: str, conversation: str | None, decision: int | None, as_json: bool) -> None:
    """Every span that left the context of a conversation, with the beginning of its text.

    "(undone)": the session was rewound past that decision, so the span is live again.

    \b
    Examples:
      compaction audit spans a.db
      compaction audit spans a.db --conversation talk-1 --decision 17

    \b
    JSON keys: spans: [{id, conversation, decision, event, position, message_id, path, start, end, tokens, action,
               reason, text, replaced_by, undone}]; text is whole and exact (null once erased), path "" is a whole
               message
    """
    from compaction.cli.opening import existing_log
    from compaction.cli.output import console, emit, plain, table

    with existing_log(db) as log:
        _check_known(log, conversation)
        _check_decision(log, conversation, decision)
        rows = log.spans(conversation, decision)
    if as_json:
        emit({"spans": [asdict(row) for row in rows]})
        return
    columns = ("span", "conversation", "decision", "tokens", "action", "where", "text")
    cells = ((r.id, r.conversation, r.decision, r.tokens, _did(r), _where(r), plain(_text(r), EXCERPT)) for r in rows)
    console().print(table("", columns, cells, right=("decision", "tokens")))


def _did(span: SpanRow) -> str:
    return (span.action or "–") + _UNDONE * span.undone


def _where(span: SpanRow) -> str:
    return "whole message" if span.path == "" else f"{span.path}[{span.start}:{span.end}]"


def _text(span: SpanRow) -> str:
    """What to show of a span: of a whole message its role, its text and the names of the tools it calls."""
    if span.text is None:
        return "(erased)"
    if span.path:
        return span.text
    message = json.loads(span.text)
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    calls = (f"{call['function']['name']}(…)" for call in message.get("tool_calls") or () if call.get("function"))
    return " ".join([f"{message['role']}:", *filter(None, [text]), *calls])


@audit.command()
@click.argument("db")
@click.argument("query")
@_conversation
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="How many hits.")
@_as_json
def search(db: str, query: str, conversation: str | None, limit: int, as_json: bool) -> None:
    """Find discarded text that holds every word of QUERY, best match first.

    The first search fills an index inside the log.

    \b
    Example:
      compaction audit search a.db "order 7712"

    \b
    JSON keys: hits: [{span_id, conversation, decision, message_id, path, snippet, rank}]; lower rank is better
    """
    from compaction.cli.opening import existing_log
    from compaction.cli.output import console, emit, plain, table

    with existing_log(db, readonly=False) as log:
        _check_known(log, conversation)
        hits = log.search(query, limit, conversation=conversation)
    if as_json:
        emit({"hits": [asdict(hit) for hit in hits]})
    elif not hits:
        console().print(f"nothing that was discarded holds {plain(query)!r}")
    else:
        columns = ("span", "conversation", "decision", "text")
        cells = ((hit.span_id, hit.conversation, hit.decision, plain(hit.snippet, 2 * EXCERPT)) for hit in hits)
        console().print(table("", columns, cells, right=("decision",)))


@audit.command()
@click.argument("db")
@click.argument("span_id")
@click.option("-o", "--output", metavar="FILE", help="Write there instead of to stdout.")
@_as_json
def restore(db: str, span_id: str, output: str | None, as_json: bool) -> None:
    """Give back what a span discarded, byte for byte: UTF-8 on stdout, nothing added, not even a newline.

    A whole message (path "") comes back as its JSON. A lone surrogate, which UTF-8 has no bytes for, is written as
    WTF-8 (three bytes, as if it were a character), and a line on stderr says so; --json keeps it as \\udXXX.

    \b
    Examples:
      compaction audit restore a.db 5f0c8e1d2b3a4c5d
      compaction audit restore a.db 5f0c8e1d2b3a4c5d -o page.txt

    \b
    JSON keys: span, text, bytes, encoding ("utf-8" or "wtf-8")
    """
    from compaction.cli.opening import existing_log
    from compaction.cli.output import emit, say
    from compaction.errors import InvalidInput

    with existing_log(db) as log:
        text = log.restore(span_id)
    raw = text.encode("utf-8", "surrogatepass")
    encoding = "wtf-8" if any("\ud800" <= character <= "\udfff" for character in text) else "utf-8"
    if output is not None:
        try:
            Path(output).write_bytes(raw)
        except OSError as exc:
            raise InvalidInput(f"{output}: cannot be written ({exc.strerror}): give another file") from exc
    if as_json:
        emit({"span": span_id, "text": text, "bytes": len(raw), "encoding": encoding})
        return
    if output is None:
        sys.stdout.buffer.write(raw)
        sys.stdout.buffer.flush()
    if encoding == "wtf-8":
        say("note: the text holds lone surrogates, written as WTF-8")


@audit.command()
@click.argument("db")
@click.option("--head", metavar="sha256:…", help="A head you kept outside (see `audit head`): it must be an ancestor.")
@_as_json
def verify(db: str, head: str | None, as_json: bool) -> int:
    """Prove that the log agrees with itself: the hash chain, every text, every derived table, triggers and index.

    Without --head, a log whose newest events were cut off verifies: what was never seen cannot be missed.

    \b
    Examples:
      compaction audit verify a.db
      compaction audit verify a.db --head sha256:9f86d081…

    \b
    JSON keys: ok, events, problems: [{table, row, column, message}], head, unanchored (events after the
               given head; null without one)
    Exit code 1: the log does not verify.
    """
    from compaction.cli.opening import existing_log
    from compaction.cli.output import console, counted, emit, plain

    _check_head(head)
    with existing_log(db) as log:
        report = log.verify(head)
    if as_json:
        emit(asdict(report))
    elif report.ok:
        kept = "" if report.unanchored is None else f", {report.unanchored:,} of them after the head you gave"
        console().print(f"ok: {report.events:,} events{kept}, head {report.head}")
    else:
        console().print(
            f"NOT ok: {counted(len(report.problems), 'problem')} in {report.events:,} events, head {report.head}"
        )
        for problem in report.problems:
            console().print(f"  {plain(str(problem))}", soft_wrap=True)
    return 0 if report.ok else 1


@audit.command("head")
@click.argument("db")
@_as_json
def show_head(db: str, as_json: bool) -> None:
    """The newest event's hash. Keep it outside the log: only that shows later whether its tail was cut off.

    \b
    Example:
      compaction audit head a.db >> heads.txt

    \b
    JSON keys: head, events
    """
    from compaction.cli.opening import existing_log
    from compaction.cli.output import emit

    with existing_log(db) as log:
        head, events = log.head(), log.newest()
    if as_json:
        emit({"head": head, "events": events})
    else:
        click.echo(head)


def _check_head(head: str | None) -> None:
    import re

    if head is not None and not re.fullmatch("sha256:[0-9a-f]{64}", head):
        raise click.UsageError(f"--head {head!r} is no head: give sha256: and 64 hex digits, as `audit head` prints")


def _check_known(log: AuditLog, conversation: str | None) -> None:
    from compaction.errors import LogMissing

    if conversation is not None and not log.seq(conversation):
        raise LogMissing(f"conversation {conversation!r} is not in the log: `compaction audit show` lists what is")


def _check_decision(log: AuditLog, conversation: str | None, decision: int | None) -> None:
    from compaction.errors import LogMissing

    if decision is not None and all(row.seq != decision for row in log.decisions(conversation)):
        raise LogMissing(f"no decision {decision} in the log: `compaction audit show` lists them")
