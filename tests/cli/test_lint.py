"""`compaction lint`: verdict, figures and findings of a chat template; only a tokenizer is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compaction.tokens.lint import CODES
from tests.cli.harness import ROOT, as_json, cli, complaint
from tests.tokens.families import TEMPLATES, tokenizer_of

KEYS = ["name", "fingerprint", "prefix_stable", "history_stable", "drops_reasoning", "injects_date"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a tokenizer and no model."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer_of("mistral").save_pretrained(str(path))
    return path


@pytest.mark.model
def test_smollm2_is_stable() -> None:
    """The documented keys come first, and a stable template passes a strict look."""
    found = as_json("lint", "smollm2", "--strict")

    assert list(found)[:6] == KEYS
    assert (found["prefix_stable"], found["history_stable"]) == (True, True)
    assert found["reuse"]["tools"]["fraction"] == 1.0
    assert [row["code"] for row in found["findings"]][:2] == ["ignores_tools", "ignores_tool_calls"]


def test_tables(folder: Path) -> None:
    """The verdict, reuse by conversation, and each finding with what is done about it."""
    shown = cli("lint", folder).stdout

    words = (
        "not stable",
        "Costs the cache, or would",
        "moves_system",
        "Folded, so that nothing is lost",
        "writes a first line",
    )
    assert all(word in shown for word in words)


def test_strict_fails_where_the_cache_pays(folder: Path) -> None:
    """The report is the same; the exit code is 1."""
    assert cli("lint", folder, "--strict", code=1).stdout == cli("lint", folder).stdout


def test_another_template(folder: Path, tmp_path: Path) -> None:
    """A template under repair is looked at in place of the tokenizer's own."""
    path = tmp_path / "fixed.jinja"
    path.write_text(TEMPLATES["chatml"], "utf-8")

    found = as_json("lint", folder, "--template", path, "--strict")

    assert found["prefix_stable"] and found["name"].endswith("fixed.jinja")


def test_a_frozen_date_costs_nothing(folder: Path, tmp_path: Path) -> None:
    """A template that writes today's date passes a strict look: the finding says what it would cost."""
    path = tmp_path / "dated.jinja"
    path.write_text("{{ strftime_now('%d %b %Y') }}" + TEMPLATES["chatml"], "utf-8")

    found = as_json("lint", folder, "--template", path, "--strict")

    assert (found["injects_date"], found["prefix_stable"], found["findings"][0]["code"]) == (True, True, "injects_date")


@pytest.mark.model
def test_the_docs_sample_is_what_is_printed() -> None:
    """docs/templates.md shows what the command prints, and has a row for each finding there is."""
    page = (ROOT / "docs" / "templates.md").read_text("utf-8")
    sample = page.partition("$ compaction lint smollm2\n")[2].partition("```")[0]
    printed = cli("lint", "smollm2").stdout

    assert [line.split() for line in sample.splitlines() if line] == [
        line.split() for line in printed.splitlines() if line.strip()
    ]
    assert tuple(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == CODES


def test_bad_input_is_one_line(folder: Path, tmp_path: Path) -> None:
    """No such model, no such file, no text, and a template that renders nothing."""
    binary, broken = tmp_path / "b.jinja", tmp_path / "c.jinja"
    binary.write_bytes(b"\xff\xfe\x00")
    broken.write_text("{% for", "utf-8")

    assert "no folder with a tokenizer" in complaint("lint", tmp_path / "nowhere")
    assert "cannot be read" in complaint("lint", folder, "--template", tmp_path / "none.jinja")
    assert "no UTF-8" in complaint("lint", folder, "--template", binary)
    assert "does not render a user message" in complaint("lint", folder, "--template", broken)


def test_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    """It is said how to give one."""
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(str(tmp_path))

    assert "--template FILE" in complaint("lint", tmp_path)
