"""Tiny random models of many architectures: enough config to be built in milliseconds, one entry for each cache shape.

Invariant: windows and chunks are 12 tokens, so that 27 tokens are beyond them and 5 are not. No pytest here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

WINDOW = 12
_BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA = {**_BASE, "num_key_value_heads": 2}
_WIDE = {**_GQA, "head_dim": 16}
_SLIDING = {**_WIDE, "sliding_window": WINDOW}
_MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 4,
    "n_shared_experts": 1,
}
_MLA = {
    **_BASE,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    **_MOE,
}
_INDEXED = {**_MLA, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "vocab_size": 64}
_FALCON = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64}
_ALTERNATING = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
_PER_LAYER_INPUT = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
_GEMMA4 = {"global_head_dim": 32, "num_global_key_value_heads": 1, **_PER_LAYER_INPUT}

# name: model type, options of its config
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _WIDE),
    "mistral, sliding": ("mistral", _SLIDING),
    "mixtral, sliding": ("mixtral", {**_SLIDING, **_MOE}),
    "qwen2, MQA": ("qwen2", {**_BASE, "num_key_value_heads": 1}),
    "qwen2, two sliding": ("qwen2", {**_SLIDING, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen3": ("qwen3", _WIDE),
    "qwen3 moe": ("qwen3_moe", {**_WIDE, **_MOE}),
    "gemma": ("gemma", _WIDE),
    "gemma2, alternating": ("gemma2", _SLIDING),
    "gemma3, hybrid": ("gemma3_text", {**_SLIDING, "sliding_window_pattern": 2}),
    "gemma3n, shared": (
        "gemma3n_text",
        {**_SLIDING, **_ALTERNATING, **_PER_LAYER_INPUT, "num_kv_shared_layers": 2, "laurel_rank": 8},
    ),
    "gemma4, shared": ("gemma4_text", {**_SLIDING, **_ALTERNATING, **_GEMMA4, "num_kv_shared_layers": 2}),
    "gemma4, keys are values": (
        "gemma4_text",
        {**_SLIDING, **_ALTERNATING, **_GEMMA4, "num_kv_shared_layers": 0, "attention_k_eq_v": True},
    ),
    "gpt2": ("gpt2", _GPT2),
    "gpt bigcode, MQA": ("gpt_bigcode", _GPT2),
    "gpt neox": ("gpt_neox", _BASE),
    "gpt-j": ("gptj", {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "vocab_size": 64}),
    "bloom": ("bloom", {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 64}),
    "mpt": ("mpt", {"d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 64, "max_seq_len": 256}),
    "phi": ("phi", _GQA),
    "phi3, sliding": ("phi3", {**_GQA, "sliding_window": WINDOW}),
    "falcon, MQA": ("falcon", _FALCON),
    "falcon, MHA": ("falcon", {**_FALCON, "multi_query": False}),
    "falcon, new": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "cohere": ("cohere", _GQA),
    "cohere2, hybrid": ("cohere2", _SLIDING),
    "olmo2": ("olmo2", _GQA),
    "olmo3, hybrid": ("olmo3", _SLIDING),
    "starcoder2, sliding": ("starcoder2", {**_GQA, "sliding_window": WINDOW}),
    "stablelm": ("stablelm", _GQA),
    "granite": ("granite", _GQA),
    "smollm3": ("smollm3", _WIDE),
    "glm4": ("glm4", _WIDE),
    "deepseek v2, MLA": ("deepseek_v2", _MLA),
    "deepseek v3, MLA": ("deepseek_v3", _MLA),
    "deepseek v3.2, MLA indexed": ("deepseek_v32", _INDEXED),
    "glm moe, MLA indexed": ("glm_moe_dsa", _INDEXED),
    "minicpm3, MLA": ("minicpm3", {key: value for key, value in _MLA.items() if key not in _MOE}),
    "gpt-oss, alternating": ("gpt_oss", {**_SLIDING, **_MOE}),
    "llama4, chunked": (
        "llama4_text",
        {**_WIDE, **_MOE, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 96, "moe_layers": []},
    ),
    "lfm2, convolution": (
        "lfm2",
        {**_WIDE, "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    ),
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 64}),
    "falcon mamba": ("falcon_mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 64}),
    "mamba2": (
        "mamba2",
        {
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8},
            **{"vocab_size": 64, "n_groups": 2, "chunk_size": 8},
        },
    ),
    "jamba": (
        "jamba",
        {
            **_GQA,
            **_MOE,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": ("bamba", {**_GQA, **_MAMBA2, "attn_layer_indices": [1, 3]}),
    "falcon h1, both in a layer": ("falcon_h1", {**_WIDE, **_MAMBA2, "mamba_d_ssm": 128}),
    "granite hybrid": (
        "granitemoehybrid",
        {**_GQA, **_MAMBA2, **_MOE, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 64},
    ),
    "zamba2": (
        "zamba2",
        {
            **_BASE,
            **{"num_key_value_heads": 4, "mamba_d_state": 8, "mamba_ngroups": 2, "n_mamba_heads": 8},
            **{"num_mem_blocks": 1, "layers_block_type": ["linear_attention", "hybrid"] * 2, "chunk_size": 8},
        },
    ),
    "nemotron h": (
        "nemotron_h",
        {
            **{key: value for key, value in _WIDE.items() if key != "num_hidden_layers"},
            **{"hybrid_override_pattern": "M*-M", "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2},
            **{"ssm_state_size": 8, "chunk_size": 8},
        },
    ),
    "qwen3-next, linear": (
        "qwen3_next",
        {**_WIDE, **_MOE, **_DELTA, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    ),
    "qwen3.5, linear": ("qwen3_5_text", {**_WIDE, **_DELTA}),
    "olmo hybrid, linear": (
        "olmo_hybrid",
        {**_WIDE, **_DELTA, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "kimi linear, MLA": (
        "kimi_linear",
        {
            **_MLA,
            **{"layer_types": ["linear_attention", "full_attention"] * 2, "linear_head_dim": 8},
            **{"linear_num_heads": 4, "linear_conv_kernel_dim": 4},
        },
    ),
}


@cache
def config_of(name: str) -> Any:
    """The transformers config of an architecture."""
    from transformers import CONFIG_MAPPING

    kind, options = ARCHITECTURES[name]
    return CONFIG_MAPPING[kind](**options)


def model_of(name: str, dtype: str) -> Any:
    """A random model of an architecture, in a number format of torch."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(1234)
        return AutoModelForCausalLM.from_config(config_of(name)).to(getattr(torch, dtype)).eval()
