"""The command line: `compaction …`, or `python -m compaction`.

Invariant: whatever goes wrong on purpose is one line on stderr that begins with `error:`, with exit code 2; Ctrl-C is
one line and exit code 130. Importing this package loads neither torch nor transformers nor the log: each command
imports what it needs when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from io import TextIOWrapper
from typing import Any

import click

from compaction.cli.audit import audit
from compaction.cli.chat import chat
from compaction.cli.kv import kv
from compaction.cli.lint import lint
from compaction.cli.policies import policies
from compaction.cli.replay import replay
from compaction.cli.run import run
from compaction.errors import CompactionError

__all__ = ["cli", "main"]

INTERRUPTED = 130
BAD_INPUT = 2
_NO_ARGUMENTS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())  # before 8.2 click prints the help itself


class _Group(click.Group):
    """Commands in the order a newcomer needs them; Ctrl-C is told apart from an aborted prompt."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they were added."""
        del ctx
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Click would turn Ctrl-C into `Abort` and print an empty line of its own."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as exc:
            raise _Interrupted(str(exc)) from exc


class _Interrupted(click.ClickException):
    exit_code = INTERRUPTED


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(metadata.version("kv-compaction"), "-V", "--version", prog_name="compaction")
def cli() -> None:
    """Keep long LLM conversations inside a budget of tokens and KV-cache bytes, and never lose a word silently.

    What leaves the context is first written, verbatim, to a SQLite log: `run` and `chat` write one, `audit` looks into
    it, proves it and takes text back, `replay` decides every decision again.

    \b
      compaction run talk.jsonl --budget 2048 --log a.db    a recorded conversation through a real model
      compaction audit show a.db                            what was thrown away, when and why
      compaction audit restore a.db 5f0c8e1d2b3a4c5d        take a piece of it back, byte for byte
      compaction replay a.db                                would the same be decided again?

    \b
    Exit codes: 0 all is well · 1 the log does not verify or a decision differs · 2 bad input, one line on stderr
                3 some turns of a run could not fit the budget · 130 interrupted, nothing lost
    """


for command in (run, chat, audit, replay, kv, lint, policies):
    cli.add_command(command)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a conversation may hold what no terminal can show
    try:
        code = cli.main(args=args, prog_name="compaction", standalone_mode=False)
        sys.stdout.flush()
    except _NO_ARGUMENTS as exc:
        click.echo(exc.format_message())
        return 0
    except click.UsageError as exc:
        where = f" (see: {exc.ctx.command_path} --help)" if exc.ctx else ""
        return _fail(f"error: {exc.format_message().rstrip('.')}{where}", BAD_INPUT)
    except _Interrupted as exc:
        return _fail(f"interrupted: {exc.message or 'what is in the log stays there'}", INTERRUPTED)
    except click.ClickException as exc:
        return _fail(f"error: {exc.format_message()}", BAD_INPUT)
    except CompactionError as exc:
        return _fail(f"error: {exc}", BAD_INPUT)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted: what is in the log stays there", INTERRUPTED)
    except BrokenPipeError:
        # The reader (`| head`) went away; stdout goes nowhere, so that closing it at exit raises nothing either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code if isinstance(code, int) else 0


def _fail(line: str, code: int) -> int:
    print(" ".join(line.split()), file=sys.stderr, flush=True)
    return code
