"""The engine contract, kept by the transformers engine on each family of models and on SmolLM2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from compaction.engines import TransformersEngine
from compaction.engines.generation import TransformersGeneration
from tests.contracts.engine_contract import EngineContract
from tests.fixtures_models import FAMILIES, shared_tiny_engine, tiny_model, tiny_tokenizer


class TestTinyModels(EngineContract):
    """Every family, layers that cannot be cut back included."""

    @pytest.fixture(params=[name for name in FAMILIES if name != "lfm2_conv"])
    def engine(self, request: pytest.FixtureRequest) -> Iterator[TransformersEngine]:
        engine = shared_tiny_engine(request.param)
        yield engine
        engine.close()


class TestStatefulModels(EngineContract):
    """Layers with a running state: correct, at the price of prefilling every turn."""

    @pytest.fixture
    def engine(self) -> Iterator[TransformersEngine]:
        engine = shared_tiny_engine("lfm2_conv")
        yield engine
        engine.close()

    def test_the_next_turn_reuses_the_prompt(self, engine: TransformersEngine) -> None:  # type: ignore[override]
        """A state cannot be continued by several tokens at once: the whole prompt is prefilled, and says why."""
        first = engine.generate("c", [{"role": "user", "content": "Hello fox"}], None, max_new_tokens=3)
        list(first)

        second = engine.generate("c", [{"role": "user", "content": "Hello fox"}], None, max_new_tokens=3)
        list(second)

        assert second.result is not None and (second.result.usage.reused, second.result.usage.why) == (0, "uncroppable")

    def test_a_reply_can_be_forgotten(self, engine: TransformersEngine) -> None:  # type: ignore[override]
        """Where a reply cannot be taken out alone, the cache goes with it; the next turn says the same as before."""
        ask = [{"role": "user", "content": "Hello fox"}]
        before = engine.complete(ask, max_new_tokens=4).ids
        list(engine.generate("c", ask, None, max_new_tokens=4))

        engine.forget_reply("c")

        assert engine.kv_bytes("c") == 0 and engine.complete(ask, max_new_tokens=4).ids == before


class Spliced(TransformersEngine):
    """Edits its caches in place, asked or not."""

    def generate(self, *request: Any, **options: Any) -> TransformersGeneration:
        return super().generate(*request, **{"apply": "splice", **options})


class TestSpliced(EngineContract):
    """Caches that are edited in place keep the contract too."""

    @pytest.fixture
    def engine(self) -> TransformersEngine:
        return Spliced(tiny_model("llama"), tokenizer=tiny_tokenizer())


@pytest.mark.model
class TestSmolLM2(EngineContract):
    """The real model."""

    @pytest.fixture
    def engine(self, smollm2: TransformersEngine) -> TransformersEngine:
        return smollm2
