"""What a chat template may not take, and the folding rule that answers it, as a table the linter reads.

Invariant: a rule asks the probed profile alone, and each has one row of `compaction.tokens.folding`'s table behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from compaction.tokens.folding import CONTINUES
from compaction.tokens.profile import TemplateProfile
from compaction.tokens.reuse import Messages

__all__ = ["RULES", "Rule"]

Change = Callable[[Messages], Messages]


def _same(messages: Messages) -> Messages:
    return messages


@dataclass(frozen=True, slots=True)
class Rule:
    """A flaw of the form a template takes: where it is there, what it is, how it is folded, a conversation with it.

    `change` makes that conversation from the plain one; `without` takes what folding writes as text out of it
    again; `tools`: that is the tool schemas.
    """

    code: str
    there: Callable[[TemplateProfile], bool]
    says: str
    remedy: str
    change: Change = _same
    without: Change | None = None
    tools: bool = False


def _each(role: str, **fields: Any) -> Change:
    """All messages of a role with these fields; None takes a field away."""

    def change(messages: Messages) -> Messages:
        return [_with(message, fields) if message["role"] == role else message for message in messages]

    return change


def _with(message: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    changed = {**message, **fields}
    return {key: value for key, value in changed.items() if value is not None or key == "content"}


def _parts(messages: Messages) -> Messages:
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} if m["role"] == "user" else m for m in messages]


def _no_calls(messages: Messages) -> Messages:
    return [_with(m, {"tool_calls": None, "content": m["content"] or ""}) for m in messages]


def _beside(messages: Messages) -> Messages:
    return [{**m, "content": "Let me look."} if m.get("tool_calls") else m for m in messages]


def _later_system(messages: Messages) -> Messages:
    return [*messages[:3], {"role": "system", "content": "The customer is known."}, *messages[3:]]


def _no_user_first(messages: Messages) -> Messages:
    return [messages[0], *messages[2:]]


def _twice(messages: Messages) -> Messages:
    return [*messages[:2], {"role": "user", "content": "Are you there?"}, *messages[2:]]


def _lacks(field: str, role: str) -> Callable[[TemplateProfile], bool]:
    return lambda profile: role not in getattr(profile, field)


RULES: tuple[Rule, ...] = (
    Rule(
        "no_system",
        lambda p: not p.system,
        "does not take a system message",
        "writes a user message in its place, first line [System message]",
    ),
    Rule(
        "no_later_system",
        lambda p: p.system and not p.later_system,
        "does not take a system message further down",
        "writes a user message in its place, first line [System message]",
        _later_system,
    ),
    Rule(
        "ignores_tools",
        lambda p: not p.tools,
        "leaves tool schemas out",
        "writes a list with one JSON line each, at the end of the leading system message",
        tools=True,
    ),
    Rule(
        "ignores_tool_calls",
        lambda p: not p.tool_calls,
        "leaves tool calls out",
        'writes lines <tool_call>{"name": …, "arguments": …}</tool_call> at the end of the content',
        without=_no_calls,
    ),
    Rule(
        "ignores_tool_results",
        lambda p: not p.tool_role,
        "does not take tool results",
        "writes a user message, first line [Tool result] or [Tool result: NAME]",
    ),
    Rule(
        "one_call_a_message",
        lambda p: p.tool_calls and not p.parallel_calls,
        "takes one tool call a message",
        "writes several calls as <tool_call> lines in the content",
        without=_no_calls,
    ),
    Rule(
        "drops_text_beside_calls",
        lambda p: p.tool_calls and not p.content_with_calls,
        "leaves out the text beside tool calls",
        "writes calls with a text beside them as <tool_call> lines after it",
        _beside,
        _no_calls,
    ),
    Rule(
        "short_ids",
        lambda p: p.short_ids,
        "takes call ids of nine letters and digits only",
        "writes nine hex digits of their hash, equal for a call and its result",
    ),
    Rule("null_content", lambda p: not p.null_content, "does not take content null", "writes an empty string"),
    Rule(
        "ignores_parts",
        _lacks("parts", "user"),
        "does not take a list of content parts",
        "writes their texts, one a line; pictures and files as [image], [file: NAME], …",
        _parts,
    ),
    Rule(
        "ignores_names",
        _lacks("names", "user"),
        "leaves out who speaks (`name`)",
        "writes a first line [NAME]",
        _each("user", name="ann"),
        _each("user", name=None),
    ),
    Rule(
        "ignores_reasoning",
        lambda p: not p.reasoning,
        "does not take reasoning_content",
        "writes a <think> block before the content",
        _each("assistant", reasoning_content="One of the two orders has not been paid."),
        _each("assistant", reasoning_content=None),
    ),
    Rule(
        "user_first",
        lambda p: p.user_first or p.needs_user,
        "wants a user message first",
        f"writes {CONTINUES} as a user message where there is none; cuts end before user messages",
        _no_user_first,
    ),
    Rule(
        "alternates",
        lambda p: p.alternates,
        "wants user and assistant to take turns",
        "writes equal neighbours as one message, an empty line between them",
        _twice,
    ),
)
