"""What the messages of a conversation are worth, read from its live cache.

Invariant: a cache that was scored is as it was, bit for bit; no forward pass holds more tokens than `limit`. What a
message is worth is the mean over its tokens, over all layers and heads, whatever will be asked later. Messages that the
cache does not hold yet have no worth.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from compaction.engines.forward import Forward
from compaction.engines.live_cache import LiveCache, common_prefix
from compaction.engines.segments import Segment
from compaction.errors import CannotScore, EngineError
from compaction.kv.quantization.layer import QuantizedLayer
from compaction.kv.rope import RotaryPlan
from compaction.kv.scoring import (
    Scores,
    expected_attention,
    keydiff,
    query_statistics,
    repeat_scores,
    span_scores,
)
from compaction.kv.scoring.keys import unlike
from compaction.tokens.template import ChatTemplate

__all__ = ["KINDS", "REPEAT", "Scoring"]

KINDS = ("expected", "keydiff", "kvzip")
REPEAT = "Repeat the previous context exactly."
_CHUNK, _SMALLEST, _LEAD = 2048, 32, 8
_SAMPLE = 512


class Scoring:
    """Scores the caches of one model. Safe to use from many threads: whoever scores holds the conversation's lock.

    Args:
        forward: the model.
        lock: held for as long as it takes: other conversations wait, since the model's attention is switched meanwhile.
        plan: finds how the model's keys are rotated.
        template: writes what asks for a repetition.
    """

    def __init__(
        self, forward: Forward, lock: threading.Lock, plan: Callable[[], RotaryPlan], template: ChatTemplate
    ) -> None:
        self._forward, self._lock, self._plan, self._template = forward, lock, plan, template

    def of(
        self, live: LiveCache, kind: str, segments: Sequence[Segment], wanted: Sequence[int], *, limit: int
    ) -> list[float | None]:
        """One figure for each message of the segments; None for those the cache does not hold whole.

        Raises EngineError for an unknown kind or a cache that holds none of them, CannotScore where model or cache have
        no such scores, or `limit` leaves no room to make them.
        """
        held = _held(segments, common_prefix(live.ids, wanted))
        ranges = [slots for slots in held if slots[0] < slots[1]]
        if not ranges:
            raise EngineError("the cache holds none of these messages: the next turn prefills them")
        worth = dict(zip(ranges, self._worth(live, kind, ranges, limit), strict=True))
        found: list[float | None] = []
        for segment, (start, end) in zip(segments, [*held, *[(0, 0)] * (len(segments) - len(held))], strict=True):
            found += [worth[start, end] / (end - start) if start < end else None] * len(segment.digests)
        return found[1:]  # the first digest is that of the tools

    def _worth(self, live: LiveCache, kind: str, ranges: Sequence[tuple[int, int]], limit: int) -> list[float]:
        if kind not in KINDS:
            raise EngineError(f"unknown score {kind!r}: use one of {', '.join(KINDS)}")
        plan = self._plan() if kind == "expected" else None
        with self._lock:
            return span_scores(self._scores(live, kind, plan, limit), ranges)

    def _scores(self, live: LiveCache, kind: str, plan: RotaryPlan | None, limit: int) -> Scores:
        position = live.slot_map.next_position
        if kind == "kvzip":
            prompt = self._asking()
            chunk = min(_CHUNK, limit - len(live) - len(prompt) - _LEAD)
            if chunk < _SMALLEST:
                raise CannotScore(f"{limit:,} tokens leave no room to repeat {len(live):,}")
            read = repeat_scores(
                self._forward.model, live.cache, live.ids, position=position, prompt=prompt, chunk=chunk
            )
            return read.most
        if plan is not None:
            sample = min(_SAMPLE, _contiguous(live), len(live) - 1)
            if sample < 2:
                raise CannotScore("the newest tokens do not stand one behind the other")
            model = self._forward.model
            seen = query_statistics(model, live.cache, live.ids, plan, position=position, sample=sample)
            return expected_attention(live.cache, seen, position=position)
        return _decoded(live) if live.storage else keydiff(live.cache, len(live))

    def _asking(self) -> list[int]:
        """Ids of a user's turn that asks for the repetition, and of the beginning of an answer."""
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        before = self._template.ids(talk, None, generation_prompt=False)
        asked = self._template.ids([*talk, {"role": "user", "content": REPEAT}], None)
        if asked[: len(before)] == before:
            return asked[len(before) :]
        return self._template.text_ids(f"\n\n{REPEAT}\n\n")


def _decoded(live: LiveCache) -> Scores:
    """KeyDiff of a quantized cache: reading decoded keys changes no code, where feeding tokens would."""
    layers = [layer if isinstance(layer, QuantizedLayer) and layer.held == len(live) else None for layer in live.layers]
    if all(layer is None for layer in layers):
        raise CannotScore("no layer of this cache has a slot for every token")
    return [None if layer is None else unlike(layer.key_slice(0, layer.held)[0].float()) for layer in layers]


def _held(segments: Sequence[Segment], shared: int) -> list[tuple[int, int]]:
    """The slots of each segment, as far as the cache holds them whole."""
    edges = [0, *accumulate(len(segment.ids) for segment in segments)]
    return [(start, end) for start, end in pairwise(edges) if end <= shared]


def _contiguous(live: LiveCache) -> int:
    """How many of the newest tokens stand one behind the other, the last one where the next token comes after it."""
    positions, following, count = live.slot_map.position, live.slot_map.next_position, 0
    while count < len(positions) and positions[-1 - count] == following - 1 - count:
        count += 1
    return count
