"""How far a live cache is from a fresh prefill of the same ids.

Invariant: the live cache is left as it was, bit by bit; the fresh one is freed on return.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from compaction.engines.live_cache import LiveCache
from compaction.engines.sampling import greedy
from compaction.ports import Divergence

__all__ = ["compare"]

Feed = Callable[[LiveCache, list[int]], torch.Tensor]


def compare(
    live: LiveCache, logits: torch.Tensor, fresh: LiveCache, fresh_logits: torch.Tensor, *, feed: Feed, tokens: int
) -> Divergence:
    """Decode `tokens` tokens on both caches, each time the fresh one's favourite. Logits: [vocabulary], of the next.

    KL(fresh ‖ live), in float64.
    """
    kl: list[float] = []
    agreed = 0
    for step in range(tokens):
        exact, ours = (torch.log_softmax(row.double().cpu(), -1) for row in (fresh_logits, logits))
        kl.append(max(0.0, float((exact.exp() * (exact - ours)).sum())))
        token = greedy(fresh_logits)
        agreed += token == greedy(logits)
        if step + 1 < tokens:
            logits, fresh_logits = feed(live, [token]), feed(fresh, [token])
    return Divergence(sum(kl) / tokens, agreed / tokens, tokens)
