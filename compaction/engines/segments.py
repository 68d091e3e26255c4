"""Which token ids of a rendered request belong to which messages.

Invariant: the segments of a request, one after the other, are its ids less the generation prompt. A boundary between
two messages is only where the template, given the messages before it alone, writes exactly the ids before it; messages
with no boundary between them (merged turns) share a segment. The first segment is the head: leading messages and tools.
Knows nothing about caches.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from compaction.engines.reasons import Request
from compaction.errors import CannotSplice, EngineError
from compaction.grammar import LEADING
from compaction.tokens.counter import TemplateCounter
from compaction.tokens.template import ChatTemplate

__all__ = ["Segment", "Segmenter"]

_KNOWN = 4096
_UNKNOWN = (-1, -1)
_T = TypeVar("_T")
_Messages = Sequence[Mapping[str, Any]]
_Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of messages (their digests, the head's with that of the tools) and the ids the template writes for it."""

    digests: tuple[bytes, ...]
    ids: tuple[int, ...]


class Segmenter:
    """Splits requests of one template. What was found for a message, or for the messages before it, is remembered.

    Safe to use from many threads.

    Args:
        template: renders.
        counter: counts messages; where it is additive, a message's ids are as many wherever it stands.
        opening: tokens of the generation prompt.
    """

    def __init__(self, template: ChatTemplate, counter: TemplateCounter, opening: int) -> None:
        self._template, self._counter, self._opening = template, counter, opening
        self._lengths: OrderedDict[bytes, int] = OrderedDict()
        self._prefixes: OrderedDict[bytes, tuple[int, int] | None] = OrderedDict()
        self._lock = threading.Lock()

    def split(self, messages: _Messages, tools: _Tools, request: Request, ids: Sequence[int]) -> tuple[Segment, ...]:
        """The segments of a request that is rendered to `ids`.

        Raises CannotSplice where the template does not let messages be told apart.
        """
        leading = next((i for i, m in enumerate(messages) if m.get("role") not in LEADING), len(messages))
        marks = self._added_up(messages, tools, request, leading) if self._counter.additive else []
        if not marks or marks[-1][1] + self._opening != len(ids):
            marks = self._rendered(messages, tools, request, ids, leading)
        if not marks or marks[-1][0] != len(messages) or (len(marks) == 1 and leading < len(messages)):
            raise CannotSplice("the chat template does not write this conversation message by message")
        digests = (request.tools, *request.messages)
        edges = [(0, 0), *((count + 1, end) for count, end in marks)]
        return tuple(Segment(digests[a:b], tuple(ids[i:j])) for (a, i), (b, j) in pairwise(edges))

    def _added_up(self, messages: _Messages, tools: _Tools, request: Request, leading: int) -> list[tuple[int, int]]:
        """(messages, tokens) at each boundary, from the counts of head and messages."""
        end = self._counter.head(messages[:leading], tools) - self._opening
        marks = [(leading, end)]
        for index in range(leading, len(messages)):
            end += self._length(request.messages[index], messages[index])
            marks.append((index + 1, end))
        return marks

    def _length(self, digest: bytes, message: Mapping[str, Any]) -> int:
        found = self._lengths.get(digest)
        if found is None:
            found = self._counter.message(message)
            _remember(self._lengths, digest, found, self._lock)
        return found

    def _rendered(
        self, messages: _Messages, tools: _Tools, request: Request, ids: Sequence[int], leading: int
    ) -> list[tuple[int, int]]:
        """The same, from rendering the messages before each boundary; boundaries that are none are left out."""
        marks: list[tuple[int, int]] = []
        key = request.tools
        for count, digest in enumerate(request.messages, 1):
            key = hashlib.blake2b(key + digest, digest_size=16).digest()
            found = self._prefix(key, messages[:count], tools) if count >= leading else None
            if found is not None and found[0] <= len(ids) and hash(tuple(ids[: found[0]])) == found[1]:
                marks.append((count, found[0]))
        return marks

    def _prefix(self, key: bytes, messages: _Messages, tools: _Tools) -> tuple[int, int] | None:
        """Length and hash of what the template writes for these messages alone; None where it refuses them."""
        found = self._prefixes.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            try:
                ids = self._template.ids(messages, tools, generation_prompt=False)
                found = (len(ids), hash(tuple(ids)))
            except EngineError:
                found = None
            _remember(self._prefixes, key, found, self._lock)
        return found


def _remember(known: OrderedDict[bytes, _T], key: bytes, value: _T, lock: threading.Lock) -> None:
    """Put it in, the oldest out."""
    with lock:
        known[key] = value
        while len(known) > _KNOWN:
            known.popitem(last=False)
