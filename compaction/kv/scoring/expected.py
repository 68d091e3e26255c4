"""ExpectedAttention: what queries like the ones seen would attend to, were they asked from further on.

Invariant: queries are compared without their rotation, so that where they stood does not matter; mean and covariance
are of the text's newest queries, the mean future rotation is that of the next positions. The cache is as it was.
Source: Devoto et al., "Expected Attention", arXiv 2510.00636. Differences: queries are observed, not recomputed from
hidden states, so that biases and query norms are in them whatever the model is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from compaction.errors import CannotScore, InvalidInput
from compaction.kv.rope import RotaryPlan, Rotation, rotate
from compaction.kv.scoring.keys import Scores
from compaction.kv.scoring.observe import Observed, feed, require_seen, rewound, slot_layers

__all__ = ["QueryStatistics", "expected_attention", "query_statistics"]


class QueryStatistics:
    """An observer that sums queries without their rotation, and their products.

    Args:
        plan: the model's, from `compaction.kv.probe.probe`.
        start: position of the first token that will be fed.
    """

    def __init__(self, plan: RotaryPlan, start: int) -> None:
        self.plan, self._next = plan, start
        self._at: dict[int, int] = {}
        self.count: dict[int, int] = {}
        self.scale: dict[int, float] = {}
        self._sum: dict[int, torch.Tensor] = {}
        self._products: dict[int, torch.Tensor] = {}

    def see(self, observed: Observed) -> None:
        """Add one layer's queries."""
        layer, query = observed.layer, observed.query.float()
        at, size = self._at.get(layer, self._next), query.shape[1]
        rotation = self.plan.layers[layer].of("keys")
        if rotation is not None:
            query = rotate(query, -torch.arange(at, at + size), rotation)
        total, products = query.sum(1), query.transpose(1, 2) @ query
        self._at[layer] = at + size
        self.count[layer] = self.count.get(layer, 0) + size
        self.scale[layer] = observed.scale
        self._sum[layer] = total + self._sum.get(layer, torch.zeros_like(total))
        self._products[layer] = products + self._products.get(layer, torch.zeros_like(products))

    def passed(self, hidden: Sequence[torch.Tensor]) -> None:
        """Nothing: queries are all there is to know."""

    def mean(self, layer: int) -> torch.Tensor:
        """Of the layer's queries, `[heads, head_dim]`."""
        return self._sum[layer] / self.count[layer]

    def covariance(self, layer: int) -> torch.Tensor:
        """Of the layer's queries, `[heads, head_dim, head_dim]`."""
        mean = self.mean(layer)
        return self._products[layer] / self.count[layer] - mean[:, :, None] * mean[:, None, :]


@torch.no_grad()
def query_statistics(
    model: Any, cache: Any, ids: Sequence[int], plan: RotaryPlan, *, position: int, sample: int = 512
) -> QueryStatistics:
    """What queries over this text are like: its newest tokens are fed once more, in their own places.

    Args:
        model: the cache's.
        cache: an arena cache whose slots hold `ids`; as it was, bit for bit, on return and after an error.
        ids: token ids of the slots, oldest first.
        plan: the model's, from `compaction.kv.probe.probe`.
        position: where the next token will stand; the sample stands at the positions before it, without a gap.
        sample: how many of the newest ids.

    Raises CannotScore for a model or cache that has no such statistics.
    """
    sample = min(sample, len(ids) - 1)
    if sample < 2:
        raise InvalidInput(f"statistics of {sample} queries over {len(ids)} ids: too few")
    chosen = slot_layers(cache, len(ids))
    for layer in chosen:
        if plan.layers[layer].kind not in ("rotary", "unrotated"):
            raise CannotScore(f"layer {layer} {plan.layers[layer].why or 'has no rotation that could be taken off'}")
    statistics = QueryStatistics(plan, position - sample)
    with rewound(cache, sample):
        feed(model, cache, ids[-sample:], position - sample, statistics)
    require_seen(model, chosen, statistics.count)
    return statistics


@torch.no_grad()
def expected_attention(
    cache: Any, statistics: QueryStatistics, *, position: int, future: int = 512, covariance: bool = True
) -> Scores:
    """Expected attention times the value's norm, `[kv_heads, slots]` by layer.

    Args:
        cache: the arena cache from which the statistics come.
        statistics: from `query_statistics`.
        position: where the next token will stand.
        future: over how many coming positions the rotation is averaged.
        covariance: whether queries are taken as normally distributed rather than as all equal to their mean.
    """
    if future < 1:
        raise InvalidInput(f"a future of {future} positions: at least 1 is needed")
    return [
        _score(layer, statistics, index, position, future, covariance) if index in statistics.count else None
        for index, layer in enumerate(cache.layers)
    ]


def _score(
    layer: Any, statistics: QueryStatistics, index: int, position: int, future: int, covariance: bool
) -> torch.Tensor:
    """softmax(K·μ·s + ½·s²·KΣKᵀ), averaged over the query heads of a group, times ‖V‖: `[kv_heads, slots]`."""
    mean, spread = statistics.mean(index), statistics.covariance(index)
    rotation = statistics.plan.layers[index].of("keys")
    if rotation is not None:
        turn = _mean_rotation(rotation, mean.shape[-1], position, future).to(mean)
        mean, spread = mean @ turn, turn.T @ spread @ turn
    keys, values, scale = layer.keys[0].float(), layer.values[0].float(), statistics.scale[index]
    mean = mean.reshape(keys.shape[0], -1, *mean.shape[1:])
    logits = torch.einsum("hsd,hgd->hgs", keys, mean) * scale
    if covariance:
        spread = spread.reshape(keys.shape[0], -1, *spread.shape[1:])
        logits += torch.einsum("hsd,hgde,hse->hgs", keys, spread, keys) * (scale**2 / 2)
    expected: torch.Tensor = torch.softmax(logits, -1).mean(1) * values.norm(dim=-1)
    return expected


def _mean_rotation(rotation: Rotation, dim: int, position: int, future: int) -> torch.Tensor:
    """The average over the next positions of the matrix that turns a row vector there, `[dim, dim]`."""
    unit = torch.eye(dim, dtype=torch.float64)
    return torch.stack([rotate(unit, at, rotation) for at in range(position, position + future)]).mean(0)
