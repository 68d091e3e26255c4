"""Quantized keys and values against transformers' own quantized caches: what they cost in quality, bytes and time.

Quality: SmolLM2 in float32; KL to the full cache over the 96 tokens behind documents of 1,024, paired by document, with
standard errors. Bits an element are measured from the distinct storages behind the context, scales, sinks, positions
and what is allocated but unused included; `asymptotic_bits` is the formula for a long conversation. transformers'
caches run at their defaults (groups of 64, a residual of 128 tokens), along the axes they have by default and the
others they offer; the best of them is the comparator. Their scales are float32 here, as the model is; where ours may
take no more than they would with scales of 16 bits, the name ends in `_16_bit_scales`. Passkeys are keys hidden at five
depths: found greedily or not, rank and log-probability.

Time: one decode step of SmolLM2 in bfloat16 behind 8,000 random keys and values, against quanto's cache (4 bits) and
`DynamicCache` with SDPA, alternating in one process; ratios of neighbouring steps, median and spread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, HQQQuantizedLayer, QuantoQuantizedLayer

from compaction.engines.forward import Forward
from compaction.kv.cache import ArenaCache
from compaction.kv.probe import probe
from compaction.kv.quantization.settings import Setting
from tests.benchmarks.quality import DATA, Harness, Measured, Reference, paired
from tests.benchmarks.sections import Picture, canvas
from tests.fixtures_models import shared_smollm2_engine

__all__ = ["draw", "quality", "run", "speed"]

DOCUMENTS, PASSKEYS = 24, 4
# Ours beside theirs at 4 and at 2 bits; a window would cost as many bytes as the codes of half a document in float32.
OURS = {
    8: ("k8v4:window=0", "k8v4"),
    4: ("tqk5v4:window=0", "tqk5v3:window=0", "tq4:window=0", "k5v3:window=0"),
    2: ("tqk3v2:window=0", "tq2:window=0"),
}
# Axes of keys and values: the default first. HQQ's mixed axes were no better and take minutes.
AXES: dict[str, tuple[Any, tuple[tuple[int, int], ...]]] = {
    "quanto": (QuantoQuantizedLayer, ((0, 0), (-1, 0), (0, -1), (-1, -1))),
    "hqq": (HQQQuantizedLayer, ((0, 0), (1, 1))),
}
TOKEN = 314  # any token: the step's time does not depend on it


def quality(
    documents: int = DOCUMENTS, keys: int = PASSKEYS, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """KL, bits and passkeys of all methods, and the comparisons with targets."""
    harness = Harness()
    plan = probe(harness.model)
    texts, hidden = harness.documents(documents), harness.passkeys(keys) if keys else []
    found: dict[str, dict[str, Any]] = {}
    measured: dict[str, Measured] = {}
    for name, build in _methods(harness, plan):
        began = time.perf_counter()
        bits: list[float] = []

        measured[name] = harness.measure(name, texts, partial(_filled, build, bits))
        found[name] = {
            "kl": measured[name].mean,
            "error": measured[name].error,
            "bits": statistics.fmean(bits),
            **({"passkey": _passkeys(harness.measure(name, hidden, partial(_filled, build, [])))} if hidden else {}),
        }
        say(f"{name:20} {json.dumps(found[name])} {time.perf_counter() - began:.0f} s")
    return {"methods": found, **_comparisons(found, measured)}


def _filled(build: Callable[[], Any], bits: list[float], reference: Reference) -> Any:
    """A cache of the document's context; notes the bits of an element."""
    cache = reference.fill(build())
    bits.append(8 * _bytes(cache) / sum(t.numel() for t in (*reference.keys, *reference.values)))
    return cache


