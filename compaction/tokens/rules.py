"""How an OpenAI-style message is turned into countable text where its rendering is not public.

Invariant: a message's tokens are a sum over its own texts plus constants, and every text field is counted once; blobs
cost what their rule says. Shared by the tiktoken counter and the estimate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from compaction.messages import is_blob
from compaction.tokens.blobs import blob_tokens, part_text

__all__ = [
    "CALL_TOKENS",
    "MESSAGE_TOKENS",
    "NAME_TOKENS",
    "REPLY_TOKENS",
    "TOOLS_TOKENS",
    "Texts",
    "message_texts",
    "tools_text",
]

MESSAGE_TOKENS = 3
"""Around each message (OpenAI's published figure); its role is counted as text beside it."""
NAME_TOKENS = 1
"""For a `name`, beside its text (OpenAI's published figure)."""
CALL_TOKENS = 3
"""Around each tool call, beside its name and arguments: an assumption, no figure is published."""
REPLY_TOKENS = 3
"""That prime the reply, once a request (OpenAI's published figure)."""
TOOLS_TOKENS = 9
"""Around the tool schemas, beside their compact JSON: an assumption, no figure is published."""
_FIELDS = ("refusal", "reasoning_content", "reasoning", "thinking")


class Texts(NamedTuple):
    """What a message is counted by: its texts, and tokens that are no text (constants and blobs)."""

    texts: tuple[str, ...]
    fixed: int


def message_texts(message: Mapping[str, Any]) -> Texts:
    """The countable parts of a message. Ids and unknown keys are not rendered and not counted."""
    texts = [str(message.get("role"))]
    fixed = MESSAGE_TOKENS
    content = message.get("content")
    if isinstance(content, str):
        texts.append(content)
    for part in content if isinstance(content, list) else ():
        if is_blob(part):
            fixed += blob_tokens(part)
        else:
            texts.append(part_text(part))
    if isinstance(message.get("name"), str):
        texts.append(message["name"])
        fixed += NAME_TOKENS
    texts += (message[key] for key in _FIELDS if isinstance(message.get(key), str))
    for call in _calls(message):
        texts += (_as_text(value) for value in call.values())
        fixed += CALL_TOKENS
    return Texts(tuple(text for text in texts if text), fixed)


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tool schemas as compact JSON."""
    return json.dumps(list(tools), ensure_ascii=False, separators=(",", ":"))


def _calls(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Name and arguments of each call; what a call of another type (`custom`) holds instead."""
    legacy = message.get("function_call")
    if isinstance(legacy, Mapping):
        yield legacy
    for call in message.get("tool_calls") or ():
        kind = call.get("type")
        inner = call.get("function", call.get(kind) if isinstance(kind, str) else None)
        if isinstance(inner, Mapping):
            yield inner


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
