"""Layer types of configs that do not spell them out, and defaults of keys that they leave out.

Invariant: for the model types listed here a config as published is read exactly as transformers 5.24 resolves it
(`configuration_*.py` of each family; tests compare the two). Any other type is read as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from compaction.errors import InvalidInput
from compaction.kv.geometry.fields import Config, optional, positive, text_config

__all__ = ["knows", "layer_names", "with_defaults"]

_COUNT = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_GEMMA3 = {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "falcon": {"multi_query": True},
    "gpt_bigcode": {"multi_query": True},
    "gemma2": {"sliding_window": 4096, "head_dim": 256},
    "gemma3_text": {"sliding_window": 4096, "hidden_size": 2304, **_GEMMA3},
    "gemma3n_text": {"sliding_window": 512},
    "cohere2": {"sliding_window": 4096},
    "gpt_oss": {"sliding_window": 128, "head_dim": 64, "num_key_value_heads": 8},
    "olmo3": {"sliding_window": 4096},
    "llama4_text": {"attention_chunk_size": 8192, "head_dim": 128, "num_key_value_heads": 8},
    "qwen3": {"head_dim": 128},
    "qwen3_next": {
        "head_dim": 256,
        "num_key_value_heads": 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    "lfm2": {"conv_L_cache": 3},
    "jamba": {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
    "bamba": {"mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_groups": 1},
    "mamba": {"state_size": 16, "conv_kernel": 4, "expand": 2},
    "falcon_mamba": {"state_size": 16, "conv_kernel": 4, "expand": 2},
    "mamba2": {"state_size": 128, "conv_kernel": 4, "expand": 2, "n_groups": 8},
}
# Types whose configs need no reading between the lines: every key that matters is written out.
_PLAIN = {
    *("llama", "mistral", "mixtral", "gemma", "gpt2", "gpt_neox", "gptj", "gpt_neo", "bloom", "mpt", "opt", "codegen"),
    *("phi", "phi3", "cohere", "olmo", "olmo2", "olmoe", "starcoder2", "stablelm", "granite", "granitemoe", "helium"),
    *("deepseek_v2", "deepseek_v3", "minicpm3", "persimmon"),
}


def knows(config: Config) -> bool:
    """Whether configs of this model type can be read without transformers to complete them."""
    kind = text_config(config).get("model_type")
    return isinstance(kind, str) and (kind in _PLAIN or kind in _DEFAULTS or kind in _IMPLIED)


def with_defaults(config: Config) -> Config:
    """The config with the keys its family leaves out; a key set to null counts as left out."""
    defaults = _DEFAULTS.get(str(config.get("model_type")), {})
    return {**config, **{key: value for key, value in defaults.items() if config.get(key) is None}}


def layer_names(config: Config) -> list[str]:
    """The type of each layer, in the words of configs.

    Raises InvalidInput where the list and the number of layers disagree.
    """
    for key in ("layer_types", "layers_block_type"):
        names = config.get(key)
        if names is None or isinstance(names, str):
            continue
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise InvalidInput(f"config {key} is no list of names")
        count = optional(config, *_COUNT)
        if not names or count not in (None, len(names)):
            raise InvalidInput(f"config {key} names {len(names)} layers, but num_hidden_layers is {count}")
        return list(names)
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return _nemotron(pattern)
    count = positive(config, *_COUNT)
    implied = _IMPLIED.get(str(config.get("model_type")), _windows)
    return implied(config, count)


def _windows(config: Config, count: int) -> list[str]:
    """Without a list: a window, else a chunk, holds for all layers (`get_layer_types_and_kwargs`)."""
    if config.get("use_sliding_window") is not False and config.get("sliding_window"):
        name = "sliding_attention"
    else:
        name = "chunked_attention" if config.get("attention_chunk_size") else "full_attention"
    return [name] * count


def _all(name: str) -> Callable[[Config, int], list[str]]:
    return lambda _, count: [name] * count


def _every(default: int, *keys: str, most: str = "sliding_attention") -> Callable[[Config, int], list[str]]:
    """One full layer after so many others; 0 or no window: all full."""

    def names(config: Config, count: int) -> list[str]:
        every = optional(config, *keys) or default
        if most == "sliding_attention" and not config.get("sliding_window"):
            return ["full_attention"] * count
        return [most if (index + 1) % every else "full_attention" for index in range(count)]

    return names


def _qwen(config: Config, count: int) -> list[str]:
    """A window is named even where it is not used; where it is, the first layers keep everything."""
    if not config.get("use_sliding_window") or not config.get("sliding_window"):
        return ["full_attention"] * count
    first = config.get("max_window_layers")
    first = 28 if first is None else int(first)
    return ["sliding_attention" if index >= first else "full_attention" for index in range(count)]


def _gpt_oss(config: Config, count: int) -> list[str]:
    del config
    return ["full_attention" if index % 2 else "sliding_attention" for index in range(count)]


def _llama4(config: Config, count: int) -> list[str]:
    """Layers with rotary positions see a chunk, the others everything."""
    rotary = config.get("no_rope_layers") or [(index + 1) % 4 for index in range(count)]
    return ["chunked_attention" if flag else "full_attention" for flag in rotary]


def _lfm2(config: Config, count: int) -> list[str]:
    full = config.get("full_attn_idxs")
    return ["full_attention" if full is None or index in full else "conv" for index in range(count)]


def _jamba(config: Config, count: int) -> list[str]:
    period, offset = optional(config, "attn_layer_period") or 8, config.get("attn_layer_offset")
    offset = 4 if offset is None else offset
    return ["full_attention" if index % period == offset else "linear_attention" for index in range(count)]


def _bamba(config: Config, count: int) -> list[str]:
    full = config.get("attn_layer_indices") or ()
    return ["full_attention" if index in full else "linear_attention" for index in range(count)]


def _recurrent_gemma(config: Config, count: int) -> list[str]:
    blocks = config.get("block_types") or ["recurrent", "recurrent", "attention"]
    names = {"recurrent": "recurrent", "attention": "sliding_attention"}
    return [names.get(blocks[index % len(blocks)], "unknown") for index in range(count)]


def _kimi(config: Config, count: int) -> list[str]:
    """The checkpoint counts layers from 1."""
    full = (config.get("linear_attn_config") or {}).get("full_attn_layers")
    if full is None:
        return ["full_attention" if index and index % 4 == 0 else "linear_attention" for index in range(count)]
    return ["full_attention" if index + 1 in full else "linear_attention" for index in range(count)]


def _nemotron(pattern: str) -> list[str]:
    letters = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    if unknown := set(pattern) - set(letters):
        raise InvalidInput(f"config hybrid_override_pattern has {min(unknown)!r}: known are {' '.join(letters)}")
    return [letters[letter] for letter in pattern]


_IMPLIED: dict[str, Callable[[Config, int], list[str]]] = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), _qwen),
    "gemma2": _every(2),
    "gemma3n_text": _every(5),
    "granitemoehybrid": _all("linear_attention"),
    **dict.fromkeys(("gemma3", "gemma3_text"), _every(6, "sliding_window_pattern", "_sliding_window_pattern")),
    "cohere2": _every(4, "sliding_window_pattern", "_sliding_window_pattern"),
    "olmo3": _every(4),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text"), _every(4, "full_attention_interval", most="linear_attention")),
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _lfm2),
    "jamba": _jamba,
    "bamba": _bamba,
    "recurrent_gemma": _recurrent_gemma,
    "kimi_linear": _kimi,
    "falcon_h1": _all("hybrid"),
    **dict.fromkeys(("rwkv", "xlstm"), _all("recurrent")),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _all("linear_attention")),
}
