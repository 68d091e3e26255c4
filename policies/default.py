"""What happens where nobody chose a policy.

Invariant: no model call, and the gentlest first.
"""

from __future__ import annotations

from compaction.policies.clamp_oversized import ClampOversized
from compaction.policies.clear_tool_results import ClearToolResults
from compaction.policies.pipeline import Pipeline
from compaction.policies.sliding_window import SlidingWindow

__all__ = ["default_policy"]


def default_policy() -> Pipeline:
    """What happens where nobody chose: clamp what is oversized, clear old tool results, then keep beginning and tail.

    From the gentlest to the hardest, without a model call. A message that fills a quarter of the room keeps head and
    tail, where the window would have to drop it whole; old tool results are most of an agent's tokens and can be had
    again by calling the tool; only then whole messages go, and the task at the beginning goes last. No summary by
    default: it costs a model call, and facts often do not survive it.
    """
    return Pipeline((ClampOversized(), ClearToolResults(), SlidingWindow()))
