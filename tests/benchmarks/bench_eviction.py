"""Eviction by score, without knowing what follows: KL on real text and hidden keys, by head and by span.

`python -m tests.benchmarks.bench_eviction` (SmolLM2, float32): at least 64 documents of 1,024 tokens of context and 96
that follow, half and three quarters of all slots evicted, every method paired with KeyDiff on the same documents; then
keys hidden at five depths. Scores are kept in the harness's scratch folder, figures are written after each document.

By head: each head of each layer keeps slots of its own (`RaggedCache`); bytes are measured. By span: whole pieces of
text of at most 64 tokens go, those with the smallest score per token first, until the budget is met. All methods keep
the first 4 and the last 32 slots.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from compaction.kv.cache import ArenaCache
from compaction.kv.probe import probe
from compaction.kv.ragged import RaggedCache
from compaction.kv.scoring import (
    Pool,
    Scores,
    expected_attention,
    keep_masks,
    keydiff,
    knorm,
    query_statistics,
    random_scores,
    repeat_scores,
    span_scores,
    streaming,
)
from tests.benchmarks.documents import DATA, Document
from tests.benchmarks.quality import Build, Harness, Measured, Reference, paired
from tests.benchmarks.sections import Picture, canvas

__all__ = ["EVICTED", "METHODS", "draw", "figures", "measure", "run"]

Figures: TypeAlias = dict[str, dict[str, Any]]
EVICTED = (0.5, 0.75)
SINKS, RECENT = 4, 32
BASELINE = "KeyDiff"
_REPEATED = ("repeat most", "repeat error")
_EXPECTED = ("expected", "mean query")


@dataclass(frozen=True, slots=True)
class Method:
    """Which scores, and who competes for slots; `pool` None: whole spans of text."""

    scores: str
    pool: Pool | None
    what: str


METHODS: dict[str, Method] = {
    "random": Method("random", "head", "any slots"),
    "knorm": Method("knorm", "head", "keys of small norm"),
    "streaming": Method("streaming", "head", "the newest slots"),
    BASELINE: Method("keydiff", "head", "keys unlike the others, per head"),
    "KeyDiff, one pool": Method("keydiff", "model", "the same scores, all heads compete"),
    "ExpectedAttention": Method("expected", "head", "per head"),
    "ExpectedAttention, mean only": Method("mean query", "head", "per head, without covariance"),
    "repeat, most attention": Method("repeat most", "model", "as KVzip scores: all heads compete"),
    "repeat, error, per layer": Method("repeat error", "layer", "heads of a layer compete"),
    "repeat, error": Method("repeat error", "model", "all heads compete"),
    "spans: oldest first": Method("streaming", None, "whole pieces of text"),
    "spans: KeyDiff": Method("keydiff", None, "whole pieces of text"),
    "spans: repeat, error": Method("repeat error", None, "whole pieces of text"),
}


class Scorer:
    """Scores of a document by name; what takes a forward pass is computed once and kept in the scratch folder."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._plan = probe(harness.model)

    def __call__(self, reference: Reference, names: Collection[str]) -> dict[str, Scores]:
        """Each `[kv_heads, slots]` by layer."""
        cache, slots = reference.arena(), len(reference.document.context)
        found: dict[str, Scores] = {
            "keydiff": keydiff(cache, slots),
            "knorm": knorm(cache, slots),
            "streaming": streaming(cache, slots),
            "random": random_scores(cache, slots, seed=sum(reference.document.context)),
        }
        for make, made in ((self._repeated, _REPEATED), (self._expected, _EXPECTED)):
            if not set(made).isdisjoint(names):
                found |= self._kept(reference.document, make, cache)
        return found

    def _kept(self, document: Document, make: Callable[..., dict[str, Scores]], cache: ArenaCache) -> dict[str, Scores]:
        path = self._harness.scratch / f"{self._harness.key(document)}{make.__name__}.pt"
        if not path.exists():
            torch.save(make(cache, list(document.context)), path)
        found: dict[str, Scores] = torch.load(path, weights_only=True)
        return found

    def _repeated(self, cache: ArenaCache, ids: list[int]) -> dict[str, Scores]:
        read = repeat_scores(self._harness.model, cache, ids, position=len(ids))
        return dict(zip(_REPEATED, (read.most, read.error), strict=True))

    def _expected(self, cache: ArenaCache, ids: list[int]) -> dict[str, Scores]:
        queries = query_statistics(self._harness.model, cache, ids, self._plan, position=len(ids))
        made = (expected_attention(cache, queries, position=len(ids), covariance=each) for each in (True, False))
        return dict(zip(_EXPECTED, made, strict=True))


