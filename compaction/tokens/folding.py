"""What a chat template cannot take, put into `content` at rendering.

Invariant: nothing of a message's text is lost: content, parts, names, refusals, reasoning, tool calls and tool schemas
reach the template either in their own field or as text, each message in its own place. Ids and unknown keys are no
text. Inputs are never changed; how one message is folded depends on that message and the profile alone, except that
leading system messages and, where roles must take turns, equal neighbours are merged.

The rules, each applied only where the profile says the template takes no other form:

| what | becomes |
|---|---|
| tool calls | lines `<tool_call>{"name": ..., "arguments": ...}</tool_call>` at the end of the content |
| a tool result | a user message, first line `[Tool result]` or `[Tool result: NAME]` |
| tool schemas | a list with one JSON line each, at the end of the (one) leading system message |
| several leading system messages | one, with an empty line between them |
| a system message where none can stand | a user message in its place, first line `[System message]` |
| a developer message | a system message |
| content null | an empty string |
| a list of parts | their texts, one a line; blobs as `[image]`, `[audio]`, `[video]`, `[file: NAME]` |
| a name (but a tool's, which its call says) | first line `[NAME]` |
| reasoning | `<think>` block before the content |
| a refusal | text at the end of the content |
| equal roles that must take turns | one message, with an empty line between them |
| no user where one must come first | a user message `[Conversation continues]` |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compaction.messages import is_blob
from compaction.tokens.blobs import part_text, placeholder
from compaction.tokens.profile import TemplateProfile

__all__ = ["CONTINUES", "RULES", "Folded", "fold"]

RULES = 1
"""Version of the rules above; part of a counter's name."""
CONTINUES = "[Conversation continues]"
_LEADING = ("system", "developer")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TOOLS_INTRO = (
    "# Tools\n\nYou may call these functions; to call one, write a line "
    '<tool_call>{"name": <name>, "arguments": <object>}</tool_call>\n'
)


@dataclass(frozen=True, slots=True)
class Folded:
    """Messages and tools the template takes as they stand."""

    messages: list[dict[str, Any]]
    tools: list[Mapping[str, Any]] | None


def fold(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, profile: TemplateProfile
) -> Folded:
    """The request in a form the template takes, by the rules of this module."""
    count = next((i for i, message in enumerate(messages) if message.get("role") not in _LEADING), len(messages))
    schemas = list(tools) if tools else None
    leading = [_message(message, profile, leading=True) for message in messages[:count]]
    if schemas is not None and not profile.tools:
        leading = [_merged(leading, _tool_text(schemas))]
        schemas = None
    elif len(leading) > 1 and not profile.many_systems:
        leading = [_merged(leading)]
    if not profile.system:
        leading = [_labelled(message, "[System message]") for message in leading]
    rest = [_message(message, profile, leading=False) for message in messages[count:]]
    return Folded(_take_turns([*leading, *rest], profile), schemas)


def _message(message: Mapping[str, Any], profile: TemplateProfile, *, leading: bool) -> dict[str, Any]:
    """One message, folded by itself."""
    data = dict(message)
    role = str(data.get("role"))
    blocks: list[str] = []
    name = data.get("name")
    if isinstance(name, str) and name and role not in ("tool", *profile.names):
        blocks.append(f"[{name}]\n")
    thought = next((data[key] for key in _REASONING if isinstance(data.get(key), str) and data[key]), None)
    if thought is not None and role == "assistant" and not profile.reasoning:
        blocks.append(f"<think>\n{thought}\n</think>\n\n")
    tail = _tail(data, profile)
    _fold_content(data, profile, "".join(blocks), tail)
    return _fold_role(data, profile, leading=leading)


def _tail(data: dict[str, Any], profile: TemplateProfile) -> list[str]:
    """Lines for the end of the content; calls that stay in their own field are brought into shape."""
    lines: list[str] = []
    if isinstance(data.get("refusal"), str) and data["refusal"]:
        lines.append(data["refusal"])
    if isinstance(data.get("function_call"), Mapping):
        lines.append(_call_line(data.pop("function_call")))
    calls = data.get("tool_calls")
    if not calls:
        return lines
    shaped = None if _must_fold(data, profile, lines) else [_shape(call, profile) for call in calls]
    if shaped is None or None in shaped:
        del data["tool_calls"]
        lines += [_call_line(call["function"]) if _is_function(call) else _other_call_line(call) for call in calls]
    else:
        data["tool_calls"] = shaped
    return lines


def _must_fold(data: Mapping[str, Any], profile: TemplateProfile, lines: Sequence[str]) -> bool:
    if not profile.tool_calls or (len(data["tool_calls"]) > 1 and not profile.parallel_calls):
        return True
    return not profile.content_with_calls and bool(data.get("content") or lines)


