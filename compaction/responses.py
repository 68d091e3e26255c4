"""Reading a provider's chat-completions response.

Invariant: the message comes back as the provider sent it; nothing is invented where a field is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compaction.errors import InvalidInput

__all__ = ["message_of", "usage_of"]


def _plain(response: object) -> Mapping[str, Any]:
    dump = getattr(response, "model_dump", None)
    data = dump(exclude_unset=True) if callable(dump) else response
    if not isinstance(data, Mapping):
        raise InvalidInput(f"record() takes a chat-completions response, not {type(response).__name__}")
    return data


def message_of(response: object) -> Mapping[str, Any]:
    """The message of a response (an SDK object or a mapping), or the message itself.

    Raises InvalidInput where there is none.
    """
    data = _plain(response)
    message = data if "role" in data else ((data.get("choices") or [{}])[0] or {}).get("message")
    if not isinstance(message, Mapping):
        raise InvalidInput("record(): the response has no choices[0].message")
    return message


def usage_of(response: object) -> dict[str, int] | None:
    """The tokens the provider reports; None where it reports none."""
    usage = _plain(response).get("usage") or {}
    if not isinstance(usage.get("prompt_tokens"), int):
        return None
    completion = int(usage.get("completion_tokens") or 0)
    return {"prompt_tokens": usage["prompt_tokens"], "completion_tokens": completion}
