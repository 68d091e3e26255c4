"""What it costs to keep a conversation's cache on a GPU.

Invariant: a GPU is paid for by the hour, whole; what its weights leave is shared among conversations by bytes. So a
conversation of B bytes costs price × B / (memory - weights) per hour that it stays resident, and floor((memory -
weights) / B) of its kind fit. Compute, activations and fragmentation are not in it: the figure is a lower bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from compaction.errors import InvalidInput

__all__ = ["Gpu"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU (or several as one): US dollars per hour, bytes of memory, bytes that weights take.

    Raises InvalidInput for a price or a size that cannot be.
    """

    usd_per_hour: float
    memory: int
    weights: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.usd_per_hour) or self.usd_per_hour < 0:
            raise InvalidInput(f"--price is {self.usd_per_hour}: give US dollars per GPU-hour, such as 2.50")
        if self.memory < 1:
            raise InvalidInput(f"--gpu-memory is {self.memory} bytes: give the GPU's memory, such as 80GiB")
        if not 0 <= self.weights < self.memory:
            raise InvalidInput(
                f"--weights {self.weights:,} bytes leave nothing of {self.memory:,} bytes of GPU memory for caches: "
                "give the memory of all the GPUs that share the weights"
            )

    @property
    def free(self) -> int:
        """Bytes for caches."""
        return self.memory - self.weights

    def to_json(self, conversation_bytes: int) -> dict[str, Any]:
        """`usd_per_hour` of one conversation, how many fit, and what it was computed from."""
        return {
            "usd_per_hour": self.usd_per_hour * conversation_bytes / self.free,
            "conversations": self.free // conversation_bytes if conversation_bytes else None,
            "price_per_gpu_hour": self.usd_per_hour,
            "gpu_memory": self.memory,
            "weights": self.weights,
        }
