"""What all quantized layers of a cache share: cosines of the slots' positions, and the memory that keys are decoded to.

Invariant: `Angles.tables` gives what belongs to the positions it is handed, computed in float64 and rounded to float32;
they are recomputed from the first position that differs from the call before. What `Scratch` hands out is overwritten
by the next layer's call. Neither holds anything that could not be computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compaction.kv.rope import Rotation

__all__ = ["Angles", "Scratch", "Shared", "Tables", "tables_of", "turn_into", "turned"]

Tables = tuple[torch.Tensor, torch.Tensor]


class _Known:
    """Tables of one rotation, `[rows, 1, slots, n / 2]`, and the positions `[rows, slots]` that they are filled for."""

    def __init__(self, rotation: Rotation, rows: int, device: torch.device) -> None:
        self.rotation, self.held = rotation, 0
        self.positions = torch.empty(rows, 0, dtype=torch.int32, device=device)
        self.cos = self.sin = torch.empty(rows, 1, 0, rotation.dims // 2, device=device)

    def grow(self, slots: int) -> None:
        """Room for half as many slots again."""
        if slots <= self.positions.shape[1]:
            return
        old, room = (self.positions, self.cos, self.sin), -(-slots * 3 // 2 // 256) * 256
        with torch.inference_mode(False):
            self.positions = old[0].new_empty(old[0].shape[0], room)
            self.cos, self.sin = (old[1].new_empty(*old[1].shape[:2], room, old[1].shape[3]) for _ in range(2))
        self.positions[:, : self.held].copy_(old[0][:, : self.held])
        self.cos[:, :, : self.held].copy_(old[1][:, :, : self.held])
        self.sin[:, :, : self.held].copy_(old[2][:, :, : self.held])

    def show(self, positions: torch.Tensor) -> Tables:
        """The tables of these positions; computed where they differ from those of the call before."""
        count = int(positions.shape[1])
        self.grow(count)
        known = min(self.held, count)
        if not torch.equal(self.positions[:, :known], positions[:, :known]):
            known = int((self.positions[:, :known] != positions[:, :known]).any(0).int().argmax())
        if known < count:
            cos, sin = tables_of(self.rotation, positions[:, known:])
            self.positions[:, known:count].copy_(positions[:, known:])
            self.cos[:, :, known:count].copy_(cos)
            self.sin[:, :, known:count].copy_(sin)
        self.held = count
        return self.cos[:, :, :count], self.sin[:, :, :count]


class Angles:
    """cos and sin of positions, once for all layers that rotate alike."""

    def __init__(self) -> None:
        self._known: dict[object, _Known] = {}

    def tables(self, rotation: Rotation, positions: torch.Tensor) -> Tables:
        """cos and sin, float32 `[rows, 1, slots, n / 2]`, of positions `[rows, slots]`: views, until the next call."""
        key = (rotation.key, positions.shape[0], positions.device)
        if key not in self._known:
            self._known[key] = _Known(rotation, int(positions.shape[0]), positions.device)
        return self._known[key].show(positions)

    def clear(self) -> None:
        """Give the memory back."""
        self._known.clear()


def tables_of(rotation: Rotation, positions: torch.Tensor) -> Tables:
    """cos and sin of positions `[rows, slots]`, of no particular order, from float64 angles."""
    turns = positions.double()[:, None, :, None] * rotation.inv_freq.to(positions.device)
    return turns.cos().float(), turns.sin().float()


def turned(x: torch.Tensor, tables: Tables, rotation: Rotation, *, back: bool = False) -> torch.Tensor:
    """A float32 copy of `x`, `[batch, heads, slots, dim]`, turned to where the tables' positions are, or back."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    out = torch.empty_like(x)
    turn_into(out, x, (tables[0], -tables[1]) if back else tables, rotation)
    return out


def turn_into(out: torch.Tensor, x: torch.Tensor, tables: Tables, rotation: Rotation) -> None:
    """Write `x`, turned to where the tables' positions are, to `out` of the same shape; `x` stays as it is."""
    start, end = rotation.start, rotation.start + rotation.dims
    for plain in (slice(0, start), slice(end, x.shape[-1])):
        if plain.start < plain.stop:
            out[..., plain].copy_(x[..., plain])
    (first, second), (to_first, to_second) = _pairs(x, rotation), _pairs(out, rotation)
    cos, sin = tables
    to_first.copy_((first * cos).addcmul_(second, sin, value=-1))
    to_second.copy_((second * cos).addcmul_(first, sin))


def _pairs(x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second channel of each pair, as views."""
    start, end = rotation.start, rotation.start + rotation.dims
    if rotation.layout == "interleaved":
        return x[..., start:end:2], x[..., start + 1 : end : 2]
    middle = (start + end) // 2
    return x[..., start:middle], x[..., middle:end]


class Scratch:
    """Memory for one layer's decoded keys and values, used by one layer after the other.

    Args:
        private: hand out memory of its own each time, for models some of whose layers read another layer's keys later.
    """

    def __init__(self, *, private: bool = False) -> None:
        self._private = private
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, name: str, like: torch.Tensor, slots: int) -> torch.Tensor:
        """An uninitialised `[batch, heads, slots, dim]` of `like`'s format."""
        batch, heads, _, dim = like.shape
        if self._private:
            return like.new_empty(batch, heads, slots, dim)
        key = (name, like.dtype, like.device)
        row = batch * heads * dim
        held = self._buffers.get(key)
        if held is None or held.numel() < row * slots:
            with torch.inference_mode(False):
                size = row * (-(-slots * 9 // 8 // 256) * 256)
                held = self._buffers[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        # Without a gap between heads: torch's products copy what is not contiguous.
        return held[: row * slots].view(batch, heads, slots, dim)

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers.values())

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers.clear()


class Shared:
    """What the quantized layers of one cache share: one after the other uses it.

    Args:
        private: as in `Scratch`.
    """

    def __init__(self, *, private: bool = False) -> None:
        self.angles, self.scratch = Angles(), Scratch(private=private)
        self._coming: tuple[int, list[int]] | None = None

    def announce(self, held: int, positions: Sequence[int]) -> None:
        """Say which positions the next pass's tokens have, behind the `held` slots there are."""
        self._coming = held, list(positions)

    def announced(self, held: int, count: int, device: torch.device) -> torch.Tensor | None:
        """The positions `[1, count]` announced for just this pass, else None."""
        if self._coming is None or self._coming[0] != held or len(self._coming[1]) != count:
            return None
        return torch.tensor([self._coming[1]], device=device)

    def clear(self) -> None:
        """Give all of it back; the next pass makes it again."""
        self.angles.clear()
        self.scratch.clear()
