"""What a compressed KV cache costs in quality: KL to the full cache on real text, and keys that are still found.

A method gets the full cache of a document's context and returns a smaller one; then the document's tail is fed as it
was written, at the positions it has behind the whole context. Figures are nats per tail token, KL(full || compressed).

    harness = Harness(model, tokenizer)
    documents = harness.documents(64)
    a = harness.measure("keydiff", documents, build_a)      # build: (Reference) -> cache, or (cache, context manager)
    b = harness.measure("ours", documents, build_b)
    paired(b.kl, a.kl)                                       # mean difference, standard error

Invariant: two methods see the same references: the full cache and its log-probabilities are computed once a document
and kept in a scratch folder by a digest of weights and ids. Everything is float32 and deterministic.
`python -m tests.benchmarks.quality` measures attention sinks with a recent window, and that a full cache costs nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import DynamicCache

from compaction.kv.cache import ArenaCache
from tests.benchmarks.documents import CONTEXT, DATA, TAIL, Document, documents, passkeys
from tests.fixtures_models import shared_smollm2_engine

__all__ = ["DATA", "Harness", "Measured", "Paired", "Reference", "paired", "streaming"]

Build = Callable[["Reference"], Any]
_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Reference:
    """The full cache of a document: keys and values of each layer `[1, kv_heads, context, dim]`, and what follows.

    `log_probs` is `[tail, vocabulary]`: what the model expects after each tail token.
    """

    document: Document
    config: Any
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    log_probs: torch.Tensor

    def fill(self, cache: Any) -> Any:
        """Put the context's keys and values into an empty cache of any kind, as a prefill would."""
        positions = torch.arange(self.keys[0].shape[2])[None]
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            cache.update(keys, values, layer, kwargs={"position_ids": positions})
        return cache

    def arena(self) -> ArenaCache:
        """The full context in a fresh arena cache."""
        cache: ArenaCache = self.fill(ArenaCache(self.config))
        return cache


@dataclass(slots=True)
class Measured:
    """One method over many documents: KL, bytes and, where documents hide a key, how well it is found."""

    name: str
    kl: list[float] = field(default_factory=list)
    found: list[bool] = field(default_factory=list)
    rank: list[float] = field(default_factory=list)
    log_prob: list[float] = field(default_factory=list)
    depth: list[float] = field(default_factory=list)

    def extend(self, other: Measured) -> None:
        """Add further documents."""
        for name in ("kl", "found", "rank", "log_prob", "depth"):
            getattr(self, name).extend(getattr(other, name))

    @property
    def mean(self) -> float:
        """Mean KL, nats per token."""
        return statistics.fmean(self.kl)

    @property
    def error(self) -> float:
        """Standard error of `mean` over documents."""
        return _standard_error(self.kl)


