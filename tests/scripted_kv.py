"""An engine without a model whose cache can be quantized and scored.

Invariant: its bytes are those the storage promises, for the tokens of the last request and its reply, and every call it
is sent is kept, so that a test can see what a session asked for and when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from compaction.budget import KVStorage
from compaction.errors import EngineError, InvalidInput
from compaction.messages import dumps
from compaction.ports import Quantized
from tests.crash.scripted_engine import ScriptedEngine

__all__ = ["STORAGES", "KVEngine", "hashed"]

STORAGES = {"k8v4": KVStorage("k8v4", 28, 640), "k4v2": KVStorage("k4v2", 16, 900)}


def hashed(kind: str, message: Mapping[str, Any]) -> float:
    """A score out of the text alone."""
    return crc32(f"{kind}{dumps(dict(message))}".encode()) / 2**32


@dataclass(frozen=True)
class KVEngine(ScriptedEngine):
    """Keeps the promises of `QuantizesKV` and `ScoresEntries`; 64 bytes a token in its own number format."""

    score: Callable[[str, Mapping[str, Any]], float] = hashed
    stored: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[str, ...]] = field(default_factory=list)

    def generate(self, conversation: str, messages: Any, tools: Any, *, max_new_tokens: int) -> Any:
        """As the scripted engine, and its tokens are held."""
        self.calls.append(("generate", conversation, self.stored.get(conversation, "")))
        self.tokens[conversation] = self.counter.request(messages, tools)
        return super().generate(conversation, messages, tools, max_new_tokens=max_new_tokens)

    def kv_bytes(self, conversation: str) -> int:
        """What the storage says."""
        name, tokens = self.stored.get(conversation, ""), self.tokens.get(conversation, 0)
        own = KVStorage("", self.kv_bytes_per_token)
        return STORAGES.get(name, own).bytes(tokens) if tokens else 0

    def release(self, conversation: str) -> None:
        """Nothing is held, in no storage."""
        self.stored.pop(conversation, None)
        self.tokens.pop(conversation, None)

    def storage(self, name: str) -> KVStorage:
        """One of `STORAGES`; "k0v0" is a name that this model cannot keep."""
        if name == "k0v0":
            raise EngineError("no layer of this model can be quantized")
        if name not in STORAGES:
            raise InvalidInput(f"storage {name!r} is unknown: use one of {', '.join(sorted(STORAGES))}")
        return STORAGES[name]

    def quantize(self, conversation: str, storage: str) -> Quantized | None:
        """Another price for the same tokens."""
        if storage == self.stored.get(conversation, ""):
            return None
        self.calls.append(("quantize", conversation, storage))
        before = self.kv_bytes(conversation)
        self.stored[conversation] = storage
        return Quantized(storage, before, self.kv_bytes(conversation), 0.005, 0.07)

    def scores(
        self, conversation: str, kind: str, messages: Sequence[Mapping[str, Any]], tools: Any, *, limit: int
    ) -> Sequence[float | None]:
        """One figure a message. Raises EngineError for a kind that is none."""
        self.calls.append(("scores", conversation, kind))
        if kind == "kvzip":
            raise EngineError("this model cannot repeat its context")
        return [self.score(kind, message) for message in messages]
