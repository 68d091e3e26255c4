"""A conversation's KV cache in arenas: a transformers `Cache` that is written in place.

Invariant: keys, values, lengths and mask sizes are those of transformers' `DynamicCache(config=…)`, which decides what
kind of layer each one is; only where they lie differs. Full and sliding-window layers are arenas; recurrent,
convolutional, indexed and shared layers stay transformers' own. Between steps of growth nothing is allocated.
Memory: at rest no full layer has more than `capacity` slots, no sliding one more than its window and a quarter; while
one layer grows, its old keys or values stand beside the new ones, and no other layer's do.
How to edit a layer in place stands in `compaction.kv.arena`. Knows nothing about messages or token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

from compaction.errors import EngineError, InvalidInput
from compaction.kv.arena import ArenaLayer, Meta, Meter
from compaction.kv.measure import logical_bytes, storage_bytes

__all__ = ["ArenaCache", "ArenaLayer", "ArenaSlidingLayer", "Meter"]


class ArenaSlidingLayer(ArenaLayer):
    """A sliding-window layer: holds the last `sliding_window - 1` tokens, as `DynamicSlidingWindowLayer` does.

    The arena is up to a quarter longer than the window: tokens are appended until it is full, then the window moves to
    its front, so that one token in many costs a move. While `record_past` is on nothing leaves, and `crop` can take
    back what was added since. After an eviction the editor sets `cumulative_length`, the position of the next token as
    the mask sees it.
    """

    is_sliding = True

    def __init__(self, sliding_window: int, **options: Any) -> None:
        if sliding_window < 1:
            raise InvalidInput(f"a sliding window of {sliding_window} tokens: at least 1 is needed")
        self.sliding_window, self.cumulative_length, self.record_past = sliding_window, 0, False
        self._sliding_window_tensor = torch.tensor(sliding_window)
        super().__init__(**options)
        self._kept = sliding_window - 1
        self._full = self._kept + min(256, max(16, sliding_window // 4))
        self.step = min(self.step, self._full - self._kept)

    def activate_past_recording(self) -> None:
        """Keep what leaves the window until the next `crop` or until `record_past` is switched off."""
        self.record_past = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states; returns what the new tokens may see, `[batch, kv_heads, seen, head_dim]`: window and all new.

        Views of the arena, or, for more new tokens than the arena holds, copies.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = int(key_states.shape[2])
        seen = min(self.held, self._kept) + count
        if not self.record_past:
            self._restrict()
            if seen > self._full:
                return self._pass_through(key_states, value_states)
        self._append(key_states, value_states)
        self.cumulative_length += count
        shown = (self.key_slice(self.held - seen, self.held), self.value_slice(self.held - seen, self.held))
        if not self.record_past:
            self._restrict()
        return shown

    def get_seq_length(self) -> int:
        """Tokens seen, not slots held."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """The window."""
        return self.sliding_window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys `update` will return for `query_length` new tokens, and the position of the first."""
        kept = min(self.held, self._kept)
        return kept + query_length, self.cumulative_length - kept

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens, given as a negative number, and what then lies before the window.

        Raises EngineError, with nothing changed, where tokens that would be in the window again are gone.
        """
        if tokens_to_remove > 0:
            raise InvalidInput(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        if not self.is_initialized:
            return
        length = self.cumulative_length + tokens_to_remove
        if length < 0 or self.held + tokens_to_remove < min(length, self._kept):
            raise EngineError(
                f"a sliding window cannot be cut back by {-tokens_to_remove}: it has not recorded its past"
            )
        self.truncate(self.held + tokens_to_remove)
        self.cumulative_length = length
        self._restrict()

    def can_crop(self, removed: int) -> bool:
        """Whether `crop(-removed)` would succeed."""
        return removed == 0 or (
            self.is_initialized
            and removed <= self.cumulative_length
            and self.held - removed >= min(self.cumulative_length - removed, self._kept)
        )

    def reserve(self, slots: int) -> None:
        """As in a full layer, for no more slots than the window needs."""
        super().reserve(min(slots, self._full))

    def shrink(self, slots: int) -> None:
        """As in a full layer, to no more slots than the window needs."""
        super().shrink(min(slots, self._full))

    def dump(self) -> tuple[dict[str, torch.Tensor], Meta]:
        """As in a full layer; what is held beyond the window, while the past is recorded, included."""
        copies, meta = super().dump()
        counters = {"cumulative_length": self.cumulative_length, "record_past": int(self.record_past)}
        return copies, {**meta, **counters, "sliding_window": self.sliding_window}

    def load(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, int | float | str]) -> None:
        """As in a full layer; a window of another length is refused."""
        self._check_dump(tensors, meta)
        if meta["sliding_window"] != self.sliding_window:
            raise InvalidInput(f"a window of {self.sliding_window} cannot hold one of {meta['sliding_window']} tokens")
        self.record_past = bool(meta["record_past"])
        super().load(tensors, meta)
        self.cumulative_length = int(meta["cumulative_length"])

    def _restrict(self) -> None:
        self._start = max(self._start, self._end - self._kept)

    def _grown(self, needed: int) -> int:
        """As in a full layer, but to the full window at most unless the past is recorded."""
        slots = super()._grown(needed)
        return slots if self.record_past else min(self._full, slots)

    def _pass_through(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """More new tokens than the arena holds: show copies of all, keep the window."""
        shown = (
            torch.cat([self.key_slice(0, self.held), keys], dim=2),
            torch.cat([self.value_slice(0, self.held), values], dim=2),
        )
        self.truncate(0)
        self._append(shown[0][:, :, shown[0].shape[2] - self._kept :], shown[1][:, :, shown[1].shape[2] - self._kept :])
        self.cumulative_length += int(keys.shape[2])
        return shown


class ArenaCache(DynamicCache):
    """The cache of one conversation, or of a batch. Hand it to any causal model's `forward` or `generate`.

    Args:
        config: the model's; which layers there are is read from it as `DynamicCache(config=…)` does.
        capacity: tokens it may hold (from the budget); None: no limit.
        step: slots by which a layer grows at least.

    `update` raises EngineError where `capacity` is exceeded.
    """

    def __init__(self, config: Any, *, capacity: int | None = None, step: int = 256) -> None:
        self.capacity, self.meter = capacity, Meter()
        kinds, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        arena = {"capacity": capacity, "step": step, "meter": self.meter}
        Cache.__init__(self, layers=[_layer(kind, more, arena) for kind, more in zip(kinds, options, strict=True)])

    @property
    def arenas(self) -> list[ArenaLayer]:
        """The layers that are arenas, in the model's order."""
        return [layer for layer in self.layers if isinstance(layer, ArenaLayer)]

    def reserve(self, tokens: int) -> None:
        """Allocate now for a conversation of `tokens`, so that nothing grows until then."""
        for layer in self.arenas:
            layer.reserve(tokens)

    def shrink(self, tokens: int) -> None:
        """Give back what a conversation of `tokens` does not need."""
        for layer in self.arenas:
            layer.shrink(tokens)

    def nbytes(self) -> int:
        """Bytes allocated, measured from the storages of all layers."""
        return storage_bytes(self)

    def logical_nbytes(self) -> int:
        """Bytes of the slots in use, and of all that layers of other kinds hold."""
        others = [layer for layer in self.layers if not isinstance(layer, ArenaLayer)]
        return sum(layer.logical_nbytes() for layer in self.arenas) + logical_bytes(others)


def _layer(kind: str, options: dict[str, Any], arena: dict[str, Any]) -> Any:
    made = DYNAMIC_LAYER_TYPE_MAPPING[kind]
    if made is DynamicLayer:
        return ArenaLayer(**arena)
    if made is DynamicSlidingWindowLayer:
        return ArenaSlidingLayer(options["sliding_window"], **arena)
    return made(**options)
