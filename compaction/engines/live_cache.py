"""One conversation's live KV cache and the tokens it stands for: id, position and times moved of each slot.

Invariant: outside a running forward pass, `slot_map` names exactly the tokens whose keys and values the layers hold, in
order; whatever cannot be kept so is dropped whole, never guessed. Slots before `dirty_from` are what a fresh prefill
would have made, at positions 0, 1, …; later ones were computed with text in view that has left the cache, or were
moved. Memory is true: bytes measured are bytes held. In arenas they are what `start_turn` allocated; without arenas, no
tensor is a view of a larger storage after a pass or a crop.
Knows nothing about messages, templates or sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from compaction.budget import KVStorage
from compaction.engines.forward import Forward
from compaction.errors import CannotRotate, CannotSplice, EngineError, InvalidInput
from compaction.kv.arena import ArenaLayer
from compaction.kv.cache import ArenaCache
from compaction.kv.measure import storage_bytes
from compaction.kv.quantization.settings import Setting
from compaction.kv.rope import RotaryPlan
from compaction.kv.slot_map import SlotMap
from compaction.kv.splice import Encoder, Spliced, Splicer

__all__ = ["LiveCache", "common_prefix", "ran_out"]

# Layers whose crop is understood. Any other (recurrent, compressed) makes the cache one that only grows.
_FULL_LAYERS = {"ArenaLayer", "QuantizedLayer", "DynamicLayer", "DynamicIndexedLayer"}
_SLIDING_LAYERS = {"ArenaSlidingLayer", "DynamicSlidingWindowLayer"}
_EMPTY_LAYERS = {"DummyLayer"}


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading ids two lists share."""
    shortest = min(len(a), len(b))
    for index in range(shortest):
        if a[index] != b[index]:
            return index
    return shortest


