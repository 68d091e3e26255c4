"""Bytes of KV cache by architecture, computed from a model's config alone.

Invariant: plain mappings in, integers out: no torch, no transformers, nothing imported but errors. What `total` says
for a length is what transformers' `DynamicCache(config=…)` holds after that many tokens of one conversation (batch 1),
provided that no tensor is a view of a larger one. Formulas per token and layer, in elements: 2·heads·dim (MHA, GQA,
MQA); rank + rotary dim (MLA as transformers >= 5.15 stores it, plus the indexer's keys where there is one); a window of
W keeps the last W - 1 tokens; a layer that reuses another's cache, or has none, adds nothing; a recurrent or
convolutional layer holds a state that does not grow.
"""

from compaction.kv.geometry.families import knows
from compaction.kv.geometry.layers import LayerGeometry, LayerKind
from compaction.kv.geometry.model import KVGeometry

__all__ = ["KVGeometry", "LayerGeometry", "LayerKind", "knows"]
