"""One view of every kind of cache layer whose slots can be edited: arenas and transformers' own dynamic layers.

Invariant: `tensors()` are views, `[…, held, dim]`, into the memory that the next forward pass reads; what is written to
them is written to the cache. After `resize` no tensor of a dynamic layer shows only part of its storage.
A sliding-window layer holds the last `held` of all slots; `total` tells it how many there are.
A quantized layer is the exception: its tensors are decoded copies, and it carries out an edit itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from compaction.errors import CannotSplice
from compaction.kv.arena import ArenaLayer
from compaction.kv.edits import Edit
from compaction.kv.quantization.layer import QuantizedLayer

__all__ = ["ArenaSlots", "DynamicSlots", "QuantizedSlots", "Slots", "slots_of"]


class Slots(Protocol):
    """The slots of one layer."""

    @property
    def held(self) -> int:
        """Slots in use."""

    @property
    def window(self) -> int | None:
        """The most slots this layer keeps between passes; None: all."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
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


class QuantizedSlots:
    """A quantized layer's slots: to be read as decoded copies, to be edited as the codes that they are."""

    window = None

    def __init__(self, layer: QuantizedLayer) -> None:
        self._layer = layer

    @property
    def held(self) -> int:
        """Slots in use."""
        return self._layer.held

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Decoded copies, made when one is asked for: what is written to them is lost."""
        return _Decoded(self._layer)

    def resize(self, length: int) -> None:
        """Forget the newest slots; a quantized layer has none of undefined content to add."""
        self._layer.truncate(length)

    def set_total(self, total: int) -> None:
        """A full layer holds all slots there are."""

    def cut(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """Copies of slots [start, end) as they are stored, for a block that `apply` puts back bit by bit."""
        return self._layer.cut(start, end)

    def apply(self, edit: Edit, index: int) -> None:
        """Carry out an edit; `index` is the layer's in the edit's blocks. A change of position moves numbers only."""
        positions = self._layer.positions[0]
        pieces: list[Any] = []
        for piece in edit.pieces:
            if piece.block is None:
                pieces.append(((piece.start, piece.end), positions[piece.start : piece.end] + piece.delta))
            else:
                pieces.append((piece.block.tensors[index], torch.tensor(piece.block.rows.position)))
        self._layer.rearrange(pieces)


class _Decoded(Mapping[str, torch.Tensor]):
    """Keys and values by name, decoded when they are read."""

    def __init__(self, layer: QuantizedLayer) -> None:
        self._layer = layer

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in ("keys", "values"):
            raise KeyError(name)
        read = self._layer.key_slice if name == "keys" else self._layer.value_slice
        return read(0, self._layer.held)

    def __iter__(self) -> Iterator[str]:
        return iter(("keys", "values") if self._layer.is_initialized else ())

    def __len__(self) -> int:
        return 2 if self._layer.is_initialized else 0


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

    Raises CannotSplice where a layer is of a kind that cannot be edited (states, transformers' quantised storage).
    """
    found: list[Slots | None] = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, QuantizedLayer):
            found.append(QuantizedSlots(layer))
        elif isinstance(layer, ArenaLayer):
            found.append(ArenaSlots(layer))
        elif type(layer).__name__ in _DYNAMIC:
            found.append(DynamicSlots(layer))
        elif type(layer).__name__ == "DummyLayer":
            found.append(None)
        else:
            raise CannotSplice(f"layer {index} is a {type(layer).__name__}, whose slots cannot be edited one by one")
    return found