def _methods(harness: Harness, plan: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All caches by name, ours first; what is built is empty."""
    config = harness.model.config

    def theirs(layer: Any, bits: int, axes: tuple[int, int]) -> Any:
        made = [layer(nbits=bits, axis_key=axes[0], axis_value=axes[1]) for _ in range(config.num_hidden_layers)]
        return Cache(layers=made)

    yield "full", partial(ArenaCache, config)
    for names in OURS.values():
        for name in names:
            yield name, partial(ArenaCache, config, storage=name, plan=plan)
    for bits in (4, 2):
        for kind, (layer, combinations) in AXES.items():
            for axes in combinations:
                yield f"{kind}{bits} axes {axes[0]} {axes[1]}", partial(theirs, layer, bits, axes)


def _comparisons(found: dict[str, dict[str, Any]], measured: dict[str, Measured]) -> dict[str, Any]:
    """K8V4 by itself; at 4 and 2 bits the best of ours that takes no more bytes than the best of theirs."""
    figures: dict[str, Any] = {}
    for name in OURS[8]:
        base = "quantized_" + name.replace(":window=0", "_no_window")
        figures[f"{base}_kl"] = {"ratio": found[name]["kl"], "error": found[name]["error"], "bits": found[name]["bits"]}
    # A position is four bytes a slot of a layer, whose two sides have 3 heads of 64 channels each.
    figures["quantized_k8v4_bits"] = {"ratio": Setting.parse("k8v4").bits_per_element(64, 64) + 32 / 384}
    for bits in (4, 2):
        theirs = {name: f for name, f in found.items() if name.startswith((f"quanto{bits}", f"hqq{bits}"))}
        plain = {name: f for name, f in theirs.items() if name.endswith("axes 0 0")}
        for label, group in (("best_axes", theirs), ("default_axes", plain)):
            other = min(group, key=lambda name: group[name]["kl"])
            for scales, most in (("", found[other]["bits"]), ("_16_bit_scales", bits + 0.5)):
                fitting = [name for name in OURS[bits] if found[name]["bits"] <= most]
                if not fitting:
                    continue
                ours = min(fitting, key=lambda name: found[name]["kl"])
                difference = paired(measured[ours].kl, measured[other].kl)
                figures[f"quantized_{bits}_bits_vs_{label}{scales}"] = {
                    "ratio": found[ours]["kl"] / found[other]["kl"],
                    "ours": ours,
                    "theirs": other,
                    "kl": [found[ours]["kl"], found[other]["kl"]],
                    "errors": [found[ours]["error"], found[other]["error"]],
                    "bits": [found[ours]["bits"], most],
                    "difference": difference.difference,
                    "difference_error": difference.error,
                }
    return {"figures": figures}


def _passkeys(measured: Measured) -> dict[str, float]:
    return {
        "found": sum(measured.found) / len(measured.found),
        "rank": statistics.fmean(measured.rank),
        "log_prob": statistics.fmean(measured.log_prob),
    }


def _bytes(cache: Any) -> int:
    """Bytes of the distinct storages that the layers hold; what ours share, one layer's working memory, left out."""
    if isinstance(cache, ArenaCache):
        return sum(layer.nbytes() for layer in cache.arenas)
    seen: dict[int, int] = {}
    for layer in cache.layers:
        for tensor in _tensors([layer.keys, layer.values, layer._quantized_keys, layer._quantized_values]):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(seen.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Plain tensors in lists, mappings and quanto's tensors, which keep three inside."""
    if isinstance(value, torch.Tensor):
        inner = [getattr(value, name, None) for name in ("_data", "_scale", "_shift")]
        if any(part is not None for part in inner):
            yield from _tensors(inner)
        else:
            yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def speed(tokens: int = 8_000, rounds: int = 15, *, compiled: bool = True, setting: str = "k8v4") -> dict[str, Any]:
    """One step behind `tokens` tokens: ours, quanto's, and the full cache's."""
    model = shared_smollm2_engine("bfloat16").model
    forward, config = Forward(model), model.config
    ours = ArenaCache(config, capacity=tokens + 256, storage=setting, plan=probe(model), compiled=compiled)
    ours.reserve(tokens + 256)
    caches: dict[str, Any] = {
        "ours": _fill(ours, model, tokens),
        "quanto": _fill(Cache(layers=[QuantoQuantizedLayer(nbits=4) for _ in ours.layers]), model, tokens),
        "full": _fill(DynamicCache(config=config), model, tokens),
    }
    allocated = ours.meter.allocations

    def step(cache: Any) -> tuple[float, float]:
        began, busy = time.perf_counter(), time.process_time()
        forward(cache, [TOKEN], cache.get_seq_length())
        return 1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - busy)

    for cache in caches.values():
        for _ in range(2):  # the first ones compile and warm up
            step(cache)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in caches}
    for _ in range(rounds):
        for name, cache in caches.items():
            times[name].append(step(cache))
    made: dict[str, Any] = {}
    for other in ("quanto", "full"):
        ratios = [a[0] / b[0] for a, b in zip(times["ours"], times[other], strict=True)]
        busy = [a[1] / b[1] for a, b in zip(times["ours"], times[other], strict=True)]
        made[f"quantized_step_{tokens}_vs_{other}"] = {
            "ratio": statistics.median(ratios),
            "spread": [min(ratios), max(ratios)],
            "cpu_ratio": statistics.median(busy),
            "ours_ms": statistics.median(t[0] for t in times["ours"]),
            "theirs_ms": statistics.median(t[0] for t in times[other]),
            "threads": torch.get_num_threads(),
            "load": os.getloadavg()[0],
            "compiled": compiled,
            "reallocated": ours.meter.allocations - allocated,
            "bytes": [sum(layer.nbytes() for layer in ours.arenas), ours.nbytes(), _bytes(caches["quanto"])],
        }
    return made


