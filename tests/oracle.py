"""An independent judge of legal output, written without the library's own grammar."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from compaction.messages import resolve
from compaction.state import State

__all__ = ["illegal", "rendered_pins"]


def illegal(messages: Sequence[dict[str, Any]], history: Sequence[Any]) -> list[str]:
    """What a provider would refuse: orphan results, and calls left without the results the history has for them."""
    problems: list[str] = []
    waiting: Counter[str] = Counter()
    unanswered = _unanswered(history)
    found: list[tuple[str, ...]] = []
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            if waiting[message["tool_call_id"]] < 1:
                problems.append(f"{index}: orphan result {message['tool_call_id']!r}")
            waiting[message["tool_call_id"]] -= 1
            continue
        if +waiting:
            found.append(tuple(sorted((+waiting).elements())))
        waiting = (
            Counter(call["id"] for call in message.get("tool_calls") or ())
            if message["role"] == "assistant"
            else Counter()
        )
    if +waiting:
        found.append(tuple(sorted((+waiting).elements())))
    left = Counter(found) - Counter(unanswered)
    return problems + [f"calls {ids} lost their results" for ids in left]


def _unanswered(history: Sequence[Any]) -> list[tuple[str, ...]]:
    out: list[tuple[str, ...]] = []
    waiting: Counter[str] = Counter()
    for message in [*history, {"role": "user"}]:
        if message["role"] == "tool":
            waiting[message["tool_call_id"]] -= 1
            continue
        if +waiting:
            out.append(tuple(sorted((+waiting).elements())))
        calls = message.get("tool_calls") or () if message["role"] == "assistant" else ()
        waiting = Counter(call["id"] for call in calls)
    return out


def rendered_pins(state: State) -> list[bool]:
    """For each pin: whether what the model sees contains the pinned text, compared by hash."""
    return [_shown(state, pin.message_id, pin.path, pin.start, pin.end) for pin in state.pins]


def _shown(state: State, message_id: str, path: str, start: int, end: int) -> bool:
    original = state.history[message_id]
    if message_id not in state.live:
        return False
    rendered = state.live[message_id].render(state.history)
    if path == "":
        return rendered == original.data
    text, wanted = resolve(rendered, path), resolve(original.data, path)[start:end]
    return any(_sha(text[at : at + len(wanted)]) == _sha(wanted) for at in range(len(text) - len(wanted) + 1))


def _sha(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
