"""`compaction lint`: what a model's chat template costs a KV cache, and what it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from compaction.tokens.lint import Finding, LintReport
    from compaction.tokens.reuse import Reuse

__all__ = ["lint"]

UNSTABLE = 1


@click.command(short_help="What a chat template costs the KV cache, and what it leaves out.")
@click.argument("model", metavar="MODEL")
@click.option("--template", metavar="FILE", help="A Jinja template to look at instead of the tokenizer's own.")
@click.option("--strict", is_flag=True, help="Exit with 1 where tokens are prefilled again that were in the cache.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.pass_context
def lint(ctx: click.Context, model: str, template: str | None, strict: bool, as_json: bool) -> None:
    """Tell whether a model's chat template keeps what it rendered once, and what it cannot take.

    MODEL is smollm2, a folder with a tokenizer, or a hub id; only its tokenizer is loaded. Three turns are rendered,
    with and without a batch of tool calls and with reasoning, and compared token by token: "reuse" is how much of what
    stood in the KV cache the next prompt begins with. Where something is folded, it is measured as folded.

    \b
    Examples:
      compaction lint smollm2
      compaction lint ./my-model --template fixed.jinja --strict

    \b
    JSON keys: name, fingerprint, prefix_stable (each prompt, generation prompt included, begins the next),
               history_stable (a turn leaves the text before it as it was), drops_reasoning, injects_date,
               moves_system, moves_tools,
               reuse: {plain, tools, reasoning, reasoning+tools: {fraction, held, reused, prefilled, prefix_stable,
               history_stable}} in tokens, over all replies but the first,
               findings: [{code, severity (cache or text), says, remedy, plain and batch (reuse without and with a
               batch of tool calls), tokens (that folding adds; null: none)}],
               profile: what the template takes, field by field
    """
    from compaction.cli.output import emit
    from compaction.tokens.lint import lint as look

    report = look(_tokenizer(model, template), name=model if template is None else f"{model} with {template}")
    if as_json:
        emit(report.to_json())
    else:
        _show(report)
    if strict and any(reuse.reused < reuse.held for reuse in report.reuse.values()):
        ctx.exit(UNSTABLE)


def _tokenizer(model: str, template: str | None) -> Any:
    """The tokenizer alone, with the template asked for."""
    from importlib.util import find_spec

    from compaction.errors import InvalidInput, ModelNotFound

    if find_spec("transformers") is None:
        raise click.UsageError("lint needs transformers: pip install 'kv-compaction[model]'")
    source = None if template is None else _read(template)
    from transformers import AutoTokenizer

    from compaction.engines.quiet import quiet

    try:
        with quiet():
            tokenizer: Any = AutoTokenizer.from_pretrained(_place(model))
    except (OSError, ValueError, KeyError) as exc:  # what transformers raises for what is no tokenizer
        line = next((line for line in str(exc).splitlines() if line.strip()), type(exc).__name__)
        raise ModelNotFound(
            f"{model!r} is not smollm2, no folder with a tokenizer, and not on a hub ({line[:200]})"
        ) from exc
    if source is not None:
        tokenizer.chat_template = source
    if tokenizer.chat_template is None:
        raise InvalidInput(f"the tokenizer of {model!r} has no chat template: give one with --template FILE")
    return tokenizer


def _place(model: str) -> str:
    if model == "smollm2":
        from compaction.engines.smollm2 import smollm2_folder

        return str(smollm2_folder())
    folder = Path(model).expanduser()
    return str(folder) if folder.is_dir() else model


def _read(path: str) -> str:
    from compaction.errors import InvalidInput

    try:
        return Path(path).expanduser().read_text("utf-8")
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is no UTF-8 text"
        raise InvalidInput(f"--template {path}: cannot be read: {reason}") from exc


def _show(report: LintReport) -> None:
    from compaction.cli.output import console, table

    out = console()
    out.print(f"{report.name} · template {report.fingerprint}")
    out.print(_verdict(report) + "\n")
    columns = ("conversation", "reuse", "in the cache", "used again", "prefilled", "prefix stable", "history stable")
    rows = [(name, *_figures(reuse)) for name, reuse in report.reuse.items()]
    out.print(table("Tokens, by conversation", columns, rows, right=columns[1:5]))
    for severity, (title, folds) in _TABLES.items():
        found = [_row(finding, folds) for finding in report.findings if finding.severity == severity]
        figures = ("tokens", *_REUSE) if folds else _REUSE
        if found:
            out.print(table(title, ("finding", "the template", "kv-compaction", *figures), found, right=figures))


_REUSE = ("reuse", "with tool calls")
_TABLES = {"cache": ("Costs the cache, or would", False), "text": ("Folded, so that nothing is lost", True)}


def _row(finding: Finding, folds: bool) -> tuple[object, ...]:
    reuse = _percent(finding.plain), _percent(finding.batch)
    tokens = (finding.tokens,) if folds else ()
    return (finding.code, finding.says, finding.remedy, *tokens, *reuse)


def _verdict(report: LintReport) -> str:
    if report.prefix_stable and report.history_stable:
        worst = min(reuse.fraction for reuse in report.reuse.values())
        if worst == 1:
            return "stable: what is in the cache stays there, only new tokens are prefilled"
        return f"stable text, moving tokens: in the worst conversation {worst:.1%} of the cache are used again"
    name, worst = min(((name, reuse.fraction) for name, reuse in report.reuse.items()), key=lambda item: item[1])
    return f"not stable: in the worst conversation ({name}) {worst:.1%} of the cache are used again"


def _figures(reuse: Reuse) -> tuple[object, ...]:
    tokens = reuse.held, reuse.reused, reuse.prefilled
    return _percent(reuse), *tokens, reuse.prefix_stable, reuse.history_stable


def _percent(reuse: Reuse) -> str:
    return f"{reuse.fraction:.1%}"
