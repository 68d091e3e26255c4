"""From coded rows to keys and values in a number format that attention reads, turned to their positions.

Invariant: what is written to `out` is decode + centre, turned by the tables, rounded once; compiled or not, the results
differ by rounding only. Nothing but `out` is changed.

Compiled (`torch.compile`, on the CPU with the system's C++ compiler) all of it is one pass over the codes, 3 to 7 times
as fast; the first call of each kind takes some seconds. Not compiled it goes in pieces that stay in the CPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch

from compaction.kv.quantization.angles import Tables, turned
from compaction.kv.quantization.codecs import Codec
from compaction.kv.rope import Rotation

__all__ = ["Reader"]

_PIECE = 1024


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

    @torch.no_grad()
    def __call__(
        self,
        rows: Mapping[str, torch.Tensor],
        centre: torch.Tensor | None,
        tables: Tables | None,
        out: torch.Tensor,
    ) -> None:
        """Decode rows `[batch, heads, slots, width]` into `out`, `[batch, heads, slots, dim]`.

        `centre` `[batch, heads, 1, dim]` is added; `tables` belong to the slots' positions.
        """
        constants = self.codec.constants(out.device)
        if self.compiled and out.shape[2] > 1 and self._fusible:
            _fused(self.codec, self.rotation is not None)(dict(rows), constants, centre, tables, out)
            return
        for start in range(0, int(out.shape[2]), _PIECE):
            end = min(start + _PIECE, int(out.shape[2]))
            piece = {name: tensor[:, :, start:end] for name, tensor in rows.items()}
            x = self.codec.decode(piece, constants)
            if centre is not None:
                x += centre
            if self.rotation is not None and tables is not None:
                x = turned(x, (tables[0][:, :, start:end], tables[1][:, :, start:end]), self.rotation)
            out[:, :, start:end].copy_(x)

    @property
    def _fusible(self) -> bool:
        """Partial and interleaved rotations are read piece by piece: as fused code they are no faster."""
        rotation = self.rotation
        return rotation is None or (rotation.layout == "half" and rotation.dims == self.codec.dim)


@cache
def _fused(codec: Codec, rotated: bool) -> Callable[..., None]:
    def read(rows: Any, constants: Any, centre: Any, tables: Any, out: Any) -> None:
        x = codec.decode(rows, constants)
        if centre is not None:
            x = x + centre
        if rotated:
            # The other half of each pair by reversing an axis of two: a concatenation would not become vector code.
            pairs = x.reshape(*x.shape[:-1], 2, codec.dim // 2)
            cos, sin = (table[:, :, :, None] for table in tables)
            sign = 2 * torch.arange(2, device=x.device, dtype=x.dtype)[:, None] - 1
            x = (pairs * cos + pairs.flip(-2) * (sin * sign)).flatten(-2)
        out.copy_(x)

    # Compiled code hangs on the code object, eight variants at most: each codec gets an object of its own.
    own = FunctionType(
        read.__code__.replace(co_name=f"read_{codec.side.codec}{codec.side.bits}"), globals(), closure=read.__closure__
    )
    compiled = torch.compile(own)

    def call(rows: Any, constants: Any, centre: Any, tables: Any, out: Any) -> None:
        for tensor in (*rows.values(), out, *(tables or ())):
            torch._dynamo.maybe_mark_dynamic(tensor, 2)
        compiled(rows, constants, centre, tables, out)

    return call
