"""Lossless chat-completions messages.

Invariant: a `Message` equals what the caller handed in as a JSON value, key order and unknown keys included, for ever:
it keeps the ASCII-escaped JSON text (so that a lone surrogate survives) and gives out fresh copies only.
This module knows nothing about conversations, budgets or templates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from compaction.errors import InvalidMessage

__all__ = [
    "JSON",
    "ROLES",
    "Message",
    "Part",
    "apply_edits",
    "canonical",
    "dumps",
    "is_blob",
    "leaves",
    "resolve",
    "validate",
]

JSON = Any
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
ROLES: tuple[str, ...] = ("system", "developer", "user", "assistant", "tool", "function")
Part = Mapping[str, Any]


class _Function(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    arguments: str | dict[str, Any] = ""


class _Call(BaseModel):
    model_config = ConfigDict(extra="allow")
    id: Annotated[str, Field(min_length=1)]
    function: _Function | None = None


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str


class _Shape(BaseModel):
    """The shape every message must have; unknown keys pass through untouched."""

    model_config = ConfigDict(extra="allow")
    role: Role
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


def dumps(value: JSON) -> str:
    """Compact ASCII JSON, keys in the order they have."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def canonical(value: JSON) -> str:
    """Compact ASCII JSON with sorted keys: equal values give equal bytes."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False, sort_keys=True)


def validate(message: object, *, index: int | None = None) -> str:
    """Check one message and return its JSON text.

    Raises InvalidMessage with the field that is wrong and what would be right.
    """
    if not isinstance(message, Mapping):
        raise InvalidMessage(f"a message is a JSON object with a role, not {type(message).__name__}", index=index)
    data = dict(message)
    try:
        text = dumps(data)
        same = json.loads(text) == data
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidMessage(f"not a JSON value: {exc}", index=index) from exc
    if not same:
        raise InvalidMessage("holds values JSON cannot keep (tuples, or keys that are no strings)", index=index)
    try:
        _Shape.model_validate_json(text) if _plain(text) else _Shape.model_validate(data)
    except ValidationError as exc:
        raise InvalidMessage(_first_problem(exc, data), index=index) from exc
    if data["role"] == "tool" and not data.get("tool_call_id"):
        raise InvalidMessage("a tool message needs the tool_call_id of the call it answers", index=index)
    return text


def _plain(text: str) -> bool:
    return len(text) > 100_000 and "\\ud" not in text


def _first_problem(exc: ValidationError, data: Mapping[str, Any]) -> str:
    first = exc.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["loc"] == ("role",):
        return f"role {data.get('role')!r} is unknown: use one of {', '.join(ROLES)}"
    return f"{where}: {first['msg']}"


class Message:
    """One message of the history. `text` is its JSON; `data` a parsed copy that must not be changed."""

    __slots__ = ("data", "id", "text")

    def __init__(self, id: str, text: str) -> None:
        self.id = id
        self.text = text
        self.data: Mapping[str, Any] = json.loads(text)

    @property
    def role(self) -> str:
        """The role as given."""
        return str(self.data["role"])

    @property
    def call_ids(self) -> tuple[str, ...]:
        """Ids of the tool calls this message makes, in order; they may repeat."""
        return tuple(str(call["id"]) for call in self.data.get("tool_calls") or ())

    @property
    def answers(self) -> str | None:
        """The id of the call this message answers, where it is a tool result."""
        return self.data.get("tool_call_id") if self.role == "tool" else None

    def fresh(self) -> dict[str, Any]:
        """A copy the caller may change."""
        return json.loads(self.text)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"Message({self.id!r}, role={self.role!r}, {len(self.text):,} characters)"


def resolve(data: JSON, path: str) -> JSON:
    """The value at a JSON Pointer (RFC 6901).

    Raises KeyError where nothing is there.
    """
    value = data
    for raw in path.split("/")[1:]:
        key = raw.replace("~1", "/").replace("~0", "~")
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, ValueError, TypeError):
            raise KeyError(path) from None
    return value


def leaves(data: JSON, path: str = "") -> Iterator[tuple[str, str]]:
    """All strings in a JSON value with their pointers, in document order."""
    if isinstance(data, str):
        yield path, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from leaves(value, f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}")
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from leaves(value, f"{path}/{index}")


def apply_edits(data: Mapping[str, Any], edits: Sequence[tuple[str, int, int, str]]) -> dict[str, Any]:
    """A copy of `data` with each (path, start, end, text) replaced; ranges are code points of the original string."""
    copy: dict[str, Any] = json.loads(dumps(data))
    by_path: dict[str, list[tuple[int, int, str]]] = {}
    for path, start, end, text in edits:
        by_path.setdefault(path, []).append((start, end, text))
    for path, ranges in by_path.items():
        parent_path, _, key = path.rpartition("/")
        parent = resolve(copy, parent_path)
        slot: Any = int(key) if isinstance(parent, list) else key.replace("~1", "/").replace("~0", "~")
        string = parent[slot]
        for start, end, text in sorted(ranges, reverse=True):
            string = string[:start] + text + string[end:]
        parent[slot] = string
    return copy


def is_blob(part: Part) -> bool:
    """Whether a content part is an image, audio or file: counted by rule, its base64 never as text."""
    return part.get("type") in {
        "image_url",
        "image",
        "input_image",
        "input_audio",
        "audio",
        "file",
        "input_file",
        "video_url",
    }
