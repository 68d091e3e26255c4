"""From coded rows to keys and values in a number format that attention reads, turned to their positions.

Invariant: what is written to `out` is decode + centre, turned by the tables, rounded once; compiled or not, the results
differ by rounding only. Nothing but `out` is changed.

Compiled (`torch.compile`, on the CPU with the system's C++ compiler) all of it is one pass over the codes, about four
times as fast; the first call of each kind takes some seconds. Not compiled it goes in pieces that stay in cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from compaction.kv.quantization.angles import Tables, turn_into
from compaction.kv.quantization.codecs import Codec
from compaction.kv.rope import Rotation

__all__ = ["Reader", "Reading", "read"]

_PIECE = 1024


class Reading(NamedTuple):
    """One side of a layer, ready to be read.

    Rows `[batch, heads, slots, width]` by name; `centre` `[batch, heads, 1, dim]`, which is added; the tables of the
    slots' positions; `out` `[batch, heads, slots, dim]`, which is written.
    """

    rows: Mapping[str, torch.Tensor]
    centre: torch.Tensor | None
    tables: Tables | None
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class Reader:
    """How one side of a layer is read.

    Args:
        codec: of the side.
        rotation: by which its rows depend on positions; None: not at all.
        compiled: whether to use `torch.compile`.
    """

    codec: Codec
    rotation: Rotation | None
    compiled: bool = False

    @property
    def fused(self) -> bool:
        """Whether compiled code reads it: partial and interleaved rotations are no faster fused."""
        rotation = self.rotation
        return self.compiled and (rotation is None or (rotation.layout == "half" and rotation.dims == self.codec.dim))

    def __call__(self, reading: Reading) -> None:
        """Read piece by piece."""
        rows, centre, tables, out = reading
        constants = self.codec.constants(out.device)
        for start in range(0, int(out.shape[2]), _PIECE):
            end = min(start + _PIECE, int(out.shape[2]))
            x = self.codec.decode({name: tensor[:, :, start:end] for name, tensor in rows.items()}, constants)
            if centre is not None:
                x += centre
            if self.rotation is None or tables is None:
                out[:, :, start:end].copy_(x)
            else:
                piece = (tables[0][:, :, start:end], tables[1][:, :, start:end])
                turn_into(out[:, :, start:end], x, piece, self.rotation)


@torch.no_grad()
def read(sides: Sequence[tuple[Reader, Reading]]) -> None:
    """Read the sides of a layer, all that can be in one compiled call."""
    together = [(reader, reading) for reader, reading in sides if reader.fused and reading.out.shape[2] > 1]
    for reader, reading in sides:
        if not any(reading is other for _, other in together):
            reader(reading)
    if together:
        kinds = tuple((reader.codec, reader.rotation is not None) for reader, _ in together)
        constants = [codec.constants(together[0][1].out.device) for codec, _ in kinds]
        _fused(kinds)([(*reading[:3], _targets(reader, reading)) for reader, reading in together], constants)


def _targets(reader: Reader, reading: Reading) -> list[torch.Tensor]:
    """Where compiled code writes: all of `out`, or its halves, each as a tensor with a storage of its own.

    Halves known to share a storage would be written by way of a copy, and from one tensor of both each channel would be
    decoded twice, once for either half.
    """
    if reader.rotation is None:
        return [reading.out]
    half = reader.codec.dim // 2
    return [from_dlpack(reading.out[..., :half]), from_dlpack(reading.out[..., half:])]


@cache
def _fused(kinds: tuple[tuple[Codec, bool], ...]) -> Callable[..., None]:
    def run(readings: Any, constants: Any) -> None:
        for (codec, rotated), (rows, centre, tables, out), known in zip(kinds, readings, constants, strict=True):
            x = codec.decode(rows, known)
            if centre is not None:
                x = x + centre
            if rotated:
                half = codec.dim // 2
                first, second, (cos, sin) = x[..., :half], x[..., half:], tables
                out[0].copy_(first * cos - second * sin)
                out[1].copy_(second * cos + first * sin)
            else:
                out[0].copy_(x)

    # Compiled code hangs on the code object, eight variants at most: each kind gets an object of its own.
    name = "read_" + "_".join(f"{codec.side.codec}{codec.side.bits}" for codec, _ in kinds)
    own = FunctionType(run.__code__.replace(co_name=name), globals(), closure=run.__closure__)
    # Products and sums may become one instruction, rounded once: a seventh of the time on a CPU with it.
    compiled = torch.compile(own, options={"cpp.enable_floating_point_contract_flag": "fast"})
    marked = False

    def call(readings: Any, constants: Any) -> None:
        nonlocal marked
        if not marked:
            for rows, _, tables, out in readings:
                for tensor in (*rows.values(), *out, *(tables or ())):
                    torch._dynamo.maybe_mark_dynamic(tensor, 2)
            marked = True
        compiled(readings, constants)

    return call
