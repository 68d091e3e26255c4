"""`make bench`: every figure the project states, with its target, in one JSON and on one page.

Sections that are not asked for keep the figures of the run before, each with its date and machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.benchmarks import bench_core
from tests.benchmarks.page import write_page
from tests.benchmarks.sections import SECTIONS, Section


def main() -> int:
    """Run the sections asked for, print a table, write JSON and page. Exit 1 where a target is missed."""
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(names)}; none: all")
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="where the figures go")
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks.md"), help="where the page goes")
    parser.add_argument("--page-only", action="store_true", help="write the page again from the JSON")
    asked = parser.parse_args()
    if not bench_core.AIDER.exists():
        print(f"no recorded conversations at {bench_core.AIDER.parent}: the benchmark needs them", file=sys.stderr)
        return 2
    unknown = sorted(set(asked.sections) - set(names))
    if unknown:
        parser.error(f"no section {unknown[0]!r}: use one of {', '.join(names)}")
    report = _before(asked.json)
    chosen = () if asked.page_only else [s for s in SECTIONS if s.name in (asked.sections or names)]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("benchmarks", total=len(chosen))
        for section in chosen:
            progress.update(task, description=section.title)
            report["sections"][section.name] = _run(section)
            asked.json.write_text(
                json.dumps(report, indent=2) + "\n"
            )  # a long run that is broken off keeps what it has
            progress.advance(task)
    write_page(report, asked.page)
    missed = _print(report)
    print(f"written to {asked.json} and {asked.page}")
    return 1 if missed else 0


def _before(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found if "sections" in found else {"sections": {}}


def _run(section: Section) -> dict[str, Any]:
    load = os.getloadavg()[0]
    figures = section.module().run()
    return {
        "at": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "load": load,
        },
        "figures": {name: value if isinstance(value, dict) else {"ratio": value} for name, value in figures.items()},
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _print(report: dict[str, Any]) -> list[str]:
    """Show all figures; returns the names of those that miss their target."""
    missed: list[str] = []
    table = Table(title="Benchmarks")
    for column in ("figure", "median", "spread", "target"):
        table.add_column(column)
    for section in SECTIONS:
        for name, figure in report["sections"].get(section.name, {"figures": {}})["figures"].items():
            target = section.targets.get(name)
            key = target.key if target else "ratio"
            if key not in figure:
                continue
            spread = figure.get("spread") if key == "ratio" else figure.get(f"{key}_spread")
            shown = f"{spread[0]:,.2f} to {spread[1]:,.2f}" if spread else ""
            goal = f"{target.direction} {target.value:,g}" if target else ""
            if target and not target.met(figure):
                missed.append(name)
                goal += " MISSED"
            table.add_row(f"{name} ({key})", f"{figure[key]:,.3f}", shown, goal)
    Console().print(table)
    return missed


if __name__ == "__main__":
    sys.exit(main())
