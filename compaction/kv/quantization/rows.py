"""Named tensors with one row a slot, in memory that grows in place.

Invariant: all tensors of a `Rows` have the same slots, on their third axis, and `held` of them are in use, from the
first on. Memory is allocated by `_resize` and `select` only, and counted in the meter there.
Knows nothing about what a row means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from compaction.kv.arena import Meter

__all__ = ["Rows"]


class Rows:
    """Rows of a layer: `[a, b, slots, width]` each, where a and b may differ between names.

    Args:
        meter: of the cache.
        step: slots by which memory grows at least, beyond that by half of what there is.
        most: slots beyond which it does not grow unless they are needed; None: no limit.
    """

    def __init__(self, meter: Meter, step: int = 256, most: int | None = None) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._meter, self._step, self._most = meter, step, most
        self._wanted = 0
        self.held = 0

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def slots(self) -> int:
        """Slots allocated."""
        return next((int(tensor.shape[2]) for tensor in self._tensors.values()), 0)

    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors.values())

    def logical_nbytes(self) -> int:
        """Bytes of the slots in use."""
        return sum(view.numel() * view.element_size() for view in self.views().values())

    def views(self, start: int = 0, end: int | None = None) -> dict[str, torch.Tensor]:
        """All tensors, slots start … end-1 of those in use, by name."""
        end = self.held if end is None else end
        return {name: tensor[:, :, start:end] for name, tensor in self._tensors.items()}

    def append(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Add slots at the end."""
        count = next(int(tensor.shape[2]) for tensor in rows.values())
        if not count:
            return
        self._need(self.held + count, rows)
        for name, tensor in rows.items():
            self._tensors[name][:, :, self.held : self.held + count].copy_(tensor.detach())
        self.held += count

    def truncate(self, length: int) -> None:
        """Keep the first `length` slots."""
        self.held = min(self.held, length)

    def keep(self, spans: Sequence[tuple[int, int]]) -> None:
        """Keep these slots only, ascending ranges; what is kept moves to the front in place."""
        at = 0
        for start, end in spans:
            if start != at:
                for tensor in self._tensors.values():
                    _forward(tensor, start, at, end - start)
            at += end - start
        self.held = at

    def replace(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Hold these parts, in this order; they may be views of what is held."""
        parts = [part for part in parts if next(iter(part.values())).shape[2]]
        if not parts:
            self.held = 0
            return
        made = {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}
        self.held = 0
        self.append(made)

    def select(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each tensor by what `change` makes of it: other rows of the first axis, another device."""
        for name, tensor in self._tensors.items():
            self._tensors[name] = new = change(tensor)
            self._meter.swap(tensor.untyped_storage().nbytes(), new.untyped_storage().nbytes())

    def reserve(self, slots: int) -> None:
        """Allocate for so many slots, now or with the first ones."""
        self._wanted = slots
        if self._tensors and self.slots < slots:
            self._resize(slots, self._tensors)

    def shrink(self, slots: int) -> None:
        """Give back what is allocated beyond `slots` and beyond what is held."""
        self._wanted = min(self._wanted, slots)
        if self.slots > max(slots, self.held):
            self._resize(max(slots, self.held), self._tensors)

    def clear(self) -> None:
        """Hold nothing, no memory either."""
        self._meter.swap(self.nbytes(), 0)
        self._tensors, self.held = {}, 0

    def _need(self, slots: int, like: Mapping[str, torch.Tensor]) -> None:
        if not self._tensors or slots > self.slots:
            grown = -(-max(slots, self.slots * 3 // 2 if self._tensors else 0) // self._step) * self._step
            if self._most is not None:
                grown = max(slots, min(grown, self._most))
            self._resize(self._wanted if slots <= self._wanted else grown, self._tensors or like)

    def _resize(self, slots: int, like: Mapping[str, torch.Tensor]) -> None:
        """Reallocate one tensor after the other, so that only one of them stands twice."""
        for name, tensor in list(like.items()):
            old = self._tensors.get(name)
            shape = (*tensor.shape[:2], slots, tensor.shape[3])
            with torch.inference_mode(False):
                new = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            if old is not None:
                new[:, :, : self.held].copy_(old[:, :, : self.held])
            self._tensors[name] = new
            self._meter.swap(old.untyped_storage().nbytes() if old is not None else 0, new.untyped_storage().nbytes())


def _forward(tensor: torch.Tensor, src: int, dst: int, length: int) -> None:
    """Copy slots to an earlier place; where source and target overlap, in pieces no longer than the distance."""
    step = max(src - dst, 1) if src - dst >= 64 else 1024
    for at in range(0, length, step):
        size = min(step, length - at)
        source = tensor[:, :, src + at : src + at + size]
        tensor[:, :, dst + at : dst + at + size].copy_(source if size <= src - dst else source.clone())
