"""What came of it: one outcome for each kill, one row for each arrow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

__all__ = ["Outcome", "Row", "rows", "table"]


@dataclass(frozen=True)
class Outcome:
    """One kill: what it belongs to, where it was, the state found ("old", "new" or ""), and what was wrong."""

    row: str
    name: str
    state: str
    problems: tuple[str, ...] = ()


@dataclass
class Row:
    """All kills of one kind."""

    name: str
    kills: int = 0
    old: int = 0
    new: int = 0
    failed: int = 0

    def to_json(self) -> dict[str, Any]:
        """The row as plain JSON."""
        return asdict(self)


def rows(outcomes: Iterable[Outcome]) -> list[Row]:
    """The outcomes, added up."""
    found: dict[str, Row] = {}
    for outcome in outcomes:
        row = found.setdefault(outcome.row, Row(outcome.row))
        row.kills += 1
        row.old += outcome.state == "old"
        row.new += outcome.state == "new"
        row.failed += bool(outcome.problems)
    return list(found.values())


def table(outcomes: Iterable[Outcome]) -> Table:
    """For people."""
    shown = Table(title="Crashes")
    shown.add_column("where", no_wrap=True)
    for name in ("tries", "old", "new", "failed"):
        shown.add_column(name, justify="right")
    for row in rows(outcomes):
        shown.add_row(
            row.name, *(f"{n:,}" for n in (row.kills, row.old, row.new)), f"{row.failed:,}" if row.failed else "–"
        )
    return shown
