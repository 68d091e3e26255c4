"""How many bytes a cache will hold, and how many stand for a moment while it grows, before anything is allocated.

Invariant: an upper bound of what is allocated at any moment, read off two forward passes of one token each instead of
a table of models; equal to it for arenas of full layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compaction.kv.arena import ArenaLayer
from compaction.kv.cache import ArenaSlidingLayer
from compaction.kv.measure import storage_bytes, tensors_in

__all__ = ["CacheSizes", "LayerSize", "slots_held"]


@dataclass(frozen=True, slots=True)
class LayerSize:
    """One layer. Bytes: `fixed` whatever stands in it, `slot` more for each slot, `widest` those of its widest tensor.

    A sliding arena keeps `kept` tokens in `full` slots and grows by `step` while a reply's past is recorded. `copies`:
    one of transformers' own layers, which copies its tensors at each token.
    """

    fixed: int
    slot: int
    widest: int
    kept: int | None = None
    full: int = 0
    step: int = 0
    copies: bool = False

    def most(self, held: int, tokens: int, reply: int) -> int:
        """Bytes between steps of growth, from `held` slots to `tokens` of which the last `reply` are a reply."""
        return self.fixed + self.slot * max(held, self._slots(tokens, reply))

    def twice(self, held: int, tokens: int, reply: int) -> int:
        """Bytes that stand beside them for a moment: one tensor while it is reallocated."""
        slots = self._slots(tokens, reply)
        if self.copies:
            return self.fixed + self.widest * max(held, slots)
        if self.kept is None:
            return 0 if held in (0, slots) else self.widest * min(held, slots)
        at_rest = min(tokens, self.full)
        return 0 if slots == at_rest and held in (0, slots) else self.widest * max(held, slots)

    def restored(self, held: int, tokens: int) -> int:
        """Slots allocated where `held` come back into a cache made for `tokens`."""
        if self.kept is None:
            return max(held, tokens)
        at_rest = min(tokens, self.full)
        return at_rest if held <= at_rest else -(-held // self.step) * self.step

    def _slots(self, tokens: int, reply: int) -> int:
        if self.kept is None:
            return tokens
        recorded = min(tokens, self.kept) + reply
        if recorded <= self.full:
            return min(tokens, self.full)
        # It grows by half of what it has, in steps; where the step after would pass its capacity, to that at once.
        return recorded * 5 // 2 + self.step


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """All layers of one model's caches."""

    layers: tuple[LayerSize, ...]

    @classmethod
    def learn(cls, new_cache: Callable[[], Any], feed: Callable[[Any, Sequence[int], int], Any]) -> CacheSizes:
        """Run a token, and another one, through a fresh cache, and look at what each added."""
        cache = new_cache()
        cache.reserve(2)
        feed(cache, [0], 0)
        first = [storage_bytes(layer) for layer in cache.layers]
        feed(cache, [0], 1)
        return cls(tuple(_size(layer, before) for layer, before in zip(cache.layers, first, strict=True)))

    def peak(self, held: Sequence[int], tokens: int, reply: int) -> int:
        """The most bytes that are allocated at once on the way from `held` slots, layer by layer, to `tokens`.

        Args:
            held: slots allocated now; 0 where a layer is empty.
            tokens: of prompt and reply.
            reply: those of the reply.
        """
        pairs = list(zip(self.layers, held, strict=True))
        return sum(layer.most(slots, tokens, reply) for layer, slots in pairs) + max(
            (layer.twice(slots, tokens, reply) for layer, slots in pairs), default=0
        )

    def restored(self, held: Sequence[int], tokens: int) -> list[int]:
        """Slots allocated, layer by layer, where `held` come back into a cache made for `tokens`."""
        return [layer.restored(slots, tokens) for layer, slots in zip(self.layers, held, strict=True)]


def slots_held(layers: Sequence[Any], tokens: int) -> list[int]:
    """Slots that the layers of a cache of so many tokens have allocated."""
    return [layer.slots if isinstance(layer, ArenaLayer) else tokens for layer in layers]


def _size(layer: Any, before: int) -> LayerSize:
    if isinstance(layer, ArenaLayer):
        widths = [tensor[:, :, :1].nbytes for tensor in tensors_in([layer.keys, layer.values])]
        slot, widest = layer.slot_nbytes, max(widths, default=0)
        if isinstance(layer, ArenaSlidingLayer):
            return LayerSize(0, slot, widest, layer._kept, layer._full, layer.step)
        return LayerSize(0, slot, widest)
    added = storage_bytes(layer) - before
    return LayerSize(before - added, added, added, copies=added > 0)
