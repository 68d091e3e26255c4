"""Bytes as the allocator sees them."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from compaction.kv.measure import logical_bytes, storage_bytes, tensors_in


def test_a_view_costs_its_whole_storage() -> None:
    """A slice keeps all of its memory alive."""
    whole = torch.zeros(100)

    assert (storage_bytes([whole[:10]]), logical_bytes([whole[:10]])) == (400, 40)


def test_shared_storage_counts_once() -> None:
    """Two views of one storage free nothing but that storage."""
    whole = torch.zeros(100)

    assert storage_bytes([whole[:50], whole[50:], whole]) == 400


def test_tensors_are_found_wherever_a_layer_keeps_them() -> None:
    """Keys, scales in a dict, states in a list: all of it is memory; scalars and numbers are not."""
    layer = SimpleNamespace(
        keys=torch.zeros(4), scales={0: torch.zeros(3)}, states=[None, torch.zeros(2)], window=torch.tensor(5), length=7
    )

    sizes = sorted(
        tensor.numel() for tensor in tensors_in(SimpleNamespace(layers=[layer], config={"x": torch.zeros(9)}))
    )

    assert sizes == [2, 3, 4]


def test_cycles_end() -> None:
    """An object that refers to itself is walked once."""
    layer = SimpleNamespace(keys=torch.zeros(2))
    layer.parent = layer

    assert storage_bytes(layer) == 8
