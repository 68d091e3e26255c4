"""KV geometry: figures known from the papers and configs, computed without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from compaction.errors import InvalidInput
from compaction.kv.geometry import KVGeometry, LayerGeometry, knows
from compaction.kv.references import REFERENCES

KIB = 1024
MIB = KIB**2
CONFIGS: dict[str, Any] = {name: dict(reference.config) for name, reference in REFERENCES.items()}
LLAMA2_7B, LLAMA3_8B, GEMMA3_1B = CONFIGS["llama-2-7b"], CONFIGS["llama-3-8b"], CONFIGS["gemma-3-1b"]


@pytest.mark.parametrize(
    ("name", "family", "expected"),
    [
        ("gpt2-xl", "MHA", 300 * KIB),
        ("llama-2-7b", "MHA", 512 * KIB),
        ("llama-3-8b", "GQA", 128 * KIB),
        ("llama-3-70b", "GQA", 320 * KIB),
        ("llama-3.2-1b", "GQA", 32 * KIB),
        ("mistral-7b", "GQA+sliding", 128 * KIB),
        ("qwen3-8b", "GQA", 144 * KIB),
        ("qwen3-0.6b", "GQA", 112 * KIB),
        ("smollm2", "GQA", 45 * KIB // 2),
        ("smollm2-360m", "GQA", 40 * KIB),
        ("deepseek-v3", "MLA", 70_272),
        ("falcon-7b", "MQA", 8 * KIB),
        ("gemma-3-270m", "MQA+sliding", 18 * KIB),
        ("gemma-3n-e4b", "GQA+sliding+shared", 40 * KIB),
        ("llama-4-scout", "GQA+chunked", 192 * KIB),
        ("jamba-v0.1", "GQA+state", 16 * KIB),
        ("mamba-2.8b", "state", 0),
    ],
)
def test_reference_points(name: str, family: str, expected: int) -> None:
    """Known models at two bytes an element cost what their papers say per token."""
    geometry = KVGeometry.from_config(CONFIGS[name], 2)

    assert (geometry.family, geometry.bytes_per_token) == (family, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_reference_is_read_without_transformers(name: str) -> None:
    """A built-in config is of a type known here, and all of its states are counted."""
    geometry = KVGeometry.from_config(CONFIGS[name], 2)

    assert knows(CONFIGS[name])
    assert geometry.total(1000) > 0 == geometry.unknown_states


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


@pytest.mark.parametrize(("name", "mebibytes"), [("gemma-3-270m", 103.5), ("gemma-3-1b", 139), ("gemma-3-27b", 2976)])
def test_windows_at_32k(name: str, mebibytes: float) -> None:
    """Gemma 3 at 32,768 tokens weighs what only its few full layers keep growing to."""
    geometry = KVGeometry.from_config(CONFIGS[name], 2)

    assert geometry.total(32_768) / MIB == pytest.approx(mebibytes, rel=1e-3)


def test_linear_layers_add_nothing_per_token() -> None:
    """Only the attention layers of a hybrid model grow; a state whose size is not told is unknown, never 0."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
    config = {**LLAMA3_8B, "num_hidden_layers": 8, "layer_types": kinds}

    geometry = KVGeometry.from_config(config, 2)

    assert (geometry.family, geometry.bytes_per_token) == ("GQA+state", 2 * 2 * 8 * 128 * 2)
    assert geometry.unknown_states == 6


def test_states_are_there_from_the_first_token() -> None:
    """A recurrent state does not grow; a conversation that has not begun has none."""
    geometry = KVGeometry.from_config(CONFIGS["mamba-2.8b"], 2)

    sizes = [geometry.total(tokens) for tokens in (0, 1, 100_000)]

    # 64 layers; 5,120 inner channels: a window of 4 in two bytes each, a state of 16 in four.
    assert sizes == [0, *[64 * 5120 * (4 * 2 + 16 * 4)] * 2]


def test_states_keep_their_width_where_keys_are_quantized() -> None:
    """Fewer bits for keys and values leave recurrent states in float32 and convolutions in two bytes."""
    narrow, wide = (KVGeometry.from_config(CONFIGS["jamba-v0.1"], size) for size in (0.5, 2))

    assert narrow.state_bytes == wide.state_bytes > 0
    assert 4 * narrow.bytes_per_token == wide.bytes_per_token


