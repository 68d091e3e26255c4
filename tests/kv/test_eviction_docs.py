"""docs/eviction.md does not lie: its example runs, and says what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from compaction.kv import scoring
from tests.fixtures_models import tiny_model

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "eviction.md").read_text("utf-8")


def test_the_example_runs() -> None:
    """On a tiny model: the old cache is empty, the new one a quarter of it and a tail."""
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, Any] = {"model": tiny_model("llama"), "ids": [*range(3, 103)]}

    exec(code, names)

    assert names["cache"].layers == [] and len(names["worth"]) == 2
    assert sum(sum(layer.counts) for layer in names["small"].ragged) == 4 * 2 * 25
    assert names["logits"].shape == (names["model"].config.vocab_size,)


def test_every_score_is_described() -> None:
    """A function that the package offers stands in the page."""
    functions = [name for name in scoring.__all__ if name[0].islower()]

    assert [name for name in functions if name not in TEXT] == []
