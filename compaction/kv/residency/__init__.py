"""Caches that are not on the device now: in host memory, on disk, or known by their text only."""

from __future__ import annotations

from compaction.kv.residency.pool import Pool, PoolUsage, PoolView, TierUsage

__all__ = ["Pool", "PoolUsage", "PoolView", "TierUsage"]
