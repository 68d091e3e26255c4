"""Fixtures of the engine tests: shared engines, emptied after each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from compaction.engines import TransformersEngine
from tests.fixtures_models import FAMILIES, shared_smollm2_engine, shared_tiny_engine


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread for torch: xdist has taken the cores, and threads that wait for each other take ten times as long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=FAMILIES)
def any_tiny(request: pytest.FixtureRequest) -> Iterator[TransformersEngine]:
    """An engine on each family of tiny models in turn."""
    engine = shared_tiny_engine(str(request.param))
    yield engine
    engine.close()


@pytest.fixture
def tiny() -> Iterator[TransformersEngine]:
    """An engine on a tiny Llama."""
    engine = shared_tiny_engine("llama")
    yield engine
    engine.close()


@pytest.fixture
def smollm2() -> Iterator[TransformersEngine]:
    """An engine on SmolLM2 in float32."""
    engine = shared_smollm2_engine("float32")
    yield engine
    engine.close()


@pytest.fixture
def talk() -> list[dict[str, Any]]:
    """A conversation of nine messages, some 200 tiny tokens."""
    return [
        {
            "role": "assistant" if n % 2 else "user",
            "content": f"message {n} says the quick brown fox {n * n}, thank you",
        }
        for n in range(9)
    ]
