"""One layer's keys and values in a preallocated arena, written in place.

Invariant: the held tokens are slots `0 … held-1`, oldest first, and everything a reader gets is a view of them; a
slot's content changes only by `update`, `write_keys`, `write_values` and `move`. Allocation happens only in `_resize`,
where old and new keys, then old and new values, stand side by side for a moment, and is counted there.
Knows nothing about positions, rotation or conversations: a slot is a row of numbers.

For code that edits a cache in place (`layer` is an `ArenaLayer` or `ArenaSlidingLayer`; `start`, `end`, `length` count
slots from the oldest one held; `n = end - start`):

    layer.held, layer.slots                   slots in use, slots allocated
    layer.key_slice(start, end)               view [batch, kv_heads, n, head_dim]; write into it, or
    layer.write_keys(start, tensor)           the same for values: value_slice, write_values
    layer.move(src_start, dst_start, length)  copies slots, keys and values, in either direction, ranges may overlap
    layer.truncate(length)                    forgets the newest slots; `extend(count)` adds slots of undefined content
    layer.nbytes(), layer.logical_nbytes()    bytes allocated, bytes of the slots held
    layer.reserve(slots), layer.shrink(slots) allocates for so many, gives back what is allocated beyond so many
    layer.dump(), layer.load(tensors, meta)   copies of what is held, for another memory; puts it back bit by bit

Evicting [a, b) is `move(b, a, held - b)` and `truncate(held - (b - a))`. Keys lie as plain rows, `[slots, head_dim]`,
rows of one head next to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from compaction.errors import EngineError, InvalidInput

__all__ = ["ArenaLayer", "Meta", "Meter"]

# What `dump` says beside its tensors: plain values that any file format takes.
Meta = dict[str, int | float | str]

# Where source and target overlap, slots are copied in pieces as long as the shift; for shifts below _SHORT through a
# copy of _SCRATCH slots at a time.
_SHORT, _SCRATCH = 64, 1024


@dataclass(slots=True)
class Meter:
    """Bytes that the arenas of one cache hold together, the most they held at once, and how often one was allocated."""

    held: int = 0
    peak: int = 0
    allocations: int = 0

    def swap(self, old: int, new: int) -> None:
        """An arena of `new` bytes has taken the place of one of `old` bytes; both stood at the same time."""
        self.peak = max(self.peak, self.held + new)
        self.held += new - old
        self.allocations += new > 0


class ArenaLayer(DynamicLayer):
    """A full-attention layer. Takes the place of transformers' `DynamicLayer`, and gives the same keys and values.

    Args:
        capacity: slots it may grow to; None: no limit.
        step: slots by which it grows at least; beyond that by half of what it has.
        meter: shared by the layers of a cache.

    Stored tensors carry no gradient. `update` raises EngineError, before it writes, where `capacity` is exceeded.
    """

    def __init__(self, *, capacity: int | None = None, step: int = 256, meter: Meter | None = None) -> None:
        if step < 1 or (capacity is not None and capacity < 1):
            raise InvalidInput(f"an arena needs capacity and step of at least 1, not {capacity!r} and {step!r}")
        self._arenas: list[torch.Tensor] = []  # keys and values, [batch, kv_heads, slots, head_dim] each, or neither
        self._start = self._end = 0
        self._reserved = 0
        self.capacity, self.step = capacity, step
        self.meter = meter if meter is not None else Meter()
        super().__init__()

    @property
    def keys(self) -> torch.Tensor | None:
        """The held keys, a view `[batch, kv_heads, held, head_dim]`; None before the first update."""
        return self.key_slice(0, self.held) if self._arenas else None

    @keys.setter
    def keys(self, value: object) -> None:
        self._drop(value)

    @property
    def values(self) -> torch.Tensor | None:
        """The held values, a view `[batch, kv_heads, held, value_dim]`; None before the first update."""
        return self.value_slice(0, self.held) if self._arenas else None

    @values.setter
    def values(self, value: object) -> None:
        self._drop(value)

    def _drop(self, value: object) -> None:
        if value is not None:
            raise InvalidInput("an arena's keys and values are set by write_keys() and write_values()")
        self.meter.swap(self.nbytes(), 0)
        self._arenas, self._start, self._end = [], 0, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take shapes, number format and device from the first states; allocates no slot yet."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self._arenas = [_empty(key_states, 0), _empty(value_states, 0)]
        self._start = self._end = 0
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states `[batch, kv_heads, n, head_dim]`; returns views of all keys and values, old and new."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._append(key_states, value_states)
        return self.key_slice(0, self.held), self.value_slice(0, self.held)

    def get_seq_length(self) -> int:
        """Tokens seen, which for a full layer are the slots held."""
        return self.held

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens, given as a negative number; memory stays until `shrink`."""
        if tokens_to_remove > 0:
            raise InvalidInput(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        if self.is_initialized:
            self.truncate(max(0, self.held + tokens_to_remove))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Select conversations of the batch, for beam search."""
        self._map(lambda arena: arena.index_select(0, beam_idx.to(arena.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each conversation of the batch."""
        self._map(lambda arena: arena.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these conversations of the batch."""
        self._map(lambda arena: arena[indices, ...])

    def offload(self) -> None:
        """Move to the host."""
        self._map(lambda arena: arena.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move back to the device where the states came from."""
        if self._arenas:
            self._map(lambda arena: arena.to(self.device, non_blocking=True))

    @property
    def held(self) -> int:
        """Slots in use."""
        return self._end - self._start

    @property
    def slots(self) -> int:
        """Slots allocated."""
        return min((int(arena.shape[2]) for arena in self._arenas), default=0)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot, keys and values."""
        return sum(a.shape[0] * a.shape[1] * a.shape[3] * a.element_size() for a in self._arenas)

    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(arena.untyped_storage().nbytes() for arena in self._arenas)

    def logical_nbytes(self) -> int:
        """Bytes of the slots in use."""
        return self.held * self.slot_nbytes

    def key_slice(self, start: int, end: int) -> torch.Tensor:
        """Keys of slots start … end-1: a view `[batch, kv_heads, end - start, head_dim]`."""
        return self._slice(0, start, end)

    def value_slice(self, start: int, end: int) -> torch.Tensor:
        """Values of slots start … end-1: a view `[batch, kv_heads, end - start, value_dim]`."""
        return self._slice(1, start, end)

    def write_keys(self, start: int, keys: torch.Tensor) -> None:
        """Overwrite the keys of as many held slots as `keys`, `[batch, kv_heads, n, head_dim]`, has."""
        self.key_slice(start, start + keys.shape[2]).copy_(keys.detach())

    def write_values(self, start: int, values: torch.Tensor) -> None:
        """Overwrite the values of as many held slots as `values`, `[batch, kv_heads, n, value_dim]`, has."""
        self.value_slice(start, start + values.shape[2]).copy_(values.detach())

    def move(self, src_start: int, dst_start: int, length: int) -> None:
        """Copy `length` held slots onto others that are held too; the ranges may overlap."""
        self._check(src_start, src_start + length)
        self._check(dst_start, dst_start + length)
        for arena in self._arenas:
            _move(arena, self._start + src_start, self._start + dst_start, length)

    def truncate(self, length: int) -> None:
        """Keep the oldest `length` slots."""
        self._check(0, length)
        self._end = self._start + length

    def extend(self, count: int) -> None:
        """Add slots at the end whose content is undefined until it is written."""
        if not self.is_initialized:
            raise InvalidInput("an arena that has seen no keys cannot be extended: it does not know their shape")
        self._room(count)
        self._end += count

    def reserve(self, slots: int) -> None:
        """Allocate now for holding `slots`, so that nothing grows until then."""
        self._reserved = slots if self.capacity is None else min(slots, self.capacity)
        if self._arenas and self.slots < self._reserved:
            self._resize(self._reserved)

    def shrink(self, slots: int) -> None:
        """Give back what is allocated beyond `slots` and beyond what is held."""
        wanted = max(slots, self.held)
        if self.slots > wanted:
            self._resize(wanted)

    def dump(self) -> tuple[dict[str, torch.Tensor], Meta]:
        """Contiguous copies of exactly what is held, by name, and what `load` must know besides.

        Keys and values `[batch, kv_heads, held, head_dim]`; no tensor where the layer has seen no token.
        """
        held = {"keys": self.keys, "values": self.values}
        copies = {name: _copy(tensor) for name, tensor in held.items() if tensor is not None}
        return copies, {"kind": type(self).__name__, "held": self.held}

    def load(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, int | float | str]) -> None:
        """Hold what `dump` gave, bit by bit, in the place of what is held now; on the device of the tensors.

        Raises InvalidInput, with nothing changed, where it came from another kind of layer, and EngineError where
        `capacity` is exceeded.
        """
        self._check_dump(tensors, meta)
        self._drop(None)
        self.is_initialized = False
        if tensors:
            self.lazy_initialization(tensors["keys"], tensors["values"])
            self._append(tensors["keys"], tensors["values"])

    def _check_dump(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, int | float | str]) -> None:
        if meta.get("kind") != type(self).__name__:
            raise InvalidInput(f"a {type(self).__name__} cannot hold what a {meta.get('kind')} dumped")
        slots = {int(tensor.shape[2]) for tensor in tensors.values()}
        if set(tensors) not in ({"keys", "values"}, set()) or slots not in ({meta["held"]}, set()):
            raise InvalidInput(f"{meta['held']} slots of keys and values belong to this dump, not {sorted(slots)}")
        self._grown(int(meta["held"]))

    def _slice(self, which: int, start: int, end: int) -> torch.Tensor:
        self._check(start, end)
        return self._arenas[which][:, :, self._start + start : self._start + end]

    def _check(self, start: int, end: int) -> None:
        if not (self._arenas or start == end == 0) or not 0 <= start <= end <= self.held:
            raise InvalidInput(f"slots {start} to {end} are not among the {self.held} held")

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        count = int(key_states.shape[2])
        self._room(count)
        start = self.held
        self._end += count
        self.write_keys(start, key_states)
        self.write_values(start, value_states)

    def _room(self, count: int) -> None:
        """See to it that `count` more slots follow the last one."""
        if self._end + count <= self.slots:
            return
        needed = self.held + count
        if needed > self.slots:
            self._resize(self._grown(needed))
        else:
            self._to_front()

    def _grown(self, needed: int) -> int:
        """Slots to allocate where `needed` are: what is reserved, else half as much again, in whole steps."""
        if self.capacity is not None and needed > self.capacity:
            raise EngineError(f"the arena's {self.capacity:,} slots are full, {needed:,} are needed: compact first")
        if needed <= self._reserved:
            return self._reserved
        wanted = -(-max(needed, self.slots * 3 // 2) // self.step) * self.step
        if self.capacity is not None and self.slots + wanted > self.capacity:
            return self.capacity  # the next growth would not fit beside this arena: let there be none
        return wanted

    def _to_front(self) -> None:
        if self._start:
            for arena in self._arenas:
                _move(arena, self._start, 0, self.held)
            self._start, self._end = 0, self.held

    def _resize(self, slots: int) -> None:
        """Reallocate, keys first and then values, so that only one of them stands twice."""
        self._to_front()
        for which, old in enumerate(self._arenas):
            new = _empty(old, slots)
            new[:, :, : self.held].copy_(old[:, :, : self.held])
            self._arenas[which] = new
            self.meter.swap(old.untyped_storage().nbytes(), new.untyped_storage().nbytes())

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        old = self.nbytes()
        self._arenas = [change(arena) for arena in self._arenas]
        self.meter.swap(old, self.nbytes())


def _empty(like: torch.Tensor, slots: int) -> torch.Tensor:
    """An ordinary tensor even inside inference mode: one made there could not be written to outside of it."""
    batch, heads, _, dim = like.shape
    with torch.inference_mode(False):
        return torch.empty(batch, heads, slots, dim, dtype=like.dtype, device=like.device)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy with a storage of its own, an ordinary tensor even inside inference mode."""
    with torch.inference_mode(False):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _move(arena: torch.Tensor, src: int, dst: int, length: int) -> None:
    """Copy slots of an arena `[batch, heads, slots, dim]`, where the ranges overlap in pieces, the safe end first."""
    distance = abs(src - dst)
    if not length or not distance:
        return
    if distance >= length:
        arena[:, :, dst : dst + length].copy_(arena[:, :, src : src + length])
        return
    piece = distance if distance >= _SHORT else min(length, _SCRATCH)
    starts = range(0, length, piece)
    for at in starts if dst < src else reversed(starts):
        size = min(piece, length - at)
        source = arena[:, :, src + at : src + at + size]
        # A piece no longer than the distance does not reach into its own target.
        arena[:, :, dst + at : dst + at + size].copy_(source if size <= distance else source.clone())
