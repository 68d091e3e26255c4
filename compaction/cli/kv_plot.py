"""The picture of `compaction kv`: bytes of one conversation over the length of its context, a line per model."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from compaction.cli.kv_report import Weighed, binary
from compaction.errors import InvalidInput

__all__ = ["check_plot", "draw"]

_STYLES = ("-", "--", "-.", ":")
_COLORS = ("#1f6feb", "#e8710a", "#2e7d32", "#8e24aa", "#c62828", "#00838f", "#795548", "#546e7a")
_LIMIT = "#212121"


def check_plot(path: str | None) -> None:
    """What would make the plot fail is said before anything is computed."""
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'kv-compaction[plot]'")
    if not path.endswith((".png", ".svg", ".pdf")):
        raise click.UsageError(f"--plot {path}: give a name that ends in .png, .svg or .pdf")
    if not Path(path).absolute().parent.is_dir():
        raise click.UsageError(f"--plot {path}: its folder does not exist: create it first")


def draw(path: str, weighed: Sequence[Weighed], *, tokens: int, free: int | None) -> None:
    """Write the picture; both axes are logarithmic. Raises InvalidInput where it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10.5, 6), dpi=130)
    _lines(axes, weighed, _lengths(tokens))
    axes.axvline(tokens, color="#9aa4b2", linestyle=":", linewidth=1.2, label=f"{tokens:,} tokens")
    if free is not None:
        axes.axhline(free, color=_LIMIT, linestyle="--", linewidth=1.2, label=f"free on the GPU: {binary(free)}")
    _frame(axes, weighed[0].storage.name)
    try:
        figure.savefig(path, bbox_inches="tight")
    except (OSError, ValueError) as exc:
        raise InvalidInput(f"--plot {path}: cannot be written: {exc}") from exc
    finally:
        pyplot.close(figure)


def _lengths(tokens: int) -> list[int]:
    """From 128 tokens to at least 131,072, eight steps an octave: kinks at windows stay where they are."""
    last = max(131_072, 2 * tokens)
    steps = [round(128 * 2 ** (step / 8)) for step in range(8 * 30)]
    return [*(length for length in steps if length < last), last]


def _lines(axes: Any, weighed: Sequence[Weighed], lengths: Sequence[int]) -> None:
    heaviest = sorted(weighed, key=lambda item: -item.geometry.total(lengths[-1]))
    for index, item in enumerate(heaviest):
        style = {"color": _COLORS[index % len(_COLORS)], "linestyle": _STYLES[index // len(_COLORS) % len(_STYLES)]}
        label = f"{item.source.name} ({item.geometry.family})"
        axes.plot(lengths, [item.geometry.total(length) for length in lengths], label=label, linewidth=1.8, **style)
        axes.plot([item.tokens], [item.bytes], "o", color=style["color"], markersize=4)


def _frame(axes: Any, stored: str) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(FixedLocator([2.0**power for power in range(0, 60, 2) if low <= 2**power <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value < 1024 else f"{value / 1024:,.0f} Ki")
    axes.yaxis.set_major_formatter(lambda value, _: binary(value))
    axes.set_title(f"KV cache of one conversation, {stored}", loc="left", fontweight="bold")
    axes.set_xlabel("tokens in the context")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.margins(x=0.01)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9, borderaxespad=0)
