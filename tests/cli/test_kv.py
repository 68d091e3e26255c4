"""`compaction kv`: figures as JSON and tables, models side by side, a picture, costs, one clear line on bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import as_json, cli, complaint

LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
KEYS = ["family", "bytes_per_token", "tokens", "bytes", "layers"]


def write_config(folder: Path, config: Any, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(config if isinstance(config, str) else json.dumps(config), "utf-8")
    return path


def test_json_of_one_model() -> None:
    """The documented keys come first, and SmolLM2 takes 22.5 KiB a token."""
    found = as_json("kv", "smollm2", "--tokens", 8000)

    assert list(found)[:5] == KEYS
    assert (found["family"], found["bytes_per_token"], found["bytes"]) == ("GQA", 23_040, 8000 * 23_040)
    assert (
        found["layers"]
        == [{"kind": "full", "bytes_per_token": 768, "keeps": None, "state_bytes": 0, "bytes": 8000 * 768}] * 30
    )


def test_json_of_several_models() -> None:
    """Each model is an object like that of one; MLA tells its older form beside."""
    found = as_json("kv", "llama-3-8b", "deepseek-v3", "gemma-3-1b", "--tokens", 32_768)["models"]

    assert [row["model"] for row in found] == ["llama-3-8b", "deepseek-v3", "gemma-3-1b"]
    assert [row["bytes_per_token"] for row in found] == [131_072, 70_272, 26_624]
    assert [row["marginal_bytes_per_token"] for row in found] == [131_072, 70_272, 4096]
    assert [row.get("expanded", {}).get("bytes_per_token") for row in found] == [None, 4_997_120, None]
    assert all(list(row)[:5] == KEYS for row in found)


def test_a_config_file_and_its_folder_are_the_same(tmp_path: Path) -> None:
    """A model folder is read at its config.json."""
    path = write_config(tmp_path, LLAMA)

    assert as_json("kv", path) == as_json("kv", tmp_path)


def test_a_config_is_completed_by_transformers(tmp_path: Path) -> None:
    """A family that is not known here gets the defaults of its class: SmolLM3 has four key/value heads."""
    path = write_config(tmp_path, {"model_type": "smollm3", "num_hidden_layers": 2, "hidden_size": 2048})

    assert as_json("kv", path)["bytes_per_token"] == 2 * 2 * 4 * 128 * 2


def test_storage_width() -> None:
    """Keys in 8 bits and values in 4 take three eighths of bf16, and the table says what is not counted."""
    shown = cli("kv", "llama-3-8b", "--dtype", "k8v4").stdout

    assert "48 KiB" in shown and "scales and full-precision windows come on top" in shown


def test_tables() -> None:
    """By kind of layer for one model, side by side for several."""
    one = cli("kv", "gemma-3-1b", "--tokens", 32_768).stdout
    several = cli("kv", "gemma-3-1b", "jamba-v0.1", "--tokens", 32_768).stdout

    assert all(words in one for words in ("last 511", "10.98 MiB", "128 MiB", "145,729,536 bytes"))
    assert all(words in several for words in ("MQA+sliding", "GQA+state", "4 full + 28 state", "139 MiB"))


def test_unknown_states_are_never_a_silent_zero(tmp_path: Path) -> None:
    """A sum that leaves out a state says that it is a lower bound."""
    path = write_config(tmp_path, {"model_type": "rwkv", "num_hidden_layers": 4, "hidden_size": 64})

    shown = cli("kv", path).stdout

    assert "> 0 B" in shown and "4 layers with a state of unknown size, not counted" in shown
    assert as_json("kv", path)["unknown_states"] == 4


def test_cost() -> None:
    """1 GiB of the 64 GiB that weights leave costs a sixty-fourth of the price."""
    money = ("--price", 3.2, "--gpu-memory", "80GiB", "--weights", "16GiB")

    cost = as_json("kv", "llama-3-8b", "--tokens", 8192, *money)["cost"]

    assert (cost["usd_per_hour"], cost["conversations"]) == (pytest.approx(0.05), 64)
    assert "0.050000" in cli("kv", "llama-3-8b", "--tokens", 8192, *money).stdout


def test_plot(tmp_path: Path) -> None:
    """The picture is a PNG; what is printed as JSON stays one object."""
    path = tmp_path / "kv.png"

    found = as_json("kv", "llama-3-8b", "mamba-2.8b", "--plot", path, "--price", 2, "--gpu-memory", "80GiB")

    assert path.read_bytes().startswith(b"\x89PNG") and len(found["models"]) == 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", ("config.json", "is no JSON")),
        ([1], ("a JSON list, not an object",)),
        ({}, ("has no num_hidden_layers", "add the key")),
        ({**LLAMA, "num_hidden_layers": "two"}, ("num_hidden_layers is 'two'", "whole number")),
        ({**LLAMA, "num_key_value_heads": 3}, ("num_key_value_heads is 3", "divide the 4")),
        ({**LLAMA, "layer_types": ["novel"] * 2}, ("'novel'", "known are")),
        ({"model_type": "smollm3", "num_hidden_layers": "x"}, ("transformers refuses", "num_hidden_layers")),
        ({"model_type": "t5", "is_encoder_decoder": True}, ("is_encoder_decoder",)),
    ],
)
def test_a_config_that_is_none(config: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    """The file and the key at fault are named in one line."""
    line = complaint("kv", write_config(tmp_path, config))

    assert line.startswith("error: ") and all(word in line for word in (*words, str(tmp_path)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("llama-3-9b",), ("'llama-3-9b'", "did you mean llama-3-8b")),
        (("zzzzzzzz",), ("built-in names", "smollm2")),
        (("./nowhere.json",), ("'./nowhere.json' does not exist",)),
        (("acme/nothing",), ("'acme/nothing'", "could not be had", "give the path")),
        (("/",), ("no config.json in it",)),
        (("smollm2", "--tokens", 0), ("--tokens", "x>=1")),
        (("smollm2", "--dtype", "int3"), ("'int3' is unknown", "k8v4")),
        (("smollm2", "--price", 2), ("--price and --gpu-memory",)),
        (("smollm2", "--price", 2, "--gpu-memory", "lots"), ("'lots'", "8GiB")),
        (("smollm2", "--price", 2, "--gpu-memory", "8GiB", "--weights", "9GiB"), ("--weights", "leave nothing")),
        (("smollm2", "--plot", "a.txt"), ("--plot a.txt", ".png")),
        (("smollm2", "--plot", "nowhere/a.png"), ("folder does not exist",)),
        ((), ("MODEL_OR_CONFIG",)),
    ],
)
def test_bad_input(arguments: tuple[object, ...], words: tuple[str, ...]) -> None:
    """One line names the thing and the next step."""
    line = complaint("kv", *arguments)

    assert all(word in line for word in words)
