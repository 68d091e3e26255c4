"""One token through the unmodified transformers model: arenas and grouped attention against `DynamicCache` and SDPA.

SmolLM2 in bfloat16, both caches filled with the same random keys and values (what they say does not change how long a
step takes), steps alternating in one process, ratios of neighbouring steps as medians with their spread. `bytes_flat`
tells whether the arenas held the same storages before and after.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from compaction.engines.forward import Forward
from compaction.kv.cache import ArenaCache
from tests.fixtures_models import shared_smollm2_engine

__all__ = ["decode", "run"]

TOKEN = 314  # any token: the step's time does not depend on it


def fill(cache: Any, model: Any, tokens: int) -> Any:
    """Put random keys and values of `tokens` tokens into all layers."""
    config = model.config
    generator = torch.Generator().manual_seed(7)
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    for layer in cache.layers:
        keys, values = (torch.randn(shape, generator=generator).to(model.dtype) for _ in range(2))
        layer.update(keys, values)
    return cache


def milliseconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def decode(model: Any, tokens: int, *, rounds: int = 15, threads: int | None = None) -> dict[str, Any]:
    """One decode step behind `tokens` tokens, ours against transformers' own, on `threads` (None: as torch is set)."""
    forward = Forward(model)  # puts grouped attention in for arenas only
    theirs = fill(DynamicCache(config=model.config), model, tokens)
    ours = ArenaCache(model.config, capacity=tokens + 64)
    ours.reserve(tokens + 64)
    fill(ours, model, tokens)
    allocated, held = ours.meter.allocations, ours.nbytes()

    def step(cache: Any) -> float:
        return milliseconds(lambda: forward(cache, [TOKEN], cache.get_seq_length()))

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        pairs = []
        for _ in range(rounds + 2):
            first = step(theirs)
            pairs.append((step(ours), first))
    finally:
        torch.set_num_threads(before)
    pairs = pairs[2:]  # the first steps warm both up
    ratios = [a / b for a, b in pairs]
    return {
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "ours_ms": statistics.median(a for a, _ in pairs),
        "theirs_ms": statistics.median(b for _, b in pairs),
        "ours_min_ms": min(a for a, _ in pairs),
        "theirs_min_ms": min(b for _, b in pairs),
        "bytes_flat": ours.meter.allocations == allocated and ours.nbytes() == held,
        "threads": threads or before,
        "load": os.getloadavg()[0],
    }


def run(threads: int | None = None) -> dict[str, Any]:
    """All figures by name."""
    model = shared_smollm2_engine("bfloat16").model
    return {
        f"decode_{tokens}_vs_dynamic_cache": decode(model, tokens, rounds=rounds, threads=threads)
        for tokens, rounds in ((8_000, 15), (500, 45))
    }
