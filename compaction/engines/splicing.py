"""Bringing a live cache to another request by editing it, instead of prefilling what follows the first change.

Invariant: afterwards the cache's ids lead the wanted ones, and what is left of those is the new tail. What cannot be
done so is refused with CannotSplice or CannotRotate: the cache may then have been edited already, but says truly what
it holds and which of it is clean, so that the caller can go on by longest common prefix.
Knows nothing about templates or sampling.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from compaction.engines.aligning import Alignment, align
from compaction.engines.forward import Forward
from compaction.engines.live_cache import LiveCache
from compaction.engines.segments import Segment
from compaction.errors import CannotSplice, InvalidInput
from compaction.kv.aside import AsideCache
from compaction.kv.probe import probe
from compaction.kv.rope import RotaryPlan
from compaction.kv.slot_map import DRIFT_BUDGET, Mode, choose_mode

__all__ = ["Applied", "Splicing"]


@dataclass(frozen=True, slots=True)
class Applied:
    """How a cache was brought to a request, for the log. Counts are of tokens.

    `mode` and `why` say where kept tokens stand, `moved` how many keys were turned, `refused` why a splice was not
    made, `drift` how often the most moved slot has been moved, `reanchored` what was prefilled to bring that down.
    `cause` is "uncroppable" or "spliced" where exactly that made held tokens useless.
    """

    how: Literal["exact", "splice"] = "exact"
    mode: Mode | None = None
    why: str = ""
    kept: int = 0
    evicted: int = 0
    inserted: int = 0
    moved: int = 0
    refused: str = ""
    drift: int = 0
    reanchored: int = 0
    cause: str = ""

    def to_json(self, *, prefilled: int, removed: bool) -> dict[str, Any]:
        """The `applied` of a `usage` event; `prefilled` as its own figure, `removed`: whether messages went."""
        # What was cut off at the end stands before nothing that could carry traces of it.
        removal = "evicted" if self.evicted else "purged" if removed else ""
        values: dict[str, Any] = {"how": self.how, "removal": removal, "prefilled": prefilled}
        if self.refused:
            values["refused"] = self.refused
        if self.how == "splice":
            values |= {"mode": self.mode, "why": self.why, "evicted": self.evicted, "inserted": self.inserted}
            values |= {"moved": self.moved, "drift": self.drift, "reanchored": self.reanchored}
        return values


class Splicing:
    """Edits caches of one model. Safe to use from many threads: whoever edits a cache holds its conversation's lock.

    Args:
        forward: the model.
        lock: held during each forward pass.
        chunk: tokens per forward pass.
        trained: positions the model has been trained on; None: unknown.
        drift_budget: moves of one slot after which what follows is prefilled afresh.
    """

    def __init__(
        self,
        forward: Forward,
        lock: threading.Lock,
        *,
        chunk: int,
        trained: int | None,
        drift_budget: int = DRIFT_BUDGET,
    ) -> None:
        if drift_budget < 1:
            raise InvalidInput(f"drift_budget is {drift_budget}: a slot must be allowed at least 1 move")
        self._forward, self._lock, self._chunk = forward, lock, chunk
        self._trained, self._budget = trained, drift_budget
        self._plan: RotaryPlan | None = None

    @property
    def plan(self) -> RotaryPlan:
        """What the probe found for the model; it runs at the first splice."""
        with self._lock:
            if self._plan is None:
                self._plan = probe(self._forward.model)
            return self._plan

    def reaches(self, live: LiveCache, at: int, coming: int) -> bool:
        """Whether so many tokens behind the first `at` slots stay within the trained length."""
        return self._trained is None or live.slot_map.free_after(at) + coming <= self._trained

    def bring(
        self,
        live: LiveCache,
        held: Sequence[Segment],
        segments: Sequence[Segment],
        wanted: Sequence[int],
        *,
        opening: int,
        reply: int,
    ) -> Applied | None:
        """Edit the cache until its ids lead `wanted`, with room for the rest and a reply.

        None where nothing is to be edited and nothing was: then to prefill the rest is exact. Raises CannotSplice and
        CannotRotate.
        """
        if live.ids[: sum(len(segment.ids) for segment in held)] != [i for segment in held for i in segment.ids]:
            raise CannotSplice("the last prompt was not prefilled to its end")
        found = align(held, live.ids, segments, wanted, opening)
        if found is None:
            raise CannotSplice("the system messages or tools have changed")
        if not found.changes and live.dirty_from is None:
            return None
        if live.stateful:
            raise CannotSplice(self.plan.evict_refusal or "a layer holds a state that no token can be taken out of")
        if not found.cut or not live.can_crop(found.cut):
            raise CannotSplice("a sliding window no longer holds what stands in front of the new tokens")
        live.crop(found.cut)
        live.record_past(False)
        applied, blocks = self._change(live, found, room=len(wanted) + reply - 1)
        applied = self._arrange(live, applied, coming=len(wanted) - len(live) + reply)
        fresh = sum(max(0, min(start + count, len(live)) - start) for start, count in blocks)
        if live.ids != list(wanted[: len(live)]):
            raise CannotSplice("the edited cache does not hold the wanted tokens")
        return replace(applied, kept=len(live) - fresh, drift=live.slot_map.most_shifts())

    def _change(self, live: LiveCache, found: Alignment, room: int) -> tuple[Applied, list[tuple[int, int]]]:
        """Evict all that goes, then put in what is new, from front to back: each block sees the final prefix.

        Returns what was done, and where blocks stand: first slot and length.
        """
        evicted = live.evict(self.plan, [(c.start, c.end) for c in found.changes]).evicted
        live.start_turn(room)
        blocks, moved, offset = [], 0, 0
        for change in found.changes:
            if change.ids:
                at = change.start + offset
                moved += live.insert(self.plan, _Aside(self, at), change.ids, at).turned
                blocks.append((at, len(change.ids)))
            offset += len(change.ids) - (change.end - change.start)
        inserted = sum(count for _, count in blocks)
        return Applied("splice", evicted=evicted, inserted=inserted, moved=moved), blocks

    def _arrange(self, live: LiveCache, applied: Applied, coming: int) -> Applied:
        """See to it that positions stay within the trained length, and moves within the drift budget."""
        try:
            choice = choose_mode(live.slot_map, coming=coming, trained=self._trained, refusal=self.plan.rotate_refusal)
        except InvalidInput as exc:
            raise CannotSplice(str(exc)) from exc
        moved = applied.moved
        if choice.mode == "compact":
            moved += live.compact(self.plan).turned
        fresh = self._reanchor(live)
        return replace(applied, mode=choice.mode, why=choice.why, moved=moved, reanchored=fresh)

    def _reanchor(self, live: LiveCache) -> int:
        """Cut back to the first slot that was moved too often; returns how many tokens are to be prefilled for it."""
        at, before = live.slot_map.reanchor_from(self._budget), len(live)
        if at is None:
            return 0
        if not live.crop(at):
            live.clear()
        return before - len(live)

    def encode(self, cache: Any, ids: Sequence[int], start: int) -> torch.Tensor:
        """Feed ids at positions start, start + 1, …, in chunks; returns the last one's logits, `[vocabulary]`."""
        logits = torch.empty(0)
        for first in range(0, len(ids), self._chunk):
            with self._lock:
                logits = self._forward(cache, ids[first : first + self._chunk], start + first)
        return logits

    def aside(self, at: int) -> Any:
        """A cache for tokens behind a prefix of `at` slots."""
        return AsideCache(self._forward.model.config) if at else self._forward.new_cache()


@dataclass(frozen=True, slots=True)
class _Aside:
    """Implements `kv.splice.Encoder` for tokens behind `at` slots."""

    splicing: Splicing
    at: int

    def new_cache(self) -> Any:
        return self.splicing.aside(self.at)

    def __call__(self, cache: Any, ids: Sequence[int], start: int) -> torch.Tensor:
        return self.splicing.encode(cache, ids, start)
