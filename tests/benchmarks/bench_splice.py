"""Evicting from the middle of a live cache, against prefilling what is kept and against plain `copy_`.

SmolLM2 in bfloat16, 8,000 random tokens in arenas, slots 2,000 to 6,000 evicted, so that 2,000 kept ones move.
`splice_*_vs_copy` is the speed of the whole call, bookkeeping included, relative to `copy_` of the moved slots' keys
and values over the same slices, calls alternating, ratios of neighbouring calls. Wall time says little on a machine
that others use: `cpu_ratio` is the same in CPU time of the calling thread, to be read at one thread. The prefill of
the kept 4,000 tokens is measured once, whole.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from compaction.engines.forward import Forward
from compaction.kv.cache import ArenaCache
from compaction.kv.probe import probe
from compaction.kv.slot_map import Mode, SlotMap
from compaction.kv.splice import Block, Splicer
from tests.benchmarks.sections import Picture, canvas
from tests.fixtures_models import shared_smollm2_engine

__all__ = ["draw", "first_token", "prefill_seconds", "run", "splice"]

TOKENS, START, END = 8_000, 2_000, 6_000
KEPT = TOKENS - (END - START)
TAIL = TOKENS - END
SUMMARY = [5] * 128


def filled(model: Any) -> Splicer:
    """Random keys and values in arenas."""
    cache: Any = ArenaCache(model.config, capacity=TOKENS + 64)
    config, generator = model.config, torch.Generator().manual_seed(7)
    shape = (1, config.num_key_value_heads, TOKENS, config.head_dim)
    for layer in cache.layers:
        keys, values = (torch.randn(shape, generator=generator).to(model.dtype) for _ in range(2))
        layer.update(keys, values)
    slot_map = SlotMap()
    slot_map.append([index % 1000 for index in range(TOKENS)])
    return Splicer(cache, probe(model), slot_map)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of one call: by the clock, and of this thread's CPU."""
    began, cpu = time.perf_counter(), time.thread_time()
    work()
    return 1e3 * (time.perf_counter() - began), 1e3 * (time.thread_time() - cpu)


def copies(splicer: Splicer) -> None:
    """The moved slots' keys and values, copied over the same slices in plain torch."""
    for layer in splicer.cache.arenas:
        for slices in (layer.key_slice, layer.value_slice):
            slices(START, START + TAIL).copy_(slices(END, TOKENS))


def splice(model: Any, mode: Mode, *, rounds: int = 15, threads: int | None = None) -> dict[str, Any]:
    """One eviction against `copy_`; the speed of ours relative to it is `ratio`."""
    splicer = filled(model)
    whole = splicer.slot_map

    def again() -> None:
        for layer in splicer.cache.arenas:
            layer.extend(TOKENS - layer.held)
        splicer.slot_map = copy.deepcopy(whole)

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        pairs = []
        for _ in range(rounds + 2):
            theirs = timed(lambda: copies(splicer))
            pairs.append((theirs, timed(lambda: splicer.evict([(START, END)], mode))))
            again()
    finally:
        torch.set_num_threads(before)
    pairs = pairs[2:]  # the first calls warm both up
    ratios = [theirs[0] / ours[0] for theirs, ours in pairs]
    return {
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "cpu_ratio": statistics.median(theirs[1] / ours[1] for theirs, ours in pairs),
        "ours_ms": statistics.median(ours[0] for _, ours in pairs),
        "copy_ms": statistics.median(theirs[0] for theirs, _ in pairs),
        "ours_min_ms": min(ours[0] for _, ours in pairs),
        "copy_min_ms": min(theirs[0] for theirs, _ in pairs),
        "threads": threads or before,
        "load": os.getloadavg()[0],
    }


def prefill_seconds(model: Any, tokens: int = KEPT) -> float:
    """A real prefill of so many tokens, in one pass, with transformers' own cache."""
    forward = Forward(model)
    forward(forward.new_cache(), [5] * 64, 0)  # warms up
    ids = [index % 1000 for index in range(tokens)]
    began = time.perf_counter()
    forward(forward.new_cache(), ids, 0)
    return time.perf_counter() - began