@dataclass(frozen=True, slots=True)
class Paired:
    """The mean of differences between two methods on the same documents, with its standard error."""

    difference: float
    error: float
    count: int

    @property
    def errors(self) -> float:
        """How many standard errors the difference is away from nothing; negative: the first one is smaller."""
        return self.difference / self.error if self.error else math.copysign(math.inf, self.difference)


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    """first - second, document by document."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    return Paired(statistics.fmean(differences), _standard_error(differences), len(differences))


class Harness:
    """One float32 model, its references and what methods cost.

    Args:
        model: a causal language model in float32; None: SmolLM2.
        tokenizer: the model's.
        scratch: where references are kept (about 66 MB a document); None: `$KV_COMPACTION_SCRATCH`, else the system's
            folder for temporary files.
    """

    def __init__(self, model: Any = None, tokenizer: Any = None, scratch: Path | None = None) -> None:
        engine = shared_smollm2_engine("float32") if model is None else None
        self.model: Any = engine.model if engine else model
        self.tokenizer: Any = engine.tokenizer if engine else tokenizer
        folder = os.environ.get("KV_COMPACTION_SCRATCH") or Path(tempfile.gettempdir()) / "kv-compaction-quality"
        self.scratch = scratch or Path(folder)
        self.scratch.mkdir(parents=True, exist_ok=True)
        self._weights = _digest_of(self.model)

    def documents(self, count: int = 64) -> list[Document]:
        """Real text; 1,024 tokens of context and 96 that follow."""
        return documents(self.tokenizer, count)

    def passkeys(self, count: int = 8) -> list[Document]:
        """Five depths of a hidden key in each of `count` texts."""
        return passkeys(self.tokenizer, count)

    @torch.no_grad()
    def reference(self, document: Document) -> Reference:
        """The full cache and its predictions, from the scratch folder where it is there."""
        path = self.scratch / f"{self.key(document)}.pt"
        if not path.exists():
            cache: Any = DynamicCache(config=self.model.config)
            for start in range(0, len(document.context), _CHUNK):
                self._forward(cache, document.context[start : start + _CHUNK], start)
            kept = {"keys": [layer.keys for layer in cache.layers], "values": [layer.values for layer in cache.layers]}
            kept = {name: [tensor.clone() for tensor in tensors] for name, tensors in kept.items()}
            log_probs = self._tail(document, cache)
            partial = path.with_suffix(f".{os.getpid()}")
            torch.save({**kept, "log_probs": log_probs}, partial)
            partial.replace(path)
        held = torch.load(path, mmap=True, weights_only=True)
        return Reference(document, self.model.config, held["keys"], held["values"], held["log_probs"])

    def key(self, document: Document) -> str:
        """Names what was computed from these weights and this document; for further files in the scratch folder."""
        ids = json.dumps([document.context, document.tail]).encode()
        return hashlib.sha256(self._weights + ids).hexdigest()[:32]

    @torch.no_grad()
    def log_probs(self, document: Document, build: Build, reference: Reference | None = None) -> torch.Tensor:
        """What the model expects after each tail token, `[tail, vocabulary]`, behind the cache that `build` makes."""
        reference = reference or self.reference(document)
        built = build(reference)
        cache, context = built if isinstance(built, tuple) else (built, nullcontext())
        return self._tail(document, cache, context)

    def kl(self, document: Document, build: Build) -> float:
        """Mean over the tail of KL(full || compressed), nats per token, teacher-forced."""
        reference = self.reference(document)
        return _kl(reference.log_probs, self.log_probs(document, build, reference))

    def measure(
        self, name: str, items: Iterable[Document], build: Build, advance: Callable[[], None] = lambda: None
    ) -> Measured:
        """One method over documents of either kind; `advance` is called after each."""
        measured = Measured(name)
        for document in items:
            reference = self.reference(document)
            ours = self.log_probs(document, build, reference)
            measured.kl.append(_kl(reference.log_probs, ours))
            if document.answer:
                _note_answer(measured, document, ours)
            advance()
        return measured

    def _tail(self, document: Document, cache: Any, context: AbstractContextManager[Any] | None = None) -> torch.Tensor:
        with context or nullcontext():
            logits = self._forward(cache, document.tail, len(document.context))
        return torch.log_softmax(logits.float(), -1)

    def _forward(self, cache: Any, ids: Sequence[int], start: int) -> torch.Tensor:
        positions = torch.arange(start, start + len(ids))[None]
        out = self.model(input_ids=torch.tensor([list(ids)]), cache=cache, position_ids=positions, use_cache=True)
        logits: torch.Tensor = out.logits[0]
        return logits


def streaming(keep: int, sinks: int = 4) -> Build:
    """The baseline: the first `sinks` tokens and the last ones, `keep` in all, at their own positions."""

    def build(reference: Reference) -> Any:
        cache = DynamicCache(config=reference.config)
        for layer, (keys, values) in enumerate(zip(reference.keys, reference.values, strict=True)):
            kept = [*range(sinks), *range(keys.shape[2] - keep + sinks, keys.shape[2])]
            cache.update(keys[:, :, kept], values[:, :, kept], layer)
        return cache

    return build


def _kl(full: torch.Tensor, ours: torch.Tensor) -> float:
    return float((full.exp() * (full - ours)).sum(-1).double().mean())


def _note_answer(measured: Measured, document: Document, log_probs: torch.Tensor) -> None:
    """The key's tokens are predicted by the positions in front of them; greedy finds it where each is the first."""
    answer = torch.tensor(document.tail[-document.answer :])
    expected = log_probs[-document.answer - 1 : -1]
    right = expected.gather(1, answer[:, None])
    ranks = (expected > right).sum(-1) + 1
    measured.found.append(bool((ranks == 1).all()))
    measured.rank.append(float(ranks.double().mean()))
    measured.log_prob.append(float(right.double().mean()))
    measured.depth.append(document.depth)


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _digest_of(model: Any) -> bytes:
    """Of a few weights of each tensor: enough to tell models apart without reading all of them."""
    digest = hashlib.sha256(torch.__version__.encode())
    for name, weight in model.named_parameters():
        sample = weight.detach().flatten()[:64].float().contiguous()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + sample.numpy().tobytes())
    return digest.digest()


def main() -> int:
    """Measure the baseline; exit 1 where the full cache itself does not come out at nothing."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.quality", description=__doc__)
    parser.add_argument("--documents", type=int, default=64, help="texts of 1,024 + 96 tokens")
    parser.add_argument("--json", type=Path, help="where the figures go as well")
    arguments = parser.parse_args()
    if not DATA.exists():
        print(f"no recorded conversations at {DATA}: the measurement needs them", file=sys.stderr)
        return 2
    harness = Harness()
    texts = harness.documents(arguments.documents)
    methods: dict[str, Build] = {
        "full": lambda reference: reference.arena(),
        "streaming 50 %": streaming(CONTEXT // 2),
        "streaming 25 %": streaming(CONTEXT // 4),
    }
    found: dict[str, Measured] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reference", total=len(texts) * len(methods))
        for name, build in methods.items():
            progress.update(task, description=name)
            found[name] = harness.measure(name, texts, build, lambda: progress.advance(task))
    for name, measured in found.items():
        print(f"{name:16} KL {measured.mean:.5f} ± {measured.error:.5f} nats per token, {len(texts)} x {TAIL} tokens")
    if arguments.json:
        arguments.json.write_text(json.dumps({name: asdict(measured) for name, measured in found.items()}, indent=2))
    return 0 if found["full"].mean < 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
