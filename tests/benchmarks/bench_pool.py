"""Twenty conversations under a pool for five: same answers, never a byte too many, and what a parked one costs.

SmolLM2 in bfloat16, conversations of 2,000 tokens of recorded text, two turns each, in an order that is the worst for
"least recently used": all first turns, then all second ones. Three times: without a pool; with one whose parked caches
go to host memory; with one whose parked caches go to files (written, fsynced and read in the run, the page cache warm).
`pool_*_turn_vs_prefill`: milliseconds until the first token of a second turn whose cache was parked, all included (the
parking of others, restoring, its own new tokens), by those of the same conversation's first turn, in which its 2,000
tokens are prefilled. `cpu_ratio` is the same in CPU time of the calling thread. `pool_*_exact` counts replies whose
ids or prompt logits are not bit for bit those without a pool. `pool_*_bytes` is the most bytes that all arenas together
held whenever one was allocated, by the pool's; counted apart from the pool's own figures, by whoever allocates.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from compaction.kv import arena
from compaction.kv.residency import Pool
from tests.benchmarks.documents import DATA, documents
from tests.benchmarks.sections import Picture, canvas
from tests.fixtures_models import smollm2_engine

__all__ = ["draw", "run"]

CONVERSATIONS, ROOM, TOKENS = 20, 5, 2_000
REPLY = 12
ASKED = "What was said about this so far? Answer in one short sentence."


@dataclass(slots=True)
class Turn:
    """A reply, what it was chosen from, and what it cost."""

    ids: tuple[int, ...]
    logits: torch.Tensor
    prefilled: int
    why: str
    ttft_ms: float
    cpu_ms: float
    was: str = ""


@dataclass(slots=True)
class Held:
    """Bytes of all arenas there are, and the most there were."""

    now: int = 0
    peak: int = 0
    allocations: int = 0

    def made(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a new one, until it is gone."""
        size = tensor.untyped_storage().nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        self.allocations += 1
        weakref.finalize(tensor, self._gone, size)
        return tensor

    def _gone(self, size: int) -> None:
        self.now -= size


@contextmanager
def counted() -> Iterator[Held]:
    """Look at every allocation of an arena."""
    held, make = Held(), arena._empty
    counting: Callable[..., torch.Tensor] = lambda like, slots: held.made(make(like, slots))  # noqa: E731
    arena._empty = counting
    try:
        yield held
    finally:
        arena._empty = make


@dataclass(slots=True)
class Run:
    """Both turns of all conversations in one engine."""

    turns: list[list[Turn]] = field(default_factory=list)
    peak: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    pool_bytes: int = 0


def texts(engine: Any, count: int, tokens: int) -> list[str]:
    """Recorded text that makes prompts of so many tokens each, or a few less."""
    made = []
    for document in documents(engine.tokenizer, count, context=tokens, tail=1):
        text = str(engine.tokenizer.decode(list(document.context), skip_special_tokens=True))
        while (over := len(_prompt(engine, text)) - tokens) > 0:
            text = text[: len(text) - max(1, over)]
        made.append(text)
    return made


def _prompt(engine: Any, text: str) -> list[int]:
    return list(engine.template.ids([{"role": "user", "content": text}], None))


def turn(engine: Any, name: str, messages: list[dict[str, Any]]) -> Turn:
    """One turn. CPU time is until the first token is chosen."""
    where = engine.pool.where(name) if engine.pool else "device"
    cpu = time.thread_time()
    generation = engine.generate(name, messages, None, max_new_tokens=REPLY)
    cpu = time.thread_time() - cpu
    list(generation)
    made = generation.result
    return Turn(
        made.ids,
        generation.prompt_logits,
        made.usage.prefilled,
        made.usage.why,
        made.usage.ttft_ms,
        1e3 * cpu,
        where,
    )


def talk(said: list[str], pool: Pool | None) -> Run:
    """First turns of all, then second ones; a fresh engine on shared weights."""
    engine = smollm2_engine("bfloat16")
    done = Run()
    if pool is not None:
        engine.use_pool(pool)
        done.pool_bytes = pool.device_bytes
    with counted() as held:
        history = [[{"role": "user", "content": text}] for text in said]
        for asked in ("", ASKED):
            row = []
            for index, messages in enumerate(history):
                if asked:
                    messages.append({"role": "user", "content": asked})
                row.append(turn(engine, str(index), messages))
                reply = engine.tokenizer.decode(list(row[-1].ids), skip_special_tokens=True)
                messages.append({"role": "assistant", "content": reply})
                print(".", end="", file=sys.stderr, flush=True)
            done.turns.append(row)
        done.peak = held.peak
    print(file=sys.stderr)
    if engine.pool is not None:
        done.usage = engine.pool.usage().to_json()
    engine.close()
    return done