def by_head(
    harness: Harness, scores: Scores, keep: float, pool: Pool, shares: list[float], reference: Reference
) -> Any:
    """The cache in which each head keeps what the budget gives it, and the way to read it."""
    arenas = reference.arena()
    before = arenas.logical_nbytes()
    cache = RaggedCache.of(arenas, keep_masks(scores, keep, pool=pool, sinks=SINKS, recent=RECENT))
    shares.append(cache.nbytes() / before)
    return cache, cache.attention(harness.model)


def by_span(scores: Scores, keep: float, shares: list[float], reference: Reference) -> Any:
    """The cache without the spans whose slots are worth least on average."""
    slots = kept_slots(scores, reference.document.lines, keep)
    cache = ArenaCache(reference.config)
    for layer, (keys, values) in enumerate(zip(reference.keys, reference.values, strict=True)):
        cache.update(keys[:, :, slots], values[:, :, slots], layer)
    shares.append(len(slots) / reference.keys[0].shape[2])
    return cache


def kept_slots(scores: Scores, ranges: Sequence[tuple[int, int]], keep: float) -> list[int]:
    """Slots that stay when whole spans go; the first and last span, where sinks and the newest tokens are, stay."""
    total = ranges[-1][1]
    worth = span_scores(scores, ranges)
    free = [i for i, (start, end) in enumerate(ranges) if start >= SINKS and end <= total - RECENT]
    left, gone = total, set()
    for index in sorted(free, key=lambda i: (worth[i] / (ranges[i][1] - ranges[i][0]), i)):
        if left <= math.floor(keep * total):
            break
        gone.add(index)
        left -= ranges[index][1] - ranges[index][0]
    return [slot for i, (start, end) in enumerate(ranges) if i not in gone for slot in range(start, end)]


def measure(
    harness: Harness, items: Iterable[Document], names: Sequence[str], note: Callable[[], None] = lambda: None
) -> Iterator[Figures]:
    """Measure the named methods at both budgets; `note` is called after each measurement.

    Yields `{"method @ evicted": {"measured": Measured, "bytes": share of the full cache's for each document}}` after
    each document: the same mapping, which has grown.
    """
    scorer = Scorer(harness)
    found: Figures = {
        f"{name} @ {evicted}": {"measured": Measured(name), "bytes": []} for evicted in EVICTED for name in names
    }
    for document in items:
        scores = scorer(harness.reference(document), {METHODS[name].scores for name in names})
        for evicted in EVICTED:
            for name in names:
                entry, method = found[f"{name} @ {evicted}"], METHODS[name]
                chosen, keep, shares = scores[method.scores], 1 - evicted, entry["bytes"]
                build: Build = (
                    partial(by_span, chosen, keep, shares)
                    if method.pool is None
                    else partial(by_head, harness, chosen, keep, method.pool, shares)
                )
                entry["measured"].extend(harness.measure(name, [document], build))
                note()
        yield found


