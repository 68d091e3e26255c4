"""One layer of a cache: what kind it is, what a token adds, how many tokens it keeps, what state it carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from compaction.errors import InvalidInput
from compaction.kv.geometry.families import layer_names
from compaction.kv.geometry.fields import Config, head_dim, of_layer, optional, positive, query_heads
from compaction.kv.geometry.states import state_of

__all__ = ["LayerGeometry", "LayerKind", "Width", "kv_heads", "read_layers"]

LayerKind = Literal["full", "sliding", "chunked", "latent", "hybrid", "state", "shared", "none"]

_SLIDING = {"sliding_attention", "hybrid_sliding", "reference_sliding_attention", "sliding"}
_FULL = {"full_attention", "attention", "global", "full"}
_STATE = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "ssm", "rwkv"}
_INDEXED = {"indexed_attention", "deepseek_sparse_attention"}
_HYBRID = {"hybrid", "hybrid_sliding"}
_NONE = {"moe", "mlp", "dummy"}


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer: bytes each kept token adds, how many tokens it keeps at most (None: all), bytes it holds anyway.

    `state_bytes` is None where the layer carries a state whose size is not known.
    """

    kind: LayerKind
    bytes_per_token: int
    keeps: int | None = None
    state_bytes: int | None = 0

    def bytes(self, tokens: int) -> int:
        """Bytes of keys and values held after so many tokens."""
        return self.bytes_per_token * (tokens if self.keeps is None else min(tokens, self.keeps))

    def total(self, tokens: int) -> int:
        """The same with the fixed state, where it is known; a conversation without a token has none yet."""
        return self.bytes(tokens) + ((self.state_bytes or 0) if tokens else 0)


@dataclass(frozen=True, slots=True)
class Width:
    """Bytes of one stored element: of keys, of values, and of the model's own number format (states, indexer keys).

    `latent` tells how MLA is kept: compressed, or expanded to every head as transformers <= 5.14 does.
    """

    keys: float
    values: float
    latent: bool = True


def read_layers(config: Config, width: Width) -> tuple[LayerGeometry, ...]:
    """The layers of a language model's config."""
    names = layer_names(config)
    shared = config.get("num_kv_shared_layers") or 0
    if not isinstance(shared, int) or not 0 <= shared <= len(names):
        raise InvalidInput(f"config num_kv_shared_layers is {shared!r}, but there are {len(names)} layers")
    own = len(names) - shared
    layers = [_layer(of_layer(config, index), name, index, len(names), width) for index, name in enumerate(names[:own])]
    return (*layers, *[LayerGeometry("shared", 0)] * shared)


def _layer(config: Config, name: str, index: int, count: int, width: Width) -> LayerGeometry:
    if name in _NONE:
        return LayerGeometry("none", 0)
    state: int | None = 0
    if name in _STATE | _HYBRID:
        known = state_of(config, name)
        state = None if known is None else known.bytes(max(width.keys, width.values))
    if name in _STATE:
        return LayerGeometry("state", 0, state_bytes=state)
    kind, keeps = _attention(config, name)
    latent = bool(config.get("kv_lora_rank")) and kind == "full"
    if latent:
        kind, per_token = "latent", _latent(config, name, index, width)
    elif name in _INDEXED:
        raise InvalidInput(f"config layer_types has {name!r} without kv_lora_rank, whose cache is not known here")
    else:
        per_token = _heads_and_dims(config, kind, index, count, width)
    return LayerGeometry("hybrid" if name in _HYBRID else kind, per_token, keeps, state)


def _attention(config: Config, name: str) -> tuple[LayerKind, int | None]:
    if name in _SLIDING:
        # A window of 1 cuts nothing: transformers keeps the slice [-0:], which is all.
        return "sliding", positive(config, "sliding_window", "attention_window_size") - 1 or None
    if name == "chunked_attention":
        return "chunked", positive(config, "attention_chunk_size") - 1 or None
    if name in _FULL | _INDEXED | _HYBRID:
        return "full", None
    raise InvalidInput(
        f"config layer_types has {name!r}, whose cache is not known here: known are "
        f"{', '.join(sorted(_FULL | _SLIDING | _STATE | _HYBRID | _NONE))}"
    )


def _latent(config: Config, name: str, index: int, width: Width) -> int:
    """MLA (arXiv:2405.04434): the latent lies where keys do, the rotary part where values do.

    Both make up keys, and values are computed from the latent: all of it has the width of keys.
    """
    rank, rotary = positive(config, "kv_lora_rank"), positive(config, "qk_rope_head_dim")
    if width.latent:
        size = (rank + rotary) * width.keys
    else:
        heads = query_heads(config)
        size = heads * (positive(config, "qk_nope_head_dim") + rotary) * width.keys
        size += heads * positive(config, "v_head_dim") * width.values
    return _bytes(size + _indexer(config, name, index) * max(2, width.keys))


def _indexer(config: Config, name: str, index: int) -> int:
    """Keys of the sparse attention's indexer; a layer may use the selection of an earlier one."""
    if name not in _INDEXED:
        return 0
    types = config.get("indexer_types")
    if isinstance(types, Sequence) and index < len(types) and types[index] == "shared":
        return 0
    return positive(config, "index_head_dim")


def _heads_and_dims(config: Config, kind: LayerKind, index: int, count: int, width: Width) -> int:
    heads, dim = kv_heads(config, index, count), head_dim(config)
    if kind == "full" and optional(config, "global_head_dim"):  # Gemma 4: wider heads where everything is seen
        dim = positive(config, "global_head_dim")
        if config.get("attention_k_eq_v"):
            heads = optional(config, "num_global_key_value_heads") or heads
    return _bytes(heads * dim * (width.keys + width.values))


def kv_heads(config: Config, index: int, count: int) -> int:
    """Key/value heads of a layer, as they are stored."""
    queries = query_heads(config)
    if config.get("model_type") == "falcon":
        # Falcon's first architecture has one head whatever `num_kv_heads` says; its second stores them expanded.
        return 1 if config.get("multi_query") and not config.get("new_decoder_architecture") else queries
    if config.get("multi_query") is True:
        return 1
    nested = config.get("attn_config")
    given = (nested if isinstance(nested, dict) else {}).get("kv_n_heads")
    for name in ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads"):
        value = config.get(name) if name != "kv_n_heads" else given
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == count:
            value = value[index]
        if value is not None:
            return _checked(name, value, queries)
    return queries


def _checked(name: str, value: object, queries: int) -> int:
    heads = positive({name: value}, name)
    if queries % heads:
        raise InvalidInput(f"config {name} is {heads}: it must divide the {queries} attention heads")
    return heads


def _bytes(size: float) -> int:
    """Whole bytes, rounded up: a layer's packed values fill bytes."""
    return -int(-size // 1)
