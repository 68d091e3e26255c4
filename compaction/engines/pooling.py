"""Many conversations' caches under one budget: who may hold how much on the device, and who must leave it.

Invariant: the sum of all promises never exceeds the pool's bytes on the device, and no cache ever holds more than it
was promised: before a turn allocates, its whole need is promised to it, transient copies included, and others are
parked until it fits. A conversation at rest is promised what it holds, measured. One in use or pinned is never parked.

Locks, in this order: `_moving` (one cache moves between tiers at a time), a conversation's own, `_ledger` (figures).
Nobody who holds a conversation's lock waits for `_moving`. Knows nothing about messages or templates.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from compaction.engines.forward import Forward
from compaction.engines.live_cache import LiveCache, ran_out
from compaction.errors import CacheRefused, CannotSplice, EngineError, PoolFull
from compaction.kv.measure import logical_bytes
from compaction.kv.residency.fingerprint import Identity, ids_digest
from compaction.kv.residency.parcel import Parcel
from compaction.kv.residency.pool import Pool, PoolUsage, TierUsage
from compaction.kv.residency.shelf import Shelf
from compaction.kv.residency.sizes import CacheSizes, slots_held
from compaction.kv.residency.snapshot import pack_cache, packed_slots, packed_tokens, unpack_cache
from compaction.kv.rope import RotaryPlan
from compaction.kv.splice import Encoder, Spliced

__all__ = ["CachePool", "PooledCache"]

_Lock = AbstractContextManager[Any]


class PooledCache(LiveCache):
    """A live cache that tells its pool what it holds."""

    def __init__(self, forward: Forward, capacity: int | None, pool: CachePool) -> None:
        self._pool = pool
        self.place: Resident | None = None
        super().__init__(forward, capacity)

    def start_turn(self, tokens: int) -> None:
        """As in any live cache; arenas that are long enough stay where smaller ones would not fit beside them.

        Raises PoolFull, with nothing changed, where more would be needed than was promised.
        """
        super().start_turn(self._pool.allow(self, tokens))

    def insert(self, plan: RotaryPlan, encoder: Encoder, ids: Sequence[int], at: int) -> Spliced:
        """As in any live cache; also refused where the pool has no room for what is encoded beside it."""
        if not self._pool.spare(self, self._pool.beside(at, len(ids))):
            raise CannotSplice("the pool has no room for a summary beside the cache")
        return super().insert(plan, encoder, ids, at)

    def end_turn(self) -> None:
        """As in any live cache; memory that moving to smaller arenas would need beside the old is asked for first."""
        if self._pool.lend(self, max((layer.nbytes() // 2 for layer in self._arenas), default=0)):
            super().end_turn()
        self._pool.leave(self)

    def clear(self) -> None:
        """Hold nothing."""
        super().clear()
        self._pool.measure(self)

    def slots(self) -> list[int]:
        """Slots allocated, layer by layer."""
        return slots_held(self.layers, len(self))

    def pack(self) -> Parcel:
        """Copies of all it holds. Raises CacheRefused for a layer that cannot be parked."""
        return pack_cache(self.layers, self.slot_map, {"dirty_from": self.dirty_from})

    def unpack(self, parcel: Parcel, tokens: int) -> None:
        """Hold what was packed, in arenas for `tokens`.

        Raises CacheRefused where it was packed from other layers; whatever is raised, it then holds nothing.
        """
        self.clear()
        try:
            self._cache.reserve(max(tokens, *packed_slots(parcel)))
            restored = unpack_cache(parcel, self.layers, self._forward.model.device)
        except BaseException as exc:
            self.clear()
            if ran_out(exc):
                raise EngineError("out of memory while a parked cache is restored: lower the pool") from exc
            raise
        self.slot_map, self.dirty_from = restored.slot_map, restored.extra["dirty_from"]

    @property
    def _arenas(self) -> list[Any]:
        return list(self._cache.arenas)


@dataclass(slots=True, eq=False)
class Resident:
    """A conversation that the pool knows: what it is promised on the device, and whether its cache is elsewhere.

    `turn` counts turns, `reply` is how many tokens the reply of the last one may have, `spare` what of the promise is
    for blocks that are encoded beside the cache. `parked`: a digest of the ids of
    a cache that is elsewhere, "" for none, `tokens` how many they are, `keep` how many of them still count; `lost` says
    why it is gone.
    """

    name: str
    live: PooledCache
    lock: _Lock
    turn: int = 0
    reply: int = 0
    promised: int = 0
    spare: int = 0
    in_use: bool = False
    parked: str = ""
    tokens: int = 0
    lost: str = ""
    keep: int | None = None


class CachePool:
    """Implements `PoolView` for one engine. Safe to use from many threads.

    Args:
        pool: bytes of each tier.
        sizes: what caches of this model hold.
        identity: whose caches they are, looked at anew each time one is parked or comes back.
    """

    def __init__(self, pool: Pool, sizes: CacheSizes, identity: Callable[[], Identity]) -> None:
        self.budget = pool
        self._sizes, self._identity = sizes, identity
        self._shelf = Shelf(pool)
        self._residents: dict[str, Resident] = {}  # least recently used first
        self._moving, self._ledger = threading.Lock(), threading.RLock()
        self._peak, self._parks, self._dropped = 0, 0, 0
        self._restores: Counter[str] = Counter()
        self._unsupported = 0

    # -- what the engine asks for

    def enter(
        self,
        conversation: str,
        live: PooledCache,
        lock: _Lock,
        tokens: int = 0,
        reply: int = 0,
        more: int = 0,
        spare: int = 0,
    ) -> str:
        """Begin a turn of `tokens`, the last `reply` of them a reply: its cache is on the device, and has room.

        It has room for as many tokens as it holds in any case, and for `more` bytes beside them; where others can be
        parked for it, also for `spare` bytes of blocks.

        Returns why a cache that was parked did not come back: "parked away", "fingerprint", "corrupted", "missing", or
        "". The turn ends with the live cache's `end_turn`, or with `leave`.

        Raises PoolFull, with nothing changed, where it does not fit, and EngineError where a turn is under way.
        """
        with self._moving:
            resident = self._begin(conversation, live, lock)
            try:
                parcel = self._parcel(conversation, resident)
                with lock:
                    there = len(live) if parcel is None else packed_tokens(parcel)
                    most = max(tokens, there)
                    needs = [self._need(live, parcel, most, goal, reply) + more for goal in (most, tokens or most)]
                    resident.reply = reply
                resident.spare = self._make_room(resident, needs[0], max(needs), spare)
                if parcel is not None:
                    with lock:
                        self._restore(conversation, resident, parcel, most)
            except BaseException:
                self.leave(live)
                raise
            lost, resident.lost = resident.lost, ""
            return lost

    def allow(self, live: PooledCache, tokens: int) -> int:
        """See to it that a turn under way may come to `tokens`; nobody is parked for it.

        Returns how many tokens to have arenas for: more, as many as now, where there is no room for moving to smaller
        ones. Raises PoolFull where that is more than was promised and not free, EngineError where no turn is under way.
        """
        with self._ledger:
            place = live.place
            if place is None or self._residents.get(place.name) is not place:
                raise EngineError("the conversation was released while its turn began: ask again")
            slots = live.slots()
            need = self._peak_of(live, slots, tokens, place.reply)
            if need <= place.promised or self.lend(live, need - place.promised):
                return tokens
            stay = max(slots, default=0)
            if tokens <= min(slots, default=0) and self._peak_of(live, slots, stay, place.reply) <= place.promised:
                return stay
            raise PoolFull(need, self.budget.device_bytes, self._promised() - place.promised)

    def beside(self, at: int, count: int) -> int:
        """Bytes beside a cache while `count` tokens are encoded behind its first `at`: they, twice, and one layer."""
        return 2 * self._sizes.peak([0] * len(self._sizes.layers), count, 0) + self.layer * (at + count)

    @property
    def layer(self) -> int:
        """Bytes of a token in the largest layer."""
        return max((layer.slot for layer in self._sizes.layers), default=0)

    def leave(self, live: PooledCache) -> None:
        """End a turn: what was promised beyond what is held is free again."""
        with self._ledger:
            if live.place is not None:
                live.place.in_use, live.place.promised, live.place.spare = False, live.bytes, 0

    def measure(self, live: PooledCache) -> None:
        """Take note that a cache at rest holds less."""
        with self._ledger:
            if live.place is not None and not live.place.in_use:
                live.place.promised = live.bytes

    def spare(self, live: PooledCache, nbytes: int) -> bool:
        """Whether a turn under way may have so many bytes beside its cache for a moment; asked for where none are left.

        They stay its own until `leave`, for the next block.
        """
        with self._ledger:
            place = live.place
            if place is not None and nbytes > place.spare and self.lend(live, nbytes - place.spare):
                place.spare = nbytes
            return place is not None and nbytes <= place.spare

    def lend(self, live: PooledCache, nbytes: int) -> bool:
        """Promise so many bytes more to a turn under way, where they are free; they return with `leave`."""
        with self._ledger:
            if live.place is None or self._promised() + nbytes > self.budget.device_bytes:
                return False
            live.place.promised += nbytes
            self._peak = max(self._peak, self._promised())
            return True

    @contextmanager
    def turn(
        self,
        conversation: str,
        live: PooledCache,
        lock: _Lock,
        tokens: int,
        reply: int,
        more: int,
        spare: int,
        goes_on: Callable[[], bool],
    ) -> Iterator[str]:
        """`enter`, and `leave` again unless a reply goes on."""
        lost = self.enter(conversation, live, lock, tokens, reply, more, spare)
        mine = live.place.turn if live.place else 0
        try:
            yield lost
        finally:
            with self._ledger:  # where a reply ended inside, the next turn may have begun
                if live.place and live.place.turn == mine and not goes_on():
                    self.leave(live)

    @contextmanager
    def visit(self, live: PooledCache, tokens: int, reply: int) -> Iterator[None]:
        """A turn of a cache outside any conversation, which is gone on leaving."""
        name = f"\x00{id(live)}"
        self.enter(name, live, nullcontext(), tokens, reply)
        try:
            yield
        finally:
            live.clear()
            self.forget(name, live)

    def parked(self, conversation: str) -> int:
        """Tokens of a conversation's cache that is parked; 0 where it is on the device, or gone."""
        with self._ledger:
            resident = self._residents.get(conversation)
            return resident.tokens if resident is not None and conversation in self._shelf else 0

    def crop(self, conversation: str, length: int) -> None:
        """Where the conversation's cache is parked, only its first `length` tokens count when it comes back."""
        with self._moving:
            resident = self._residents.get(conversation)
            if resident is not None and resident.parked:
                resident.keep = length if resident.keep is None else min(resident.keep, length)

    def forget(self, conversation: str, live: PooledCache) -> None:
        """A conversation was released: what is parked of it goes too."""
        with self._moving, self._ledger:
            resident = self._residents.get(conversation)
            if resident is not None and resident.live is live:
                del self._residents[conversation]
                self._shelf.discard(conversation)

    # -- what a manager shows

    def usage(self) -> PoolUsage:
        """Figures now; waits for no forward pass."""
        host, disk = self._shelf.usage()
        with self._ledger:
            holders = sum(resident.promised > 0 for resident in self._residents.values())
            refused = Counter(self._shelf.refused)
            refused["unsupported"] += self._unsupported
            return PoolUsage(
                device=TierUsage(self.budget.device_bytes, self._promised(), holders),
                host=host,
                disk=disk,
                peak_bytes=self._peak,
                parks=self._parks,
                dropped=self._dropped + self._shelf.dropped,
                restores=dict(self._restores),
                refused=dict(+refused),
            )

    def where(self, conversation: str) -> str:
        """Where its cache is: "device", "host", "disk", or "text"."""
        with self._ledger:
            resident = self._residents.get(conversation)
            if resident is not None and resident.promised:
                return "device"
        return self._shelf.tier(conversation) or "text"

    def pin(self, conversation: str) -> None:
        """Leave its cache where it is, whatever room others need."""
        with self._moving, self._ledger:
            self._shelf.keep.add(conversation)

    def unpin(self, conversation: str) -> None:
        """Let it be parked again."""
        with self._moving, self._ledger:
            self._shelf.keep.discard(conversation)

    # -- inside

    def _begin(self, conversation: str, live: PooledCache, lock: _Lock) -> Resident:
        with self._ledger:
            resident = self._residents.pop(conversation, None)
            if resident is None or resident.live is not live:
                resident = live.place = Resident(conversation, live, lock)
                self._shelf.discard(conversation)  # of one that is being released
            self._residents[conversation] = resident  # most recently used
            if resident.in_use:
                raise EngineError(f"conversation {conversation!r} is still generating: finish that reply or close() it")
            resident.in_use = True
            resident.turn += 1
            return resident

    def _parcel(self, conversation: str, resident: Resident) -> Parcel | None:
        """What is parked of it; where that is gone or refused, `lost` says why."""
        if not resident.parked:
            return None
        if conversation not in self._shelf:
            resident.parked, resident.lost = "", "parked away"
            return None
        try:
            return self._shelf.get(conversation, self._fingerprint(resident, resident.parked))
        except CacheRefused as exc:
            resident.parked, resident.lost = "", exc.code
            return None

    def _need(self, live: PooledCache, parcel: Parcel | None, most: int, tokens: int, reply: int) -> int:
        """Bytes a turn of `tokens` may come to on the device; what is parked comes back into arenas for `most`."""
        held = live.slots() if parcel is None else self._sizes.restored(packed_slots(parcel), most)
        return self._peak_of(live, held, tokens, reply)

    def _peak_of(self, live: PooledCache, held: Sequence[int], tokens: int, reply: int) -> int:
        """Bytes allocated at once on the way there; of a quantized cache its price, and one tensor that grows."""
        if live.price is None:
            return self._sizes.peak(held, tokens, reply)
        return max(live.bytes, live.price.bytes(tokens)) + tokens * self.layer

    def _make_room(self, resident: Resident, least: int, need: int, spare: int) -> int:
        """Park others, the least recently used first, until `need` and what is possible of `spare` fit; promise both.

        Where even `need` cannot be, `least`. Returns what was promised of `spare`.
        """
        with self._ledger:
            others = [(name, other) for name, other in self._residents.items() if other is not resident]
            stay = {name for name, other in others if other.in_use or name in self._shelf.keep}
            free = self.budget.device_bytes - sum(other.promised for name, other in others if name in stay)
            need = need if need <= free else least
            if need > free:
                raise PoolFull(need, self.budget.device_bytes, self.budget.device_bytes - free)
            spare = min(spare, free - need)
            may_go = [(name, other) for name, other in others if name not in stay and other.promised]
        for name, other in may_go:
            if self._promised() - resident.promised + need + spare <= self.budget.device_bytes:
                break
            self._park(name, other)
        with self._ledger:
            resident.promised = need + spare
            self._peak = max(self._peak, self._promised())
        return spare

    def _park(self, conversation: str, resident: Resident) -> None:
        """Take a cache off the device, to where there is room for it."""
        with resident.lock:
            live, parcel = resident.live, None
            if not len(live):
                live.clear()
                return
            digest = ids_digest(live.ids)
            if self._shelf.takes(logical_bytes(live.layers)):
                try:
                    parcel = live.pack()
                except CacheRefused:
                    self._unsupported += 1
            resident.tokens = len(live)
            live.clear()
            resident.parked, resident.keep = digest, None
        self._parks += 1
        if parcel is None:
            self._dropped += 1
        else:
            self._shelf.put(conversation, parcel, self._fingerprint(resident, digest))

    def _restore(self, conversation: str, resident: Resident, parcel: Parcel, tokens: int) -> None:
        """Put a cache back on the device; where it turns out to be of no use, `lost` says why."""
        tier = self._shelf.tier(conversation)
        try:
            resident.live.unpack(parcel, tokens)
        except CacheRefused as exc:
            resident.parked, resident.lost = "", exc.code
            self._shelf.refuse(conversation, exc.code)
            return
        if resident.keep is not None and resident.keep < len(resident.live):
            resident.live.crop(resident.keep)
        resident.parked, resident.keep = "", None
        self._restores[str(tier)] += 1
        self._shelf.discard(conversation)

    def _fingerprint(self, resident: Resident, ids: str) -> dict[str, str]:
        own = replace(self._identity(), storage=resident.live.storage or "full")
        return own.fingerprint(resident.name, ids)

    def _promised(self) -> int:
        with self._ledger:
            return sum(resident.promised for resident in self._residents.values())
