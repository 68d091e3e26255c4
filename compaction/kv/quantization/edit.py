"""Where slots of a quantized layer come to lie when it is put together anew.

Invariant: kept slots stay in their region and order; codes stay codes wherever they can. What comes from outside in
full precision is coded only where codes follow it, and codes are decoded only where a slot in full precision precedes
them that is not a sink: regions stand in order, and nothing else can be done there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from compaction.kv.quantization.rows import Rows

if TYPE_CHECKING:
    from compaction.kv.quantization.layer import QuantizedLayer

__all__ = ["Arrangement", "Piece"]

Span = tuple[int, int]
# A range of slots that are held, or the tensors of slots that stood outside.
Piece = Span | Mapping[str, torch.Tensor]


class Arrangement:
    """The parts of each region, in order, once `pieces` stand one behind the other.

    Args:
        layer: which holds the kept slots and codes what must be coded.
        pieces: slots held, or tensors of `QuantizedLayer.cut`, or "keys" and "values" in full precision.
        positions: of each piece's slots now, `[n]` each.
    """

    def __init__(self, layer: QuantizedLayer, pieces: Sequence[Piece], positions: Sequence[torch.Tensor]) -> None:
        self._layer = layer
        self._parts: dict[str, list[Span | Mapping[str, torch.Tensor]]] = {"first": [], "body": [], "recent": []}
        kept = [list(layer.spans(*piece)) if isinstance(piece, tuple) else [] for piece in pieces]
        for index, (piece, at) in enumerate(zip(pieces, positions, strict=True)):
            follows = {name for spans in kept[index + 1 :] for name, _, _ in spans}
            if isinstance(piece, tuple):
                for name, start, end in kept[index]:
                    self._parts[name].append((start, end))
                continue
            for came_from, rows, begin, end in _segments(piece):
                self._place(came_from, rows, piece, at[begin:end].to(layer.device, torch.int32)[None], follows)

    def apply(self, name: str, rows: Rows) -> None:
        """Make a region what was worked out for it."""
        parts = self._parts[name]
        if all(isinstance(part, tuple) for part in parts):
            rows.keep([part for part in parts if isinstance(part, tuple)])
            return
        rows.replace([rows.views(*part) if isinstance(part, tuple) else part for part in parts])

    def _place(
        self,
        came_from: str,
        rows: Mapping[str, torch.Tensor],
        piece: Mapping[str, torch.Tensor],
        positions: torch.Tensor,
        follows: set[str],
    ) -> None:
        layer, parts = self._layer, self._parts
        rows = {name: tensor.to(layer.device) for name, tensor in rows.items()}
        coded = came_from == "body"
        if "encoded" not in rows and not coded:
            rows["encoded"] = positions[:, None, :, None]
        only_sinks = not parts["body"] and not parts["recent"]
        if "first" in follows or (only_sinks and came_from == "first"):
            region = "first"
        elif coded:
            region = "recent" if parts["recent"] else "body"
        else:
            region = "body" if "body" in follows else "recent"
        if coded:
            rows = self._codes(rows, piece["centre"].to(layer.device) if "centre" in piece else None, positions, region)
        elif region == "body":
            rows = layer.code(rows)
        parts[region].append(rows)

    def _codes(
        self, rows: Mapping[str, torch.Tensor], centre: torch.Tensor | None, positions: torch.Tensor, region: str
    ) -> Mapping[str, torch.Tensor]:
        """Codes as the layer can hold them: as they are, or, where it takes another vector off its keys, made again."""
        layer = self._layer
        if layer.centre is None and centre is not None:
            layer.centre = centre
        if region == "body" and centre is not None and layer.centre is not None and torch.equal(centre, layer.centre):
            return rows
        full = layer.decode(rows, centre, positions)
        return layer.code(full) if region == "body" else full


def _segments(piece: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor], int, int]]:
    """The regions a piece came from, their rows, and which of its slots they are."""
    if "keys" in piece:
        yield "", {name: piece[name] for name in ("keys", "values")}, 0, int(piece["keys"].shape[2])
        return
    start = 0
    for region in ("first", "body", "recent"):
        rows = {name.partition(".")[2]: t for name, t in piece.items() if name.startswith(region + ".")}
        if rows:
            count = int(next(iter(rows.values())).shape[2])
            yield region, rows, start, start + count
            start += count