def first_token(model: Any, *, rounds: int = 3) -> dict[str, dict[str, Any]]:
    """From a summary's final text to the next token's logits, against the best exact path: reusing the prefix.

    Ours: encode, put in the place of the evicted 4,000, one token, the median of `rounds`; and without the encoding,
    which can be done before the user's turn arrives. Exact: crop to the prefix, prefill summary and tail, once.
    """
    forward = Forward(model)
    splicer = filled(model)
    tail = splicer.slot_map.ids[END:]

    def exactly() -> None:
        splicer.crop(START)
        forward(splicer.cache, [*SUMMARY, *tail, 7], START)

    def encode() -> None:
        blocks[:] = [splicer.encode(forward, SUMMARY, START)]

    def put() -> None:
        splicer.insert(blocks[0], START, END)
        forward(splicer.cache, [7], splicer.append([7])[0])

    exact = timed(exactly)
    blocks: list[Block] = []
    encoding, putting = [], []
    for _ in range(rounds):
        splicer = filled(model)
        encoding.append(timed(encode))
        putting.append(timed(put))
    together = [(a + b, c + d) for (a, c), (b, d) in zip(encoding, putting, strict=True)]
    return {
        "splice_summary_first_token_vs_exact": _against(together, exact),
        "splice_encoded_summary_first_token_vs_exact": _against(putting, exact),
    }


def _against(times: list[tuple[float, float]], exact: tuple[float, float]) -> dict[str, Any]:
    walls = [wall / exact[0] for wall, _ in times]
    return {
        "ratio": statistics.median(walls),
        "spread": [min(walls), max(walls)],
        "cpu_ratio": statistics.median(cpu for _, cpu in times) / exact[1],
        "ours_s": statistics.median(wall for wall, _ in times) / 1e3,
        "exact_s": exact[0] / 1e3,
    }


def run(threads: int | None = None) -> dict[str, Any]:
    """All figures by name. Takes a minute or two: the prefills are whole ones."""
    model = shared_smollm2_engine("bfloat16").model
    compact, gap = splice(model, "compact", threads=threads), splice(model, "gap", threads=threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        seconds, summary = prefill_seconds(model), first_token(model)
    finally:
        torch.set_num_threads(before)
    against = {"ratio": 1e3 * seconds / compact["ours_ms"], "prefill_s": seconds, "ours_ms": compact["ours_ms"]}
    return {
        "splice_compact_vs_copy": compact,
        "splice_gap_vs_copy": gap,
        "splice_compact_vs_prefill": against,
        **summary,
    }


def draw(figures: Mapping[str, Mapping[str, Any]]) -> list[Picture]:
    """Milliseconds of an eviction, of a plain copy, and of what they save."""
    compact, gap = figures["splice_compact_vs_copy"], figures["splice_gap_vs_copy"]
    first = figures["splice_summary_first_token_vs_exact"]
    bars = {
        "copy_ of the slots that move": compact["copy_ms"],
        "evict, gap positions": gap["ours_ms"],
        "evict, compact positions": compact["ours_ms"],
        "prefill of what is kept": 1e3 * figures["splice_compact_vs_prefill"]["prefill_s"],
        "summary to first token, spliced": 1e3 * first["ours_s"],
        "… encoded before": 1e3 * figures["splice_encoded_summary_first_token_vs_exact"]["ours_s"],
        "summary to first token, exact": 1e3 * first["exact_s"],
    }
    picture, axes = canvas(8, 3)
    shown = axes.barh(list(bars), list(bars.values()))
    axes.bar_label(shown, [f" {value:,.0f} ms" for value in bars.values()], fontsize=8)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="milliseconds")
    return [Picture("splice", "4,000 of 8,000 tokens taken out of the middle, SmolLM2 in bfloat16", picture)]
