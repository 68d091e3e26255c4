"""A long conversation in small: 30,000 tokens through a budget of 1,024, in splice mode and in exact mode.

`python -m tests.benchmarks.bench_long` (SmolLM2, bfloat16). The dialogues of MemoryBank, one after the other, are one
conversation of two sessions with the default policy: one prefills what follows a cut, one splices. Before each message
counts as history, both have to predict it: it is teacher-forced as it enters, and every token of its text but the first
(the pass before may have foretold that) is scored against what each session has in its cache by then. Perplexities are
over all those tokens; the ratio is splice to exact. Positions pass the trained 8,192, so that keys are turned on the
way. KV bytes are measured after each turn. RSS is that of a process of its own, which holds both sessions, read after
`malloc_trim`, with torch's caches of CPU kernels, one for each length of a pass, held to 64: at their 1,024 entries
plain transformers alone grows by 100 MB in 180 passes of different lengths.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from compaction.budget import Budget
from compaction.engines import TransformersEngine
from compaction.engines.live_cache import LiveCache
from compaction.manager import SessionManager
from compaction.ports import Apply
from compaction.session import Session
from tests.benchmarks.documents import DATA
from tests.benchmarks.sections import Picture, canvas
from tests.fixtures_models import smollm2_engine

__all__ = ["draw", "run"]

TOKENS, BUDGET = 30_000, 1_024
SOURCE = DATA / "memorybank_en.jsonl.gz"
APPLIED: tuple[Apply, ...] = ("splice", "exact")


class Watched(TransformersEngine):
    """Keeps the log-probability of every token but the first of each prompt: by slot, of each cache."""

    def watch(self) -> None:
        """From now on."""
        self.foretold: dict[int, dict[int, float]] = {}
        self._hidden: torch.Tensor | None = None
        self._last: dict[int, tuple[int, torch.Tensor]] = {}
        self.model.model.register_forward_hook(self._keep)

    def collect(self, live: LiveCache) -> dict[int, float]:
        """What was kept of a cache since this was last asked for: by slot."""
        self._last.pop(id(live), None)
        return self.foretold.pop(id(live))

    def _keep(self, module: Any, given: Any, made: Any) -> None:
        self._hidden = made[0] if isinstance(made, tuple) else made.last_hidden_state

    @torch.no_grad()
    def _feed(self, live: LiveCache, ids: list[int]) -> torch.Tensor:
        first = len(live)
        logits = super()._feed(live, ids)
        slot, told = self._last.get(id(live), (-1, logits))
        if slot == first:  # the pass before, of the same prompt, has foretold the first token of this one
            self.foretold.setdefault(id(live), {})[first] = float(torch.log_softmax(told.float(), -1)[ids[0]])
        self._last[id(live)] = len(live), logits
        if len(ids) == 1:
            return logits
        if self._hidden is None or self._hidden.shape[1] != len(ids):
            raise RuntimeError("the pass was not seen")
        rows = torch.log_softmax(self.model.lm_head(self._hidden[0, :-1]).float(), -1)
        found = self.foretold.setdefault(id(live), {})
        for slot, row, token in zip(range(first + 1, first + len(ids)), rows, ids[1:], strict=True):
            found[slot] = float(row[token])
        return logits


@dataclass
class Side:
    """One of the two sessions and its figures."""

    engine: Watched
    session: Session
    loss: list[float] = field(default_factory=list)
    kv_bytes: list[int] = field(default_factory=list)
    applied: list[dict[str, Any]] = field(default_factory=list)
    reanchored: int = 0
    cpu: float = 0.0
    prefilled: int = 0
    peak: int = 0
    compactions: int = 0
    highest: int = 0

    def take(self, message: dict[str, str]) -> None:
        """The message enters: its text is scored behind what the cache holds then."""
        began = time.thread_time()
        self.session.append(message)
        reply = self.session.probe(max_new_tokens=1)
        self.cpu += time.thread_time() - began
        live = self.engine._conversations[self.session.id].live
        scores = self.engine.collect(live)
        template = self.engine.template
        text = len(template.text_ids(message["content"]))
        end = reply.usage.prompt_tokens - self.engine._opening - _closing(self.engine)
        self.loss += [-scores[slot] for slot in range(end - text + 1, end)]
        usage = reply.usage
        self.kv_bytes.append(usage.kv_bytes or 0)
        self.applied.append(dict(usage.applied or {}))
        self.prefilled += usage.prefilled
        self.peak = max(self.peak, usage.peak_tokens)
        self.compactions += reply.decision is not None
        self.highest = max(self.highest, live.slot_map.next_position)

    def figures(self) -> dict[str, Any]:
        """What came of it."""
        done = [a for a in self.applied if a.get("how") == "splice"]
        return {
            "perplexity": perplexity(self.loss),
            "perplexity_thirds": [perplexity(part) for part in thirds(self.loss)],
            "cpu_s": round(self.cpu, 1),
            "prefilled": self.prefilled,
            "compactions": self.compactions,
            "peak_tokens": self.peak,
            "highest_position": self.highest,
            "kv_bytes_largest": max(self.kv_bytes),
            "spliced": len(done),
            "compact": sum(a.get("mode") == "compact" for a in done),
            "evicted": sum(a.get("evicted", 0) for a in done),
            "moved": sum(a.get("moved", 0) for a in done),
            "drift": max((a.get("drift", 0) for a in done), default=0),
            "reanchored": sum(a.get("reanchored", 0) for a in done),
            "refused": sorted({a["refused"] for a in self.applied if a.get("refused")}),
        }


def _closing(engine: TransformersEngine) -> int:
    """Tokens that close a message."""
    asked = [{"role": "user", "content": "a"}]
    ids = engine.template.ids(asked, None, generation_prompt=False)
    at = len(ids) - 1 - ids[::-1].index(engine.template.text_ids("a")[0])
    return len(ids) - 1 - at


def perplexity(loss: Sequence[float]) -> float:
    """exp of the mean."""
    return math.exp(sum(loss) / len(loss))


def thirds(loss: Sequence[float]) -> Iterator[Sequence[float]]:
    """Beginning, middle and end."""
    size = -(-len(loss) // 3)
    return (loss[at : at + size] for at in range(0, len(loss), size))


def messages(engine: TransformersEngine, tokens: int) -> list[dict[str, str]]:
    """The dialogues in order, until they make so many tokens of text."""
    found: list[dict[str, str]] = []
    with gzip.open(SOURCE, "rt", encoding="utf-8") as file:
        for line in file:
            for message in json.loads(line)["messages"]:
                text = message["content"].strip()
                count = len(engine.template.text_ids(text))
                if count:
                    found.append({"role": message["role"], "content": text})
                    tokens -= count
                if tokens <= 0:
                    return found
    return found


def rss() -> int:
    """Bytes of memory of this process, less what the allocator holds for nobody."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def play(tokens: int, dtype: str, step: Callable[[int, int], None] = lambda done, of: None) -> dict[str, Any]:
    """Both sessions through the conversation."""
    made = smollm2_engine(dtype)
    engine = Watched(made.model, tokenizer=made.tokenizer)
    engine.watch()
    sides = {
        apply: Side(engine, SessionManager(engine, budget=Budget(tokens=BUDGET), apply=apply).session(apply))
        for apply in APPLIED
    }
    told = messages(engine, tokens)
    memory = []
    for index, message in enumerate(told):
        for side in sides.values():
            side.take(message)
        memory.append(rss())
        step(index + 1, len(told))
    splice, exact = sides["splice"].figures(), sides["exact"].figures()
    budget = engine._splicing._budget
    kept = (
        splice["drift"] <= budget
        and max(splice["peak_tokens"], exact["peak_tokens"]) <= BUDGET
        and max(splice["kv_bytes_largest"], exact["kv_bytes_largest"]) <= BUDGET * engine.kv_bytes_per_token
    )
    grown = {"ratio": by_thousand(memory, tokens)[-1] / by_thousand(memory, tokens)[1]}
    engine.close()
    return {
        "long_perplexity_splice_vs_exact": {
            "ratio": splice["perplexity"] / exact["perplexity"],
            "tokens": len(sides["exact"].loss),
            "messages": len(told),
            "cpu_ratio": splice["cpu_s"] / exact["cpu_s"],
            "prefilled_ratio": splice["prefilled"] / exact["prefilled"],
            "splice": splice | {"kv_bytes_by_thousand": by_thousand(sides["splice"].kv_bytes, tokens)},
            "exact": exact | {"kv_bytes_by_thousand": by_thousand(sides["exact"].kv_bytes, tokens)},
        },
        "long_budgets_kept": {"ratio": float(kept), "budget": BUDGET, "drift_budget": budget},
        "long_rss_last_vs_second_thousand": grown | {"rss_by_thousand": by_thousand(memory, tokens)},
    }


