"""An engine without a model, for children that have to start in milliseconds.

Its reply is a function of the request, so that a conversation that was killed goes on with the words it would have had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compaction.budget import Window
from compaction.messages import dumps
from compaction.ports import Generated, Usage
from compaction.testing import FakeCounter

__all__ = ["ScriptedEngine"]


class _Reply:
    """Keeps the promises of `ports.Generation`."""

    def __init__(self, words: Sequence[str], prompt: int) -> None:
        self.result: Generated | None = None
        self._words, self._prompt = words, prompt
        self._said: list[str] = []

    def __iter__(self) -> Iterator[str]:
        for word in self._words:
            if self.result is not None:
                return
            self._said.append(word)
            yield word
        self._finish("stop")

    def close(self) -> None:
        """Stop where it is."""
        if self.result is None:
            self._finish("cancelled")

    def _finish(self, reason: str) -> None:
        count = len(self._said)
        usage = Usage(self._prompt, count, self._prompt, 0, self._prompt + count, 0, 0, 1.0, 1.0, "first")
        self.result = Generated("".join(self._said), tuple(range(count)), reason, usage)


@dataclass(frozen=True)
class ScriptedEngine:
    """Keeps the promises of `ports.Engine`; holds no cache."""

    counter: FakeCounter = field(default_factory=FakeCounter)
    window: Window = field(default_factory=lambda: Window(100_000, "model config"))
    name: str = "scripted"
    kv_bytes_per_token: int = 64
    user_first: bool = False

    def generate(
        self,
        conversation: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        max_new_tokens: int,
    ) -> _Reply:
        """Six words that depend on every message of the request."""
        digest = hashlib.sha256(dumps([dict(message) for message in messages]).encode()).hexdigest()
        words = [f"{digest[i : i + 6]} " for i in range(0, 36, 6)]
        return _Reply(words[:max_new_tokens], self.counter.request(messages, tools))

    def forget_reply(self, conversation: str) -> None:
        """There is nothing to forget."""

    def complete(self, messages: Sequence[Mapping[str, Any]], *, max_new_tokens: int) -> Generated:
        """One reply outside any conversation."""
        reply = self.generate("", messages, None, max_new_tokens=max_new_tokens)
        for _ in reply:
            pass
        if reply.result is None:
            raise RuntimeError("the reply has not ended")
        return reply.result

    def kv_bytes(self, conversation: str) -> int:
        """None are held."""
        return 0

    def release(self, conversation: str) -> None:
        """There is nothing to free."""
