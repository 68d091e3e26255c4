"""Models for tests: tiny random ones of many families, and SmolLM2. No pytest here: import what you need.

Invariant: equal arguments give equal weights and tokenizers; models are shared, engines are built fresh, because an
engine holds conversations.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from compaction.engines import TransformersEngine

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog. A message, a summary, a tool result and a question.",
    "user assistant system tool: please tell me what the order number is and when it will be here, thank you.",
    "def f(x): return x + 1  # numbers 0 1 2 3 4 5 6 7 8 9 and symbols {}[]()<>|_-=+*/\\\"'`~!@#$%^&",
)
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
_GQA = {**_COMMON, "num_key_value_heads": 2, "head_dim": 16}
_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024, "initializer_range": 0.1}
_MLA = {
    **_COMMON,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 4,
}
_SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GQA),
    "qwen2": ("Qwen2", {**_COMMON, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", _GQA),
    "gpt2": ("GPT2", _GPT2),
    "gpt_neox": ("GPTNeoX", {**_COMMON, "rotary_pct": 0.5}),
    "mistral_sliding": ("Mistral", {**_GQA, "sliding_window": 24}),
    "gemma3_hybrid": (
        "Gemma3Text",
        {**_GQA, "sliding_window": 24, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    ),
    "deepseek_mla": ("DeepseekV3", _MLA),
    "lfm2_conv": (
        "Lfm2",
        {
            **_GQA,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
}
CROPPABLE = ("llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "deepseek_mla")
SLIDING = ("mistral_sliding", "gemma3_hybrid")
STATEFUL = ("lfm2_conv",)
FAMILIES = (*CROPPABLE, *SLIDING, *STATEFUL)


@cache
def tiny_tokenizer(template: str = CHATML) -> Any:
    """A byte-level BPE tokenizer of some 400 tokens, trained here, with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


@cache
def tiny_model(family: str) -> Any:
    """A random float32 model of a family (see FAMILIES), always with the same weights."""
    import torch
    import transformers

    name, options = _SPECS[family]
    tokenizer = tiny_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": 1}
    config = getattr(transformers, f"{name}Config")(vocab_size=len(tokenizer), **ids, **options)
    causal = getattr(transformers, f"{name.removesuffix('Text')}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        return causal(config).float().eval()


def tiny_engine(family: str = "llama", **options: Any) -> TransformersEngine:
    """A fresh engine on the shared tiny model of a family."""
    return TransformersEngine(tiny_model(family), tokenizer=tiny_tokenizer(), **options)


@cache
def shared_tiny_engine(family: str = "llama") -> TransformersEngine:
    """One engine a family, for tests that `close()` it afterwards: probing a template takes longer than most tests."""
    return tiny_engine(family)


@cache
def shared_smollm2_engine(dtype: str = "float32") -> TransformersEngine:
    """One engine on SmolLM2, for tests that `close()` it afterwards. Loads in about two seconds."""
    return TransformersEngine("smollm2", device="cpu", dtype=dtype)


def smollm2_engine(dtype: str = "float32", **options: Any) -> TransformersEngine:
    """A fresh engine on SmolLM2; the weights are loaded once per process and number format."""
    shared = shared_smollm2_engine(dtype)
    return TransformersEngine(shared.model, tokenizer=shared.tokenizer, **options)
