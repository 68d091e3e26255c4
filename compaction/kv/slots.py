"""One view of every kind of cache layer whose slots can be edited: arenas and transformers' own dynamic layers.

Invariant: `tensors()` are views, `[…, held, dim]`, into the memory that the next forward pass reads; what is written to
them is written to the cache. After `resize` no tensor of a dynamic layer shows only part of its storage.
A sliding-window layer holds the last `held` of all slots; `total` tells it how many there are.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from compaction.errors import CannotSplice
from compaction.kv.arena import ArenaLayer

__all__ = ["ArenaSlots", "DynamicSlots", "Slots", "slots_of"]


class Slots(Protocol):
    """The slots of one layer."""

    @property
    def held(self) -> int:
        """Slots in use."""

    @property
    def window(self) -> int | None:
        """The most slots this layer keeps between passes; None: all."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of all slots by name ("keys", "values", "indexer_keys"), `[…, held, dim]`."""

    def resize(self, length: int) -> None:
        """Forget the newest slots, or add ones of undefined content."""

    def set_total(self, total: int) -> None:
        """Tell a sliding-window layer how many slots the conversation has."""


class ArenaSlots:
    """An arena's slots; resizing allocates only where the arena is full."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    @property
    def held(self) -> int:
        """Slots in use."""
        return int(self._layer.held)

    @property
    def window(self) -> int | None:
        """The window less the coming token, for a sliding layer that does not record its past."""
        return _window(self._layer)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views into the arena."""
        if not self._layer.is_initialized:
            return {}
        return {"keys": self._layer.key_slice(0, self.held), "values": self._layer.value_slice(0, self.held)}

    def resize(self, length: int) -> None:
        """Truncate or extend."""
        if length <= self.held:
            self._layer.truncate(length)
        else:
            self._layer.extend(length - self.held)

    def set_total(self, total: int) -> None:
        """A sliding layer counts tokens."""
        _count(self._layer, self.held, total)


class DynamicSlots:
    """A layer of transformers' own: each resize copies it, because its memory cannot grow or shrink."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    @property
    def held(self) -> int:
        """Slots in use."""
        keys = getattr(self._layer, "keys", None)
        return int(keys.shape[-2]) if isinstance(keys, torch.Tensor) and keys.numel() else 0

    @property
    def window(self) -> int | None:
        """The window less the coming token, for a sliding layer that does not record its past."""
        return _window(self._layer)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The layer's tensors themselves."""
        found = {name: getattr(self._layer, name, None) for name in ("keys", "values", "indexer_keys")}
        # Before the first update transformers keeps a tensor without dimensions to tell.
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor) and tensor.dim() > 1}

    def resize(self, length: int) -> None:
        """Copy to tensors of that many slots."""
        for name, tensor in self.tensors().items():
            held = min(length, int(tensor.shape[-2]))
            with torch.inference_mode(False):
                new = tensor.new_empty((*tensor.shape[:-2], length, tensor.shape[-1]))
            new.narrow(-2, 0, held).copy_(tensor.narrow(-2, 0, held))
            setattr(self._layer, name, new)

    def set_total(self, total: int) -> None:
        """A sliding layer counts tokens."""
        _count(self._layer, self.held, total)


def _window(layer: Any) -> int | None:
    if not getattr(layer, "is_sliding", False) or getattr(layer, "record_past", False):
        return None
    return int(layer.sliding_window) - 1


def _count(layer: Any, held: int, total: int) -> None:
    """An under-filled window counts what it holds: masks would be too long, and `crop` would miss tokens."""
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = total if held >= layer.sliding_window - 1 else held


_DYNAMIC = {"AsideLayer", "DynamicLayer", "DynamicIndexedLayer", "DynamicSlidingWindowLayer"}


def slots_of(cache: Any) -> list[Slots | None]:
    """The slots of each layer of a cache; None for a layer that uses another's keys.

    Raises CannotSplice where a layer is of a kind that cannot be edited (states, quantised storage).
    """
    found: list[Slots | None] = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, ArenaLayer):
            found.append(ArenaSlots(layer))
        elif type(layer).__name__ in _DYNAMIC:
            found.append(DynamicSlots(layer))
        elif type(layer).__name__ == "DummyLayer":
            found.append(None)
        else:
            raise CannotSplice(f"layer {index} is a {type(layer).__name__}, whose slots cannot be edited one by one")
    return found
