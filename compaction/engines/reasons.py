"""Why tokens were prefilled that had stood in the cache before.

Invariant: a reason is read off what was held and what is wanted, ids first, messages second; nothing is guessed from
text. Only the caller knows its intent, so a hint ("compaction") wins where the messages did change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compaction.messages import dumps

__all__ = ["Held", "Request", "why_prefilled"]


@dataclass(frozen=True, slots=True)
class Request:
    """What a prompt was rendered from: a digest per message, and one for the tools."""

    messages: tuple[bytes, ...]
    tools: bytes

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Request:
        """The digests of a request."""
        return cls(tuple(_digest(dict(message)) for message in messages), _digest([dict(tool) for tool in tools or ()]))


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(dumps(value).encode("ascii"), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Held:
    """What stood in a cache: ids, the first `prompt` of them rendered from `request`, the rest a reply of that text.

    `opening` is how many tokens of the prompt's end are the generation prompt.
    """

    ids: Sequence[int]
    prompt: int
    opening: int
    request: Request | None
    said: str | None


def why_prefilled(
    held: Held,
    wanted: Sequence[int],
    shared: int,
    messages: Sequence[Mapping[str, Any]],
    now: Request,
    *,
    hint: str,
    decode: Callable[[Sequence[int]], str],
) -> str:
    """One of "", "first", "compaction", "edited", "template", "retokenized" (see `ports.Usage`).

    Args:
        held: what stands in the cache.
        wanted: ids of the new prompt, `shared` of which lead both lists.
        messages, now: what the new prompt was rendered from, and its digests.
        hint: the caller's own reason for changing the messages, "" for none.
        decode: text of ids.
    """
    before = held.request
    if not held.ids or before is None:
        return "first"
    if shared >= min(len(held.ids), len(wanted)):
        return ""
    if now.messages[: len(before.messages)] != before.messages or now.tools != before.tools:
        return hint or ("compaction" if _gap(before.messages, now.messages) else "edited")
    if shared < held.prompt - held.opening:
        return "template"  # the same messages and tools, rendered otherwise
    if len(held.ids) <= held.prompt:
        return ""  # only the generation prompt differs, and no reply stands behind it
    said = decode(held.ids[held.prompt :]).rstrip("\ufffd")
    if shared >= held.prompt and decode(wanted[held.prompt :]).startswith(said):
        return "retokenized"
    follows = messages[len(before.messages)] if len(messages) > len(before.messages) else {}
    repeated = follows.get("role") == "assistant" and follows.get("content") == held.said
    return "template" if repeated else hint or "edited"


def _gap(before: Sequence[bytes], now: Sequence[bytes]) -> bool:
    """Whether messages are missing from the middle while later ones stayed."""
    start = 0
    while start < min(len(before), len(now)) and before[start] == now[start]:
        start += 1
    return bool(set(before[start + 1 :]) & set(now[start:]))