class LiveCache:
    """The cache of one conversation (batch 1). Not thread-safe: its owner holds a lock.

    Args:
        forward: the model.
        capacity: tokens that the arenas may grow to; None: transformers' own layers, which copy all at each token.

    Attributes:
        slot_map: what stands in the slots. Its `next_position` is where the next token goes.
        price: what the narrower storage its full-attention layers are kept in costs; None: the model's number format.
        dirty_from: the first slot that carries traces of what is gone, or was moved; None: all are as prefilled.
    """

    def __init__(self, forward: Forward, capacity: int | None = None) -> None:
        self._forward, self._capacity = forward, capacity
        self._setting: Setting | None = None
        self._rotary: RotaryPlan | None = None
        self.price: KVStorage | None = None
        self._cache: Any = self._new_cache()
        self.slot_map = SlotMap()
        self.dirty_from: int | None = None
        self.peak_tokens = 0
        self.peak_bytes = 0
        self._parked = 0
        self._aside = False

    def __len__(self) -> int:
        return len(self.slot_map)

    @property
    def ids(self) -> list[int]:
        """The tokens, in order; not to be changed."""
        return self.slot_map.ids

    @property
    def clean(self) -> int:
        """How many leading slots are as a fresh prefill would have made them."""
        return len(self) if self.dirty_from is None else self.dirty_from

    @property
    def cache(self) -> Any:
        """The transformers cache, for those who leave it as it is."""
        return self._cache

    @property
    def layers(self) -> list[Any]:
        """The transformers cache layers."""
        return list(self._cache.layers)

    @property
    def bytes(self) -> int:
        """Bytes held now, over distinct storages."""
        return storage_bytes(self._cache)

    @property
    def stateful(self) -> bool:
        """Whether some layer holds a state that cannot be cut back to fewer tokens."""
        known = _FULL_LAYERS | _SLIDING_LAYERS | _EMPTY_LAYERS
        return any(type(layer).__name__ not in known for layer in self.layers)

    def start_turn(self, tokens: int) -> None:
        """Make room for exactly `tokens`, and forget earlier peaks: what is given back is no part of this turn's.

        Raises EngineError where memory does not suffice; what stood in the cache stays.
        """
        if isinstance(self._cache, ArenaCache):
            with _out_of_memory(tokens):
                self._cache.shrink(tokens)
                self._cache.meter.peak = self._cache.meter.held
                self._cache.reserve(tokens)
        self.peak_tokens, self.peak_bytes = len(self), 0
        self._note_peak()

    def end_turn(self) -> None:
        """Give back what was reserved for a reply that became much shorter: where less than half is used."""
        if self._aside:
            return  # what waits on the host comes back first
        if isinstance(self._cache, ArenaCache):
            self._cache.shared.clear()
            if 2 * self._cache.logical_nbytes() < self._cache.nbytes():
                self._cache.shrink(0)
                self._note_peak()

    def feed(self, ids: Sequence[int]) -> torch.Tensor:
        """One forward pass over further ids; returns the last one's logits, shape [vocabulary].

        An exception leaves the layers uneven: what stood there before is restored where that is possible, else dropped.
        Raises EngineError where memory does not suffice.
        """
        before = len(self)
        try:
            with _out_of_memory(before + len(ids)):
                self._announce(len(ids))
                logits = self._forward(self._cache, ids, self.slot_map.next_position)
            self.slot_map.append(ids)
            self._note_peak()  # before the copies: the larger figure is the peak
            self._own_storage()
        except BaseException:
            self._recover(before)
            raise
        self.peak_tokens = max(self.peak_tokens, len(self))
        return logits

    def record_past(self, on: bool) -> None:
        """Whether sliding layers keep what leaves their window from now on, so that a reply can be taken out again."""
        for layer in self.layers:
            if type(layer).__name__ in _SLIDING_LAYERS:
                layer.record_past = on

    def can_crop(self, length: int) -> bool:
        """Whether every layer still holds all that a cache of the first `length` tokens would hold."""
        removed = len(self) - length
        if removed <= 0:
            return removed == 0
        return not self.stateful and all(_can_drop(layer, removed) for layer in self.layers)

    def crop(self, length: int) -> bool:
        """Keep the first `length` tokens; where a layer cannot, drop everything. Returns whether they were kept."""
        if length == 0 or not self.can_crop(length):
            self.clear()
            return length == 0
        removed = len(self) - length
        try:
            for layer in self.layers:
                _drop_last(layer, removed)
            self._own_storage()
        except BaseException:
            self.clear()
            raise
        self._forget_after(length)
        return True

    def clear(self) -> None:
        """Hold nothing."""
        self._cache = self._new_cache()
        self.slot_map, self.dirty_from = SlotMap(), None

    @property
    def storage(self) -> str:
        """Name of the storage it is kept in; "": the model's number format."""
        return self.price.name if self.price is not None else ""

    def keep_as(
        self, price: KVStorage | None, setting: Setting | None, plan: RotaryPlan | None, *, drop: bool = True
    ) -> None:
        """Keep full-attention layers so from now on; `drop`: hold nothing, else they are converted already.

        None: in the model's number format.
        """
        self.price, self._setting, self._rotary = price, setting, plan
        if drop:
            self.clear()

    def _new_cache(self) -> Any:
        cache = self._forward.new_cache(self._capacity)
        if self._setting is not None and self._rotary is not None and isinstance(cache, ArenaCache):
            cache.quantize(self._setting, self._rotary, compiled=self._forward.compiled)
        return cache

    def _announce(self, count: int) -> None:
        """Tell quantized layers the positions of the coming tokens: some models' attention does not hand them on."""
        if self._setting is not None and isinstance(self._cache, ArenaCache):
            at = self.slot_map.next_position
            self._cache.announce(range(at, at + count))

    def _forget_after(self, length: int) -> None:
        clean = self.clean
        self.slot_map.crop(length)
        if length <= clean:
            self.slot_map.next_position = length  # what follows a clean prefix goes where a prefill would put it
        if self.dirty_from is not None and self.dirty_from >= length:
            self.dirty_from = None

    # -- editing in place

    def evict(self, plan: RotaryPlan, ranges: Sequence[tuple[int, int]]) -> Spliced:
        """Take slot ranges out; what is kept stays at its positions. Later slots keep traces of what went.

        Raises CannotSplice, with nothing changed, where the layers do not allow it.
        """
        with self._splicer(plan) as splicer:
            done = splicer.evict(ranges)
        if done.evicted:
            self._mark_dirty(min(start for start, end in ranges if start < end))
        return done

    def insert(self, plan: RotaryPlan, encoder: Encoder, ids: Sequence[int], at: int) -> Spliced:
        """Put tokens in front of slot `at`, encoded as the model sees them behind the slots before it only.

        Raises CannotSplice or CannotRotate, with nothing changed, where the layers do not allow it.
        """
        with self._splicer(plan) as splicer, _out_of_memory(len(self) + len(ids)):
            block = splicer.encode(encoder, ids, at)
            # Beside the block, one layer's prefix stood a second time while the block was encoded.
            self._note_peak(block.nbytes + self._largest_layer(at + len(ids)))
            done = splicer.insert(block, at, at)
        self.peak_tokens = max(self.peak_tokens, at + len(ids))
        if at <= self.clean:
            self.dirty_from = at + len(ids) if at + len(ids) < len(self) else None
        self._note_peak()
        return done

    def compact(self, plan: RotaryPlan) -> Spliced:
        """Close all holes between positions by turning keys; slots stay where they are.

        Raises CannotRotate, with nothing changed, where keys cannot be turned.
        """
        with self._splicer(plan) as splicer:
            return splicer.compact()

    @contextmanager
    def aside(self, length: int | None = None) -> Iterator[None]:
        """What is fed inside comes behind the first `length` slots (None: all) and is taken out again, bit by bit.

        Slots behind them wait on the host meanwhile; they count as held. Raises CannotSplice where some layer cannot
        be put back so, and EngineError where the host's memory does not suffice.
        """
        at = len(self) if length is None else length
        self._check_aside(at)
        parked: list[_Parked] = []
        try:
            with _out_of_memory(2 * len(self) - at):
                parked += (_Parked.of(layer, len(self) - at) for layer in self.layers if isinstance(layer, ArenaLayer))
        except BaseException:
            for part in parked:
                part.put_back(0)
            raise
        rows, dirty = deepcopy(self.slot_map), self.dirty_from
        self._parked, self._aside = sum(part.nbytes for part in parked), True
        self.record_past(True)
        self.slot_map.crop(at)
        if at:
            self.slot_map.next_position = rows.free_after(at)
        try:
            yield
        finally:
            self._parked, self._aside = 0, False
            if len(self) >= at:  # else a pass broke, and the cache was dropped
                fed = len(self) - at
                for part in parked:
                    part.put_back(fed)
                self.slot_map, self.dirty_from = rows, dirty

    def _check_aside(self, at: int) -> None:
        odd = [type(layer).__name__ for layer in self.layers if not isinstance(layer, ArenaLayer)]
        if set(odd) - _EMPTY_LAYERS:
            raise CannotSplice(f"layers of the kind {odd[0]} cannot be put back as they were")
        if self._setting is not None:
            raise CannotSplice("quantized layers code what leaves their window, which cannot be taken back")
        if at < len(self) and any(type(layer).__name__ in _SLIDING_LAYERS for layer in self.layers):
            raise CannotSplice("a sliding window cannot go back to an earlier place and return")

    @contextmanager
    def _splicer(self, plan: RotaryPlan) -> Iterator[Splicer]:
        splicer = Splicer(self._cache, plan, self.slot_map)
        try:
            yield splicer
        except (CannotSplice, CannotRotate, InvalidInput):
            raise  # refused: nothing was changed
        except BaseException:
            self.clear()
            raise
        self.slot_map = splicer.slot_map

    def _mark_dirty(self, slot: int) -> None:
        first = min(slot, self.clean)
        self.dirty_from = first if first < len(self) else None

    def _largest_layer(self, slots: int) -> int:
        """Bytes of so many slots in the largest layer."""
        return slots * max((layer.slot_nbytes for layer in self.layers if isinstance(layer, ArenaLayer)), default=0)

    def _note_peak(self, more: int = 0) -> None:
        held = self.bytes + self._parked + more
        if isinstance(self._cache, ArenaCache):  # while an arena grew, its old keys or values stood there too
            held += self._cache.meter.peak - self._cache.meter.held
        self.peak_bytes = max(self.peak_bytes, held)

    def _recover(self, before: int) -> None:
        """After a broken pass: cut full layers back; any other kind may be half written and goes."""
        self._forget_after(min(before, len(self)))
        layers = [layer for layer in self.layers if type(layer).__name__ not in _EMPTY_LAYERS]
        if not before or any(type(layer).__name__ not in {"ArenaLayer", "DynamicLayer"} for layer in layers):
            self.clear()
            return
        for layer in layers:
            if isinstance(layer, ArenaLayer):
                layer.truncate(min(before, layer.held))
                continue
            layer.keys = layer.keys[..., :before, :].clone()
            layer.values = layer.values[..., :before, :].clone()
            if not layer.keys.shape[-2] == layer.values.shape[-2] == before:
                self.clear()
                return

    def _own_storage(self) -> None:
        """Copy every tensor that shows only part of its storage."""
        for layer in self.layers:
            if isinstance(layer, ArenaLayer):
                continue
            for name in ("keys", "values", "indexer_keys"):
                tensor = getattr(layer, name, None)
                if isinstance(tensor, torch.Tensor) and _hides_memory(tensor):
                    setattr(layer, name, tensor.clone(memory_format=torch.contiguous_format))


