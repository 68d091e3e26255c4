"""Scores from the keys alone, and baselines: no forward pass is needed.

Invariant: float32 on the keys' device, `[kv_heads, slots]` for each layer that holds a slot for every token, None for
the others; higher means keep. Equal caches give equal scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from compaction.kv.scoring.observe import slot_layers

__all__ = ["Scores", "keydiff", "knorm", "random_scores", "streaming", "unlike"]

Scores: TypeAlias = list[torch.Tensor | None]


def keydiff(cache: Any, slots: int) -> Scores:
    """KeyDiff: minus the cosine between a key and the mean of all keys' directions; unusual keys stay.

    Source: Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction", arXiv 2504.15364.
    """

    return _each(cache, slots, unlike)


def unlike(keys: torch.Tensor) -> torch.Tensor:
    """KeyDiff of one layer's keys, float32 `[kv_heads, slots, head_dim]`: `[kv_heads, slots]`."""
    directions = torch.nn.functional.normalize(keys, dim=-1)
    return -torch.nn.functional.cosine_similarity(keys, directions.mean(1, keepdim=True), dim=-1)


def knorm(cache: Any, slots: int) -> Scores:
    """Minus the norm of the key. Source: Devoto et al., arXiv 2406.11430."""
    return _each(cache, slots, lambda keys: -keys.norm(dim=-1))


def streaming(cache: Any, slots: int) -> Scores:
    """The newest stay: with protected sinks this is StreamingLLM at unchanged positions (arXiv 2309.17453)."""
    return _each(cache, slots, lambda keys: torch.arange(slots, dtype=torch.float32).expand(keys.shape[0], -1).clone())


def random_scores(cache: Any, slots: int, seed: int) -> Scores:
    """Any slots, the same ones for the same seed: what every method must beat."""
    generator = torch.Generator().manual_seed(seed)
    return _each(cache, slots, lambda keys: torch.rand(keys.shape[:2], generator=generator).to(keys.device))


def _each(cache: Any, slots: int, score: Callable[[torch.Tensor], torch.Tensor]) -> Scores:
    """A function of the keys `[kv_heads, slots, head_dim]` on each layer that can be cut."""
    chosen: Sequence[int] = slot_layers(cache, slots)
    return [score(layer.keys[0].float()) if index in chosen else None for index, layer in enumerate(cache.layers)]