def test_keys_and_values_of_different_width() -> None:
    """Keys in 8 bits and values in 4 take 6 bits an element on average."""
    assert KVGeometry.from_config(LLAMA3_8B, 1, value_bytes=0.5).bytes_per_token == 48 * KIB


def test_packed_values_fill_whole_bytes() -> None:
    """Three elements of 4 bits take two bytes."""
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 3, "head_dim": 3}

    assert KVGeometry.from_config(config, 0.25).bytes_per_token == 2


def test_mla_expanded_to_every_head() -> None:
    """transformers up to 5.14 kept DeepSeek-V3 at 4.77 MiB a token: 128 heads of 192 for keys and 128 for values."""
    geometry = KVGeometry.from_config(CONFIGS["deepseek-v3"], 2, latent=False)

    assert geometry.bytes_per_token == 61 * 128 * (192 + 128) * 2


def test_shared_layers_add_nothing() -> None:
    """Layers that reuse an earlier layer's cache are counted once, where the cache is."""
    config = {**LLAMA3_8B, "num_kv_shared_layers": 16}

    assert KVGeometry.from_config(config, 2).bytes_per_token == 64 * KIB


def test_layers_may_override_the_config() -> None:
    """A layer with a `per_layer_config` of its own is read with it."""
    config = {
        **LLAMA3_8B,
        "per_layer_config": {"0": {"head_dim": 256, "num_key_value_heads": 4}, "1": {"head_dim": 64}},
    }

    layers = KVGeometry.from_config(config, 2).layers

    assert [layer.bytes_per_token for layer in layers[:3]] == [4096, 2048, 4096]


def test_a_window_keeps_one_token_less() -> None:
    """The token being computed is part of the window, so the cache holds the W - 1 before it."""
    layer = LayerGeometry("sliding", 10, keeps=511)

    assert [layer.bytes(tokens) for tokens in (0, 511, 512, 9999)] == [0, 5110, 5110, 5110]


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
    assert (len(data["layers"]), sum(layer["bytes"] for layer in data["layers"])) == (32, data["bytes"])


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, "num_hidden_layers"),
        ({"num_hidden_layers": 2}, "num_attention_heads"),
        ({**LLAMA3_8B, "num_hidden_layers": 0}, "at least 1"),
        ({**LLAMA3_8B, "layer_types": ["full_attention"]}, "32"),
        ({**LLAMA3_8B, "layer_types": ["novel"] * 32}, "novel"),
        ({**LLAMA3_8B, "layer_types": [1] * 32}, "layer_types is no list of names"),
        ({**LLAMA3_8B, "num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({**LLAMA3_8B, "num_hidden_layers": True}, "num_hidden_layers is True"),
        ({**LLAMA3_8B, "num_key_value_heads": 5}, "num_key_value_heads is 5: it must divide the 32"),
        ({**LLAMA3_8B, "num_key_value_heads": 64}, "num_key_value_heads is 64"),
        ({**LLAMA3_8B, "hidden_size": 4097}, "hidden_size 4097"),
        ({**LLAMA3_8B, "num_kv_shared_layers": 33}, "num_kv_shared_layers is 33"),
        ({**LLAMA3_8B, "layer_types": ["indexed_attention"] * 32}, "indexed_attention"),
        ({**LLAMA3_8B, "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({**CONFIGS["deepseek-v3"], "qk_rope_head_dim": None}, "qk_rope_head_dim"),
        ({**CONFIGS["jamba-v0.1"], "mamba_d_state": 0}, "mamba_d_state is 0"),
        ({"hybrid_override_pattern": "M*X", "model_type": "nemotron_h"}, "hybrid_override_pattern has 'X'"),
    ],
)
def test_a_config_that_is_none_is_refused(config: dict[str, Any], names: str) -> None:
    """What is missing or makes no sense is named."""
    with pytest.raises(InvalidInput, match=names):
        KVGeometry.from_config(config, 2)


def test_a_width_of_nothing_is_refused() -> None:
    """An element takes some bytes."""
    with pytest.raises(InvalidInput, match="element_bytes is 0"):
        KVGeometry.from_config(LLAMA3_8B, 2, value_bytes=0)


def test_geometry_loads_no_torch() -> None:
    """The geometry of a model can be had without torch or transformers."""
    code = (
        "import sys, compaction, compaction.kv.geometry, compaction.engines\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"
