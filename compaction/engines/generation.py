"""A running reply: the decode loop.

Invariant: while a reply runs, the cache holds its prompt and all sampled tokens but the last; when it ends early, by
`close()`, an interrupt or an error, the cache holds the prompt only (or nothing, where a layer cannot be cut back).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from compaction.engines.detokenize import Detokenizer
from compaction.engines.live_cache import LiveCache
from compaction.engines.splicing import Applied
from compaction.ports import Generated, Usage

__all__ = ["Prefilled", "TransformersGeneration"]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt that stands in the cache: its last logits (shape [vocabulary]), how it got there, and since when.

    `removed`: whether messages that stood there before are gone.
    """

    logits: Any
    prompt: int
    applied: Applied
    why: str
    started: float
    removed: bool = False

    @property
    def fresh(self) -> int:
        """Tokens that went through the model."""
        return self.prompt - self.applied.kept

    def to_json(self) -> dict[str, Any]:
        """The `applied` of a `usage` event."""
        return self.applied.to_json(prefilled=self.fresh, removed=self.removed)


class TransformersGeneration:
    """Implements `ports.Generation`. Iterate for pieces of text; `result` is there once the reply has ended.

    `prompt_logits` (float32 on the CPU, shape [vocabulary]) are what the first token was chosen from.
    """

    def __init__(
        self,
        live: LiveCache,
        prefilled: Prefilled,
        *,
        feed: Callable[[LiveCache, list[int]], Any],
        choose: Callable[[Any], int],
        stop: frozenset[int],
        max_new_tokens: int,
        detokenizer: Detokenizer,
        lock: AbstractContextManager[Any],
        clock: Callable[[], float],
    ) -> None:
        self.result: Generated | None = None
        self.prompt_logits = prefilled.logits.float().cpu()
        self._live, self._prefilled = live, prefilled
        self._feed, self._choose, self._stop = feed, choose, stop
        self._max, self._text, self._lock, self._clock = max_new_tokens, detokenizer, lock, clock
        self._ids: list[int] = []
        self._next: int | None = choose(prefilled.logits)
        self._ttft_ms = (clock() - prefilled.started) * 1000
        self._decode_ms, self._passes = 0.0, 0
        live.record_past(True)

    def __iter__(self) -> Iterator[str]:
        """Pieces of text as they are generated. Leaving the loop early cancels."""
        try:
            while self.result is None:
                piece = self._advance()
                if piece:
                    yield piece
        except BaseException:  # also GeneratorExit and KeyboardInterrupt: whatever ends the loop early cancels
            self.close()
            raise

    def close(self) -> None:
        """Stop; where the reply was still running, `result` says "cancelled" and the cache holds the prompt only."""
        with self._lock:
            if self.result is None:
                self._text.flush()
                self._live.crop(min(self._prefilled.prompt, len(self._live)))
                self._finish("cancelled")

    def _advance(self) -> str:
        """One token: returns its text, or "" where that is not final yet."""
        with self._lock:
            if self.result is not None:
                return ""
            token = self._sample() if self._next is None else self._next
            self._next = None
            self._ids.append(token)
            if token in self._stop:
                rest = self._text.flush()
                self._finish("stop")
                return rest
            piece = self._text.push(token)
            if len(self._ids) >= self._max:
                piece += self._text.flush()
                self._finish("length")
            return piece

    def _sample(self) -> int:
        started = self._clock()
        token = self._choose(self._feed(self._live, self._ids[-1:]))
        self._decode_ms += (self._clock() - started) * 1000
        self._passes += 1
        return token

    def _finish(self, reason: str) -> None:
        self._live.end_turn()
        done = self._prefilled
        usage = Usage(
            prompt_tokens=done.prompt,
            completion_tokens=len(self._ids),
            prefilled=done.fresh,
            reused=done.applied.kept,
            peak_tokens=self._live.peak_tokens,
            kv_bytes=self._live.bytes,
            peak_kv_bytes=self._live.peak_bytes,
            ttft_ms=self._ttft_ms,
            tpot_ms=self._decode_ms / self._passes if self._passes else None,
            why=done.why,
            applied=done.to_json(),
        )
        self.result = Generated(self._text.text, tuple(self._ids), reason, usage)
