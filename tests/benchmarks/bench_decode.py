"""One token behind 500, 2,000 and 8,000 others: four ways, in one process, and the limit that memory sets.

SmolLM2 in bfloat16: transformers' own `DynamicCache` and SDPA; the unmodified model with arenas and grouped attention;
our own step, plain and compiled. All caches hold the same random keys and values (what they say does not change how
long a step takes); the ways alternate token by token, ratios are medians over neighbouring tokens with their spread.
`limit_ms` is (bytes of the weights + bytes of keys and values) / the bandwidth of a long sequential read, measured in
the same process with as many threads; `of_limit` is how many times the limit a way takes.
`decode_budget` decodes 2,000 tokens in arenas of a budget: the most bytes held at any token relative to the budget, and
`decode_allocations`, how often an arena was allocated meanwhile. Alone, as JSON:
`python -m tests.benchmarks.bench_decode [THREADS]`.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from compaction.engines.decode_step import DecodeStep
from compaction.engines.forward import Forward
from compaction.engines.live_cache import LiveCache
from compaction.kv.cache import ArenaCache
from tests.benchmarks.sections import Picture, canvas
from tests.fixtures_models import shared_smollm2_engine

__all__ = ["bandwidth", "budget", "decode", "draw", "fill", "run"]

TOKEN = 314  # any token: the step's time does not depend on it
LENGTHS = {500: 45, 2_000: 25, 8_000: 15}  # tokens held: rounds
WAYS = {"theirs": "DynamicCache + SDPA", "model": "arenas", "plain": "own step", "compiled": "own step, compiled"}
_READ_BYTES = 1 << 30


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


def bandwidth(rounds: int = 7) -> float:
    """Bytes per second of the fastest of some sequential reads of 1 GiB, with as many threads as torch is set to."""
    block = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / min(milliseconds(block.sum) for _ in range(rounds)) * 1e3


def steps_of(model: Any) -> dict[str, tuple[DecodeStep, float]]:
    """The own steps asked for, with the seconds it took to make them."""
    made: dict[str, tuple[DecodeStep, float]] = {}
    for kind in ("plain", "compiled"):
        began = time.perf_counter()
        step = DecodeStep(model, "compiled" if kind == "compiled" else "plain")
        made[kind] = (step, time.perf_counter() - began)
    return made


def decode(
    model: Any, tokens: int, steps: Mapping[str, DecodeStep], *, rounds: int, bytes_per_second: float
) -> dict[str, dict[str, Any]]:
    """One decode step behind `tokens` tokens, by each way; figures by way."""
    ways = ["theirs", "model", *steps]
    forwards = {way: Forward(model, steps.get(way)) for way in ways}  # grouped attention goes in for arenas only
    caches: dict[str, Any] = {}
    for way in ways:
        cache: Any = DynamicCache(config=model.config)
        if way != "theirs":
            cache = ArenaCache(model.config, capacity=tokens + 64)
            cache.reserve(tokens + 64)
        caches[way] = fill(cache, model, tokens)
    allocated = {way: (caches[way].meter.allocations, caches[way].nbytes()) for way in ways[1:]}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 2):
        for way in ways:
            times[way].append(milliseconds(partial(forwards[way], caches[way], [TOKEN], tokens + number)))
    flat = {way: (caches[way].meter.allocations, caches[way].nbytes()) == held for way, held in allocated.items()}
    read = weight_bytes(model) + caches["model"].logical_nbytes()
    limit = 1e3 * read / bytes_per_second
    return {way: _figure(times[way][2:], times["theirs"][2:], limit) | {"bytes_flat": flat.get(way)} for way in ways}


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that one token reads: of an embedding that is no output layer, a row."""
    parameters = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        del parameters[id(model.model.embed_tokens.weight)]
    return sum(parameters.values())


def _figure(mine: list[float], theirs: list[float], limit: float) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "ms": statistics.median(mine),
        "min_ms": min(mine),
        "limit_ms": limit,
        "of_limit": statistics.median(mine) / limit,
    }


