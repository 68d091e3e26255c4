"""What stands in a cache's slots: token, position when encoded, position now, times moved; and the rules over them.

Invariant: the lists have one entry per slot of a full-attention layer, oldest first; positions rise strictly and stay
below `next_position`, where the next token goes. Nobody else counts positions: a cache's own length is wrong as soon
as a slot was evicted, so every forward pass is given `position_ids` from here.
Knows nothing about tensors: no torch is imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from compaction.errors import InvalidInput

__all__ = ["DRIFT_BUDGET", "MIN_CHUNK", "Mode", "ModeChoice", "SlotMap", "SlotRows", "choose_mode", "chunk_to_evict"]

Mode = Literal["gap", "compact"]

# Tokens that go at once: each move of a key is one rounding, so the fewer moves the better.
MIN_CHUNK = 64
# Moves of one slot before its keys should be computed afresh. Measured on random bf16 keys, dim 64 and 128: an error of
# 0.15 % after one move, 1.9 % after 32, 5.8 % after 128, growing in proportion even for moves by 200 positions, because
# slow channels turn by less than a rounding. In fp16 a seventh of that, in fp32 7e-7 after 32.
DRIFT_BUDGET = 32


@dataclass(slots=True)
class SlotRows:
    """Entries of some slots: token ids, positions when encoded, positions now, times moved."""

    ids: list[int] = field(default_factory=list)
    original: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    shifts: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, start: int, end: int, delta: int = 0) -> SlotRows:
        """A copy of slots start … end-1, moved by `delta` positions."""
        position, shifts = self.position[start:end], self.shifts[start:end]
        if delta:
            position, shifts = [at + delta for at in position], [count + 1 for count in shifts]
        return SlotRows(self.ids[start:end], self.original[start:end], position, shifts)

    def add(self, other: SlotRows) -> None:
        """Append another's slots."""
        self.ids += other.ids
        self.original += other.original
        self.position += other.position
        self.shifts += other.shifts


@dataclass(slots=True)
class SlotMap(SlotRows):
    """The slots of one conversation."""

    next_position: int = 0

    def append(self, ids: Sequence[int]) -> list[int]:
        """Note tokens that a forward pass puts at the end; returns the positions to run them at."""
        made = list(range(self.next_position, self.next_position + len(ids)))
        self.add(SlotRows(list(ids), made, list(made), [0] * len(made)))
        self.next_position += len(made)
        return made

    def crop(self, length: int) -> None:
        """Take back the newest slots as if they had never been: the next token goes where the first of them stood."""
        if not 0 <= length <= len(self):
            raise InvalidInput(f"cannot cut {len(self)} slots back to {length}")
        if length < len(self):
            self.next_position = self.position[length]
            for column in (self.ids, self.original, self.position, self.shifts):
                del column[length:]

    def position_at(self, slot: int) -> int:
        """Position of a slot; behind the last one, where the next token goes."""
        return self.position[slot] if slot < len(self) else self.next_position

    def free_after(self, slot: int) -> int:
        """The first position that a slot put in front of `slot` may take."""
        return self.position[slot - 1] + 1 if slot else 0

    def most_shifts(self) -> int:
        """How often the most moved slot was moved."""
        return max(self.shifts, default=0)

    def needs_reanchor(self, budget: int = DRIFT_BUDGET) -> bool:
        """Whether some slot was moved more often than the budget allows: crop there and prefill again."""
        return self.most_shifts() > budget

    def reanchor_from(self, budget: int = DRIFT_BUDGET) -> int | None:
        """The first slot beyond the budget: cropping to it and prefilling the rest restores exact keys."""
        return next((slot for slot, count in enumerate(self.shifts) if count > budget), None)


def chunk_to_evict(
    boundaries: Sequence[int], need: int, *, start: int = 0, minimum: int = MIN_CHUNK
) -> tuple[int, int] | None:
    """The oldest whole turns that free at least `need` slots, and never fewer than `minimum` at once.

    Args:
        boundaries: slots where a turn begins, ascending, and the end of the last turn that may go.
        need: slots to free.
        start: nothing before this slot goes (the system block, BOS).

    Returns:
        (start, end) slots, both boundaries; None where no such span exists.
    """
    cuts = [cut for cut in boundaries if cut >= start]
    if any(a >= b for a, b in itertools.pairwise(cuts)):
        raise InvalidInput("boundaries of turns must be ascending slots")
    wanted = max(need, minimum)
    return next(((cuts[0], cut) for cut in cuts[1:] if cut - cuts[0] >= wanted), None)


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """A mode and the reason for the log."""

    mode: Mode
    why: str


def choose_mode(slot_map: SlotMap, *, coming: int, trained: int | None, refusal: str = "") -> ModeChoice:
    """Gap positions, unless the coming tokens would then pass the trained length; `refusal` says keys cannot move.

    Raises InvalidInput where neither is possible: then only prefilling again is left.
    """
    end = slot_map.next_position + coming
    if trained is None or end <= trained:
        return ModeChoice("gap", "kept tokens stay at their positions: equals masked attention")
    if refusal:
        raise InvalidInput(f"position {end:,} passes the trained {trained:,} and {refusal}: prefill again instead")
    return ModeChoice("compact", f"position {end:,} would pass the trained {trained:,}")
