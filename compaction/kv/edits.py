"""What an edit of slots does: which kept slots move where, by how many positions, and what is put between them.

Invariant: an `Edit` is pure arithmetic over slots and positions; it is complete before a tensor is touched, so an edit
that cannot be done changes nothing. A `Block` is what stands outside of a cache: slots with their keys and values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compaction.errors import InvalidInput
from compaction.kv.slot_map import Mode, SlotMap, SlotRows

__all__ = ["Block", "Edit", "Piece", "plan_compaction", "plan_eviction", "plan_insertion"]


@dataclass(slots=True)
class Block:
    """Slots outside of a cache: parked ones, or a summary that was encoded aside.

    `tensors` has an entry per layer: by name, `[…, n, dim]`, the last n slots of the block that the layer holds (fewer
    than all for a sliding-window layer; {} for one that holds none). `extent` is how many positions the block spans.
    """

    rows: SlotRows
    tensors: list[dict[str, torch.Tensor]]
    extent: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for layer in self.tensors for tensor in layer.values())

    def to(self, device: str | torch.device) -> Block:
        """The same block on another device."""
        moved = [{name: tensor.to(device) for name, tensor in layer.items()} for layer in self.tensors]
        return Block(self.rows, moved, self.extent)


@dataclass(frozen=True, slots=True)
class Piece:
    """Kept slots [start, end) that move to `target` and by `delta` positions; or a block that is put there."""

    start: int
    end: int
    target: int
    delta: int = 0
    block: Block | None = None

    @property
    def length(self) -> int:
        """Slots."""
        return len(self.block.rows) if self.block else self.end - self.start


@dataclass(frozen=True, slots=True)
class Edit:
    """All pieces in their new order, and how many slots and which next position there are afterwards."""

    pieces: tuple[Piece, ...]
    total: int
    next_position: int
    removed: tuple[tuple[int, int], ...]

    @property
    def rotates(self) -> bool:
        """Whether some kept key changes its position."""
        return self.turned > 0

    @property
    def turned(self) -> int:
        """Kept slots whose position changes."""
        return sum(piece.length for piece in self.pieces if piece.delta)

    @property
    def moved(self) -> int:
        """Kept slots whose place or position changes."""
        kept = (piece for piece in self.pieces if piece.block is None)
        return sum(piece.length for piece in kept if piece.delta or piece.target != piece.start)

    def rows(self, slot_map: SlotMap) -> SlotRows:
        """The slot map's entries afterwards."""
        made = SlotRows()
        for piece in self.pieces:
            made.add(piece.block.rows if piece.block else slot_map.cut(piece.start, piece.end, piece.delta))
        return made


def plan_eviction(slot_map: SlotMap, ranges: Sequence[tuple[int, int]], mode: Mode) -> Edit:
    """Take out slot ranges. In compact mode what follows a range moves to where the range began."""
    pieces: list[Piece] = []
    at, target, delta = 0, 0, 0
    removed = tuple((start, end) for start, end in sorted(ranges) if start < end)
    for start, end in removed:
        if not at <= start < end <= len(slot_map):
            raise InvalidInput(f"slots {start} to {end} are not a range of their own among the {len(slot_map)} held")
        pieces.append(Piece(at, start, target, delta))
        target += start - at
        if mode == "compact":
            delta -= slot_map.position_at(end) - slot_map.position[start]
        at = end
    pieces.append(Piece(at, len(slot_map), target, delta))
    total = target + len(slot_map) - at
    return Edit(tuple(p for p in pieces if p.length), total, slot_map.next_position + delta, removed)


def plan_compaction(slot_map: SlotMap) -> Edit:
    """Close every hole between positions: slots stay where they are, and stand at positions 0, 1, … afterwards."""
    starts = [s for s in range(1, len(slot_map)) if slot_map.position[s] != slot_map.position[s - 1] + 1]
    bounds = [0, *starts, len(slot_map)]
    runs = [(a, b) for a, b in itertools.pairwise(bounds) if a < b]
    pieces = tuple(Piece(a, b, a, a - slot_map.position[a]) for a, b in runs)
    return Edit(pieces, len(slot_map), len(slot_map), ())


def plan_insertion(slot_map: SlotMap, start: int, end: int, block: Block, mode: Mode) -> Edit:
    """Put a block in the place of slots [start, end), which may be none; its positions are already final.

    In gap mode the tail moves only as far as the block needs; in compact mode it follows the block without a hole.
    """
    if not 0 <= start <= end <= len(slot_map):
        raise InvalidInput(f"slots {start} to {end} are not among the {len(slot_map)} held")
    if not len(block.rows):
        raise InvalidInput("a block without tokens cannot be inserted: evict instead")
    first = block.rows.position[0]
    if first < slot_map.free_after(start):
        raise InvalidInput(f"position {first} is taken: what stands before slot {start} has moved since")
    behind = first + block.extent
    delta = behind - slot_map.position_at(end)
    if mode == "gap":
        delta = max(0, block.rows.position[-1] + 1 - slot_map.position_at(end))
    size = len(block.rows)
    pieces = (
        Piece(0, start, 0),
        Piece(0, 0, start, 0, block),
        Piece(end, len(slot_map), start + size, delta),
    )
    total = len(slot_map) - (end - start) + size
    removed = ((start, end),) if start < end else ()
    return Edit(tuple(p for p in pieces if p.length), total, slot_map.next_position + delta, removed)
