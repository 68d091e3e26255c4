"""The picture of a run: tokens and KV bytes over the turns, the budget, and where was compacted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compaction.cli.figures import Figures
from compaction.errors import InvalidInput

__all__ = ["draw"]

_SENT, _WITHOUT, _LIMIT, _CUT, _KV = "#1f6feb", "#9aa4b2", "#c62828", "#e8710a", "#2e7d32"


def draw(path: str, figures: Figures, *, limit: int, bytes_per_token: int, title: str) -> None:
    """Write a PNG (or what the name's ending says). Raises InvalidInput where it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = {"height_ratios": [3, 2], "hspace": 0.08}
    figure, (tokens, memory) = pyplot.subplots(2, 1, sharex=True, figsize=(11, 6.5), dpi=130, gridspec_kw=height)
    _tokens(tokens, figures, limit)
    _memory(memory, figures, limit * bytes_per_token)
    _conversations(tokens, memory, figures)
    tokens.set_title(title, loc="left", fontweight="bold")
    memory.set_xlabel("turn")
    for axes in (tokens, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9, borderaxespad=0)
    try:
        figure.savefig(path, bbox_inches="tight")
    except (OSError, ValueError) as exc:
        raise InvalidInput(f"--plot {path}: cannot be written: {exc}") from exc
    finally:
        pyplot.close(figure)


def _tokens(axes: Any, figures: Figures, limit: int) -> None:
    turns = range(1, len(figures.series) + 1)
    without = [turn.history_tokens for turn in figures.series]
    _broken(axes, figures, turns, without, color=_WITHOUT, linestyle=":", linewidth=1.4, label="without compaction")
    peaks = [turn.peak_tokens for turn in figures.series]
    _broken(axes, figures, turns, peaks, color=_SENT, linewidth=1.6, label="prompt + reply")
    axes.axhline(limit, color=_LIMIT, linestyle="--", linewidth=1.2, label=f"budget: {limit:,}")
    if figures.cuts:
        at = [cut.turn + 1 for cut in figures.cuts]
        before, after = [cut.before for cut in figures.cuts], [cut.after for cut in figures.cuts]
        axes.vlines(at, after, before, color=_CUT, linewidth=1.2, alpha=0.8)
        axes.plot(at, after, "v", color=_CUT, markersize=5, label=f"compaction, before → after ({len(at)})")
    # What there would be without compaction may be many budgets high; the line may leave the picture.
    axes.set_ylim(top=1.1 * max(limit, *peaks, min(2 * limit, max(without, default=0))))
    axes.set_ylabel("tokens")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _memory(axes: Any, figures: Figures, limit: int) -> None:
    turns = range(1, len(figures.series) + 1)
    held = [(turn.kv_bytes or 0) / 2**20 for turn in figures.series]
    _broken(axes, figures, turns, held, color=_KV, linewidth=1.6, label="KV cache, measured")
    axes.axhline(limit / 2**20, color=_LIMIT, linestyle="--", linewidth=1.2, label=f"budget: {limit / 2**20:,.1f} MiB")
    axes.set_ylabel("MiB")


def _broken(
    axes: Any, figures: Figures, turns: Sequence[int], values: Sequence[float], *, label: str, **style: Any
) -> None:
    """One line a conversation: nothing connects the end of one to the beginning of the next."""
    start = 0
    for end in range(1, len(turns) + 1):
        if end == len(turns) or figures.series[end].conversation != figures.series[start].conversation:
            style |= {"marker": "o" if len(turns) <= 40 or end - start == 1 else None, "markersize": 3}
            axes.plot(turns[start:end], values[start:end], label=None if start else label, **style)
            start = end


def _conversations(tokens: Any, memory: Any, figures: Figures) -> None:
    """Every second conversation on a shade, so that one sees where they begin."""
    start, shaded = 0, False
    names = [turn.conversation for turn in figures.series]
    if len(set(names)) < 2:
        return
    for end in range(1, len(names) + 1):
        if end == len(names) or names[end] != names[start]:
            if shaded:
                for axes in (tokens, memory):
                    axes.axvspan(start + 0.5, end + 0.5, color="#000000", alpha=0.04, linewidth=0)
            start, shaded = end, not shaded
