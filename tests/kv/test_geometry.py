"""KV geometry: figures known from the papers and configs, computed without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from compaction.errors import InvalidInput
from compaction.kv.geometry import KVGeometry

KIB = 1024
GPT2_XL = {"model_type": "gpt2", "n_layer": 48, "n_head": 25, "n_embd": 1600}
LLAMA2_7B = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
LLAMA3_8B = {**LLAMA2_7B, "num_key_value_heads": 8}
SMOLLM2 = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "head_dim": 64,
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
FALCON_7B = {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "num_kv_heads": 71,
    "multi_query": True,
    "hidden_size": 4544,
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_size": 1152,
    "sliding_window": 512,
}


@pytest.mark.parametrize(
    ("config", "family", "expected"),
    [
        pytest.param(GPT2_XL, "MHA", 300 * KIB, id="GPT-2 XL"),
        pytest.param(LLAMA2_7B, "MHA", 512 * KIB, id="Llama-2-7B"),
        pytest.param(LLAMA3_8B, "GQA", 128 * KIB, id="Llama 3 8B"),
        pytest.param(DEEPSEEK_V3, "MLA", 70_272, id="DeepSeek-V3"),
        pytest.param(SMOLLM2, "GQA", 45 * KIB // 2, id="SmolLM2-135M"),
        pytest.param(FALCON_7B, "MQA", 32 * 2 * 64 * 2, id="Falcon-7B"),
    ],
)
def test_reference_points(config: dict[str, Any], family: str, expected: int) -> None:
    """Known models at two bytes an element cost what their papers say per token."""
    geometry = KVGeometry.from_config(config, 2)

    assert (geometry.family, geometry.bytes_per_token) == (family, expected)


def test_a_full_llama2_context_is_two_gib() -> None:
    """4,096 tokens of Llama-2-7B are exactly 2 GiB."""
    geometry = KVGeometry.from_config(LLAMA2_7B, 2)

    assert geometry.bytes(4096) == 2 * KIB**3


def test_a_sliding_window_stops_growing() -> None:
    """Gemma 3 1B at 32,768 tokens holds 4 full layers and 22 windows of 511 tokens."""
    geometry = KVGeometry.from_config(GEMMA3_1B, 2)

    assert geometry.bytes(32_768) == 1024 * (4 * 32_768 + 22 * 511)


def test_explicit_layer_types_win_over_the_pattern() -> None:
    """A config that spells its layers out is read as it says."""
    config = {**GEMMA3_1B, "layer_types": ["full_attention"] * 26}

    assert KVGeometry.from_config(config, 2).family == "MQA"


def test_linear_layers_add_nothing_per_token() -> None:
    """Only the attention layers of a hybrid model grow with the conversation."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
    config = {**LLAMA3_8B, "num_hidden_layers": 8, "layer_types": kinds}

    geometry = KVGeometry.from_config(config, 2)

    assert (geometry.family, geometry.bytes_per_token) == ("GQA+state", 2 * 2 * 8 * 128 * 2)


def test_shared_layers_add_nothing() -> None:
    """Layers that reuse an earlier layer's cache are counted once, where the cache is."""
    config = {**LLAMA3_8B, "num_kv_shared_layers": 16}

    assert KVGeometry.from_config(config, 2).bytes_per_token == 64 * KIB


def test_a_switched_off_window_is_no_window() -> None:
    """Qwen2 configs name a window they do not use; such layers keep every token."""
    config = {**LLAMA3_8B, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}

    assert KVGeometry.from_config(config, 2).family == "GQA"


def test_a_multimodal_config_is_read_at_its_text_model() -> None:
    """The language model inside a multimodal config is what has the cache."""
    assert KVGeometry.from_config({"vision_config": {}, "text_config": LLAMA3_8B}, 2).bytes_per_token == 128 * KIB


def test_json_has_the_documented_keys() -> None:
    """`compaction kv --json` prints these keys in this order."""
    data = KVGeometry.from_config(LLAMA3_8B, 2).to_json(10)

    assert list(data) == ["family", "bytes_per_token", "tokens", "bytes", "layers"]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, "num_hidden_layers"),
        ({"num_hidden_layers": 2}, "num_attention_heads"),
        ({**LLAMA3_8B, "num_hidden_layers": 0}, "at least 1"),
        ({**LLAMA3_8B, "layer_types": ["full_attention"]}, "32"),
        ({**LLAMA3_8B, "layer_types": ["novel"] * 32}, "novel"),
    ],
)
def test_a_config_that_is_none_is_refused(config: dict[str, Any], names: str) -> None:
    """What is missing or makes no sense is named."""
    with pytest.raises(InvalidInput, match=names):
        KVGeometry.from_config(config, 2)


def test_geometry_loads_no_torch() -> None:
    """The geometry of a model can be had without torch or transformers."""
    code = (
        "import sys, compaction, compaction.kv.geometry, compaction.engines\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"