def _fill(cache: Any, model: Any, tokens: int) -> Any:
    """Random keys and values of `tokens` tokens in all layers, the same for all caches."""
    config, generator = model.config, torch.Generator().manual_seed(7)
    shape, at = (1, config.num_key_value_heads, tokens, config.head_dim), torch.arange(tokens)[None]
    for layer in cache.layers:
        keys, values = (torch.randn(shape, generator=generator).to(model.dtype) for _ in range(2))
        layer.update(keys, values, kwargs={"position_ids": at})
    return cache


def run() -> dict[str, Any]:
    """All figures by name."""
    made = quality()
    caches = {f"cache {name}": figure for name, figure in made["methods"].items()}
    return {**made["figures"], **speed(), **{f"{k}_eager": v for k, v in speed(compiled=False).items()}, **caches}


def draw(figures: Mapping[str, Mapping[str, Any]]) -> list[Picture]:
    """KL to the full cache over the bits that a number takes."""
    picture, axes = canvas(8, 5)
    for kind, mark in (("quanto", "s"), ("hqq", "^"), ("", "o")):
        shown = {
            name.removeprefix("cache "): figure
            for name, figure in figures.items()
            if name.startswith(f"cache {kind}") and figure["kl"] > 0
        }
        if not kind:
            shown = {name: f for name, f in shown.items() if not name.startswith(("quanto", "hqq"))}
        bits, kl = [f["bits"] for f in shown.values()], [f["kl"] for f in shown.values()]
        axes.errorbar(
            bits,
            kl,
            [f["error"] for f in shown.values()],
            fmt=mark,
            label=f"{kind}, each pair of axes" if kind else "this package",
        )
        for name, x, y in zip(shown, bits, kl, strict=True) if not kind else ():
            axes.annotate(f"{name}  ", (x, y), fontsize=7, va="center", ha="right")
    axes.set(xlabel="bits a number, scales, sinks and positions included", ylabel="KL, nats per token", yscale="log")
    axes.set_xlim(1.2)
    axes.legend(frameon=False)
    return [Picture("quantized", "KL to the full cache of every quantized cache, by its bits", picture)]


def main(arguments: Sequence[str] | None = None) -> int:
    """One part or all, as one JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_quantized", description=__doc__)
    parser.add_argument("part", choices=("quality", "speed", "all"))
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="texts of 1,024 + 96 tokens")
    parser.add_argument("--passkeys", type=int, default=PASSKEYS, help="texts with a key at five depths each")
    parser.add_argument("--tokens", type=int, default=8_000, help="behind which a step is timed")
    parser.add_argument("--eager", action="store_true", help="time without torch.compile")
    parser.add_argument("--json", type=Path, help="where the figures go as well")
    asked = parser.parse_args(arguments)
    if not DATA.exists():
        print(f"no recorded conversations at {DATA}: the measurement needs them", file=sys.stderr)
        return 2
    made: dict[str, Any] = {}
    if asked.part != "quality":
        made |= speed(asked.tokens, compiled=not asked.eager)
    if asked.part != "speed":
        made |= quality(asked.documents, asked.passkeys, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(made, indent=2))
    if asked.json:
        asked.json.write_text(json.dumps(made, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
