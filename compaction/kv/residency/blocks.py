"""Evicted keys and values, kept so that an eviction can be undone in the cache.

Invariant: a block comes back with the bits, positions and shifts that it had when it was evicted, or not at all: in gap
mode the cache is then as if nothing had been evicted. Knows nothing of what the tokens mean.
"""

from __future__ import annotations

from compaction.kv.edits import Block
from compaction.kv.residency.fingerprint import Identity, ids_digest
from compaction.kv.residency.pool import Pool
from compaction.kv.residency.shelf import Shelf, Tier
from compaction.kv.residency.snapshot import pack_block, unpack_block

__all__ = ["BlockStore"]


class BlockStore:
    """Parked blocks of one model's conversations, in the tiers of a pool below the device; by key, a span's id say.

    Args:
        pool: its host memory and disk are used; its `device` is not.
        identity: of the model and tokenizer; a block of another one is refused.

    Safe to use from many threads. Raises InvalidBudget where the pool's folder cannot be used.
    """

    def __init__(self, pool: Pool, identity: Identity) -> None:
        self.identity = identity
        self._shelf = Shelf(pool)
        self._digests: dict[tuple[str, str], str] = {}

    def put(self, conversation: str, key: str, block: Block) -> Tier | None:
        """Keep a block, in the place of what lay under the key; returns where it went, None: no tier has room."""
        digest = ids_digest(block.rows.ids)
        placed = self._shelf.put(
            _name(conversation, key), pack_block(block), self.identity.fingerprint(conversation, digest)
        )
        self._digests[conversation, key] = digest
        return placed

    def get(self, conversation: str, key: str) -> Block:
        """The block, on the host; it stays here until `discard`.

        Raises CacheRefused: "missing" (never put, discarded, or no tier had room), "corrupted", "fingerprint".
        """
        fingerprint = self.identity.fingerprint(conversation, self._digests.get((conversation, key), ""))
        return unpack_block(self._shelf.get(_name(conversation, key), fingerprint))

    def tier(self, conversation: str, key: str) -> Tier | None:
        """Where a block lies; None: nowhere."""
        return self._shelf.tier(_name(conversation, key))

    def discard(self, conversation: str, key: str | None = None) -> None:
        """Forget a block, or all of a conversation; files are removed."""
        for owner, name in list(self._digests):
            if owner == conversation and key in (None, name):
                self._digests.pop((owner, name), None)
                self._shelf.discard(_name(owner, name))

    def close(self) -> None:
        """Forget all."""
        self._digests.clear()
        self._shelf.close()


def _name(conversation: str, key: str) -> str:
    return f"{len(conversation)}:{conversation}:{key}"
