"""Calling any causal language model with a cache of its own, positions always explicit.

Invariant: a pass is given the positions of its tokens; a cache's own length is wrong for some layer kinds and after
an eviction. Knows nothing about conversations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import DynamicCache

from compaction.kv.attention import GroupedDecode
from compaction.kv.cache import ArenaCache

__all__ = ["Forward"]


class Forward:
    """One way to call any causal LM: which keywords this model's `forward` takes is looked up once.

    Args:
        model: a causal language model of transformers.
        step: tried first for a single token; None from it means that the model must run
            (`compaction.engines.decode_step.DecodeStep`).
        compiled: whether quantized layers are read by compiled code.
    """

    def __init__(
        self,
        model: Any,
        step: Callable[[Any, int, int], torch.Tensor | None] | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        self.model, self.step, self.compiled = model, step, compiled
        names = set(inspect.signature(model.forward).parameters)
        self._cache = "cache" if "cache" in names else "past_key_values"
        self._positions = "position_ids" in names
        self._last_only = "logits_to_keep" in names
        self._grouped = GroupedDecode(model)

    def new_cache(self, capacity: int | None = None) -> Any:
        """An empty cache, its layers of the kinds the config names; arenas of at most `capacity` tokens where given."""
        if capacity is None:
            return DynamicCache(config=self.model.config)
        return ArenaCache(self.model.config, capacity=capacity)

    @torch.no_grad()
    def __call__(self, cache: Any, ids: Sequence[int], start: int) -> torch.Tensor:
        """Feed ids at positions start, start + 1, …; returns the last position's logits, shape [vocabulary].

        Positions are always explicit: a cache's own length is wrong for some layer kinds.
        """
        if self.step is not None and len(ids) == 1:
            stepped = self.step(cache, ids[0], start)
            if stepped is not None:
                return stepped
        device = self.model.device
        keywords: dict[str, Any] = {self._cache: cache, "use_cache": True}
        if self._positions:
            keywords["position_ids"] = torch.arange(start, start + len(ids), device=device)[None]
        if self._last_only:
            keywords["logits_to_keep"] = 1
        # Elsewhere than on the CPU nobody has measured SDPA's kernels for one token against ours.
        grouped = isinstance(cache, ArenaCache) and len(ids) == 1 and device.type == "cpu"
        with self._grouped if grouped else nullcontext():
            out = self.model(input_ids=torch.tensor([list(ids)], device=device), **keywords)
        logits: torch.Tensor = out.logits[0, -1]
        return logits
