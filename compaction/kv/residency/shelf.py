"""The tiers below the device: parcels in host memory, then in files, then nowhere.

Invariant: host memory and files never exceed their bytes, not even while one is written: room is made first. What is
used least recently goes down first; what is kept (`keep`) stays where it is. What cannot be written or must not be used
is gone, never half there. Safe to use from many threads.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compaction.errors import CacheRefused
from compaction.kv.measure import storage_bytes
from compaction.kv.residency.files import file_bytes, read_parcel, write_parcel
from compaction.kv.residency.folder import Folder
from compaction.kv.residency.parcel import Parcel
from compaction.kv.residency.pool import Pool, TierUsage

__all__ = ["Shelf", "Tier"]

Tier = Literal["host", "disk"]


@dataclass(slots=True)
class _Entry:
    """A parcel in host memory, or the file it lies in; its bytes there."""

    fingerprint: Mapping[str, str]
    nbytes: int
    parcel: Parcel | None = None
    path: Path | None = None

    @property
    def tier(self) -> Tier:
        return "disk" if self.parcel is None else "host"


@dataclass(slots=True)
class _Tally:
    """What has happened since the shelf was made."""

    dropped: int = 0
    refused: Counter[str] = field(default_factory=Counter)


class Shelf:
    """Keeps parcels by key, in the tiers of a pool below the device.

    Raises InvalidBudget where the pool's folder cannot be used.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.keep: set[str] = set()
        self._folder = Folder(pool.folder) if pool.folder else None
        self._entries: dict[str, _Entry] = {}  # least recently used first
        self._tally = _Tally()
        self._files = 0
        self._lock = threading.RLock()

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._entries

    def tier(self, key: str) -> Tier | None:
        """Where a parcel lies; None: nowhere."""
        with self._lock:
            entry = self._entries.get(key)
            return entry.tier if entry else None

    def takes(self, nbytes: int) -> bool:
        """Whether a parcel of so many bytes could have a place at all."""
        return nbytes <= max(self.pool.host_bytes, self.pool.disk_bytes)

    def put(self, key: str, parcel: Parcel, fingerprint: Mapping[str, str]) -> Tier | None:
        """Keep a parcel, in the place of what lay under the key; returns where it went, None: nowhere."""
        with self._lock:
            self._remove(key)
            entry = _Entry(fingerprint, storage_bytes(list(parcel.tensors.values())), parcel)
            placed = self._host(key, entry) or self._disk(key, entry)
            self._tally.dropped += not placed
            return self.tier(key)

    def get(self, key: str, fingerprint: Mapping[str, str]) -> Parcel:
        """The parcel, which stays where it is until `discard`. A file's tensors are read when they are asked for.

        Raises CacheRefused ("missing", "corrupted", "fingerprint"); what was refused is gone.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                raise CacheRefused("missing", f"nothing is parked under {key!r}")
            try:
                return self._open(entry, fingerprint)
            except CacheRefused as exc:
                self.refuse(key, exc.code)
                raise

    def refuse(self, key: str, code: str) -> None:
        """Count a parcel that must not be used, and forget it."""
        with self._lock:
            self._tally.refused[code] += 1
            self._remove(key)

    def discard(self, key: str) -> None:
        """Forget a parcel; its file is removed."""
        with self._lock:
            self._remove(key)

    def close(self) -> None:
        """Forget all, and remove the folder."""
        with self._lock:
            for key in list(self._entries):
                self._remove(key)
            if self._folder is not None:
                self._folder.close()

    def usage(self) -> tuple[TierUsage, TierUsage]:
        """What host memory and files hold now."""
        with self._lock:
            budgets: dict[Tier, int] = {"host": self.pool.host_bytes, "disk": self.pool.disk_bytes}
            host, disk = (
                TierUsage(budget, self._held(tier), sum(entry.tier == tier for entry in self._entries.values()))
                for tier, budget in budgets.items()
            )
            return host, disk

    @property
    def dropped(self) -> int:
        """Parcels for which no tier had room."""
        return self._tally.dropped

    @property
    def refused(self) -> dict[str, int]:
        """Parcels that were not used, and files that could not be written or removed, by reason."""
        with self._lock:
            return dict(self._tally.refused)

    def _open(self, entry: _Entry, fingerprint: Mapping[str, str]) -> Parcel:
        if entry.path is not None:
            return read_parcel(entry.path, fingerprint)
        if entry.parcel is None or dict(entry.fingerprint) != dict(fingerprint):
            differing = sorted(n for n in {*fingerprint} if entry.fingerprint.get(n) != fingerprint[n])
            raise CacheRefused("fingerprint", f"what is parked is of another {', '.join(differing)}")
        return entry.parcel

    def _held(self, tier: Tier) -> int:
        return sum(entry.nbytes for entry in self._entries.values() if entry.tier == tier)

    def _host(self, key: str, entry: _Entry) -> bool:
        """Into host memory, others going down to make room."""
        if not self.pool.host_bytes or not self._makes_room("host", entry.nbytes, self.pool.host_bytes):
            return False
        self._entries[key] = entry
        return True

    def _disk(self, key: str, entry: _Entry) -> bool:
        """Into a file; a disk that refuses costs a prefill later, not the turn that is under way."""
        if self._folder is None or entry.parcel is None:
            return False
        try:
            size = file_bytes(entry.parcel, entry.fingerprint)
            if not self._makes_room("disk", size, self.pool.disk_bytes):
                return False
            self._files += 1
            path = self._folder.path / f"{self._files:08d}.safetensors"
            write_parcel(path, entry.parcel, entry.fingerprint)
        except OSError:
            self._tally.refused["disk"] += 1
            return False
        except CacheRefused as exc:
            self._tally.refused[exc.code] += 1
            return False
        self._entries[key] = _Entry(entry.fingerprint, size, path=path)
        return True

    def _makes_room(self, tier: Tier, nbytes: int, budget: int) -> bool:
        """Send down the least recently used until so many bytes are free; nothing moves where that is impossible."""
        movable = [key for key, entry in self._entries.items() if entry.tier == tier and key not in self.keep]
        stays = self._held(tier) - sum(self._entries[key].nbytes for key in movable)
        if stays + nbytes > budget:
            return False
        while self._held(tier) + nbytes > budget:
            self._down(movable.pop(0))
        return True

    def _down(self, key: str) -> None:
        """One tier down, in its place in the order."""
        entry = self._entries[key]
        if entry.tier == "disk" or not self._disk(key, entry):
            self._remove(key)
            self._tally.dropped += 1

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is None or entry.path is None:
            return
        try:
            entry.path.unlink(missing_ok=True)
        except OSError:  # somebody else has changed the folder
            self._tally.refused["disk"] += 1