@dataclass(frozen=True, slots=True)
class _Parked:
    """The newest slots of an arena on the host, the arena without them, and what it was like."""

    layer: ArenaLayer
    held: int
    recorded: bool
    tail: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, layer: ArenaLayer, count: int) -> _Parked:
        """Take the newest `count` slots out."""
        held = layer.held
        slices = (layer.key_slice, layer.value_slice) if count else ()
        tail = tuple(part(held - count, held).to("cpu", copy=True) for part in slices)
        layer.truncate(held - count)
        return cls(layer, held, bool(getattr(layer, "record_past", False)), tail)

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return sum(part.numel() * part.element_size() for part in self.tail)

    def put_back(self, fed: int) -> None:
        """As it was before, `fed` tokens having been fed meanwhile."""
        count = int(self.tail[0].shape[-2]) if self.tail else 0
        self.layer.truncate(self.held - count)
        if count:
            self.layer.extend(count)
            self.layer.write_keys(self.held - count, self.tail[0])
            self.layer.write_values(self.held - count, self.tail[1])
        layer: Any = self.layer
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length -= fed
            layer.record_past = self.recorded


@contextmanager
def _out_of_memory(tokens: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as exc:
        if not ran_out(exc):
            raise
        raise EngineError(f"out of memory at {tokens:,} tokens: lower the budget") from exc


def ran_out(exc: BaseException) -> bool:
    """Whether memory did not suffice: on the CPU torch has no error of its own for that."""
    return isinstance(exc, torch.OutOfMemoryError) or (isinstance(exc, RuntimeError) and "allocate memory" in str(exc))


def _hides_memory(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def _can_drop(layer: Any, removed: int) -> bool:
    if type(layer).__name__ not in _SLIDING_LAYERS:
        return True
    if not layer.is_initialized:
        return False
    held = int(layer.keys.shape[-2])
    return bool(held - removed >= min(layer.cumulative_length - removed, layer.sliding_window - 1))


def _drop_last(layer: Any, removed: int) -> None:
    if type(layer).__name__ in _SLIDING_LAYERS and layer.is_initialized:
        layer.record_past = True  # without it transformers refuses to crop a full window; `_can_drop` has checked
        layer.crop(-removed)
        layer.record_past = False
    elif removed:
        layer.crop(-removed)
