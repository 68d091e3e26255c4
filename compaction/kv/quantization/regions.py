"""Where the slots of a quantized layer lie: sinks, codes, recent ones, and beside them every slot's position.

Invariant: slots are numbered through the three regions, oldest first; `where` has a position for each of them. All
memory, and the vector that is taken off keys, is counted in the meter.
Knows nothing about what rows mean or how they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from compaction.errors import InvalidInput
from compaction.kv.arena import Meter
from compaction.kv.quantization.rows import Rows

__all__ = ["BLOCK", "Region", "Regions", "length", "own_copy"]

BLOCK = 64  # slots that are coded at once, when the window has grown by as many
Region = dict[str, torch.Tensor]


class Regions:
    """The rows of one layer.

    Args:
        sinks, window: as in a `Setting`.
        meter: of the cache.
        step, capacity: slots by which it grows at least, and how many there may be.
    """

    def __init__(self, sinks: int, window: int, meter: Meter, step: int, capacity: int | None) -> None:
        self._sinks, self._window, self._meter = sinks, window, meter
        self.first, self.recent = Rows(meter, max(1, sinks)), Rows(meter, BLOCK)
        self.body, self.where = Rows(meter, step, capacity), Rows(meter, step, capacity)
        self._centre: torch.Tensor | None = None

    @property
    def held(self) -> int:
        """Slots in use."""
        return self.where.held

    @property
    def slots(self) -> int:
        """Slots allocated."""
        return sum(rows.slots for rows in self.named().values())

    @property
    def positions(self) -> torch.Tensor:
        """The position of each slot, int32 `[rows, held]`; one row where all conversations of the batch agree."""
        views = self.where.views()
        return views["positions"][:, 0, :, 0] if views else torch.empty(1, 0, dtype=torch.int32)

    @property
    def centre(self) -> torch.Tensor | None:
        """What is taken off keys before they are coded, `[batch, kv_heads, 1, head_dim]`; None before the first."""
        return self._centre

    @centre.setter
    def centre(self, value: torch.Tensor | None) -> None:
        old = self._centre.untyped_storage().nbytes() if self._centre is not None else 0
        self._centre = own_copy(value) if value is not None else None
        self._meter.swap(old, self._centre.untyped_storage().nbytes() if self._centre is not None else 0)

    def named(self) -> dict[str, Rows]:
        """The three regions, oldest slots first."""
        return {"first": self.first, "body": self.body, "recent": self.recent}

    def nbytes(self) -> int:
        """Bytes allocated."""
        centre = self._centre.untyped_storage().nbytes() if self._centre is not None else 0
        return sum(rows.nbytes() for rows in self._all()) + centre

    def logical_nbytes(self) -> int:
        """Bytes of the slots in use."""
        centre = self._centre.numel() * self._centre.element_size() if self._centre is not None else 0
        return sum(rows.logical_nbytes() for rows in self._all()) + centre

    def spans(self, start: int, end: int) -> Iterator[tuple[str, int, int]]:
        """The part of each region that lies in slots [start, end), in the region's own slots."""
        if not 0 <= start <= end <= self.held:
            raise InvalidInput(f"slots {start} to {end} are not among the {self.held} held")
        offset = 0
        for name, rows in self.named().items():
            a, b = max(start - offset, 0), min(end - offset, rows.held)
            if a < b:
                yield name, a, b
            offset += rows.held

    def cut(self, start: int, end: int) -> Region:
        """Copies of slots [start, end) as they are stored, named by region, and the centre where some are codes."""
        made: Region = {}
        for name, a, b in self.spans(start, end):
            made |= {f"{name}.{key}": own_copy(view) for key, view in self.named()[name].views(a, b).items()}
            if name == "body" and self._centre is not None:
                made["centre"] = own_copy(self._centre)
        return made

    def fill(self, parts: Mapping[str, Region], positions: torch.Tensor, centre: torch.Tensor | None) -> None:
        """Hold the rows of each region, where nothing was held."""
        self.centre = centre
        self.where.append({"positions": positions})
        for name, rows in self.named().items():
            if parts[name]:
                rows.append(parts[name])

    def truncate(self, count: int) -> None:
        """Keep the oldest `count` slots."""
        first = self.first.held
        coded = first + self.body.held
        self.first.truncate(count)
        self.body.truncate(max(0, count - first))
        self.recent.truncate(max(0, count - coded))
        self.where.truncate(count)

    def reserve(self, slots: int) -> None:
        """Allocate for holding `slots`, so that nothing grows until then."""
        self.where.reserve(slots)
        self.first.reserve(min(slots, self._sinks))
        self.recent.reserve(min(slots, self._window + BLOCK))
        self.body.reserve(max(0, slots - self._sinks - self._window))

    def shrink(self, slots: int) -> None:
        """Give back what is allocated beyond `slots` and beyond what is held."""
        rest = max(slots, self.held)
        self.where.shrink(rest)
        self.body.shrink(max(0, rest - self.first.held - self.recent.held))
        self.recent.shrink(min(rest, self._window + BLOCK) if slots else 0)

    def clear(self) -> None:
        """Hold nothing, no memory either."""
        self.centre = None
        for rows in self._all():
            rows.clear()

    def for_batch(self, positions: torch.Tensor, batch: int) -> torch.Tensor:
        """Positions to append, `[rows, n]`, with as many rows as those held; which get more where these have more."""
        rows = int(self.positions.shape[0])
        numbered = (self.where, self.first, self.recent)
        if not self.held and positions.shape[0] != rows:
            for region in numbered:
                region.clear()
            return positions
        if positions.shape[0] > rows:
            for region in numbered:
                region.select(lambda t: _rows_of_their_own(t, batch))
            rows = batch
        return positions.expand(rows, -1)

    def select(self, change: Callable[[torch.Tensor], torch.Tensor], batch: int) -> None:
        """Change what has a row for each conversation of the batch; positions that all share get rows of their own."""
        for rows in self._all():
            rows.select(lambda t: _own(change(t.expand(batch, -1, -1, -1))))
        if self._centre is not None:
            self.centre = change(self._centre)

    def _all(self) -> list[Rows]:
        return [self.first, self.body, self.recent, self.where]


def length(rows: Mapping[str, torch.Tensor]) -> int:
    """Slots of some rows."""
    return next((int(tensor.shape[2]) for tensor in rows.values()), 0)


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy with a storage of its own, an ordinary tensor even inside inference mode."""
    with torch.inference_mode(False):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that shows all of its storage."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else own_copy(tensor)


def _rows_of_their_own(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    """Positions of one row become those of each conversation; keys and values have theirs already."""
    return (
        own_copy(tensor.expand(batch, -1, -1, -1)) if tensor.dtype == torch.int32 and tensor.shape[0] == 1 else tensor
    )
