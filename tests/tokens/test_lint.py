"""The template linter on made families and on SmolLM2's own template: what it finds, and that its figures are right."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from compaction.errors import EngineError
from compaction.tokens.lint import CODES, Finding, LintReport, lint
from compaction.tokens.lint_rules import RULES
from compaction.tokens.reuse import TOOLS, talk
from tests.tokens.families import TEMPLATES, tokenizer_of

Reports = Callable[[str], LintReport]

FOUND = {
    "chatml": "ignores_tools ignores_tool_calls null_content ignores_parts ignores_names ignores_reasoning",
    "qwen": "prefix_unstable history_unstable drops_reasoning ignores_parts ignores_names",
    "llama3": "injects_date retokenizes one_call_a_message drops_text_beside_calls ignores_parts ignores_names "
    "ignores_reasoning",
    "mistral": "prefix_unstable history_unstable moves_system moves_tools no_later_system drops_text_beside_calls "
    "short_ids ignores_parts ignores_names ignores_reasoning user_first alternates",
    "gemma": "no_system ignores_tools ignores_tool_calls ignores_tool_results null_content ignores_parts "
    "ignores_names ignores_reasoning user_first alternates",
    "alpaca": "retokenizes ignores_tools ignores_tool_calls null_content ignores_parts ignores_names ignores_reasoning",
}
# The generation prompt opens a thought that history does not show.
OPEN_THOUGHT = TEMPLATES["chatml"].replace("assistant\n' }}{%- endif", "assistant\n<think>\n' }}{%- endif")


@pytest.fixture(scope="module")
def report_of() -> Reports:
    """Reports of made families; each template is looked at once."""
    made: dict[str, LintReport] = {}

    def report(family: str) -> LintReport:
        if family not in made:
            made[family] = lint(tokenizer_of(family), name=family)
        return made[family]

    return report


def codes(report: LintReport) -> list[str]:
    return [finding.code for finding in report.findings]


def finding(report: LintReport, code: str) -> Finding:
    return next(found for found in report.findings if found.code == code)


def own_ids(tokenizer: Any, messages: Any, tools: Any, prompt: bool) -> list[int]:
    """What transformers itself renders, without this library."""
    options = {"tools": tools, "add_generation_prompt": prompt, "tokenize": True, "return_dict": False}
    return list(tokenizer.apply_chat_template(messages, **options))


def own_figures(tokenizer: Any, messages: Any, tools: Any) -> tuple[int, int]:
    """(held, reused), worked out from transformers' own ids."""
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    held = reused = 0
    for one, two in pairwise(replies):
        before = own_ids(tokenizer, messages[: one + 1], tools, prompt=False)
        after = own_ids(tokenizer, messages[:two], tools, prompt=True)
        held += len(before)
        reused += next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    return held, reused


@pytest.mark.parametrize("family", FOUND)
def test_each_family_has_its_findings(family: str, report_of: Reports) -> None:
    """Exactly what the family's template does, those about the cache first, in a fixed order."""
    assert codes(report_of(family)) == FOUND[family].split()


@pytest.mark.model
def test_smollm2_is_stable_and_takes_text_alone(smollm2: Any) -> None:
    """Its cache is used whole; tools, calls and the like are folded, and what that adds is counted."""
    report = lint(smollm2)

    assert (report.prefix_stable, report.history_stable, report.profile.injects_date) == (True, True, False)
    assert codes(report) == FOUND["chatml"].split()
    assert {reuse.fraction for reuse in report.reuse.values()} == {1.0}
    assert finding(report, "ignores_tools").tokens == 121


@pytest.mark.parametrize("family", TEMPLATES)
def test_history_is_stable_where_the_profile_says_so(family: str, report_of: Reports) -> None:
    """Measured on a conversation, it is what probing with marker strings finds."""
    report = report_of(family)

    assert report.history_stable == report.profile.prefix_stable


@pytest.mark.parametrize("family", ["chatml", "qwen", "metaspace"])
def test_figures_are_those_of_transformers(family: str, report_of: Reports) -> None:
    """Held and reused tokens of a conversation that needs no folding, worked out without this library."""
    reuse = report_of(family).reuse["plain"]

    assert (reuse.held, reuse.reused) == own_figures(tokenizer_of(family), talk(batch=False), None)


