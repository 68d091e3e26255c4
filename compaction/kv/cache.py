"""A conversation's KV cache in arenas: a transformers `Cache` that is written in place.

Invariant: keys, values, lengths and mask sizes are those of transformers' `DynamicCache(config=…)`, which decides what
kind of layer each one is; only where they lie differs, and, with a `storage`, how exactly the older ones are kept. Full
and sliding-window layers are arenas; recurrent, convolutional, indexed and shared layers stay transformers' own.
Between steps of growth nothing is allocated.
Memory: at rest no full layer has more than `capacity` slots, no sliding one more than its window and a quarter; while
one layer grows, its old keys or values stand beside the new ones, and no other layer's do.
How to edit a layer in place stands in `compaction.kv.arena`. Knows nothing about messages or token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from compaction.kv.measure import Saving, logical_bytes, saving, storage_bytes
from compaction.kv.quantization.angles import Shared
from compaction.kv.quantization.layer import QuantizedLayer
from compaction.kv.quantization.settings import Setting, Storage, by_layer
from compaction.kv.rope import RotaryPlan

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
        storage: how full-attention layers are stored ("k8v4", a Setting, one a layer, a mapping from layer to one);
            None: as the model makes keys and values. Layers of other kinds stay as they are: `storages` tells.
        plan: what `compaction.kv.probe.probe` found for the model; needed for `storage`.
        compiled: whether quantized layers are read by `torch.compile`d code, which takes seconds once.

    `update` raises EngineError where `capacity` is exceeded.
    """

    def __init__(
        self,
        config: Any,
        *,
        capacity: int | None = None,
        step: int = 256,
        storage: Storage = None,
        plan: RotaryPlan | None = None,
        compiled: bool = False,
    ) -> None:
        self.capacity, self.meter = capacity, Meter()
        self._step = step
        kinds, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        # Where layers read keys of earlier ones, what those were shown must outlive the next layer's pass.
        self.shared = Shared(private="DummyLayer" in {DYNAMIC_LAYER_TYPE_MAPPING[kind].__name__ for kind in kinds})
        layers = [_layer(kind, more, self._arena) for kind, more in zip(kinds, options, strict=True)]
        for index, setting in enumerate(by_layer(storage, len(layers))):
            if setting is not None and type(layers[index]) is ArenaLayer:
                layers[index] = self._quantized(index, setting, plan, compiled)
        Cache.__init__(self, layers=layers)

    @property
    def arenas(self) -> list[ArenaLayer]:
        """The layers that are arenas, in the model's order."""
        return [layer for layer in self.layers if isinstance(layer, ArenaLayer)]

    @property
    def storages(self) -> list[str]:
        """How each layer is stored: a setting's name, or "full" and the kind of layer."""
        return [
            layer.setting.name if isinstance(layer, QuantizedLayer) else f"full ({type(layer).__name__})"
            for layer in self.layers
        ]

    def announce(self, positions: Sequence[int]) -> None:
        """Say which positions the coming pass's tokens have; needed for quantized layers of models whose attention does
        not hand positions to its cache (GPT-NeoX, Falcon, StableLM: without it their update raises EngineError).
        """
        held = [layer.held for layer in self.layers if isinstance(layer, QuantizedLayer)]
        self.shared.announce(max(held, default=0), positions)

    @torch.no_grad()
    def quantize(
        self, storage: Storage, plan: RotaryPlan, positions: Sequence[int] | None = None, *, compiled: bool = False
    ) -> Saving:
        """Store full-attention layers by codes from now on, those that hold something already included.

        Args:
            storage: as above; layers that are quantized already stay as they are, for codes are made once.
            plan: what the probe found.
            positions: of the slots held; None: 0, 1, 2, …
            compiled: as above.

        Returns bytes before and after, measured from the storages. Raises InvalidInput, with nothing changed, where
        positions and slots do not agree.
        """
        before = storage_bytes(self)
        chosen = by_layer(storage, len(self.layers))
        wanted = {
            index: (layer, setting)
            for index, (layer, setting) in enumerate(zip(self.layers, chosen, strict=True))
            if setting is not None and isinstance(layer, ArenaLayer) and type(layer) is ArenaLayer
        }
        held = {layer.held for layer, _ in wanted.values()}
        at = list(range(max(held, default=0))) if positions is None else list(positions)
        if held - {len(at)}:
            raise InvalidInput(f"{len(at)} positions were given for layers that hold {sorted(held)} slots")
        made = {index: self._quantized(index, setting, plan, compiled) for index, (_, setting) in wanted.items()}
        for index, layer in made.items():
            full, _ = wanted[index]
            if full.is_initialized:
                states = {"keys": full.key_slice(0, full.held), "values": full.value_slice(0, full.held)}
                layer.take(states, torch.tensor(at, dtype=torch.int32, device=full.device)[None])
            self.layers[index] = layer
            full.reset()
        return saving(before, self, self.meter.held + self._others())

    def _quantized(self, index: int, setting: Setting, plan: RotaryPlan | None, compiled: bool) -> QuantizedLayer:
        if plan is None:
            raise InvalidInput("quantized storage needs the model's rotation: plan=compaction.kv.probe.probe(model)")
        rope = plan.layers[index]
        return QuantizedLayer(setting, rope, shared=self.shared, compiled=compiled, **self._arena)

    @property
    def _arena(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "step": self._step, "meter": self.meter}

    def _others(self) -> int:
        """Bytes that the meter does not count: layers that are no arenas, and what quantized layers share."""
        return storage_bytes([[layer for layer in self.layers if not isinstance(layer, ArenaLayer)], self.shared])

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
