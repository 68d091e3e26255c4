"""Telling a provider's "the prompt is too long" from its other errors.

Invariant: no provider's SDK is imported; an error is known by its `code`, its HTTP status and its words, wherever the
usual SDKs keep them (attributes, `body`, `error`, the message). A rate limit ("tokens per minute") is not an overflow.

    OpenAI      400, code context_length_exceeded: "This model's maximum context length is 8192 tokens. However, …",
                "Your input exceeds the context window of this model"
    vLLM        400: "This model's maximum context length is …", "The decoder prompt (length 9000) is longer than the
                maximum model length of 8192", "exceeds the model's max_model_len"
    llama.cpp   400, type exceed_context_size_error: "the request exceeds the available context size"
    Anthropic   400: "prompt is too long: 210000 tokens > 200000 maximum", "input length and `max_tokens` exceed context
                limit"; 413, type request_too_large
    others      "input token count (…) exceeds the maximum number of tokens", "Input is too long for requested model",
                "too large for model with … maximum context length", "exceeds context length", "reduce the length of …"
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

__all__ = ["PATTERNS", "too_long"]

CODES = frozenset(
    {"context_length_exceeded", "exceed_context_size_error", "request_too_large", "string_above_max_length"}
)
OTHER_STATUS = frozenset({401, 403, 404, 408, 429})
TOO_LARGE = 413

PATTERNS: tuple[re.Pattern[str], ...] = tuple(
    re.compile(words, re.IGNORECASE)
    for words in (
        r"context_length_exceeded|exceed_context_size_error",
        r"maximum context length",
        r"max(imum)?[ _]model[ _]len(gth)?",
        r"(exceeds?|larger than|longer than) (the |available |maximum |model'?s? )*context (size|length|window|limit)",
        r"context (size|length|window|limit) (has been |was |is )?exceeded",
        r"(prompt|input|request) is too long",
        r"exceeds? the maximum number of (input )?tokens",
        r"(too many|input) tokens exceed",
        r"reduce the length of (the|your) (messages|prompt|input)",
    )
)
"""What the messages of overflow errors have in common."""


def too_long(error: BaseException) -> bool:
    """Whether a provider refused a request because its prompt does not fit the model's context."""
    status = _status(error)
    if status in OTHER_STATUS:
        return False
    if status == TOO_LARGE or any(code in CODES for code in _codes(error)):
        return True
    text = str(error)
    return any(pattern.search(text) for pattern in PATTERNS)


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    for holder, name in ((error, "status_code"), (error, "status"), (error, "http_status"), (response, "status_code")):
        value = getattr(holder, name, None)
        if isinstance(value, int):
            return value
    return None


def _codes(error: BaseException) -> Iterator[str]:
    """Codes and types of the error itself and of the JSON body the SDK kept."""
    body = getattr(error, "body", None)
    inner = body.get("error") if isinstance(body, Mapping) else None
    for holder in (body, inner):
        if isinstance(holder, Mapping):
            yield from (str(holder[key]) for key in ("code", "type") if holder.get(key))
    yield from (str(value) for key in ("code", "type") if (value := getattr(error, key, None)))
