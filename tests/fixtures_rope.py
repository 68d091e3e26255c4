"""Tiny random models of many architectures, by how position enters their caches. No pytest here.

Invariant: equal names give equal weights; what the probe should find stands beside each, written down by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = ["ARCHITECTURES", "Architecture", "architecture_model"]

_BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA = {**_BASE, "num_key_value_heads": 2, "head_dim": 16}
_KV2 = {**_BASE, "num_key_value_heads": 2}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MLA = {
    **_BASE,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_DEEPSEEK = {**_MLA, "first_k_dense_replace": 4}
_GPTJ = {
    "vocab_size": 64,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 1024,
    "rotary_dim": 8,
    "initializer_range": 0.1,
}
_PLAIN = {key: _BASE[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "initializer_range")}
_GEMMA3N = {
    **_GQA,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "activation_sparsity_pattern": None,
    "altup_num_inputs": 2,
}


def _scaled(**parameters: Any) -> dict[str, Any]:
    return {**_GQA, "rope_parameters": {"rope_theta": 10_000.0, **parameters}}


@dataclass(frozen=True)
class Architecture:
    """A model and what the probe should find, per layer: "where/layout/rotary channels", or the kind of layer."""

    causal: str
    config: str
    options: dict[str, Any]
    layers: tuple[str, ...]
    by_slot: bool = False


def _is(name: str, options: dict[str, Any], *layers: str, config: str = "", by_slot: bool = False) -> Architecture:
    causal = name if name.endswith("Model") else f"{name}ForCausalLM"
    return Architecture(causal, config or f"{name.removesuffix('LMHeadModel')}Config", options, layers, by_slot)


_ALL = ("keys/half/16",) * 4
_PAIRS = ("keys/interleaved/16",) * 4
_STATE = "state"

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _is("Llama", _GQA, *_ALL),
    "llama3_scaling": _is(
        "Llama",
        _scaled(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        *_ALL,
    ),
    "linear_scaling": _is("Llama", _scaled(rope_type="linear", factor=4.0), *_ALL),
    "yarn": _is("Llama", _scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=256), *_ALL),
    "dynamic_ntk": _is("Llama", _scaled(rope_type="dynamic", factor=4.0, original_max_position_embeddings=512), *_ALL),
    "longrope": _is(
        "Phi3",
        {
            **_scaled(
                rope_type="longrope",
                short_factor=[1 + i / 8 for i in range(8)],
                long_factor=[2.0 + i for i in range(8)],
                original_max_position_embeddings=512,
            ),
            "original_max_position_embeddings": 512,
        },
        *_ALL,
    ),
    "qwen2": _is("Qwen2", {**_BASE, "num_key_value_heads": 1}, *_ALL),
    "qwen3": _is("Qwen3", _GQA, *_ALL),
    "gemma2": _is("Gemma2", {**_GQA, "sliding_window": 24, "query_pre_attn_scalar": 16}, *_ALL),
    "gemma3_dual_theta": _is(
        "Gemma3",
        {**_GQA, "sliding_window": 24, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
        *_ALL,
        config="Gemma3TextConfig",
    ),
    "gemma3n_shared_kv": _is("Gemma3n", _GEMMA3N, *_ALL[:2], "empty", "empty", config="Gemma3nTextConfig"),
    "phi_partial": _is("Phi", _BASE, *("keys/half/8",) * 4),
    "gpt_neox_partial": _is("GPTNeoX", {**_BASE, "rotary_pct": 0.5}, *("keys/half/8",) * 4),
    "stablelm_partial": _is("StableLm", _KV2, *("keys/half/4",) * 4),
    "nemotron_partial": _is("Nemotron", {**_GQA, "partial_rotary_factor": 0.5}, *("keys/half/8",) * 4),
    "glm4_partial_pairs": _is("Glm4", {**_GQA, "partial_rotary_factor": 0.5}, *("keys/interleaved/8",) * 4),
    "cohere_pairs": _is("Cohere", _KV2, *_PAIRS),
    "ernie_pairs": _is("Ernie4_5", _GQA, *_PAIRS),
    "gptj_no_buffer": _is("GPTJ", _GPTJ, *("keys/interleaved/8",) * 3),
    "codegen_no_buffer": _is("CodeGen", {**_GPTJ, "n_ctx": 1024}, *("keys/interleaved/8",) * 3),
    "smollm3_nope": _is("SmolLM3", _KV2, *_ALL[:3], "unrotated"),
    "cohere2_nope": _is("Cohere2", {**_KV2, "sliding_window": 24}, *_PAIRS[:3], "unrotated"),
    "llama4_nope_pairs": _is(
        "Llama4",
        {
            **_GQA,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 64,
        },
        *_PAIRS[:3],
        "unrotated",
        config="Llama4TextConfig",
    ),
    "deepseek_v3_mla": _is("DeepseekV3", _DEEPSEEK, *("values/half/8",) * 4),
    "deepseek_v2_mla_pairs": _is(
        "DeepseekV2", {**_DEEPSEEK, "topk_method": "greedy", "n_group": 1}, *("values/interleaved/8",) * 4
    ),
    "deepseek_v32_indexer": _is(
        "DeepseekV32",
        {**_DEEPSEEK, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64},
        *("values/half/8 indexer_keys/half/8",) * 4,
    ),
    "minicpm3_mla": _is("MiniCPM3", _MLA, *("values/half/8",) * 4),
    "gpt_oss": _is("GptOss", {**_GQA, **_MOE, "sliding_window": 24}, *_ALL),
    "mixtral": _is("Mixtral", {**_GQA, **_MOE, "sliding_window": None}, *_ALL),
    "mistral": _is("Mistral", {**_GQA, "sliding_window": None}, *_ALL),
    "olmo2": _is("Olmo2", _KV2, *_ALL),
    "granite": _is("Granite", _KV2, *_ALL),
    "starcoder2": _is("Starcoder2", {**_KV2, "sliding_window": None}, *_ALL),
    "falcon": _is("Falcon", {**_PLAIN, "num_hidden_layers": 3}, *_ALL[:3]),
    "falcon_alibi": _is("Falcon", {**_PLAIN, "num_hidden_layers": 3, "alibi": True}, *("unrotated",) * 3, by_slot=True),
    "bloom_alibi": _is(
        "Bloom",
        {"vocab_size": 64, "hidden_size": 64, "n_layer": 3, "n_head": 4, "initializer_range": 0.1},
        *("unrotated",) * 3,
        by_slot=True,
    ),
    "mpt_alibi": _is(
        "Mpt",
        {"vocab_size": 64, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 1024, "initializer_range": 0.1},
        *("unrotated",) * 3,
        by_slot=True,
    ),
    "gpt2_learned": _is("GPT2LMHeadModel", {key: _GPTJ[key] for key in _GPTJ if key != "rotary_dim"}, *("fixed",) * 3),
    "opt_learned": _is(
        "OPT",
        {**_PLAIN, "num_hidden_layers": 3, "ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.1},
        *("fixed",) * 3,
    ),
    "mamba_state": _is("Mamba", {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2}, _STATE, _STATE),
    "lfm2_conv": _is(
        "Lfm2",
        {**_GQA, "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
        *(_STATE, "keys/half/16") * 2,
    ),
    "qwen3_next_linear": _is(
        "Qwen3Next",
        {
            **_GQA,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        *(_STATE, "keys/half/4") * 2,
    ),
}


@cache
def architecture_model(name: str) -> Any:
    """A random float32 model, always with the same weights."""
    import torch
    import transformers

    made = ARCHITECTURES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, made.causal)(getattr(transformers, made.config)(**made.options)).float().eval()
