"""A conversation's cache as a parcel, and back.

Invariant: what comes back is what was taken, layer by layer and bit by bit, with the tokens, positions and shifts of
its slots. Knows nothing of where a parcel goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from compaction.errors import CacheRefused
from compaction.kv.edits import Block
from compaction.kv.residency.layers import dump_layer, load_layer
from compaction.kv.residency.parcel import Parcel
from compaction.kv.slot_map import SlotMap, SlotRows

__all__ = ["Restored", "pack_block", "pack_cache", "packed_slots", "packed_tokens", "unpack_block", "unpack_cache"]


@dataclass(frozen=True, slots=True)
class Restored:
    """What stands in the slots of a cache that came back, and what its owner had to say of it."""

    slot_map: SlotMap
    extra: Mapping[str, Any]


def pack_cache(layers: list[Any], slot_map: SlotMap, extra: Mapping[str, Any] | None = None) -> Parcel:
    """Copies of all that the layers hold, in host memory. `extra`: plain JSON that comes back as it is.

    Raises CacheRefused ("unsupported") for a layer that cannot be taken apart.
    """
    tensors: dict[str, torch.Tensor] = {}
    metas = []
    for index, layer in enumerate(layers):
        held, meta = dump_layer(index, layer)
        tensors |= {f"{index}.{name}": tensor for name, tensor in held.items()}
        metas.append({**meta, "tensors": list(held)})  # a file has an order of its own
    rows = {"next": slot_map.next_position, **_rows_to_json(slot_map)}
    return Parcel(tensors, {"layers": metas, "slots": rows, "extra": dict(extra or {})})


def unpack_cache(parcel: Parcel, layers: list[Any], device: torch.device) -> Restored:
    """Fill the layers of a fresh cache, one after the other; returns what stands in their slots.

    Raises CacheRefused ("fingerprint") where the layers are others than those that were packed; the fresh cache is
    then of no use.
    """
    metas = parcel.meta["layers"]
    if len(metas) != len(layers):
        raise CacheRefused("fingerprint", f"{len(metas)} layers were parked and the model has {len(layers)}")
    for index, layer in enumerate(layers):
        held = {name: parcel.tensors[f"{index}.{name}"] for name in metas[index]["tensors"]}
        load_layer(index, layer, held, metas[index], device)
    slots = parcel.meta["slots"]
    rows = _rows_from_json(slots)
    slot_map = SlotMap(rows.ids, rows.original, rows.position, rows.shifts, next_position=int(slots["next"]))
    return Restored(slot_map, parcel.meta["extra"])


def packed_tokens(parcel: Parcel) -> int:
    """Tokens of a packed cache."""
    return len(parcel.meta["slots"]["ids"])


def packed_slots(parcel: Parcel) -> list[int]:
    """Slots held, layer by layer; for layers that do not count slots, the conversation's tokens."""
    tokens = packed_tokens(parcel)
    return [int(layer.get("own", {}).get("held", tokens)) for layer in parcel.meta["layers"]]


def pack_block(block: Block) -> Parcel:
    """An evicted block in host memory; its tensors themselves where they lie there already."""
    tensors = {
        f"{index}.{name}": tensor.cpu() for index, layer in enumerate(block.tensors) for name, tensor in layer.items()
    }
    names = [list(layer) for layer in block.tensors]
    return Parcel(tensors, {"layers": names, "extent": block.extent, "slots": _rows_to_json(block.rows)})


def unpack_block(parcel: Parcel) -> Block:
    """The block as it was, its tensors in host memory: `Splicer.restore` copies them to where the cache is."""
    tensors = [
        {name: parcel.tensors[f"{index}.{name}"] for name in names} for index, names in enumerate(parcel.meta["layers"])
    ]
    return Block(_rows_from_json(parcel.meta["slots"]), tensors, int(parcel.meta["extent"]))


def _rows_to_json(rows: SlotRows) -> dict[str, Any]:
    return {"ids": rows.ids, "original": rows.original, "position": rows.position, "shifts": rows.shifts}


def _rows_from_json(rows: Mapping[str, Any]) -> SlotRows:
    return SlotRows(list(rows["ids"]), list(rows["original"]), list(rows["position"]), list(rows["shifts"]))
