"""Scores from making the model read its context again: what it looks at then is what it needs to know it.

Invariant: a slot's score depends on the text and the model alone, not on what will be asked later; the cache is cropped
back to what it was, bit for bit. Costs about as much as prefilling the text once more.
Sources: `most` is KVzip (Kim et al., arXiv 2505.23416). `error` is ours: the square of what a slot adds to the residual
stream, relative to that stream, averaged over queries instead of the largest one. Both compare across heads and layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compaction.errors import CannotScore, InvalidInput
from compaction.kv.scoring.keys import Scores
from compaction.kv.scoring.observe import Observed, feed, require_seen, restored, slot_layers

__all__ = ["Repeated", "repeat_scores"]

_LEAD = 8
_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "wo")


@dataclass(frozen=True, slots=True)
class Repeated:
    """Two scores from one reading, `[kv_heads, slots]` by layer.

    `most` is the largest attention weight that any query of the head's group gave to the slot. `error` is the mean over
    queries of `(weight · ‖W_o value‖ / ‖residual stream‖)²`, summed over the group: the relative squared change of the
    stream were the slot's part of it missing.
    """

    most: Scores
    error: Scores


class _Received:
    """An observer of the attention that the first `slots` slots receive."""

    def __init__(self, layers: Sequence[int], slots: int) -> None:
        self.layers, self.slots = frozenset(layers), slots
        self.most: dict[int, torch.Tensor] = {}  # [kv_heads, slots]
        self.squares: dict[int, torch.Tensor] = {}  # summed squared weights, [kv_heads, group, slots]
        self.gain: dict[int, torch.Tensor] = {}  # ‖W_o value‖² by query head, [kv_heads, group, slots]
        self.inverse: dict[int, float] = {}  # summed 1 / ‖residual stream‖²
        self.queries = 0

    def see(self, observed: Observed) -> None:
        """Add one layer of one pass."""
        layer = observed.layer
        if layer not in self.layers:
            return
        weights = _weights(observed)[..., : self.slots]
        most, squares = weights.amax((1, 2)), weights.square_().sum(2)
        if layer in self.most:
            most, squares = torch.maximum(most, self.most[layer]), squares + self.squares[layer]
        else:
            self.gain[layer] = _gain(observed, self.slots)
        self.most[layer], self.squares[layer] = most, squares

    def passed(self, hidden: Sequence[torch.Tensor]) -> None:
        """Note how large the stream was where each layer read it."""
        if not hidden:
            raise CannotScore("the model does not return its hidden states")
        for layer in self.layers:
            inverse = float((1 / hidden[layer].float().square().sum(-1)).sum())
            self.inverse[layer] = self.inverse.get(layer, 0.0) + inverse
        self.queries += int(hidden[0].shape[1])

    def error(self, layer: int) -> torch.Tensor:
        """The second score of a layer."""
        received: torch.Tensor = (self.squares[layer] * self.gain[layer]).sum(1)
        return received * (self.inverse[layer] / self.queries**2)


@torch.no_grad()
def repeat_scores(
    model: Any, cache: Any, ids: Sequence[int], *, position: int, prompt: Sequence[int] = (), chunk: int = 2048
) -> Repeated:
    """What each slot is worth while the model reads the text again.

    Args:
        model: the cache's.
        cache: an arena cache whose slots hold `ids`; as it was, bit for bit, on return and after an error. It needs
            room for `prompt` and `chunk` tokens more.
        ids: token ids of the slots, oldest first.
        position: where the next token would stand.
        prompt: ids in front of each chunk that ask for a repetition. SmolLM2 needs none.
        chunk: ids that are read at once; later chunks are led in by the last ids of the one before.

    Raises CannotScore for a model or cache that has no such scores.
    """
    if chunk < 1:
        raise InvalidInput(f"chunks of {chunk} tokens: at least 1 is needed")
    layers = slot_layers(cache, len(ids))
    received = _Received(layers, len(ids))
    for start in range(0, len(ids), chunk):
        with restored(cache):
            lead = ids[max(0, start - _LEAD) : start]
            feed(model, cache, [*prompt, *lead, *ids[start : start + chunk]], position, received)
        require_seen(model, layers, received.most)
    of_all = range(len(cache.layers))
    return Repeated(
        [received.most.get(layer) for layer in of_all],
        [received.error(layer) if layer in received.layers else None for layer in of_all],
    )


def _weights(observed: Observed) -> torch.Tensor:
    """Softmax over all slots each position may see, float32 `[kv_heads, group, positions, slots]`."""
    queries, count, slots = observed.groups().float(), observed.query.shape[1], observed.key.shape[1]
    scores = torch.matmul(queries, observed.key.float().transpose(1, 2)[:, None]).mul_(observed.scale)
    unseen = ~torch.ones(count, count, dtype=torch.bool, device=scores.device).tril()
    scores[..., slots - count :].masked_fill_(unseen, -math.inf)
    return torch.softmax(scores, -1)


def _gain(observed: Observed, slots: int) -> torch.Tensor:
    """‖W_o value‖² of each slot through the output projection of each query head, `[kv_heads, group, slots]`."""
    values = observed.value[:, :slots].float()
    heads, dim = observed.query.shape[0], values.shape[-1]
    by_head = _projection(observed.module, heads * dim).float().reshape(-1, heads, dim).transpose(0, 1)
    products = (by_head.transpose(1, 2) @ by_head).reshape(values.shape[0], -1, dim, dim)
    found: torch.Tensor = (torch.matmul(values[:, None], products) * values[:, None]).sum(-1)
    return found


def _projection(module: torch.nn.Module, width: int) -> torch.Tensor:
    """Weights `[hidden, heads · value_dim]` of the projection behind a module's attention."""
    for name in _PROJECTIONS:
        weight = getattr(getattr(module, name, None), "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            continue
        if type(getattr(module, name)).__name__ == "Conv1D":  # transformers' own, weights the other way round
            weight = weight.T
        if weight.shape[1] == width:
            return weight
    raise CannotScore(f"{type(module).__name__} has none of the output projections {', '.join(_PROJECTIONS)}")
