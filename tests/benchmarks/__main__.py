"""`make bench`: every figure the project states, as named ratios in one JSON, beside its target."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.benchmarks import bench_core, bench_decode, bench_splice, bench_store

TARGETS: dict[str, tuple[str, str, float]] = {
    # name: (figure, direction, target)
    "append_1m_vs_10k": ("ratio", "<=", 1.2),
    "truncate_vs_trim_messages_exact": ("ratio", ">=", 1000),
    "sliding_window_vs_trim_messages_exact": ("ratio", ">=", 1000),
    "idle_prepare_5000_vs_10_entries": ("large_ms", "<=", 0.1),
    "store_commit_full_vs_bare": ("ratio", "<=", 2.0),
    "store_commit_normal_vs_bare": ("more_us", "<=", 100),
    "store_bytes_per_json_byte": ("ratio", "<=", 1.6),
    "decode_8000_vs_dynamic_cache": ("ratio", "<=", 0.35),
    "splice_compact_vs_copy": ("ratio", ">=", 0.4),
    "splice_gap_vs_copy": ("ratio", ">=", 0.7),
    "splice_compact_vs_prefill": ("ratio", ">=", 500),
    "splice_summary_first_token_vs_exact": ("ratio", "<=", 0.12),
    "decode_500_vs_dynamic_cache": ("ratio", "<=", 0.9),
}


def main() -> int:
    """Run all, print a table, write the JSON. Exit 1 where a target is missed."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="where the figures go")
    path: Path = parser.parse_args().json
    if not bench_core.AIDER.exists():
        print(f"no recorded conversations at {bench_core.AIDER.parent}: the benchmark needs them", file=sys.stderr)
        return 2
    figures: dict[str, Any] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("benchmarks", total=4)
        for bench in (bench_store, bench_core, bench_decode, bench_splice):
            progress.update(task, description=bench.__name__.rpartition(".")[2])
            figures |= {
                name: value if isinstance(value, dict) else {"ratio": value} for name, value in bench.run().items()
            }
            progress.advance(task)
    missed = [name for name, target in TARGETS.items() if not _met(figures[name], *target)]
    machine = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
    path.write_text(json.dumps({"machine": machine, "figures": figures, "missed": missed}, indent=2) + "\n")
    _print(figures, missed)
    print(f"written to {path}")
    return 1 if missed else 0


def _met(figure: dict[str, Any], key: str, direction: str, target: float) -> bool:
    value = float(figure[key])
    return value <= target if direction == "<=" else value >= target


def _print(figures: dict[str, Any], missed: list[str]) -> None:
    table = Table(title="Benchmarks")
    for column in ("figure", "median", "spread", "target"):
        table.add_column(column)
    for name, figure in figures.items():
        key, direction, target = TARGETS.get(name, ("ratio", "", 0.0))
        spread = figure.get("spread") if key == "ratio" else figure.get(f"{key}_spread")
        shown = f"{spread[0]:,.2f} to {spread[1]:,.2f}" if spread else ""
        goal = f"{direction} {target:,g}{' MISSED' if name in missed else ''}" if name in TARGETS else ""
        table.add_row(f"{name} ({key})", f"{figure[key]:,.3f}", shown, goal)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
