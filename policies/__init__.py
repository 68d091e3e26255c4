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
from compaction.policies.fallback import Fallback
from compaction.policies.noop import NoOp
from compaction.policies.pipeline import Pipeline
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
    "SlidingWindow",
    "Summarize",
    "Truncate",
    "default_policy",
    "make",
    "parameters",
]


def default_policy() -> Pipeline:
    """What happens where nobody chose: clamp what is oversized, clear old tool results, then keep beginning and tail.

    From the gentlest to the hardest, without a model call. A message that fills a quarter of the room keeps head and
    tail, where the window would have to drop it whole; old tool results are most of an agent's tokens and can be had
    again by calling the tool; only then whole messages go, and the task at the beginning goes last. No summary by
    default: it costs a model call, and facts often do not survive it.
    """
    return Pipeline((ClampOversized(), ClearToolResults(), SlidingWindow()))


BUILTIN: Mapping[str, Factory] = MappingProxyType(
    {
        "clamp_oversized": ClampOversized,
        "clear_tool_results": ClearToolResults,
        "default": default_policy,
        "fallback": Fallback,
        "noop": NoOp,
        "pipeline": Pipeline,
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
