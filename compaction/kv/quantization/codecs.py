"""Rows of numbers to codes and back.

Invariant: a row's codes depend on that row (and on the codec) alone, never on its neighbours: a row can be moved, cut
out or appended to, and what is decoded stays bit for bit the same. Codes are chosen for the scale as it is stored.

Affine: each group of channels has its lowest value, rounded down, and a step, rounded up; codes count steps. The error
is half a step at most. Turbo: the row is rotated, each group of it coded by the levels of N(0, 1), with the scale of
DRIVE and EDEN, |y|² / <y, levels>, which makes <q, x> unbiased at no extra bit (a norm alone shrinks it by up to 36 %).
Knows nothing about positions, layers or what is taken off a row before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from compaction.kv.quantization.codebook import levels, rotation
from compaction.kv.quantization.packing import pack, packed_width, unpack
from compaction.kv.quantization.settings import Side

__all__ = ["STATISTIC", "Codec"]

STATISTIC = torch.bfloat16  # float16 overflows at 65,504, which keys of attention sinks reach


@dataclass(frozen=True, slots=True)
class Codec:
    """One side of a layer: how its rows of `dim` channels are coded. Hashable: equal codecs decode by the same code."""

    side: Side
    dim: int

    @property
    def group(self) -> int:
        """Channels that share a scale."""
        return self.side.group_of(self.dim)

    @property
    def rows(self) -> dict[str, tuple[int, torch.dtype]]:
        """What a coded row consists of: width and number format by name."""
        groups = self.dim // self.group
        made = {"codes": (packed_width(self.side.bits, self.dim), torch.uint8), "scale": (groups, STATISTIC)}
        return made | ({"low": (groups, STATISTIC)} if self.side.codec == "affine" else {})

    @property
    def nbytes(self) -> int:
        """Bytes of one coded row of one head."""
        return sum(width * dtype.itemsize for width, dtype in self.rows.values())

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Code float32 rows `[…, dim]`: tensors `[…, width]` by the names in `rows`."""
        return _affine(x, self) if self.side.codec == "affine" else _turbo(x, self)

    def constants(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """What `decode` needs beside rows: levels and rotation, on a device."""
        return () if self.side.codec == "affine" else _tables(self, device)

    def decode(self, rows: Mapping[str, torch.Tensor], constants: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
        """The float32 rows `[…, dim]` that the codes stand for; `constants` as `constants()` gives them."""
        codes = unpack(rows["codes"], self.side.bits, self.dim)
        scale = rows["scale"].float()[..., None]
        if self.side.codec == "affine":
            grouped = _grouped(codes, self.group).float()
            return torch.addcmul(rows["low"].float()[..., None], grouped, scale).flatten(-2)
        table, matrix = constants
        return (_grouped(table[codes.int()], self.group) * scale).flatten(-2) @ matrix


@cache
def _tables(codec: Codec, device: torch.device) -> tuple[torch.Tensor, ...]:
    return levels(codec.side.bits).to(device), rotation(codec.dim).to(device)


def _affine(x: torch.Tensor, codec: Codec) -> dict[str, torch.Tensor]:
    grouped, top = _grouped(x, codec.group), 2**codec.side.bits - 1
    low = _rounded_down(grouped.amin(-1))
    scale = -_rounded_down(-(grouped.amax(-1) - low.float()) / top)
    scale = torch.where(scale > 0, scale, 1.0).to(STATISTIC)
    codes = ((grouped - low.float()[..., None]) / scale.float()[..., None]).round_().clamp_(0, top)
    return {"codes": pack(codes.to(torch.uint8).flatten(-2), codec.side.bits), "scale": scale, "low": low}


def _turbo(x: torch.Tensor, codec: Codec) -> dict[str, torch.Tensor]:
    table, matrix = _tables(codec, x.device)
    turned = _grouped(x @ matrix.T, codec.group)
    square = turned.square().sum(-1, keepdim=True)
    unit = turned * (codec.group / square.clamp(min=1e-30)).sqrt()
    codes = torch.bucketize(unit, (table[1:] + table[:-1]) / 2, out_int32=True)
    scale = square / (turned * table[codes]).sum(-1, keepdim=True).clamp(min=1e-30)
    packed = pack(codes.to(torch.uint8).flatten(-2), codec.side.bits)
    return {"codes": packed, "scale": scale[..., 0].to(STATISTIC)}


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """`[…, dim]` as `[…, groups, group]`."""
    return x.reshape(*x.shape[:-1], -1, group)


def _rounded_down(x: torch.Tensor) -> torch.Tensor:
    """The stored number next to x that is not above it."""
    near = x.to(STATISTIC)
    return torch.where(near.float() <= x, near, (x - x.abs() / 256).to(STATISTIC))
