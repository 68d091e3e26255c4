"""What leaves the device: tensors by name, and what belongs to them as plain JSON values.

Invariant: a parcel says nothing of where it lies; its tensors may be read from a file only when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Parcel"]


@dataclass(frozen=True, slots=True)
class Parcel:
    """Tensors with storages of their own, and what `meta` says of them."""

    tensors: Mapping[str, torch.Tensor]
    meta: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
