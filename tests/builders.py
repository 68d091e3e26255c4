"""Chat messages in few words, for tests that read as sentences.

Every builder returns a fresh dict that the caller may change; ids of tool calls are the caller's, because in real
conversations they repeat.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["assistant", "call", "image", "roles", "system", "tool", "tool_batch", "tool_schema", "user"]

Message = dict[str, Any]


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def user(content: str | Sequence[Mapping[str, Any]], **more: Any) -> Message:
    """A user message of text or content parts; further keys as given."""
    return {
        "role": "user",
        "content": content if isinstance(content, str) else [dict(part) for part in content],
        **more,
    }


def assistant(content: str | None, *, calls: Sequence[Mapping[str, Any]] = (), **more: Any) -> Message:
    """An assistant message, with tool calls where there are any."""
    message: Message = {"role": "assistant", "content": content, **more}
    if calls:
        message["tool_calls"] = [dict(item) for item in calls]
    return message


def call(id: str, name: str = "lookup", /, **arguments: Any) -> Message:
    """One tool call, for `assistant(None, calls=[…])`."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def tool(id: str, content: str) -> Message:
    """The result of the call with that id."""
    return {"role": "tool", "tool_call_id": id, "content": content}


def tool_batch(results: Sequence[tuple[str, str]], *, content: str | None = None) -> list[Message]:
    """An assistant message with one call for each (id, result) and all the results: one unit for every cut."""
    calls = [call(id) for id, _ in results]
    return [assistant(content, calls=calls), *(tool(id, result) for id, result in results)]


def tool_schema(name: str = "lookup", description: str = "Look something up.") -> Message:
    """A tool as chat-completions clients declare it."""
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def image(data: str = "iVBORw0KGgo=") -> Message:
    """A content part with a picture."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def roles(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The roles in order: a conversation's shape, for assertions."""
    return [str(message["role"]) for message in messages]
