"""`make crash`: kill the process everywhere, and show that no message is lost or doubled.

Parts: `failpoints` (one kill at each arrow of the design's picture, by wrappers around the seams), `story` (kills at
random moments, no model), `writers` (two processes on one conversation), `disk` (a disk that fills up), `model` (the
arrows around the engine with a real KV cache), `run` (kill -9 of `compaction run` on SmolLM2 at random moments).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.crash.jobs import PARTS, QUICK, Job, Options, jobs
from tests.crash.results import Outcome, rows, table

SHM = "/dev/shm"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print a table, write the JSON. Exit 1 on any failure."""
    given = _parser().parse_args(arguments)
    parts = given.only or (QUICK if given.quick else PARTS)
    # A killed process leaves the same file on a disk of memory, where fsync costs nothing.
    place = SHM if given.quick and os.access(SHM, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="crash-", dir=place) as folder:
        options = Options(given.kills, given.seed, 0 if given.quick else given.each, Path(folder))
        outcomes = list(_all(parts, options))
    failed = [outcome for outcome in outcomes if outcome.problems]
    Console().print(table(outcomes))
    for outcome in failed:
        print(f"FAILED {outcome.row}: {outcome.name}: {'; '.join(outcome.problems)}")
    print(f"{len(outcomes):,} tries, {len(failed):,} failed (seed {given.seed})")
    if given.json:
        result = {
            "seed": given.seed,
            "tries": len(outcomes),
            "failed": len(failed),
            "rows": [row.to_json() for row in rows(outcomes)],
            "notes": [outcome.name for outcome in outcomes if not outcome.state],
            "failures": [{"row": o.row, "name": o.name, "problems": list(o.problems)} for o in failed],
        }
        given.json.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    return 1 if failed or not outcomes else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.crash", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="kills of a real run (default 20)")
    parser.add_argument("--seed", type=int, default=1, help="where random moments come from (default 1)")
    parser.add_argument("--each", type=int, default=3, help="times that each place of each story is tried (default 3)")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"some of: {' '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="each place once, no model: seconds, as in the gate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results go")
    return parser


def _all(parts: Sequence[str], options: Options) -> Iterator[Outcome]:
    """All outcomes, with a progress bar. It has no thread of its own: children are forked from this process."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as bar:
        for part in parts:
            work = jobs(part, options)
            task = bar.add_task(part, total=sum(job.count for job in work))
            for job in work:
                for outcome in _done(job):
                    bar.advance(task)
                    bar.refresh()
                    yield outcome


def _done(job: Job) -> Iterator[Outcome]:
    try:
        yield from job.run()
    # Whatever a broken library raises is one failure more; the other tries still say something.
    except Exception as exc:  # noqa: BLE001
        yield Outcome(job.part, "raised", "", (f"{type(exc).__name__}: {exc}", traceback.format_exc()))


if __name__ == "__main__":
    sys.exit(main())
