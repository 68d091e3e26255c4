"""A cache for encoding a few tokens behind a prefix that another cache holds, without copying the prefix.

Invariant: a full layer keeps a view of the prefix and stores the new tokens only; prefix and new tokens stand side by
side in one tensor for as long as one layer's attention runs. Other layers are transformers' own: windows are short.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

__all__ = ["AsideCache", "AsideLayer"]


class AsideLayer(DynamicLayer):
    """A full-attention layer. The first update shows it the prefix; `keys` and `values` are those of later ones."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self._prefix: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states `[batch, kv_heads, n, head_dim]`; returns prefix and all new ones, in one tensor each."""
        if self._prefix is None:
            self.lazy_initialization(key_states, value_states)
            self._prefix = key_states, value_states
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            return self._prefix
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        return torch.cat([self._prefix[0], self.keys], dim=-2), torch.cat([self._prefix[1], self.values], dim=-2)

    def get_seq_length(self) -> int:
        """Tokens of prefix and new ones."""
        return 0 if self._prefix is None else int(self._prefix[0].shape[-2] + self.keys.shape[-2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that `update` will return for `query_length` new tokens, from position 0."""
        return self.get_seq_length() + query_length, 0


class AsideCache(Cache):
    """Layers of the kinds a config names; full ones are `AsideLayer`."""

    def __init__(self, config: Any) -> None:
        layers = DynamicCache(config=config).layers
        super().__init__(layers=[AsideLayer() if type(layer) is DynamicLayer else layer for layer in layers])
