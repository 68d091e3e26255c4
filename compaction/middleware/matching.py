"""Matching a caller's whole list of messages against a conversation's history.

Invariant: after `reconcile` the history says what the caller's list says, message by message, and every divergence is
a logged `rewound` event; a list that is not legal changes nothing. The list is compared with the history itself, by
value, in one pass: hashing it would read it just as far, and nothing that is cached can go stale. Only what is new is
validated, counted and written. This module knows nothing about models, replies or threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from compaction.errors import InvalidInput, InvalidMessage
from compaction.grammar import Batch, follow
from compaction.messages import Message, validate
from compaction.session import Session

__all__ = ["plain", "reconcile", "same"]


def plain(value: object) -> object:
    """A message or response as a mapping: SDK objects (they have `model_dump`) give the keys they were made with."""
    dump = getattr(value, "model_dump", None)
    return dump(exclude_unset=True) if callable(dump) else value


def same(known: Mapping[str, Any], given: object) -> bool:
    """Whether two messages say the same.

    They do if they are equal as JSON values (`1`, `1.0` and `true` differ), after leaving out what says nothing: keys
    that are null or an empty list, in the message, its tool calls and its content parts, and an empty `content` beside
    tool calls. So a reply recorded from an SDK object equals the dict that comes back.
    """
    if not isinstance(given, Mapping):
        return False
    return _equal(known, given) or _equal(_said(known), _said(given))


def reconcile(session: Session, messages: Sequence[object]) -> None:
    """Bring the session's history to `messages`: append what is new, rewind first where the lists part.

    It rewinds to just before the first message that differs, so that compactions decided before it stay in force.
    Raises InvalidMessage with the position in the caller's list, and InvalidInput for an empty list
    or one that parts from a fork's shared history; all before anything is logged.
    """
    if not messages:
        raise InvalidInput(f"no messages for {session.id!r}: an empty list has nothing to send, and discards nothing")
    given = [plain(message) for message in messages]
    known = list(session.state.history.values())
    pairs = enumerate(zip(known, given, strict=False))
    common = next((i for i, (old, new) in pairs if not same(old.data, new)), min(len(known), len(given)))
    rest = _checked(known[:common], given[common:])
    if common < len(known):
        _rewind(session, known[common].id, common)
    session.extend(rest)


def _checked(kept: Sequence[Message], rest: Sequence[object]) -> list[Mapping[str, Any]]:
    """`rest`, each a legal message in its place after `kept`."""
    start = len(kept)
    while start and kept[start - 1].role == "tool":
        start -= 1
    batch: Batch | None = None
    for message in islice(kept, max(0, start - 1), None):
        batch = follow(batch, message)
    checked: list[Mapping[str, Any]] = []
    for index, raw in enumerate(rest, start=len(kept)):
        message = Message("", validate(raw, index=index))
        try:
            batch = follow(batch, message)
        except InvalidMessage as exc:
            raise InvalidMessage(exc.reason, index=index) from exc
        checked.append(message.data)
    return checked


def _rewind(session: Session, message_id: str, position: int) -> None:
    """Rewind to just before a message was appended."""
    seq = session.state.appended_at.get(message_id, 0) - 1  # 0: appended before the fork, not by this conversation
    if seq < 1:
        raise InvalidInput(
            f"message {position} differs from the history {session.id!r} shares with the conversation it was forked "
            "from: fork that one at an earlier point, or use another conversation name"
        )
    session.rewind(seq)


def _equal(a: object, b: object) -> bool:
    """Equality of JSON values, told apart by type; only as deep as `a` goes."""
    if isinstance(a, str):
        return a == b
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and len(a) == len(b) and all(k in b and _equal(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and a == b


def _said(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a message says: a shallow copy without what says nothing."""
    said = _without_empty(message)
    calls, parts = said.get("tool_calls"), said.get("content")
    if isinstance(calls, list):
        said["tool_calls"] = [_call(call) for call in calls]
        if parts == "":
            del said["content"]
    if isinstance(parts, list):
        said["content"] = [_without_empty(part) if isinstance(part, Mapping) else part for part in parts]
    return said


def _call(call: object) -> object:
    if not isinstance(call, Mapping):
        return call
    said, function = _without_empty(call), call.get("function")
    return {**said, "function": _without_empty(function)} if isinstance(function, Mapping) else said


def _without_empty(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None and item != []}
