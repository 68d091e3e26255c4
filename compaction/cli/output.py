"""What all commands share on their way out: one JSON object, tables, and conversation text that is safe to show.

Invariant: nothing a conversation holds reaches a terminal as a control character; nothing is cut without an ellipsis.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compaction.messages import dumps

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

__all__ = ["console", "counted", "emit", "errors", "figure", "mib", "pairs", "plain", "progress", "say", "table"]

PIPED_WIDTH = 160


def emit(data: Mapping[str, Any]) -> None:
    """The one JSON object of a command, as one line of ASCII."""
    sys.stdout.write(dumps(data) + "\n")


def say(line: str) -> None:
    """One line on stderr, at once."""
    print(line, file=sys.stderr, flush=True)


def console() -> Console:
    """Stdout; wide where nobody's terminal limits it, so that ids are never cut."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH, markup=False, emoji=False)


def errors() -> Console:
    """Stderr, where progress goes."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def progress(unit: str) -> Progress:
    """A progress bar on stderr that leaves nothing behind, and shows nothing where stderr is no terminal.

    Tasks have a field `note`, shown at the end of the line.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    shown = errors()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn(unit),
        TextColumn("{task.fields[note]}", style="dim"),
        TimeElapsedColumn(),
        console=shown,
        transient=True,
        disable=not shown.is_terminal,
    )


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[str] = ()) -> Table:
    """A table of plain cells; the columns named in `right` hold numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(title=title or None, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    numbers = set(right)
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(figure(cell) for cell in row))
    return made


def pairs(title: str, rows: Iterable[tuple[str, object]]) -> Table:
    """A table of names and values."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    made.title, made.title_justify, made.title_style = title or None, "left", "bold"
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, figure(value))
    return made


def figure(value: object) -> str:
    """A cell: integers with thousands separators, None as a dash, text made safe."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if isinstance(value, float) else plain(str(value))


def counted(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def mib(bytes: int | None) -> str:
    """Bytes as MiB."""
    return "–" if bytes is None else f"{bytes / 2**20:,.1f} MiB"


def plain(text: str, limit: int | None = None) -> str:
    """Text on one line, without control characters, cut with an ellipsis after `limit` characters."""
    cut = text if limit is None else text[: 4 * limit]
    line = "".join(map(_safe, " ".join(cut.split())))
    if limit is not None and (len(line) > limit or len(cut) < len(text)):
        line = line[: max(0, limit - 1)] + "…"
    return line


def _safe(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