def room(engine: Any, said: list[str]) -> int:
    """Bytes of five conversations with both turns, the longest there are."""
    both = max(len(_prompt(engine, text)) for text in said) + len(_prompt(engine, ASKED)) + 2 * REPLY
    return ROOM * both * int(engine.kv_bytes_per_token)


def against(plain: Run, pooled: Run) -> dict[str, Any]:
    """The figures of one pooled run."""
    parked = [index for index, second in enumerate(pooled.turns[1]) if second.was != "device"]
    walls = [pooled.turns[1][i].ttft_ms / pooled.turns[0][i].ttft_ms for i in parked]
    cpus = [pooled.turns[1][i].cpu_ms / pooled.turns[0][i].cpu_ms for i in parked]
    pairs = [
        (a, b) for one, other in zip(plain.turns, pooled.turns, strict=True) for a, b in zip(one, other, strict=True)
    ]
    different = sum(a.ids != b.ids or not torch.equal(a.logits, b.logits) for a, b in pairs)
    again = sum(b.prefilled - a.prefilled for a, b in pairs)
    return {
        "turn_vs_prefill": {
            "ratio": statistics.median(walls),
            "spread": [min(walls), max(walls)],
            "cpu_ratio": statistics.median(cpus),
            "cpu_spread": [min(cpus), max(cpus)],
            "turn_ms": statistics.median(pooled.turns[1][i].ttft_ms for i in parked),
            "prefill_ms": statistics.median(pooled.turns[0][i].ttft_ms for i in parked),
            "resident_turn_ms": statistics.median(second.ttft_ms for second in plain.turns[1]),
            "parked": len(parked),
            "threads": torch.get_num_threads(),
            "load": os.getloadavg()[0],
        },
        "exact": {"different": different, "replies": len(pairs), "tokens_prefilled_again": again},
        "bytes": {
            "ratio": pooled.peak / pooled.pool_bytes,
            "peak": pooled.peak,
            "pool": pooled.pool_bytes,
            "without_pool": plain.peak,
            "promised_peak": pooled.usage["peak_bytes"],
            "usage": pooled.usage,
        },
    }


def run(conversations: int = CONVERSATIONS, tokens: int = TOKENS) -> dict[str, Any]:
    """All figures by name. Three times twenty prefills of 2,000 tokens: some ten minutes on two cores."""
    engine = smollm2_engine("bfloat16")
    said = texts(engine, conversations, tokens)
    size = room(engine, said)
    folder = Path(tempfile.mkdtemp(prefix="bench-pool-"))
    try:
        plain = talk(said, None)
        tiers = {"host": Pool(size, host="8GiB"), "disk": Pool(size, disk=(folder, "8GiB"))}
        figures: dict[str, Any] = {}
        for tier, pool in tiers.items():
            found = against(plain, talk(said, pool))
            figures |= {f"pool_{tier}_{name}": value for name, value in found.items()}
        return figures
    finally:
        shutil.rmtree(folder)


def draw(figures: Mapping[str, Mapping[str, Any]]) -> list[Picture]:
    """Milliseconds to the first token, by where the cache was."""
    host, disk = (figures[f"pool_{tier}_turn_vs_prefill"] for tier in ("host", "disk"))
    bars = {
        "on the device": host["resident_turn_ms"],
        "parked on the host": host["turn_ms"],
        "parked on disk": disk["turn_ms"],
        "prefilled": host["prefill_ms"],
    }
    picture, axes = canvas(7, 2.2)
    shown = axes.barh(list(bars), list(bars.values()))
    axes.bar_label(shown, [f" {value:,.0f} ms" for value in bars.values()], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds to the first token of a turn behind 2,000 tokens")
    return [Picture("pool", "A turn's first token, by where the conversation's cache was", picture)]


def main() -> int:
    """`python -m tests.benchmarks.bench_pool`: one JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_pool", description=__doc__)
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    asked = parser.parse_args()
    if not DATA.exists():
        print(f"no recorded conversations at {DATA}: the benchmark needs them", file=sys.stderr)
        return 2
    print(json.dumps(run(asked.conversations, asked.tokens), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