def tables(texts: Figures, keys: Figures, names: Sequence[str]) -> str:
    """The figures as a Markdown table."""
    head = ["method", "slots"]
    for evicted in EVICTED:
        head += [f"{evicted:.0%} gone: KL", f"less {BASELINE}", "bytes left", "keys found", "mean rank"]
    lines = [" | ".join(["", *head, ""]).strip(), "|" + "---|" * len(head)]
    for name in names:
        cells = [name, METHODS[name].what]
        for evicted in EVICTED:
            measured: Measured = texts[f"{name} @ {evicted}"]["measured"]
            base: Measured = texts[f"{BASELINE} @ {evicted}"]["measured"]
            difference = paired(measured.kl, base.kl)
            less = f"{difference.difference:+.4f} ± {difference.error:.4f}" if name != BASELINE else ""
            shares = texts[f"{name} @ {evicted}"]["bytes"]
            cells += [f"{measured.mean:.4f} ± {measured.error:.4f}", less, f"{sum(shares) / len(shares):.3f}"]
            asked = keys[f"{name} @ {evicted}"]["measured"] if keys else Measured(name)
            rank = sum(asked.rank) / len(asked.rank) if asked.rank else math.nan
            cells += [f"{sum(asked.found)} of {len(asked.found)}", f"{rank:,.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plain(found: Figures) -> dict[str, Any]:
    """For JSON."""
    return {
        name: {
            "kl": entry["measured"].kl,
            "bytes": entry["bytes"],
            "found": entry["measured"].found,
            "rank": entry["measured"].rank,
            "log_prob": entry["measured"].log_prob,
            "depth": entry["measured"].depth,
        }
        for name, entry in found.items()
    }


def main() -> int:
    """Run, print the table, write the JSON. Exit 1 where none of ours is better than KeyDiff by two standard errors."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_eviction", description=__doc__)
    parser.add_argument("--documents", type=int, default=64, help="texts of 1,024 + 96 tokens")
    parser.add_argument("--only", nargs="*", choices=METHODS, default=list(METHODS), help="methods beside KeyDiff")
    parser.add_argument("--keys", type=int, default=4, help="texts with a hidden key, at five depths each")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("eviction.json"),
        help="where the figures go, after each text; beside it the table",
    )
    arguments = parser.parse_args()
    if not DATA.exists():
        print(f"no recorded conversations at {DATA}: the measurement needs them", file=sys.stderr)
        return 2
    harness, names = Harness(), [name for name in METHODS if name == BASELINE or name in arguments.only]
    texts, hidden = harness.documents(arguments.documents), harness.passkeys(arguments.keys)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("hidden keys", total=(len(texts) + len(hidden)) * len(names) * len(EVICTED))
        found: Figures = {}
        keys: Figures = {}
        for figures in measure(harness, hidden, names, lambda: progress.advance(task)):
            keys = figures
        progress.update(task, description="texts")
        for found in measure(harness, texts, names, lambda: progress.advance(task)):
            arguments.json.write_text(json.dumps({"texts": plain(found), "keys": plain(keys)}, indent=1) + "\n")
            arguments.json.with_suffix(".md").write_text(tables(found, keys, names) + "\n")
    print(tables(found, keys, names))
    ours = [name for name in names if METHODS[name].scores in _REPEATED and METHODS[name].pool]
    best = {evicted: best_of(found, ours, evicted) for evicted in EVICTED if ours}
    for evicted, (name, errors) in best.items():
        print(f"{evicted:.0%} evicted: {name} differs from {BASELINE} by {errors:+.1f} standard errors")
    print(f"written to {arguments.json}")
    return 0 if all(errors < -2 for _, errors in best.values()) else 1


def figures(found: Figures, keys: Figures) -> Figures:
    """All figures by name: how far the best of ours is from KeyDiff, then each method's mean KL and standard error."""
    ours = [name for name, method in METHODS.items() if method.scores in _REPEATED and method.pool]
    best = {evicted: best_of(found, ours, evicted) for evicted in EVICTED}
    made: Figures = {
        f"eviction_{evicted:.0%}_from_keydiff".replace("%", ""): {"standard_errors": errors, "method": name}
        for evicted, (name, errors) in best.items()
    }
    for label, entry in found.items():
        name, _, evicted = label.rpartition(" @ ")
        measured, base = entry["measured"], found[f"{BASELINE} @ {evicted}"]["measured"]
        figure = made[f"evicted {float(evicted):.0%}: {name}"] = {"kl": measured.mean, "error": measured.error}
        figure |= {"documents": len(measured.kl), "bytes_left": sum(entry["bytes"]) / len(entry["bytes"])}
        asked = keys[label]["measured"].found
        figure |= {"keys_found": sum(asked), "keys": len(asked)}
        if name != BASELINE:
            figure["from_keydiff"] = paired(measured.kl, base.kl).difference
    return made


def run() -> Figures:
    """All methods on 64 documents and 20 hidden keys. Takes half an hour on a quiet core."""
    harness, names = Harness(), list(METHODS)
    *_, keys = measure(harness, harness.passkeys(4), names)
    *_, found = measure(harness, harness.documents(64), names)
    return figures(found, keys)


def draw(found: Figures) -> list[Picture]:
    """KL of every method at both budgets, on a logarithmic scale, with the share of hidden keys that are found."""
    figure, axes = canvas(9, 5)
    for offset, evicted in ((-0.2, EVICTED[0]), (0.2, EVICTED[1])):
        shown = [found[f"evicted {evicted:.0%}: {name}"] for name in METHODS]
        rows = [index + offset for index in range(len(METHODS))]
        axes.barh(rows, [f["kl"] for f in shown], 0.4, xerr=[f["error"] for f in shown], label=f"{evicted:.0%} evicted")
        for row, each in zip(rows, shown, strict=True):
            axes.text(each["kl"] + each["error"], row, f" {each['keys_found']}/{each['keys']}", va="center", fontsize=7)
    axes.set_yticks(range(len(METHODS)), list(METHODS))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("KL to the full cache, nats per token; beside it: hidden keys found")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return [Picture("eviction", "KL to the full cache of every way to evict, and hidden keys found", figure)]


def best_of(found: Figures, names: Sequence[str], evicted: float) -> tuple[str, float]:
    """The one with the smallest KL, and how many standard errors it is from KeyDiff."""
    name = min(names, key=lambda each: float(found[f"{each} @ {evicted}"]["measured"].mean))
    base = found[f"{BASELINE} @ {evicted}"]["measured"].kl
    return name, paired(found[f"{name} @ {evicted}"]["measured"].kl, base).errors


if __name__ == "__main__":
    sys.exit(main())
