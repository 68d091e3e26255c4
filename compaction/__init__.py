"""Context compaction that never loses a word silently.

The public names are loaded when first used: importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compaction.budget import Budget
    from compaction.kv.residency.pool import Pool
    from compaction.manager import Compacted, SessionManager, compact
    from compaction.prepared import Prepared, Reply
    from compaction.session import Session

__all__ = ["Budget", "Compacted", "Pool", "Prepared", "Reply", "Session", "SessionManager", "compact"]

_HOMES = {
    "Budget": "compaction.budget",
    "Compacted": "compaction.manager",
    "Pool": "compaction.kv.residency.pool",
    "Prepared": "compaction.prepared",
    "Reply": "compaction.prepared",
    "Session": "compaction.session",
    "SessionManager": "compaction.manager",
    "compact": "compaction.manager",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'compaction' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
