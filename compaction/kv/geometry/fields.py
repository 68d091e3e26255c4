"""Numbers out of a config, under the names that different model families give them.

Invariant: a value that is missing or makes no sense raises InvalidInput with its key; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compaction.errors import InvalidInput

__all__ = ["Config", "head_dim", "hidden_size", "of_layer", "optional", "positive", "query_heads", "text_config"]

Config = Mapping[str, Any]

_TEXT = ("text_config", "language_config", "llm_config", "decoder")
_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")


def text_config(config: Config) -> Config:
    """The language model's part: a multimodal config has it inside."""
    for key in _TEXT:
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            return inner
    return config


def of_layer(config: Config, index: int) -> Config:
    """The config as one layer sees it: some models override keys layer by layer (Gemma 4)."""
    overrides = config.get("per_layer_config")
    if not isinstance(overrides, Mapping):
        return config
    own = overrides.get(str(index), overrides.get(index))
    return {**config, **own} if isinstance(own, Mapping) else config


def optional(config: Config, *names: str) -> int | None:
    """The first of these keys that is set, at least 1; None where none is."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidInput(f"config {name} is {value!r}: it must be a whole number")
        if value < 1:
            raise InvalidInput(f"config {name} is {value}: it must be at least 1")
        return value
    return None


def positive(config: Config, name: str, *others: str) -> int:
    """The first of these keys that is set; one of them must be."""
    value = optional(config, name, *others)
    if value is None:
        also = f" (nor {', '.join(others)})" if others else ""
        raise InvalidInput(f"config has no {name}{also}: is it a language model's config.json? add the key")
    return value


def query_heads(config: Config) -> int:
    """Attention heads of a layer."""
    return positive(config, *_QUERY_HEADS)


def hidden_size(config: Config) -> int:
    """Width of the residual stream."""
    return positive(config, *_HIDDEN)


def head_dim(config: Config) -> int:
    """Elements of one head's key."""
    given = optional(config, "attention_head_dim", "head_dim", "kv_channels", "d_kv")
    if given is not None:
        return given
    width, heads = hidden_size(config), query_heads(config)
    if width % heads:
        raise InvalidInput(f"config hidden_size {width} is no multiple of its {heads} heads: add head_dim")
    return width // heads