def test_figures_with_tools_and_reasoning_are_those_of_transformers(report_of: Reports) -> None:
    """The same for a template that takes both: dropped thoughts cost what transformers' own ids say."""
    messages = [{**message, "content": message["content"] or ""} for message in talk(batch=True, reasoning=True)]
    reuse = report_of("qwen").reuse["reasoning+tools"]

    held, reused = own_figures(tokenizer_of("qwen"), messages, [dict(tool) for tool in TOOLS])

    assert (reuse.held, reuse.reused) == (held, reused)
    assert 0.5 < reuse.fraction < 0.9 and not reuse.prefix_stable


def test_a_system_message_that_moves_costs_most_of_the_cache(report_of: Reports) -> None:
    """All behind the place where it stood is prefilled again."""
    report = report_of("mistral")

    assert (report.moves_system, report.moves_tools, report.prefix_stable) == (True, True, False)
    assert finding(report, "moves_system").plain.fraction < 0.3


def test_a_date_that_moves_would_cost_nearly_all(report_of: Reports) -> None:
    """Frozen it costs nothing of its own; what midnight would cost is measured."""
    report = report_of("llama3")

    dated = finding(report, "injects_date")
    assert dated.plain.fraction < 0.05 and dated.batch.fraction < 0.05
    assert report.prefix_stable and report.reuse["plain"].fraction > 0.7
    assert "2025-01-01" in dated.remedy


def test_tokens_that_merge_are_told_from_text_that_moves(report_of: Reports) -> None:
    """Text that is stable with ids that are not is a finding of its own."""
    alpaca = report_of("alpaca")

    assert (alpaca.prefix_stable, alpaca.history_stable) == (True, True)
    assert 0.99 < finding(alpaca, "retokenizes").plain.fraction < 1


def test_an_opened_thought_is_unstable() -> None:
    """A generation prompt that history lacks makes every turn prefill the reply before it."""
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = OPEN_THOUGHT

    report = lint(tokenizer)

    assert (report.prefix_stable, report.history_stable) == (False, True)
    assert "prefix_unstable" in codes(report)
    assert 0 < report.reuse["plain"].fraction < 1


def test_what_folding_adds_is_counted(report_of: Reports) -> None:
    """Tool schemas, calls, names and thoughts that the template leaves out have their tokens."""
    report = report_of("chatml")

    added = {found.code: found.tokens for found in report.findings}
    assert all((added[code] or 0) > 0 for code in ("ignores_tools", "ignores_tool_calls", "ignores_names"))
    assert added["null_content"] is None


def test_folding_costs_no_prefix(report_of: Reports) -> None:
    """Whatever is folded in a stable template, the cache is used whole."""
    report = report_of("gemma")

    assert {found.plain.fraction for found in report.findings} == {1.0}
    assert {found.batch.fraction for found in report.findings} == {1.0}


def test_equal_templates_give_equal_reports() -> None:
    """A report is a function of tokenizer and template."""
    assert lint(tokenizer_of("qwen")).to_json() == lint(tokenizer_of("qwen")).to_json()


def test_json_holds_what_the_report_holds(report_of: Reports) -> None:
    """Verdicts, figures of all conversations, and each finding with its remedy and its cost."""
    data = report_of("qwen").to_json()

    assert list(data["reuse"]) == ["plain", "tools", "reasoning", "reasoning+tools"]
    assert data["drops_reasoning"] and not data["injects_date"]
    assert data["findings"][0]["plain"]["fraction"] == round(report_of("qwen").reuse["reasoning"].fraction, 4)
    assert all(found["remedy"] for found in data["findings"])


def test_every_rule_has_a_code_of_its_own() -> None:
    """Codes are unique, and each is found in some family or can be."""
    assert len(set(CODES)) == len(CODES)
    assert {rule.code for rule in RULES} <= set(CODES)
    assert {code for found in FOUND.values() for code in found.split()} <= set(CODES)


def test_a_template_that_renders_nothing_is_refused() -> None:
    """It is named, in one line."""
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = "{{ raise_exception('no') }}"

    with pytest.raises(EngineError, match="'broken' does not render a user message"):
        lint(tokenizer, name="broken")