def _shape(call: Mapping[str, Any], profile: TemplateProfile) -> dict[str, Any] | None:
    """A call in the form the template takes; None where it has none."""
    if not _is_function(call):
        return None
    function = call["function"]
    arguments = function.get("arguments", "")
    if profile.arguments_as_dict and isinstance(arguments, str):
        arguments = _parsed(arguments) if arguments.strip() else {}
        if not isinstance(arguments, dict):
            return None
    elif profile.arguments_as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    shaped = {**call, "function": {**function, "arguments": arguments}}
    if profile.short_ids:
        shaped["id"] = _short_id(str(call.get("id")))
    return shaped


def _is_function(call: Mapping[str, Any]) -> bool:
    return isinstance(call.get("function"), Mapping)


def _other_call_line(call: Mapping[str, Any]) -> str:
    """A call of another type (`custom`), whole but for its id."""
    return f"<tool_call>{json.dumps({key: call[key] for key in call if key != 'id'}, ensure_ascii=False)}</tool_call>"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _short_id(call_id: str) -> str:
    """Nine letters and digits, equal for equal ids."""
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _call_line(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        # Kept as written, so that what the model said is what it reads again, valid JSON or not.
        written = arguments if arguments.strip() else "{}"
    else:
        written = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function.get("name", ""), ensure_ascii=False)
    return f'<tool_call>{{"name": {name}, "arguments": {written}}}</tool_call>'


def _fold_content(data: dict[str, Any], profile: TemplateProfile, before: str, tail: Sequence[str]) -> None:
    content = data.get("content")
    if isinstance(content, list):
        if data.get("role") in profile.parts and not before and not tail:
            data["content"] = [_text_part(part) for part in content]
            return
        content = "\n".join(map(part_text, content))
    if before or tail:
        data["content"] = before + "\n".join(filter(None, [content or "", *tail]))
    elif content is None:
        if not (profile.null_content and data.get("tool_calls")):
            data["content"] = ""
    elif content is not data["content"]:
        data["content"] = content


def _text_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if part.get("type") == "text":
        return part
    return {"type": "text", "text": placeholder(part) if is_blob(part) else part_text(part)}


def _fold_role(data: dict[str, Any], profile: TemplateProfile, *, leading: bool) -> dict[str, Any]:
    role = data.get("role")
    if role == "developer" and role not in profile.roles:
        data["role"] = role = "system"
    if leading:
        return data
    if (role == "tool" and not profile.tool_role) or (role == "function" and role not in profile.roles):
        name = data.get("name")
        label = f"[Tool result: {name}]" if role == "tool" and isinstance(name, str) and name else "[Tool result]"
        return _labelled(data, label)
    if role in _LEADING and not profile.later_system:
        return _labelled(data, "[System message]")
    if role == "tool" and profile.short_ids:
        data["tool_call_id"] = _short_id(str(data.get("tool_call_id")))
    return data


def _labelled(message: Mapping[str, Any], label: str) -> dict[str, Any]:
    return {"role": "user", "content": f"{label}\n{_as_text(message.get('content'))}"}


def _as_text(content: Any) -> str:
    return "\n".join(map(part_text, content)) if isinstance(content, list) else content or ""


def _merged(leading: Sequence[Mapping[str, Any]], *more: str) -> dict[str, Any]:
    texts = [_as_text(message.get("content")) for message in leading]
    return {"role": "system", "content": "\n\n".join(filter(None, [*texts, *more]))}


def _tool_text(tools: Sequence[Mapping[str, Any]]) -> str:
    return _TOOLS_INTRO + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)


def _take_turns(messages: list[dict[str, Any]], profile: TemplateProfile) -> list[dict[str, Any]]:
    """A user where one must be, and equal neighbours as one where roles must alternate."""
    start = next((i for i, message in enumerate(messages) if message["role"] not in _LEADING), len(messages))
    users = any(message["role"] == "user" for message in messages)
    first = messages[start]["role"] if start < len(messages) else None
    opener = {"role": "user", "content": CONTINUES}
    if (profile.user_first and first not in ("user", None)) or (profile.needs_user and not users):
        messages = [*messages[:start], opener, *messages[start:]]
    if profile.consecutive:
        return messages
    turns: list[dict[str, Any]] = []
    for message in messages:
        if turns and message["role"] == turns[-1]["role"] and message["role"] in ("user", "assistant"):
            turns[-1] = _joined(turns[-1], message)
        else:
            turns.append(message)
    return turns


def _joined(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    texts = [_as_text(message.get("content")) for message in (one, two)]
    joined: dict[str, Any] = {**one, "content": "\n\n".join(filter(None, texts))}
    calls = [*(one.get("tool_calls") or ()), *(two.get("tool_calls") or ())]
    thoughts = [str(m["reasoning_content"]) for m in (one, two) if m.get("reasoning_content")]
    if calls:
        joined["tool_calls"] = calls
    if thoughts:
        joined["reasoning_content"] = "\n\n".join(thoughts)
    return joined
