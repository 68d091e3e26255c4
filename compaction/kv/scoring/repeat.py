"""Scores from making the model repeat its context: what it looks at then is what it needs to know it.

Invariant: a slot's score depends on the text and the model alone, not on what will be asked later; the cache is cropped
back to what it was, bit for bit. Costs about as much as prefilling the text once more.
Source: Kim et al., "KVzip", arXiv 2505.23416.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from compaction.errors import InvalidInput
from compaction.kv.scoring.keys import Scores
from compaction.kv.scoring.observe import Observed, feed, require_seen, restored, slot_layers

__all__ = ["ReceivedAttention", "repeat_scores"]

_LEAD = 8


class ReceivedAttention:
    """An observer: the most attention that each of the first `slots` slots gets from any query of its heads' group."""

    def __init__(self, layers: Sequence[int], slots: int) -> None:
        self._layers, self._slots = frozenset(layers), slots
        self.most: dict[int, torch.Tensor] = {}

    def see(self, observed: Observed) -> None:
        """Compare one layer's weights of one pass with those seen before."""
        if observed.layer not in self._layers:
            return
        weights = attention_weights(observed)[..., : self._slots].amax((1, 2))
        before = self.most.get(observed.layer)
        self.most[observed.layer] = weights if before is None else torch.maximum(before, weights)


def attention_weights(observed: Observed) -> torch.Tensor:
    """Softmax over all slots each position may see, float32 `[kv_heads, group, positions, slots]`."""
    queries, count, slots = observed.groups().float(), observed.query.shape[1], observed.key.shape[1]
    scores = torch.matmul(queries, observed.key.float().transpose(1, 2)[:, None]) * observed.scale
    unseen = ~torch.ones(count, slots, dtype=torch.bool, device=scores.device).tril(slots - count)
    return torch.softmax(scores.masked_fill_(unseen, -math.inf), -1)


@torch.no_grad()
def repeat_scores(
    model: Any, cache: Any, ids: Sequence[int], *, position: int, prompt: Sequence[int] = (), chunk: int = 2048
) -> Scores:
    """The most attention each slot gets while the model is made to repeat the text.

    Args:
        model: the cache's.
        cache: an arena cache whose slots hold `ids`; as it was, bit for bit, on return and after an error. It needs
            room for `prompt` and `chunk` tokens more.
        ids: token ids of the slots, oldest first.
        position: where the next token would stand.
        prompt: ids that ask for the repetition, in front of each chunk ("Repeat the previous context exactly.").
        chunk: ids that are repeated at once; later chunks are led in by the last ids of the one before.

    Raises CannotScore for a model or cache that has no such scores.
    """
    if chunk < 1:
        raise InvalidInput(f"chunks of {chunk} tokens: at least 1 is needed")
    layers = slot_layers(cache, len(ids))
    seen = ReceivedAttention(layers, len(ids))
    for start in range(0, len(ids), chunk):
        with restored(cache):
            lead = ids[max(0, start - _LEAD) : start]
            feed(model, cache, [*prompt, *lead, *ids[start : start + chunk]], position, seen)
    require_seen(model, layers, seen.most)
    return [seen.most.get(index) for index in range(len(cache.layers))]
