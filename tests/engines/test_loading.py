"""From a name to an engine: what loads, and what is said of what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compaction.engines import TransformersEngine
from compaction.engines.loading import pick_device, pick_dtype
from compaction.errors import EngineError, InvalidInput, ModelNotFound
from tests.fixtures_models import tiny_engine, tiny_model, tiny_tokenizer

ASK = [{"role": "user", "content": "Tell me about the quick brown fox."}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tiny Llama in it, as `save_pretrained` leaves one."""
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_folder_loads(folder: Path) -> None:
    """A local folder gives the model that was saved there, named after it, in the number format it has."""
    engine = TransformersEngine(str(folder), device="cpu")

    assert (engine.name, engine.model.dtype) == ("tiny", torch.float32)
    assert engine.complete(ASK, max_new_tokens=5).ids == tiny_engine("llama").complete(ASK, max_new_tokens=5).ids


def test_dtype_can_be_chosen(folder: Path) -> None:
    """Half the bytes an element, half the bytes a token."""
    engine = TransformersEngine(folder, device="cpu", dtype="bf16")

    assert 2 * engine.kv_bytes_per_token == tiny_engine("llama").kv_bytes_per_token


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "~/none-at-all", "a/b/c", "no model is called this!"])
def test_an_unknown_model_is_one_clear_line(name: str) -> None:
    """The message names the model and what would have been possible."""
    with pytest.raises(ModelNotFound) as caught:
        TransformersEngine(name)

    assert name in str(caught.value) and "smollm2" in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    """A folder that exists but holds no config is a mistake, not a hub id."""
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        TransformersEngine(tmp_path)


def test_a_broken_folder_is_an_engine_error(folder: Path) -> None:
    """A config that no model answers to is refused with its name."""
    (folder / "config.json").write_text('{"model_type": "never-heard-of"}')

    with pytest.raises(EngineError, match="tiny"):
        TransformersEngine(folder)


def test_a_built_model_needs_its_tokenizer() -> None:
    """A bare model cannot render messages."""
    with pytest.raises(InvalidInput, match="tokenizer"):
        TransformersEngine(tiny_model("llama"))


def test_a_tokenizer_without_template_is_refused() -> None:
    """Without a chat template there is no request to render."""
    tokenizer = tiny_tokenizer.__wrapped__()
    tokenizer.chat_template = None

    with pytest.raises(EngineError, match="chat template"):
        TransformersEngine(tiny_model("llama"), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("window", "expected"), [(None, (1024, "model config")), (100, (100, "user")), (4096, (4096, "user"))]
)
def test_the_window_and_who_says_so(window: int | None, expected: tuple[int, str]) -> None:
    """The user's word counts over the config's."""
    found = tiny_engine("llama", window=window).window

    assert (found.tokens, found.source) == expected


def test_learned_positions_cannot_be_exceeded() -> None:
    """GPT-2 has a table of positions: a window beyond it would index outside."""
    with pytest.raises(InvalidInput, match="1,024"):
        tiny_engine("gpt2", window=2048)


def test_the_whole_window_can_be_used() -> None:
    """A prompt and a reply that fill the window to the last token run, also on learned positions."""
    engine = tiny_engine("gpt2")
    prompt = engine.counter.request(ASK, None)

    result = engine.complete(ASK, max_new_tokens=1024 - prompt)

    assert result.usage.peak_tokens <= 1023


@pytest.mark.parametrize("options", [{"window": 0}, {"window": True}, {"prefill_chunk": 0}, {"dtype": "int3"}])
def test_arguments_that_make_no_sense(options: dict[str, Any]) -> None:
    """Each is refused when the engine is built."""
    with pytest.raises(InvalidInput):
        tiny_engine("llama", **options)


def test_a_device_that_is_not_there() -> None:
    """The device asked for is used or refused, never replaced."""
    with pytest.raises(EngineError, match="xpu"):
        pick_device("xpu:7")


@pytest.mark.parametrize(
    ("asked", "stored", "expected"),
    [
        (None, torch.bfloat16, torch.bfloat16),
        (None, torch.float16, torch.bfloat16),
        (None, torch.float32, torch.float32),
        ("fp16", torch.float32, torch.float16),
        (torch.float64, None, torch.float64),
    ],
)
def test_number_formats(asked: Any, stored: Any, expected: torch.dtype) -> None:
    """What is asked for, else bfloat16, else float32 where the weights are stored so."""
    assert pick_dtype(asked, "cpu", stored) == expected


def test_no_reply_tokens_is_no_reply(tiny: TransformersEngine) -> None:
    """A reply of no tokens is a mistake, found before the model runs."""
    with pytest.raises(InvalidInput, match="max_new_tokens"):
        tiny.generate("c", ASK, None, max_new_tokens=0)

    assert tiny.kv_bytes("c") == 0
