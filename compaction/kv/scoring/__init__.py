"""Which slots of a live cache matter: scores by head, and what is kept by them.

Invariant: every score is made without knowing what will be asked later. A cache that was scored is as it was.
"""

from compaction.kv.scoring.budgets import Pool, keep_masks, span_scores
from compaction.kv.scoring.expected import QueryStatistics, expected_attention, query_statistics
from compaction.kv.scoring.keys import Scores, keydiff, knorm, random_scores, streaming
from compaction.kv.scoring.repeat import Repeated, repeat_scores

__all__ = [
    "Pool",
    "QueryStatistics",
    "Repeated",
    "Scores",
    "expected_attention",
    "keep_masks",
    "keydiff",
    "knorm",
    "query_statistics",
    "random_scores",
    "repeat_scores",
    "span_scores",
    "streaming",
]
