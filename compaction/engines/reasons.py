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

__all__ = ["Request", "why_prefilled"]


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


def why_prefilled(
    held: Sequence[int],
    wanted: Sequence[int],
    shared: int,
    *,
    prompt: int,
    opening: int,
    before: Request | None,
    now: Request,
    hint: str,
    decode: Callable[[Sequence[int]], str],
) -> str:
    """One of "", "first", "compaction", "edited", "template", "retokenized" (see `ports.Usage`).

    Args:
        held: ids in the cache; the first `prompt` of them were a prompt, the rest a reply.
        wanted: ids of the new prompt, `shared` of which lead both lists.
        opening: tokens of the generation prompt at the end of a prompt.
        before, now: what the old and the new prompt were rendered from.
        hint: the caller's own reason for changing the messages, "" for none.
        decode: text of ids.
    """
    if not held or before is None:
        return "first"
    if shared >= len(held) or shared >= len(wanted):
        return ""
    if shared >= prompt:
        said, rendered = decode(held[prompt:]).rstrip("\ufffd"), decode(wanted[prompt:])
        return "retokenized" if rendered.startswith(said) else "edited"
    if shared >= prompt - opening and len(held) <= prompt:
        return ""  # only the generation prompt differs, and no reply stood behind it
    same_history = now.messages[: len(before.messages)] == before.messages and now.tools == before.tools
    if same_history:
        return "template"
    return hint or ("compaction" if _gap(before.messages, now.messages) else "edited")


def _gap(before: Sequence[bytes], now: Sequence[bytes]) -> bool:
    """Whether messages are missing from the middle while later ones stayed."""
    start = 0
    while start < min(len(before), len(now)) and before[start] == now[start]:
        start += 1
    return bool(set(before[start + 1 :]) & set(now[start:]))
