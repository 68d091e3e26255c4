"""The events a conversation is made of, and the texts they point to.

Invariant: events are the sole truth and hold no conversation text. A text lives in a row of its own; an event names it
by a salted digest, so that erasing the text (and its salt) leaves the chain verifiable and the digest unguessable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from compaction.errors import InvalidInput
from compaction.messages import canonical

__all__ = ["KINDS", "Event", "Kind", "NewEvent", "Text", "chain", "check_payload", "digest_of", "seal"]

Kind = Literal[
    "opened",
    "appended",
    "pinned",
    "unpinned",
    "decision_started",
    "decision_committed",
    "decision_failed",
    "generation_started",
    "usage",
    "probe",
    "interrupted",
    "restored",
    "rewound",
    "redacted",
    "reanchored",
]


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event not written yet. `at` is UTC, ISO 8601; `payload` plain JSON without conversation text."""

    kind: Kind
    at: str
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """An event as written: `id` counts in the file, `seq` from 1 in its conversation; `hash` is 32 bytes."""

    id: int
    conversation: str
    seq: int
    kind: Kind
    at: str
    payload: Mapping[str, Any]
    hash: bytes


@dataclass(frozen=True, slots=True)
class Text:
    """A text with its salt and salted digest (32 bytes, SHA-256 of salt + UTF-8)."""

    digest: bytes
    salt: bytes
    body: str


def digest_of(salt: bytes, body: str) -> bytes:
    """SHA-256 of salt + UTF-8 of the text; lone surrogates as in WTF-8."""
    return hashlib.sha256(salt + body.encode("utf-8", "surrogatepass")).digest()


def seal(body: str, salt: bytes) -> Text:
    """A text ready to be written under its salted digest."""
    return Text(digest_of(salt, body), salt, body)


def chain(previous: bytes, id: int, conversation: str, seq: int, kind: str, at: str, payload: str) -> bytes:
    """The hash of an event row: SHA-256 over the previous row's hash and the row's own fields as canonical JSON.

    `payload` is the JSON text as stored, so that old rows verify whatever later versions write.
    """
    row = canonical([id, conversation, seq, kind, at, payload])
    return hashlib.sha256(previous + row.encode("ascii")).digest()


Hex = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Payload(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Policy(_Payload):
    name: str
    version: int
    params: dict[str, Any]


class _Opened(_Payload):
    policy: _Policy
    counter: str
    budget: dict[str, Any]
    head: Annotated[list[int], Field(min_length=3, max_length=3)]
    total: Annotated[int, Field(ge=0)]
    tools: Hex | None


class _Appended(_Payload):
    message: str
    text: Hex
    role: str
    tokens: Annotated[int, Field(ge=0)]
    counter: str
    total: Annotated[int, Field(ge=0)]


class _Range(_Payload):
    message: str
    path: str
    start: int
    end: int


class _Committed(_Payload):
    trigger: str
    policy: _Policy
    rung: int
    answers: list[int]
    plan: list[dict[str, Any]]
    spans: list[list[Any]]
    changed: list[list[Any]]


class _Failed(_Payload):
    tokens: int
    failures: list[dict[str, Any]]


class _Usage(_Payload):
    prompt_tokens: int
    completion_tokens: int


class _WithText(_Payload):
    text: Hex


class _Rewound(_Payload):
    to: int


_MODELS: dict[str, type[_Payload]] = {
    "opened": _Opened,
    "appended": _Appended,
    "pinned": _Range,
    "unpinned": _Range,
    "decision_started": _Payload,
    "decision_committed": _Committed,
    "decision_failed": _Failed,
    "generation_started": _Payload,
    "usage": _Usage,
    "probe": _WithText,
    "interrupted": _WithText,
    "restored": _Range,
    "rewound": _Rewound,
    "redacted": _Payload,
    "reanchored": _Payload,
}
KINDS: tuple[str, ...] = tuple(_MODELS)


def check_payload(kind: str, payload: Mapping[str, Any]) -> None:
    """Validate a payload as read back.

    Raises InvalidInput with the kind and the first field that is wrong.
    """
    model = _MODELS.get(kind)
    if model is None:
        raise InvalidInput(f"unknown event kind {kind!r}")
    try:
        model.model_validate(payload)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        raise InvalidInput(f"{kind} payload: {'.'.join(map(str, first['loc']))}: {first['msg']}") from exc
