"""What all conversations together may hold, tier by tier, and what they do hold.

Invariant: plain figures, checked when they are made; no torch is imported. A tier that is not named holds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from compaction.budget import parse_bytes
from compaction.errors import InvalidBudget

__all__ = ["Pool", "PoolUsage", "PoolView", "TierUsage"]


@dataclass(frozen=True, slots=True)
class Pool:
    """Bytes of KV cache that all conversations of an engine may hold together.

    Args:
        device: where the model computes; never exceeded, growth and restoring included.
        host: main memory for caches that had to leave the device; 0: none.
        disk: a folder, made where it is missing, and the bytes of the files in it; None: none. Files are readable by
            their owner only, and go when their conversation is released or the process ends.

    Bytes are an int or a text such as "8GiB". Raises InvalidBudget for figures that cannot be.
    """

    device: int | str
    host: int | str = 0
    disk: tuple[str | Path, int | str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", _bytes("device", self.device, least=1))
        object.__setattr__(self, "host", _bytes("host", self.host, least=0))
        if self.disk is not None:
            if not isinstance(self.disk, tuple) or len(self.disk) != 2 or not isinstance(self.disk[0], (str, Path)):
                raise InvalidBudget(f"a pool's disk is a folder and its bytes, ('/path', '50GiB'), not {self.disk!r}")
            folder, size = self.disk
            if not str(folder) or "\0" in str(folder):
                raise InvalidBudget(f"a pool's disk needs a folder, not {str(folder)!r}")
            try:
                path = Path(folder).expanduser()
            except RuntimeError as exc:  # nobody of that name
                raise InvalidBudget(f"a pool's disk needs a folder, not {str(folder)!r}: {exc}") from exc
            object.__setattr__(self, "disk", (path, _bytes("disk", size, least=1)))

    @classmethod
    def of(cls, value: Pool | int | str) -> Pool:
        """A pool as it is, or one with these bytes on the device and no tier below."""
        return value if isinstance(value, Pool) else cls(value)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return int(self.device)

    @property
    def host_bytes(self) -> int:
        """Bytes in main memory."""
        return int(self.host)

    @property
    def disk_bytes(self) -> int:
        """Bytes of files."""
        return int(self.disk[1]) if self.disk else 0

    @property
    def folder(self) -> Path | None:
        """Where files go."""
        return Path(self.disk[0]) if self.disk else None


def _bytes(tier: str, value: int | str, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise InvalidBudget(f"a pool's {tier} is bytes, an int or a text such as '8GiB', not {value!r}")
    found = parse_bytes(value)
    if found < least:
        raise InvalidBudget(f"a pool of {found} bytes ({tier}) holds nothing: give a positive number")
    return found


@dataclass(frozen=True, slots=True)
class TierUsage:
    """One tier: what it may hold, what it holds, and of how many conversations."""

    budget: int
    bytes: int
    conversations: int


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """A pool's figures now, and what it has done since it was made.

    `device.bytes` is what conversations at rest hold, as measured, and what running ones may come to; `peak_bytes` is
    the most that this was. `restores` counts by the tier they came from, `refused` by reason ("fingerprint",
    "corrupted", "missing", "unsupported", "disk").
    """

    device: TierUsage
    host: TierUsage
    disk: TierUsage
    peak_bytes: int = 0
    parks: int = 0
    dropped: int = 0
    restores: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The figures as plain JSON values, in a fixed order."""
        tiers = {"device": self.device, "host": self.host, "disk": self.disk}
        return {
            **{
                name: {"budget": t.budget, "bytes": t.bytes, "conversations": t.conversations}
                for name, t in tiers.items()
            },
            **{"peak_bytes": self.peak_bytes, "parks": self.parks, "dropped": self.dropped},
            **{"restores": dict(self.restores), "refused": dict(self.refused)},
        }


class PoolView(Protocol):
    """A pool at work, as `SessionManager.pool` shows it. Safe to use from many threads."""

    @property
    def budget(self) -> Pool:
        """What it may hold."""

    def usage(self) -> PoolUsage:
        """Figures now; waits for no forward pass."""

    def where(self, conversation: str) -> str:
        """Where its cache is: "device", "host", "disk", or "text" where it must be prefilled."""

    def pin(self, conversation: str) -> None:
        """Leave its cache where it is, whatever room others need."""

    def unpin(self, conversation: str) -> None:
        """Let it be parked again."""
