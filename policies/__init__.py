"""The built-in policies.

Invariant: every policy is a frozen dataclass whose fields are its parameters, and a pure function from a view and a
target to a plan. Import them as `compaction.policies`.
"""

from __future__ import annotations

if __name__ != "compaction.policies":
    raise ImportError(f"import compaction.policies, not {__name__}: a folder of this name may be somebody else's")

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from compaction.policies import _registry
from compaction.policies._registry import Factory, parameters
from compaction.policies.clamp_oversized import ClampOversized
from compaction.policies.clear_tool_results import ClearToolResults
from compaction.policies.default import default_policy
from compaction.policies.fallback import Fallback
from compaction.policies.noop import NoOp
from compaction.policies.pipeline import Pipeline
from compaction.policies.quantize import Quantize
from compaction.policies.scored_eviction import ScoredEviction
from compaction.policies.sliding_window import SlidingWindow
from compaction.policies.summarize import Summarize
from compaction.policies.truncate import Truncate
from compaction.ports import Policy

__all__ = [
    "BUILTIN",
    "ClampOversized",
    "ClearToolResults",
    "Factory",
    "Fallback",
    "NoOp",
    "Pipeline",
    "Quantize",
    "ScoredEviction",
    "SlidingWindow",
    "Summarize",
    "Truncate",
    "default_policy",
    "make",
    "parameters",
]


BUILTIN: Mapping[str, Factory] = MappingProxyType(
    {
        "clamp_oversized": ClampOversized,
        "clear_tool_results": ClearToolResults,
        "default": default_policy,
        "fallback": Fallback,
        "noop": NoOp,
        "pipeline": Pipeline,
        "quantize": Quantize,
        "scored_eviction": ScoredEviction,
        "sliding_window": SlidingWindow,
        "summarize": Summarize,
        "truncate": Truncate,
    }
)
"""Factories by name. "default" is a name for users; the policy it makes calls itself "pipeline"."""


def make(name: str, params: Mapping[str, Any] | None = None, factories: Mapping[str, Factory] = BUILTIN) -> Policy:
    """The policy of that name with these parameters; `{"name": …, "params": …}` inside them becomes a policy too.

    Raises InvalidPolicy for an unknown name or parameter, or a value that cannot be.
    """
    return _registry.make(name, params, factories)