def by_thousand(series: Sequence[int], tokens: int) -> list[int]:
    """The largest value in each thousand tokens, of one value a message; the last stands for what is left over."""
    parts = max(2, round(tokens / 1_000))
    edges = [len(series) * part // parts for part in range(parts + 1)]
    return [max(series[a:b]) for a, b in itertools.pairwise(edges)]


def run(tokens: int = TOKENS, dtype: str = "bfloat16") -> dict[str, Any]:
    """All figures by name, from a process of its own. Takes a quarter of an hour on two quiet cores."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long.json"
        asked = ["--here", "--tokens", str(tokens), "--dtype", dtype, "--json", str(path)]
        environment = {**os.environ, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
        subprocess.run([sys.executable, "-m", "tests.benchmarks.bench_long", *asked], env=environment, check=True)
        figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return figures


def draw(figures: Mapping[str, Mapping[str, Any]]) -> list[Picture]:
    """Bytes over the conversation: of both caches, and of the process."""
    ratio = figures["long_perplexity_splice_vs_exact"]
    picture, axes = canvas(8, 3.5)
    for side, style in zip(APPLIED, ("-", "--"), strict=True):
        held = ratio[side]["kv_bytes_by_thousand"]
        axes.plot(range(1, len(held) + 1), [value / 2**20 for value in held], style, label=f"KV cache, {side}")
    held = figures["long_rss_last_vs_second_thousand"]["rss_by_thousand"]
    axes.plot(range(1, len(held) + 1), [value / 2**20 for value in held], color="0.5", label="process")
    axes.set(xlabel="thousands of tokens", ylabel="MiB", yscale="log", ylim=(10, 2000))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False)
    return [Picture("long", "Memory over a conversation of 30,000 tokens in a budget of 1,024", picture)]


def shown(tokens: int, dtype: str) -> dict[str, Any]:
    """All figures, with a progress bar."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("messages", total=None)
        return play(tokens, dtype, lambda done, of: progress.update(task, completed=done, total=of))


def main() -> int:
    """Run and write the JSON. Exit 1 where a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_long", description=__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, help="where the figures go; default: the screen")
    parser.add_argument("--here", action="store_true", help="in this process, whatever else it holds")
    asked = parser.parse_args()
    figures = (shown if asked.here else run)(asked.tokens, asked.dtype)
    text = json.dumps(figures, indent=2)
    if asked.json:
        asked.json.write_text(text + "\n", encoding="utf-8")
    if asked.here:
        return 0
    print(text)
    kept = figures["long_perplexity_splice_vs_exact"]["ratio"] <= 1.25 and figures["long_budgets_kept"]["ratio"] == 1
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
