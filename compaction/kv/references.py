"""Facts about known models: the keys of their published configs that decide the weight of a KV cache.

Invariant: each entry holds nothing that its source does not say; the source is the config.json of the hub id it names,
or the transformers class whose documented defaults describe that model. Names are lower case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["REFERENCES", "Reference"]


@dataclass(frozen=True, slots=True)
class Reference:
    """A model's config, as far as its cache is concerned, and where it stands."""

    source: str
    config: Mapping[str, Any]


def _gpt2(source: str, layers: int, heads: int, width: int) -> Reference:
    return Reference(source, {"model_type": "gpt2", "n_layer": layers, "n_head": heads, "n_embd": width})


def _decoder(source: str, kind: str, layers: int, heads: int, kv: int, width: int, **more: Any) -> Reference:
    shape = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "hidden_size": width}
    return Reference(source, {"model_type": kind, **shape, **more})


def _deepseek(source: str, kind: str, layers: int, heads: int, width: int) -> Reference:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    return _decoder(source, kind, layers, heads, heads, width, **latent)


def _gemma3(source: str, layers: int, heads: int, kv: int, width: int, window: int, dim: int = 256) -> Reference:
    return _decoder(source, "gemma3_text", layers, heads, kv, width, head_dim=dim, sliding_window=window)


_JAMBA = {"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
_DELTA = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
_QWEN3_NEXT = {
    **{"head_dim": 256, "full_attention_interval": 4, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4},
    **_DELTA,
}
_LFM2 = {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3}
_FALCON = {"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True}
_MAMBA = {"num_hidden_layers": 64, "hidden_size": 2560, "state_size": 16, "conv_kernel": 4, "expand": 2}
_SCOUT = {"head_dim": 128, "attention_chunk_size": 8192}
_GEMMA3N = {"head_dim": 256, "sliding_window": 512, "num_kv_shared_layers": 15}

REFERENCES: dict[str, Reference] = {
    "gpt2": _gpt2("openai-community/gpt2", 12, 12, 768),
    "gpt2-xl": _gpt2("openai-community/gpt2-xl", 48, 25, 1600),
    "llama-2-7b": _decoder("meta-llama/Llama-2-7b-hf", "llama", 32, 32, 32, 4096),
    "llama-2-70b": _decoder("meta-llama/Llama-2-70b-hf", "llama", 80, 64, 8, 8192),
    "llama-3-8b": _decoder("meta-llama/Meta-Llama-3-8B", "llama", 32, 32, 8, 4096),
    "llama-3-70b": _decoder("meta-llama/Meta-Llama-3-70B", "llama", 80, 64, 8, 8192),
    "llama-3.2-1b": _decoder("meta-llama/Llama-3.2-1B", "llama", 16, 32, 8, 2048, head_dim=64),
    "llama-4-scout": _decoder("transformers.Llama4TextConfig defaults", "llama4_text", 48, 40, 8, 5120, **_SCOUT),
    "smollm2": _decoder("HuggingFaceTB/SmolLM2-135M-Instruct", "llama", 30, 9, 3, 576),
    "smollm2-360m": _decoder("HuggingFaceTB/SmolLM2-360M-Instruct", "llama", 32, 15, 5, 960),
    "mistral-7b": _decoder("mistralai/Mistral-7B-v0.1", "mistral", 32, 32, 8, 4096, sliding_window=4096),
    "qwen2.5-7b": _decoder("Qwen/Qwen2.5-7B-Instruct", "qwen2", 28, 28, 4, 3584),
    "qwen3-0.6b": _decoder("Qwen/Qwen3-0.6B", "qwen3", 28, 16, 8, 1024, head_dim=128),
    "qwen3-8b": _decoder("Qwen/Qwen3-8B", "qwen3", 36, 32, 8, 4096, head_dim=128),
    "qwen3-next-80b": _decoder("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next", 48, 16, 2, 2048, **_QWEN3_NEXT),
    "gemma-2-9b": _decoder("google/gemma-2-9b", "gemma2", 42, 16, 8, 3584, head_dim=256, sliding_window=4096),
    "gemma-3-270m": _gemma3("google/gemma-3-270m", 18, 4, 1, 640, 512),
    "gemma-3-1b": _gemma3("google/gemma-3-1b-it", 26, 4, 1, 1152, 512),
    "gemma-3-27b": _gemma3("google/gemma-3-27b-it", 62, 32, 16, 5376, 1024, dim=128),
    "gemma-3n-e4b": _decoder("transformers.Gemma3nTextConfig defaults", "gemma3n_text", 35, 8, 2, 2048, **_GEMMA3N),
    "gpt-oss-20b": _decoder("openai/gpt-oss-20b", "gpt_oss", 24, 64, 8, 2880, head_dim=64, sliding_window=128),
    "gpt-oss-120b": _decoder("openai/gpt-oss-120b", "gpt_oss", 36, 64, 8, 2880, head_dim=64, sliding_window=128),
    "deepseek-v2-lite": _deepseek("deepseek-ai/DeepSeek-V2-Lite", "deepseek_v2", 27, 16, 2048),
    "deepseek-v3": _deepseek("deepseek-ai/DeepSeek-V3", "deepseek_v3", 61, 128, 7168),
    "falcon-7b": Reference("tiiuae/falcon-7b", {"model_type": "falcon", **_FALCON}),
    "jamba-v0.1": _decoder("ai21labs/Jamba-v0.1", "jamba", 32, 32, 8, 4096, **_JAMBA),
    "lfm2-1.2b": _decoder("LiquidAI/LFM2-1.2B", "lfm2", 16, 32, 8, 2048, **_LFM2),
    "mamba-2.8b": Reference("state-spaces/mamba-2.8b-hf", {"model_type": "mamba", **_MAMBA}),
}