def budget(model: Any, step: DecodeStep | None, *, prompt: int = 100, decoded: int = 2_000) -> dict[str, Any]:
    """Decode in a live cache of exactly so many tokens: its storages at every token, and what was allocated."""
    allowed = prompt + decoded
    live = LiveCache(Forward(model, step), allowed)
    live.start_turn(allowed)
    live.feed([number % 1000 for number in range(prompt)])
    meter = live.layers[0].meter
    before, most = meter.allocations, live.bytes
    began = time.perf_counter()
    for number in range(decoded):
        live.feed([number % 1000])
        most = max(most, live.bytes)
    seconds = time.perf_counter() - began
    allowed_bytes = allowed * sum(layer.slot_nbytes for layer in live.layers)
    return {
        "ratio": most / allowed_bytes,
        "allocations": meter.allocations - before,
        "bytes": most,
        "budget_bytes": allowed_bytes,
        "tokens": decoded,
        "ms": 1e3 * seconds / decoded,
    }


@contextmanager
def _threads(count: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield count or before
    finally:
        torch.set_num_threads(before)


def run(threads: int | None = None) -> dict[str, Any]:
    """All figures by name. Takes two or three minutes, a compilation included."""
    model = shared_smollm2_engine("bfloat16").model
    figures: dict[str, Any] = {}
    names = {"model": "decode", "plain": "plain_step", "compiled": "own_step", "theirs": "dynamic_cache"}
    with _threads(threads) as used:
        about = {"threads": used, "load": os.getloadavg()[0]}
        made = steps_of(model)
        steps: dict[str, DecodeStep] = {kind: step for kind, (step, _) in made.items() if step.kind == kind}
        for kind in made.keys() - steps.keys():  # a step that there is not has missed its target
            for tokens in LENGTHS:
                figure = {"ratio": math.inf, "refusal": made[kind][0].refusal}
                figures[f"{names[kind]}_{tokens}_vs_dynamic_cache"] = figure
        for tokens, rounds in LENGTHS.items():
            speed = bandwidth()
            for way, figure in decode(model, tokens, steps, rounds=rounds, bytes_per_second=speed).items():
                seconds = {"seconds_to_make": made[way][1]} if way in made else {}
                name = f"{names[way]}_{tokens}" + ("" if way == "theirs" else "_vs_dynamic_cache")
                figures[name] = figure | about | seconds | {"read_gb_per_s": speed / 1e9}
        figures["decode_budget"] = held = budget(model, steps.get("compiled")) | about
        figures["decode_allocations"] = {"count": held["allocations"]}
    return figures


def draw(figures: Mapping[str, Mapping[str, Any]]) -> list[Picture]:
    """Milliseconds per token of each way over the tokens held, and the limit."""
    names = {"theirs": "dynamic_cache_{}"} | {
        way: name + "_{}_vs_dynamic_cache"
        for way, name in (("model", "decode"), ("plain", "plain_step"), ("compiled", "own_step"))
    }
    picture, axes = canvas(7, 4)
    for way, name in names.items():
        held = [tokens for tokens in LENGTHS if name.format(tokens) in figures]
        axes.plot(
            held, [figures[name.format(tokens)].get("ms", math.nan) for tokens in held], marker="o", label=WAYS[way]
        )
    held = [tokens for tokens in LENGTHS if f"dynamic_cache_{tokens}" in figures]
    limits = [figures[f"dynamic_cache_{tokens}"]["limit_ms"] for tokens in held]
    axes.plot(held, limits, color="0.5", linestyle="--", label="reading weights and cache once")
    axes.set(xlabel="tokens in the cache", ylabel="ms per token", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return [Picture("decode", "One token of SmolLM2 in bfloat16, by the tokens before it", picture)]


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]) if len(sys.argv) > 1 else None), indent=2))
