"""Counting tokens of the rendered request: exactly with a model's template, else with a labelled estimate.

Importing this package loads neither transformers nor tiktoken nor tokenizers.
"""

from __future__ import annotations

from compaction.errors import CounterUnavailable
from compaction.ports import Counter
from compaction.tokens.blobs import blob_tokens
from compaction.tokens.counter import TemplateCounter
from compaction.tokens.encoding import TiktokenCounter
from compaction.tokens.estimate import EstimateCounter
from compaction.tokens.folding import fold
from compaction.tokens.profile import TemplateProfile
from compaction.tokens.template import ChatTemplate

__all__ = [
    "ChatTemplate",
    "EstimateCounter",
    "TemplateCounter",
    "TemplateProfile",
    "TiktokenCounter",
    "blob_tokens",
    "default_counter",
    "fold",
]


def default_counter() -> Counter:
    """tiktoken's cl100k_base where its vocabulary is at hand without a download, else the labelled estimate."""
    try:
        return TiktokenCounter(download=False)
    except CounterUnavailable:
        return EstimateCounter()
