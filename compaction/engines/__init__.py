"""Engines: what renders, counts, generates and holds the KV cache.

Invariant: importing this package loads neither torch nor transformers nor an HTTP stack; a name does so when it is
first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compaction.engines.sampling import Sampling
    from compaction.engines.transformers_engine import TransformersEngine

__all__ = ["Sampling", "TransformersEngine"]

_HOME = {
    "Sampling": "compaction.engines.sampling",
    "TransformersEngine": "compaction.engines.transformers_engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
