"""Predicted equals measured: the geometry against a real forward pass of a tiny model, for every architecture."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compaction.engines.forward import Forward
from compaction.engines.live_cache import LiveCache
from compaction.kv.geometry import KVGeometry, knows
from compaction.kv.measure import logical_bytes, storage_bytes
from tests.kv.architectures import ARCHITECTURES, config_of, model_of

STEPS = (5, 1, 5, 1, 1, 20, 1)  # 5 and 6 tokens are below the window of 12, 11 to 13 around it, 33 and 34 beyond
ELEMENT = {"float32": 4, "bfloat16": 2}


def mapping(name: str) -> dict[str, Any]:
    """The config of an architecture as the engine hands it to the geometry."""
    found: dict[str, Any] = config_of(name).get_text_config(decoder=True).to_dict()
    return found


@pytest.mark.parametrize("dtype", ELEMENT)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_predicted_equals_measured(name: str, dtype: str) -> None:
    """Distinct storages of a `DynamicCache(config=…)`, and what they show, differ from the formula by 0 bytes."""
    geometry = KVGeometry.from_config(mapping(name), ELEMENT[dtype])
    live = LiveCache(Forward(model_of(name, dtype)))
    differences = []

    for step in STEPS:
        live.feed([3] * step)
        predicted = geometry.total(len(live.ids))
        differences.append((storage_bytes(live.layers) - predicted, logical_bytes(live.layers) - predicted))

    assert differences == [(0, 0)] * len(STEPS)
    assert geometry.unknown_states == 0


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if knows({"model_type": ARCHITECTURES[name][0]})])
def test_a_saved_config_says_the_same(name: str) -> None:
    """A config.json, which leaves derived keys out, is read like the config that transformers makes of it."""
    kind, options = ARCHITECTURES[name]
    written = {**json.loads(json.dumps(options)), "model_type": kind}

    assert KVGeometry.from_config(written, 2) == KVGeometry.from_config(mapping(name), 2)


def test_fp8_storage() -> None:
    """transformers' own FP8 cache holds one byte an element, as predicted; its two scales a layer are scalars."""
    import torch
    from transformers import QuantizedCache

    model = model_of("llama", "bfloat16")
    cache = QuantizedCache("fp8", model.config)
    with torch.no_grad():
        for step in (5, 1, 9):
            model(input_ids=torch.tensor([[3] * step]), cache=cache, use_cache=True)

    assert storage_bytes(cache) == KVGeometry.from_config(mapping("llama"), 1).total(15)
