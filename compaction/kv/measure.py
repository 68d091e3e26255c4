"""Bytes of KV cache as the allocator sees them.

Invariant: a storage counts once, whole, however many views share it: a slice keeps all of its memory alive.
Knows nothing about models or conversations, and imports no torch: a tensor is whatever has an `untyped_storage`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from compaction.errors import EngineError

__all__ = ["Saving", "logical_bytes", "saving", "storage_bytes", "tensors_in"]


def tensors_in(value: Any) -> Iterator[Any]:
    """All tensors reachable from a cache, a layer, or containers of them, each object once.

    Scalars (zero dimensions) are left out: layers keep a few as bookkeeping, none holds state of a token.
    """
    yield from _walk(value, set())


def _walk(value: Any, seen: set[int]) -> Iterator[Any]:
    if value is None or isinstance(value, (str, bytes, int, float)) or id(value) in seen:
        return
    seen.add(id(value))
    if hasattr(value, "untyped_storage"):
        if value.dim() > 0:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _walk(item, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _walk(item, seen)
    elif hasattr(value, "layers"):
        yield from _walk(value.layers, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for name, item in vars(value).items():
            if name not in {"config", "device", "dtype"}:
                yield from _walk(item, seen)


def storage_bytes(value: Any) -> int:
    """Bytes of the distinct storages behind all tensors in `value`: what freeing it would give back."""
    sizes: dict[tuple[str, int], int] = {}
    for tensor in tensors_in(value):
        storage = tensor.untyped_storage()
        sizes[str(tensor.device), storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def logical_bytes(value: Any) -> int:
    """Bytes of the elements that the tensors in `value` show; smaller than `storage_bytes` where a view hides some."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


@dataclass(frozen=True, slots=True)
class Saving:
    """Bytes of distinct storages before and after something was made smaller."""

    before: int
    after: int

    @property
    def saved(self) -> int:
        """Bytes that are free now; negative where it grew."""
        return self.before - self.after

    @property
    def ratio(self) -> float:
        """What is left, as a fraction of what there was."""
        return self.after / self.before if self.before else 1.0


def saving(before: int, value: Any, claimed: int) -> Saving:
    """The saving from `before` bytes to what `value` holds now, of which `claimed` bytes are said to be left.

    Raises EngineError where the distinct storages hold more than that: a view keeps all of its memory alive, and codes
    beside the tensors they were made from save nothing.
    """
    after = storage_bytes(value)
    if after > claimed:
        raise EngineError(
            f"{claimed:,} bytes should be left of {before:,}, the storages hold {after:,}: the saving is not there"
        )
    return Saving(before, after)
