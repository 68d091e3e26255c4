"""Bytes of KV cache by architecture, computed from a model's config alone.

Invariant: plain mappings in, integers out: no torch, no transformers. What `bytes` says for a length is what
transformers' `DynamicCache` holds after that many tokens (batch 1), fixed recurrent and convolution states aside.
Formulas: 2·heads·dim elements a token and layer (MHA, GQA, MQA); rank + rotary dim (MLA, as transformers >= 5.15 stores
it); a sliding window of W keeps the last W - 1 tokens; a layer that reuses another's cache, or has none, adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from compaction.errors import InvalidInput

__all__ = ["KVGeometry", "LayerGeometry", "LayerKind"]

LayerKind = Literal["full", "sliding", "latent", "shared", "state"]

_SLIDING = {"sliding_attention", "hybrid_sliding", "reference_sliding_attention", "chunked_attention", "sliding"}
_STATE = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "ssm", "moe", "mlp", "rwkv"}
_FULL = {"full_attention", "attention", "hybrid", "global", "full"}
_STATE_FAMILIES = {"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"}


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer: bytes each kept token adds, and how many tokens it keeps at most (None: all)."""

    kind: LayerKind
    bytes_per_token: int
    keeps: int | None = None

    def bytes(self, tokens: int) -> int:
        """Bytes held after so many tokens."""
        return self.bytes_per_token * (tokens if self.keeps is None else min(tokens, self.keeps))


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What a conversation's KV cache weighs.

    `family` is "MHA", "GQA", "MQA", "MLA" or "none", with "+sliding" and "+state" where some layers are of that kind.
    """

    family: str
    layers: tuple[LayerGeometry, ...]
    element_bytes: float

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token adds while no window is full: the bound a budget in bytes divides by."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def bytes(self, tokens: int) -> int:
        """Bytes after so many tokens, windows taken into account; fixed states of linear layers are not counted."""
        return sum(layer.bytes(tokens) for layer in self.layers)

    def to_json(self, tokens: int) -> dict[str, Any]:
        """`family, bytes_per_token, tokens, bytes, layers` as plain JSON values."""
        return {
            "family": self.family,
            "bytes_per_token": self.bytes_per_token,
            "tokens": tokens,
            "bytes": self.bytes(tokens),
            "layers": len(self.layers),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], element_bytes: float = 2) -> KVGeometry:
        """The geometry of a model.

        Args:
            config: the model's `config.json` as a mapping; a multimodal one is read at its `text_config`.
            element_bytes: bytes of one stored element: 4 for float32, 2 for bfloat16 and float16, 1 for 8 bits.

        Raises InvalidInput with the key that is missing or makes no sense.
        """
        if element_bytes <= 0:
            raise InvalidInput(
                f"element_bytes is {element_bytes}: give the bytes of one element, such as 2 for bfloat16"
            )
        text = _text_config(config)
        count = _positive(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
        kinds = _kinds(text, count)
        heads = [] if all(kind in {"state", "shared"} for kind, _ in kinds) else _kv_heads(text, count)
        layers = tuple(
            LayerGeometry(kind, int(_elements(text, kind, heads[index] if heads else 0) * element_bytes), keeps)
            for index, (kind, keeps) in enumerate(kinds)
        )
        return cls(_family(text, kinds, heads), layers, element_bytes)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("text_config", "language_config", "llm_config", "decoder"):
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            return inner
    return config


def _positive(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 1:
                raise InvalidInput(f"config {name} is {value}: it must be at least 1")
            return value
    raise InvalidInput(f"config has no {names[0]} (nor {', '.join(names[1:])}): is it a model's config.json?")


def _query_heads(config: Mapping[str, Any]) -> int:
    return _positive(config, "num_attention_heads", "n_head", "n_heads", "num_heads")


def _kv_heads(config: Mapping[str, Any], count: int) -> list[int]:
    """Key/value heads of each layer."""
    if _is_latent(config):
        return [1] * count
    for name in ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"):
        value = config.get(name)
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == count:
            return [int(item) for item in value]
        if isinstance(value, int) and value > 0 and not _ignores_kv_heads(config):
            return [value] * count
    if config.get("multi_query") is True:
        return [1] * count
    return [_query_heads(config)] * count


def _ignores_kv_heads(config: Mapping[str, Any]) -> bool:
    """Falcon's first architecture has one key/value head, whatever `num_kv_heads` says."""
    return config.get("model_type") == "falcon" and not config.get("new_decoder_architecture")


def _is_latent(config: Mapping[str, Any]) -> bool:
    return bool(config.get("kv_lora_rank"))


def _head_dim(config: Mapping[str, Any]) -> int:
    for name in ("head_dim", "kv_channels", "d_kv"):
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return _positive(config, "hidden_size", "n_embd", "d_model") // _query_heads(config)


def _elements(config: Mapping[str, Any], kind: LayerKind, heads: int) -> int:
    """Elements one token adds to a layer."""
    if kind in {"state", "shared"}:
        return 0
    if kind == "latent":
        rotary = _positive(config, "qk_rope_head_dim")
        return int(config["kv_lora_rank"]) + rotary + int(config.get("index_head_dim") or 0)
    return 2 * heads * _head_dim(config)


def _kinds(config: Mapping[str, Any], count: int) -> list[tuple[LayerKind, int | None]]:
    """Kind of each layer, and how many tokens it keeps."""
    if config.get("model_type") in _STATE_FAMILIES:
        return [("state", None)] * count
    names = config.get("layer_types")
    if isinstance(names, Sequence) and not isinstance(names, str):
        if len(names) != count:
            raise InvalidInput(f"config layer_types names {len(names)} layers, but there are {count}")
        kinds = [_kind(config, str(name)) for name in names]
    else:
        kinds = [_kind(config, name) for name in _implied_types(config, count)]
    shared = config.get("num_kv_shared_layers") or 0
    return [("shared", None) if index >= count - shared else kind for index, kind in enumerate(kinds)]


def _kind(config: Mapping[str, Any], name: str) -> tuple[LayerKind, int | None]:
    if name in _STATE:
        return "state", None
    if name in _SLIDING:
        key = "attention_chunk_size" if name == "chunked_attention" else "sliding_window"
        return "sliding", _positive(config, key) - 1
    if name in _FULL:
        return ("latent" if _is_latent(config) else "full"), None
    raise InvalidInput(f"config layer_types has {name!r}, whose cache is not known here")


def _implied_types(config: Mapping[str, Any], count: int) -> list[str]:
    """Layer types of configs that do not spell them out, as transformers resolves them."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return ["full_attention"] * count
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    pattern = pattern or {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}.get(str(config.get("model_type")))
    if isinstance(pattern, int):
        return ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(count)]
    first = int(config.get("max_window_layers") or 0) if "use_sliding_window" in config else 0
    return ["sliding_attention" if index >= first else "full_attention" for index in range(count)]


def _family(config: Mapping[str, Any], kinds: Sequence[tuple[LayerKind, int | None]], heads: Sequence[int]) -> str:
    present = {kind for kind, _ in kinds}
    if "latent" in present:
        base = "MLA"
    elif not present & {"full", "sliding"}:
        base = "none"
    elif max(heads) == 1 and _query_heads(config) > 1:
        base = "MQA"
    else:
        base = "MHA" if max(heads) == _query_heads(config) else "GQA"
    return base + "".join(f"+{kind}" for kind in ("sliding", "state") if kind in present)
