"""What is wrong with a chat template, what that costs, and what is done about it.

Invariant: a report is a function of the tokenizer, its template and the folding rules. Each finding is read off the
probed profile or off measured ids, never off the template's source, and names the rule that answers it
(`compaction.tokens.folding`); its cost is measured on a conversation that has what the finding is about.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from compaction.tokens.lint_rules import RULES, Rule
from compaction.tokens.profile import TemplateProfile
from compaction.tokens.reuse import SYSTEM, TOOLS, Messages, Reuse, measure, talk
from compaction.tokens.template import FROZEN_DATE, ChatTemplate

__all__ = ["CODES", "Finding", "LintReport", "lint"]

Severity = Literal["cache", "text"]
CODES = (
    *(
        "prefix_unstable",
        "history_unstable",
        "moves_system",
        "moves_tools",
        "drops_reasoning",
        "injects_date",
        "retokenizes",
    ),
    *(rule.code for rule in RULES),
)
"""All codes there are, in the order of a report."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing a template does or does not do.

    Attributes:
        code: its fixed name.
        severity: "cache": tokens that stand in a cache are prefilled again. "text": without folding, something a
            message says would be lost or refused.
        says: what is wrong. `remedy`: what kv-compaction does about it.
        plain, batch: prefix reuse of a three-turn conversation that has what this is about, without and with a batch
            of tool calls, once folded.
        tokens: what folding adds to the one with the batch; None where it adds no text of its own.
    """

    code: str
    severity: Severity
    says: str
    remedy: str
    plain: Reuse
    batch: Reuse
    tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The finding as plain JSON values, in a fixed order."""
        return {
            "code": self.code,
            "severity": self.severity,
            "says": self.says,
            "remedy": self.remedy,
            "plain": self.plain.to_json(),
            "batch": self.batch.to_json(),
            "tokens": self.tokens,
        }


