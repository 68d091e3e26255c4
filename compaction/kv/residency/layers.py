"""Taking a cache layer apart into tensors and plain values, and putting it together again.

Invariant: a layer that comes back has every attribute that it had, tensors bit by bit, so that the next forward pass
computes the same. What is not understood is refused by name, never left out. Arenas and quantised layers do it
themselves (`dump`, `load`); transformers' own kinds are walked attribute by attribute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compaction.errors import CacheRefused

__all__ = ["dump_layer", "load_layer"]

# Their state is what their attributes say; any other class may keep some of it elsewhere.
_WALKED = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "DynamicIndexedLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "DummyLayer",
}
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def dump_layer(index: int, layer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Copies of a layer's tensors by name, each with a storage of its own, and the rest as JSON values.

    Raises CacheRefused ("unsupported") for a layer of a kind that is not known.
    """
    kind = type(layer).__name__
    if hasattr(layer, "dump"):
        tensors, meta = layer.dump()
        return {name: tensor.cpu() for name, tensor in tensors.items()}, {"kind": kind, "own": meta}
    if kind not in _WALKED:
        raise CacheRefused("unsupported", f"layer {index} is a {kind}, which cannot be parked")
    tensors = {}
    values = {name: _take(f"{index}.{name}", value, name, tensors) for name, value in vars(layer).items()}
    return tensors, {"kind": kind, "values": values}


def load_layer(
    index: int, layer: Any, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any], device: torch.device
) -> None:
    """Give a fresh layer what `dump_layer` took from one of its kind.

    Raises CacheRefused ("fingerprint") where it is of another kind.
    """
    kind = type(layer).__name__
    if meta.get("kind") != kind:
        raise CacheRefused("fingerprint", f"layer {index} is a {kind} and a {meta.get('kind')} was parked")
    if "own" in meta:
        layer.load({name: tensor.to(device) for name, tensor in tensors.items()}, meta["own"])
        return
    for name, value in meta["values"].items():
        setattr(layer, name, _put(value, tensors, device))


def _take(where: str, value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A value as JSON; tensors go to `tensors` under a name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        with torch.inference_mode(False):
            copy = torch.empty(value.shape, dtype=value.dtype)
        tensors[name] = copy.copy_(value)
        return {"tensor": name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, torch.device):
        return {"device": True}
    if isinstance(value, dict) and all(isinstance(key, (int, str)) for key in value):
        return {"dict": [[key, _take(where, item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    raise CacheRefused("unsupported", f"layer {where} is a {type(value).__name__}, which cannot be parked")


def _put(value: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    """The inverse of `_take`; a tensor is a copy, so that what was parked stays as it is."""
    if not isinstance(value, dict):
        return value
    (kind, what), *_ = value.items()
    if kind == "tensor":
        with torch.inference_mode(False):
            return torch.empty(tensors[what].shape, dtype=tensors[what].dtype, device=device).copy_(tensors[what])
    if kind == "dtype":
        return _DTYPES[what]
    return device if kind == "device" else {key: _put(item, tensors, device) for key, item in what}
