"""From scores to what stays: masks by head for a budget of slots, and sums over spans of text.

Invariant: deterministic. Scores are rounded to 16 bits of mantissa before they are ranked, ties go to the older slot;
exactly the budgeted number of slots stays, the protected ones among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from compaction.errors import InvalidInput
from compaction.kv.scoring.keys import Scores

__all__ = ["Pool", "keep_masks", "span_scores"]

Pool = Literal["model", "layer", "head"]

_MANTISSA = 1 << 16


def keep_masks(
    scores: Scores, keep: float, *, pool: Pool = "model", safeguard: float = 0.2, sinks: int = 4, recent: int = 32
) -> list[torch.Tensor | None]:
    """Which slots stay, bool `[kv_heads, slots]` for each scored layer.

    Args:
        scores: `[kv_heads, slots]` by layer; where the pool is "model" they must be comparable across layers.
        keep: fraction of all slots, over all heads and layers, that stays; in (0, 1].
        pool: who competes for slots: all heads of the "model", those of a "layer" (AdaKV, arXiv 2407.11550), or each
            "head" by itself.
        safeguard: fraction of an even share that each head has for itself before the pool is opened.
        sinks: oldest slots that every head keeps; attention leans on them whatever they say.
        recent: newest slots that every head keeps.

    Raises InvalidInput where the protected slots alone exceed the budget.
    """
    chosen = [layer for layer in scores if layer is not None]
    if not 0 < keep <= 1 or not 0 <= safeguard <= 1 or not chosen:
        raise InvalidInput(f"cannot keep {keep!r} of {len(chosen)} scored layers with a safeguard of {safeguard!r}")
    share = math.floor(keep * chosen[0].shape[1])
    if min(sinks + recent, chosen[0].shape[1]) > share:
        raise InvalidInput(f"{sinks} + {recent} protected slots do not fit into {share} a head: protect fewer")
    ranked = [_protected(_rounded(layer), sinks, recent) for layer in chosen]
    heads = torch.cat([layer.cpu() for layer in ranked])
    own = share if pool == "head" else max(min(sinks + recent, heads.shape[1]), math.floor(safeguard * share))
    mask = torch.zeros_like(heads, dtype=torch.bool).scatter_(1, _order(heads)[:, :own], True)
    if pool != "head":
        sizes = [layer.shape[0] for layer in chosen] if pool == "layer" else [heads.shape[0]]
        for part, taken in zip(torch.split(heads, sizes), torch.split(mask, sizes), strict=True):
            by_slot = part.masked_fill(taken, -math.inf).T.flatten()  # slots first: ties go to the older one
            chosen_next = _order(by_slot)[: share * part.shape[0] - int(taken.sum())]
            taken[chosen_next % part.shape[0], chosen_next // part.shape[0]] = True
    masks = iter(torch.split(mask, [layer.shape[0] for layer in chosen]))
    return [None if layer is None else next(masks).to(layer.device) for layer in scores]


def span_scores(scores: Scores, ranges: Sequence[tuple[int, int]]) -> list[float]:
    """One figure a span: the sum over its slots, heads and layers, rounded; higher means keep.

    A longer span sums up more: divide by its length to ask what its memory is worth.
    """
    chosen = [layer for layer in scores if layer is not None]
    if not chosen:
        raise InvalidInput("no layer has scores")
    total = torch.stack([layer.double().sum(0).cpu() for layer in chosen]).sum(0)
    if any(not 0 <= start < end <= total.shape[0] for start, end in ranges):
        raise InvalidInput(f"spans must be ranges of the {total.shape[0]} scored slots")
    sums = torch.stack([total[start:end].sum() for start, end in ranges]) if ranges else total[:0]
    return [float(value) for value in _rounded(sums)]


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """To 16 bits of mantissa: what another order of summation changes is gone."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * _MANTISSA).round() / _MANTISSA, exponent)


def _protected(layer: torch.Tensor, sinks: int, recent: int) -> torch.Tensor:
    layer = layer.clone()
    layer[:, :sinks] = math.inf
    layer[:, max(0, layer.shape[1] - recent) :] = math.inf
    return layer


def _order(values: torch.Tensor) -> torch.Tensor:
    """Indices by falling value, ties in order of position."""
    return values.sort(dim=-1, descending=True, stable=True).indices