@dataclass(frozen=True, slots=True)
class LintReport:
    """A template's findings, those about the cache first, and its prefix reuse by kind of conversation.

    `reuse` has the keys "plain", "tools", "reasoning" and "reasoning+tools". `moves_system`: the system message, or
    the tools, stand further down as the conversation grows.
    """

    name: str
    fingerprint: str
    profile: TemplateProfile
    reuse: Mapping[str, Reuse]
    moves_system: bool
    moves_tools: bool
    findings: tuple[Finding, ...]

    @property
    def costs(self) -> tuple[Finding, ...]:
        """The findings that make tokens be prefilled again."""
        return tuple(finding for finding in self.findings if finding.severity == "cache")

    @property
    def prefix_stable(self) -> bool:
        """Each turn's prompt, generation prompt included, begins the next turn's, in all conversations measured."""
        return all(reuse.prefix_stable for reuse in self.reuse.values())

    @property
    def history_stable(self) -> bool:
        """A further message leaves those before it as they were, in all conversations measured."""
        return all(reuse.history_stable for reuse in self.reuse.values())

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values, in a fixed order."""
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "prefix_stable": self.prefix_stable,
            "history_stable": self.history_stable,
            "drops_reasoning": self.profile.drops_reasoning,
            "injects_date": self.profile.injects_date,
            "moves_system": self.moves_system,
            "moves_tools": self.moves_tools,
            "reuse": {name: reuse.to_json() for name, reuse in self.reuse.items()},
            "findings": [finding.to_json() for finding in self.findings],
            "profile": self.profile.to_json(),
        }


def lint(tokenizer: Any, *, name: str | None = None) -> LintReport:
    """Look at a transformers tokenizer's chat template; some two hundred renderings.

    Raises EngineError where there is no chat template, or one that renders not even a user message.
    """
    return _Linter(tokenizer, name).report()


class _Linter:
    def __init__(self, tokenizer: Any, name: str | None) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, name=name)
        self._reuse = {
            kind: self._measure(talk(batch=batch, reasoning=reasoning), batch)
            for kind, batch, reasoning in (
                ("plain", False, False),
                ("tools", True, False),
                ("reasoning", False, True),
                ("reasoning+tools", True, True),
            )
        }

    def report(self) -> LintReport:
        profile = self._template.profile
        moved = self._moves(SYSTEM, batch=False), self._moves(str(TOOLS[0]["function"]["name"]), batch=True)
        report = LintReport(
            name=self._template.name,
            fingerprint=self._template.fingerprint,
            profile=profile,
            reuse=self._reuse,
            moves_system=moved[0],
            moves_tools=moved[1],
            findings=(),
        )
        folded = (self._folded(rule) for rule in RULES if rule.there(profile))
        return replace(report, findings=(*self._cached(report), *folded))

    def _measure(self, messages: Messages, batch: bool) -> Reuse:
        return measure(self._template, messages, TOOLS if batch else None)

    def _moves(self, mark: str, *, batch: bool) -> bool:
        """Whether the mark stands behind the first user message once there are more."""
        messages = talk(batch=False)
        text = self._template.render(messages, TOOLS if batch else None)
        return text.find(mark) > text.find(messages[1]["content"])

    def _cached(self, report: LintReport) -> Iterator[Finding]:
        """What makes tokens be prefilled again."""
        if not report.prefix_stable:
            yield self._finding("prefix_unstable", *self._pair(lambda reuse: reuse.prefix_stable))
        if not report.history_stable:
            yield self._finding("history_unstable", *self._pair(lambda reuse: reuse.history_stable))
        if report.moves_system:
            yield self._finding("moves_system", *self._pair(None))
        if report.moves_tools:
            yield self._finding("moves_tools", *self._pair(None))
        if report.profile.drops_reasoning:
            yield self._finding("drops_reasoning", self._reuse["reasoning"], self._reuse["reasoning+tools"])
        if report.profile.injects_date:
            yield self._finding("injects_date", *self._tomorrow())
        if any(reuse.retokenized for reuse in self._reuse.values()):
            yield self._finding("retokenizes", *self._pair(lambda reuse: not reuse.retokenized))

    def _finding(self, code: str, plain: Reuse, batch: Reuse) -> Finding:
        says, remedy = _CACHE[code]
        return Finding(code, "cache", says, remedy, plain, batch)

    def _pair(self, stable: Callable[[Reuse], bool] | None) -> tuple[Reuse, Reuse]:
        """Figures without and with a batch: of the conversations without reasoning, where these show it."""
        plain, batch = self._reuse["plain"], self._reuse["tools"]
        if stable is None or not (stable(plain) and stable(batch)):
            return plain, batch
        return self._reuse["reasoning"], self._reuse["reasoning+tools"]

    def _tomorrow(self) -> tuple[Reuse, Reuse]:
        """What it would cost if each turn came a day after the one before."""
        day = ChatTemplate(self._tokenizer, date=FROZEN_DATE + datetime.timedelta(days=1))
        plain = measure(self._template, talk(batch=False), None, later=day)
        return plain, measure(self._template, talk(batch=True), TOOLS, later=day)

    def _folded(self, rule: Rule) -> Finding:
        plain, batch = (rule.change(talk(batch=batch)) for batch in (False, True))
        tokens = None
        if rule.tools:
            tokens = self._tokens(batch, TOOLS) - self._tokens(batch, None)
        elif rule.without is not None:
            tokens = self._tokens(batch, TOOLS) - self._tokens(rule.without(batch), TOOLS)
        measured = self._measure(plain, False), self._measure(batch, True)
        return Finding(rule.code, "text", rule.says, rule.remedy, *measured, tokens)

    def _tokens(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None) -> int:
        return len(self._template.ids(messages, tools))


_CACHE = {
    "prefix_unstable": (
        "a turn's prompt, generation prompt included, does not begin the next turn's",
        "keeps what both share, prefills the rest; usage says why: template",
    ),
    "history_unstable": (
        "writes earlier messages differently once others follow",
        "keeps what stays the same, prefills the rest; usage says why: template",
    ),
    "moves_system": (
        "puts the system message behind earlier turns as the conversation grows",
        "renders it where the template wants it, prefills all behind its old place each turn",
    ),
    "moves_tools": (
        "puts the tool schemas behind earlier turns as the conversation grows",
        "renders them where the template wants them, prefills all behind their old place each turn",
    ),
    "drops_reasoning": (
        "leaves the reasoning of earlier turns out",
        "keeps it in log and view, cuts the cache back to what the next prompt shares with it",
    ),
    "injects_date": (
        "writes today's date into the prompt",
        f"freezes it at {FROZEN_DATE:%Y-%m-%d} (ChatTemplate(date=…)): a date that moves would cost this",
    ),
    "retokenizes": (
        "the text of earlier turns stays as it was, its tokens do not: they merge with what follows",
        "keeps what both share, prefills the rest; usage says why: retokenized, or template",
    ),
}
