"""What `make bench` runs: the sections, in order, with the targets their figures are held to.

Invariant: a section's module has `run() -> {figure: number or mapping}`, and may have `draw(figures) -> [Picture]`; its
docstring says how the figures were taken and stands on the page.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["SECTIONS", "Picture", "Section", "Target", "canvas"]

Figures = Mapping[str, Mapping[str, Any]]


class Target(NamedTuple):
    """A figure's `key` is to be at most ("<=") or at least (">=") `value`."""

    key: str
    direction: str
    value: float

    def met(self, figure: Mapping[str, Any]) -> bool:
        """Whether the figure keeps it."""
        value = float(figure[self.key])
        return value <= self.value if self.direction == "<=" else value >= self.value


class Picture(NamedTuple):
    """A matplotlib figure, the name of its file and what it shows."""

    name: str
    caption: str
    figure: Any


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """A matplotlib figure and its axes, in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


@dataclass(frozen=True)
class Section:
    """One module of figures."""

    name: str
    title: str
    targets: Mapping[str, Target] = field(default_factory=dict)

    def module(self) -> ModuleType:
        """The module, imported when it is needed: some need a minute for a model."""
        return importlib.import_module(f"tests.benchmarks.bench_{self.name}")


SECTIONS = (
    Section(
        "store",
        "The log",
        {
            "store_commit_full_vs_bare": Target("ratio", "<=", 2.0),
            "store_commit_normal_vs_bare": Target("more_us", "<=", 100),
            "store_bytes_per_json_byte": Target("ratio", "<=", 1.6),
        },
    ),
    Section(
        "core",
        "Appending, planning, preparing",
        {
            "append_1m_vs_10k": Target("ratio", "<=", 1.2),
            "truncate_vs_trim_messages_exact": Target("ratio", ">=", 1000),
            "sliding_window_vs_trim_messages_exact": Target("ratio", ">=", 1000),
            "idle_prepare_5000_vs_10_entries": Target("large_ms", "<=", 0.1),
        },
    ),
    Section(
        "decode",
        "Decoding",
        {
            "decode_8000_vs_dynamic_cache": Target("ratio", "<=", 0.35),
            "decode_500_vs_dynamic_cache": Target("ratio", "<=", 0.9),
            "own_step_8000_vs_dynamic_cache": Target("ratio", "<=", 0.15),
            "decode_budget": Target("ratio", "<=", 1.0),
            "decode_allocations": Target("count", "<=", 0),
        },
    ),
    Section(
        "splice",
        "Editing the live cache",
        {
            "splice_compact_vs_copy": Target("ratio", ">=", 0.4),
            "splice_gap_vs_copy": Target("ratio", ">=", 0.7),
            "splice_compact_vs_prefill": Target("ratio", ">=", 500),
            "splice_summary_first_token_vs_exact": Target("ratio", "<=", 0.12),
            "splice_encoded_summary_first_token_vs_exact": Target("ratio", "<=", 0.06),
        },
    ),
    Section(
        "quantized",
        "Quantized keys and values",
        {
            "quantized_k8v4_no_window_kl": Target("ratio", "<=", 0.001),
            "quantized_k8v4_bits": Target("ratio", "<=", 7.1),
            "quantized_4_bits_vs_best_axes": Target("ratio", "<=", 0.3),
            "quantized_2_bits_vs_best_axes": Target("ratio", "<=", 0.2),
            "quantized_step_8000_vs_quanto": Target("ratio", "<=", 0.4),
            "quantized_step_8000_vs_full": Target("ratio", "<=", 0.5),
        },
    ),
    Section(
        "eviction",
        "Eviction by score",
        {f"eviction_{evicted}_from_keydiff": Target("standard_errors", "<=", -2) for evicted in (50, 75)},
    ),
    Section(
        "pool",
        "Twenty conversations under a pool for five",
        {
            **{f"pool_{tier}_turn_vs_prefill": Target("ratio", "<=", 0.2) for tier in ("host", "disk")},
            **{f"pool_{tier}_exact": Target("different", "<=", 0) for tier in ("host", "disk")},
            **{f"pool_{tier}_bytes": Target("ratio", "<=", 1.0) for tier in ("host", "disk")},
        },
    ),
    Section(
        "long",
        "A long conversation in small",
        {
            "long_perplexity_splice_vs_exact": Target("ratio", "<=", 1.25),
            "long_budgets_kept": Target("ratio", ">=", 1),
            "long_rss_last_vs_second_thousand": Target("ratio", "<=", 1.1),
        },
    ),
)
