"""What a resident conversation costs."""

from __future__ import annotations

import pytest

from compaction.errors import InvalidInput
from compaction.kv.cost import Gpu
from compaction.kv.storage import STORAGES, storage

GIB = 2**30


def test_a_conversation_pays_for_its_share_of_what_weights_leave() -> None:
    """16 GiB of the 64 GiB that weights leave is a quarter of the price, and four such conversations fit."""
    cost = Gpu(2.0, 80 * GIB, 16 * GIB).to_json(16 * GIB)

    assert (cost["usd_per_hour"], cost["conversations"]) == (0.5, 4)


def test_a_conversation_of_nothing_costs_nothing() -> None:
    """Without a byte there is no number of conversations that fit."""
    cost = Gpu(2.0, 80 * GIB).to_json(0)

    assert (cost["usd_per_hour"], cost["conversations"]) == (0, None)


@pytest.mark.parametrize(
    ("price", "memory", "weights", "names"),
    [
        (float("nan"), 1, 0, "--price"),
        (-1.0, 1, 0, "--price"),
        (1.0, 0, 0, "--gpu-memory"),
        (1.0, 8, 8, "--weights"),
    ],
)
def test_a_gpu_that_cannot_be_is_refused(price: float, memory: int, weights: int, names: str) -> None:
    """The option at fault is named."""
    with pytest.raises(InvalidInput, match=names):
        Gpu(price, memory, weights)


def test_quantized_storages_say_so() -> None:
    """Below two bytes an element, scales come on top."""
    assert sorted(name for name in STORAGES if storage(name).quantized) == ["fp8", "int2", "int4", "int8", "k8v4"]


def test_an_unknown_storage_is_refused() -> None:
    """The names there are stand in the message."""
    with pytest.raises(InvalidInput, match="'int3' is unknown: use one of fp32"):
        storage("int3")
