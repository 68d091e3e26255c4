"""Which texts an event names.

Invariant: an event names a text by the hex of its salted digest, in one of three places: as `{"t": hex}` anywhere in
the payload, as `text` or `tools` at its top, or in the list `failures` at its top. Nothing else in a payload is taken
for a reference, so that a message id or a parameter may look like a digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from compaction.plan import Span

__all__ = ["mentions", "named", "span_of"]

_HEX = re.compile(r"[0-9a-f]{64}\Z")


def named(payload: Mapping[str, Any]) -> Iterator[str]:
    """The digests a payload names, in hex, in the order they stand."""
    for key in ("text", "tools"):
        if _is_digest(payload.get(key)):
            yield payload[key]
    failures = payload.get("failures")
    if isinstance(failures, list):
        yield from (item for item in failures if _is_digest(item))
    yield from _notes(payload)


def mentions(payload: Any) -> Iterator[str]:
    """Every string in a payload that looks like a digest, wherever it stands."""
    if _is_digest(payload):
        yield payload
    elif isinstance(payload, dict):
        for value in payload.values():
            yield from mentions(value)
    elif isinstance(payload, list):
        for value in payload:
            yield from mentions(value)


def span_of(row: Any) -> Span:
    """The span in a row `[message_id, path, start, end, action_index, tokens]` of a decision's payload.

    Raises ValueError for a row of another shape.
    """
    if not isinstance(row, list) or len(row) != 6:
        raise ValueError(f"a span is [message, path, start, end, action, tokens], not {row!r}")
    message_id, path, *numbers = row
    if not (isinstance(message_id, str) and isinstance(path, str)):
        raise ValueError(f"a span starts with a message id and a path, not {row!r}")
    if any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in numbers):
        raise ValueError(f"start, end, action and tokens of a span are non-negative integers, not {row!r}")
    return Span(message_id, path, numbers[0], numbers[1])


def _notes(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if key != "params"}  # a policy's own, whatever they look like
        if len(value) == 1 and _is_digest(value.get("t")):
            yield value["t"]
            return
        for item in value.values():
            if isinstance(item, (dict, list)):
                yield from _notes(item)
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, (dict, list)):
                yield from _notes(item)


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _HEX.match(value) is not None
