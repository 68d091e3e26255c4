"""Editing a live cache in place: evict, insert, park, restore, crop.

Invariant: after each call slot map, layers and positions agree, and what was refused (`CannotSplice`, `CannotRotate`,
InvalidInput) has changed nothing. The caller gives every forward pass the positions that `append` returns; a cache's
own length is wrong as a position once something was evicted.

*Gap* positions: kept tokens stay at their positions, so the next token's logits are those of masked attention over the
whole text. *Compact* positions: what follows moves up and its keys are turned; exact where a prefix goes, approximate
in the middle, where distances change by design. Either way later tokens keep traces of what was evicted: it is out of
the cache, not erased.

Sliding-window layers hold the last window only. An eviction outside of it leaves them alone. One inside leaves the
window under-filled, because what slid out before cannot come back: refused unless `underfill=True`. In gap mode such a
window then counts slots, and reaches further back than the model's until it has filled up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from compaction.errors import CannotSplice, InvalidInput
from compaction.kv.edits import Block, Edit, Piece, plan_compaction, plan_eviction, plan_insertion
from compaction.kv.rope import RotaryPlan, Rotation, Turn, carry, rotate
from compaction.kv.slot_map import Mode, SlotMap, SlotRows
from compaction.kv.slots import QuantizedSlots, Slots, slots_of

__all__ = ["Block", "Encoder", "Spliced", "Splicer"]


class Encoder(Protocol):
    """A way to run a model; `compaction.engines.forward.Forward` is one."""

    def new_cache(self) -> Any:
        """An empty cache."""

    def __call__(self, cache: Any, ids: Sequence[int], start: int) -> torch.Tensor:
        """Feed ids at positions start, start + 1, …"""


@dataclass(frozen=True, slots=True)
class Spliced:
    """What an edit did, for the log. Of the `moved` slots, `turned` got another position.

    `underfilled` names the sliding layers that now hold less than their window.
    """

    mode: Mode
    evicted: int
    inserted: int
    moved: int
    turned: int
    underfilled: tuple[int, ...] = ()
    parked: tuple[Block, ...] = ()

    @property
    def rotated(self) -> bool:
        """Whether keys were turned."""
        return self.turned > 0


class Splicer:
    """Edits one conversation's cache (batch 1). Not thread-safe: its owner holds a lock.

    Args:
        cache: a transformers cache of dynamic layers or arenas.
        plan: what `compaction.kv.probe.probe` found for its model.
        slot_map: what stands in the cache already; None: nothing.
    """

    def __init__(self, cache: Any, plan: RotaryPlan, slot_map: SlotMap | None = None) -> None:
        self.cache, self.plan = cache, plan
        self.slot_map = slot_map if slot_map is not None else SlotMap()

    def append(self, ids: Sequence[int]) -> list[int]:
        """Note tokens about to be fed; returns their positions. Take back with `slot_map.crop` where the pass fails."""
        return self.slot_map.append(ids)

    def evict(
        self, ranges: Sequence[tuple[int, int]], mode: Mode = "gap", *, park: bool = False, underfill: bool = False
    ) -> Spliced:
        """Take slot ranges out; with `park` their keys and values come back as blocks for `restore`."""
        edit = plan_eviction(self.slot_map, ranges, mode)
        refusal = "" if self._only_prefix(edit) and not self._states() else self.plan.evict_refusal
        if refusal:
            raise CannotSplice(refusal)
        slots = self._checked(edit, underfill)
        parked = tuple(self._block(slots, start, end) for start, end in edit.removed) if park else ()
        return self._apply(edit, slots, mode, parked)

    def insert(self, block: Block, start: int, end: int, mode: Mode = "gap", *, underfill: bool = False) -> Spliced:
        """Put a block in the place of slots [start, end)."""
        if self.plan.evict_refusal:
            raise CannotSplice(self.plan.evict_refusal)
        edit = plan_insertion(self.slot_map, start, end, block, mode)
        return self._apply(edit, self._checked(edit, underfill), mode, ())

    def restore(self, block: Block, mode: Mode = "gap", *, underfill: bool = False) -> Spliced:
        """Put a parked block back where its positions belong.

        In gap mode everything is bit-equal to what it was. In compact mode the tail is turned back (one more rounding).
        Tokens fed in between never saw the block.
        """
        first = block.rows.position[0]
        at = next(
            (slot for slot, position in enumerate(self.slot_map.position) if position >= first), len(self.slot_map)
        )
        return self.insert(block, at, at, mode, underfill=underfill)

    def compact(self) -> Spliced:
        """Close all holes that evictions in gap mode have left between positions; each kept key moves once at most."""
        edit = plan_compaction(self.slot_map)
        return self._apply(edit, self._checked(edit, underfill=True), "compact", ())

    @torch.no_grad()
    def encode(self, encoder: Encoder, ids: Sequence[int], at: int) -> Block:
        """Keys and values of `ids` as the model sees them behind the first `at` slots only; nothing is changed.

        They stand at the first free positions behind slot `at - 1`, for `insert(block, at, end)`.
        """
        if not ids or not 0 <= at <= len(self.slot_map):
            raise InvalidInput(f"cannot encode {len(ids)} tokens behind {at} of {len(self.slot_map)} slots")
        slots = slots_of(self.cache)
        self._require_window(slots, at)
        aside = encoder.new_cache()
        for layer, fresh in zip(slots, aside.layers, strict=True):
            if layer is not None and at:
                _prefill(fresh, layer, at, len(self.slot_map))
        first = self.slot_map.free_after(at)
        encoder(aside, ids, first)
        positions = list(range(first, first + len(ids)))
        rows = SlotRows(list(ids), positions, list(positions), [0] * len(ids))
        return Block(rows, [_last(layer, len(ids)) for layer in slots_of(aside)], len(ids))

    def crop(self, length: int) -> None:
        """Take the newest slots back, as if they had never been fed."""
        removed = len(self.slot_map) - length
        slots = slots_of(self.cache)
        for index, layer in enumerate(slots):
            if layer is None or removed <= 0 or layer.held == len(self.slot_map):
                continue
            # A layer that records its past (no window now) is in the middle of a reply: its owner crops the cache.
            if layer.window is None or layer.held - removed < min(length, layer.window):
                raise CannotSplice(f"layer {index} no longer holds the window of the first {length} tokens")
        self.slot_map.crop(length)
        for layer in slots:
            if layer is not None and removed:
                layer.resize(max(0, layer.held - removed))
                layer.set_total(length)

    # -- inside

    def _states(self) -> bool:
        return any(layer.kind == "state" for layer in self.plan.layers)

    def _only_prefix(self, edit: Edit) -> bool:
        """Distances between slots stay as they are where only the oldest go."""
        return len(edit.removed) <= 1 and all(start == 0 for start, _ in edit.removed)

    def _checked(self, edit: Edit, underfill: bool) -> list[Slots | None]:
        if edit.rotates:
            self.plan.require_rotation()
        slots = slots_of(self.cache)
        if any(piece.block for piece in edit.pieces) and any(layer and not layer.tensors() for layer in slots):
            raise CannotSplice("the cache has seen no token yet and does not know the shape of its keys")
        for index, layer in enumerate(slots):
            if layer is None or layer.window is None or underfill:
                continue
            if self._window_after(layer, edit, index) < min(layer.window, edit.total):
                raise CannotSplice(
                    f"layer {index} slides over the last {layer.window + 1} tokens and would hold fewer after this edit"
                )
        return slots

    def _window_after(self, layer: Slots, edit: Edit, index: int) -> int:
        window = layer.window if layer.window is not None else edit.total
        return sum(size for _, size in _trailing(edit, len(self.slot_map) - layer.held, window, index))

    def _require_window(self, slots: list[Slots | None], at: int) -> None:
        for index, layer in enumerate(slots):
            if layer is not None and layer.window is not None:
                oldest = len(self.slot_map) - layer.held
                if oldest > max(0, at - layer.window):
                    raise CannotSplice(f"layer {index} no longer holds the window in front of slot {at}")

    def _block(self, slots: list[Slots | None], start: int, end: int) -> Block:
        """A copy of slots [start, end) as they are."""
        tensors = []
        for layer in slots:
            if isinstance(layer, QuantizedSlots):
                tensors.append(layer.cut(start, end))
                continue
            oldest = len(self.slot_map) - layer.held if layer is not None else end
            a, b = max(start, oldest) - oldest, end - oldest
            held = layer.tensors() if layer is not None and a < b else {}
            tensors.append({name: tensor[..., a:b, :].contiguous().clone() for name, tensor in held.items()})
        extent = self.slot_map.position_at(end) - self.slot_map.position[start]
        return Block(self.slot_map.cut(start, end), tensors, extent)

    @torch.no_grad()
    def _apply(self, edit: Edit, slots: list[Slots | None], mode: Mode, parked: tuple[Block, ...]) -> Spliced:
        turns = {piece.delta: Turn(piece.delta) for piece in edit.pieces}
        underfilled = []
        for index, layer in enumerate(slots):
            if layer is None:
                continue
            if isinstance(layer, QuantizedSlots):
                layer.apply(edit, index)
                continue
            rotations = {rotation.where: rotation for rotation in self.plan.layers[index].rotations}
            if layer.window is None and layer.held == len(self.slot_map):
                _edit_in_place(layer, edit, index, rotations, turns)
            else:
                _rebuild(layer, edit, index, rotations, len(self.slot_map))
            layer.set_total(edit.total)
            if layer.window is not None and layer.held < min(layer.window, edit.total):
                underfilled.append(index)
        rows = edit.rows(self.slot_map)
        self.slot_map = SlotMap(rows.ids, rows.original, rows.position, rows.shifts, edit.next_position)
        inserted = sum(len(piece.block.rows) for piece in edit.pieces if piece.block)
        evicted = sum(end - start for start, end in edit.removed)
        return Spliced(mode, evicted, inserted, edit.moved, edit.turned, tuple(underfilled), parked)


def _edit_in_place(
    layer: Slots, edit: Edit, index: int, rotations: dict[str, Rotation], turns: dict[int, Turn]
) -> None:
    """Move what is kept, towards the front first to last, towards the end last to first; then write blocks."""
    if edit.total > layer.held:
        layer.resize(edit.total)
    kept = [piece for piece in edit.pieces if piece.block is None and (piece.delta or piece.target != piece.start)]
    backward = [piece for piece in reversed(kept) if piece.target > piece.start]
    for name, whole in layer.tensors().items():
        for piece in [*(p for p in kept if p.target <= p.start), *backward]:
            carry(whole, piece.start, piece.target, piece.length, rotations.get(name), turns[piece.delta])
        for piece in edit.pieces:
            if piece.block is not None:
                whole.narrow(-2, piece.target, piece.length).copy_(piece.block.tensors[index][name])
    if edit.total < layer.held:
        layer.resize(edit.total)


def _trailing(edit: Edit, oldest: int, window: int, index: int) -> list[tuple[Piece, int]]:
    """What a sliding layer holds afterwards: pieces from the newest back, and how many of their last slots.

    `oldest` is the first slot it holds now. The run ends where the window is full or a slot is missing.
    """
    found: list[tuple[Piece, int]] = []
    room = window
    for piece in reversed(edit.pieces):
        if piece.block is not None:
            held = max((int(t.shape[-2]) for t in piece.block.tensors[index].values()), default=0)
        else:
            held = piece.end - max(piece.start, min(oldest, piece.end))
        size = min(held, room)
        if size:
            found.append((piece, size))
        room -= size
        if not room or held < piece.length:
            break
    return found


def _rebuild(layer: Slots, edit: Edit, index: int, rotations: dict[str, Rotation], before: int) -> None:
    """A sliding window's slots afterwards, put together from copies: it is short."""
    oldest = before - layer.held
    window = layer.window if layer.window is not None else edit.total
    run = _trailing(edit, oldest, window, index)[::-1]
    made: dict[str, list[torch.Tensor]] = {}
    for name, whole in layer.tensors().items():
        for piece, size in run:
            if piece.block is not None:
                part = piece.block.tensors[index][name][..., -size:, :]
            else:
                part = whole.narrow(-2, piece.end - oldest - size, size)
                rotation = rotations.get(name)
                part = rotate(part, piece.delta, rotation) if rotation and piece.delta else part.clone()
            made.setdefault(name, []).append(part)
    layer.resize(sum(size for _, size in run))
    for name, whole in layer.tensors().items() if made else ():
        whole.copy_(torch.cat([part.to(whole.device) for part in made[name]], dim=-2))


def _prefill(fresh: Any, layer: Slots, at: int, total: int) -> None:
    """Show a fresh layer the first `at` of `total` slots, as views: its first update copies them, as it does always."""
    oldest = total - layer.held
    size = min(at - oldest, layer.window if layer.window is not None else at)
    views = {name: tensor.narrow(-2, at - oldest - size, size) for name, tensor in layer.tensors().items()}
    fresh.update(views["keys"], views["values"])
    if "indexer_keys" in views:
        fresh.update_indexer(views["indexer_keys"])
    if hasattr(fresh, "cumulative_length"):
        fresh.cumulative_length = at


def _last(layer: Slots | None, count: int) -> dict[str, torch.Tensor]:
    """Copies of the newest slots of a layer, as many as it has of them."""
    if layer is None:
        return {}
    size = min(count, layer.held)
    return {name: tensor[..., -size:, :].contiguous().clone() for name, tensor in layer.tensors().items()}
