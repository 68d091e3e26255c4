"""Codes of 1 to 8 bits, packed without a wasted bit.

Invariant: `unpack(pack(codes, bits), bits, dim)` gives the codes back, for every `bits` and every `dim`. A row of `dim`
codes takes `packed_width(bits, dim)` bytes: dim · bits / 8 where that is a whole number of bytes for each field.
A code is cut into fields of 4, 2 and 1 bits (or is one field of 8): 5 bits are a field of 4 and one of 1. A field's
values lie side by side in a row of bytes of its own, the first 8 / width of its channels 1, 1 + n, 1 + 2n … in one
byte (n: the row's bytes), so that packing and unpacking are shifts of whole contiguous pieces.
Knows nothing about what a code means.
"""

from __future__ import annotations

import torch

from compaction.errors import InvalidInput

__all__ = ["fields", "pack", "packed_width", "unpack"]

_WIDTHS = (8, 4, 2, 1)


def fields(bits: int) -> tuple[tuple[int, int], ...]:
    """The fields of a code: (width, shift) each, widest first; the widest holds the code's lowest bits."""
    made, shift = [], 0
    for width in _WIDTHS:
        if bits & width:
            made.append((width, shift))
            shift += width
    return tuple(made)


def packed_width(bits: int, dim: int) -> int:
    """Bytes of a packed row of `dim` codes."""
    return sum(_bytes(width, dim) for width, _ in fields(bits))


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes, uint8 `[…, dim]` below 2^bits, as bytes `[…, packed_width]`."""
    if bits == 8:
        return codes
    dim = int(codes.shape[-1])
    rows = []
    for width, shift in fields(bits):
        per_byte, size = 8 // width, _bytes(width, dim)
        values = (codes >> shift) & (2**width - 1)
        if size * per_byte != dim:
            values = torch.nn.functional.pad(values, (0, size * per_byte - dim))
        row = values[..., :size]
        for index in range(1, per_byte):
            row = row | (values[..., index * size : (index + 1) * size] << (index * width))
        rows.append(row)
    return rows[0] if len(rows) == 1 else torch.cat(rows, -1)


def unpack(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The codes of packed rows, uint8 `[…, dim]`."""
    if bits == 8:
        return packed
    total: torch.Tensor | None = None
    start = 0
    for width, shift in fields(bits):
        size = _bytes(width, dim)
        row = packed[..., None, start : start + size]
        start += size
        # One shift over a new axis, not a concatenation: this is what torch.compile turns into plain vector code.
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)[:, None]
        values = ((row >> shifts) & (2**width - 1)).flatten(-2)[..., :dim]
        total = values if total is None else total | (values << shift)
    if total is None:
        raise InvalidInput(f"{bits} bits: a code has 1 to 8")
    return total


def _bytes(width: int, dim: int) -> int:
    return -(-dim * width // 8)
