"""A file outside the log that remembers its newest hash.

Invariant: a record is written and fsynced only after the event it names is durable, so every record is an ancestor of
the log's head, unless the log's tail was cut off or the file belongs to another log. Two fixed lines take turns: a
record torn by a power failure leaves the one before it readable.
"""

from __future__ import annotations

import os
import re
import warnings

from compaction.errors import LogError, LogReadOnly

__all__ = ["GENESIS", "HeadFile", "head_text"]

GENESIS = "sha256:" + "0" * 64
"""The head of an empty log."""

_LINE = re.compile(r"([0-9]{12}) (sha256:[0-9a-f]{64})\n")
_WIDTH = 12 + 1 + 7 + 64 + 1


def head_text(hash: bytes) -> str:
    """A hash as people keep it: "sha256:" and 64 hex digits."""
    return f"sha256:{hash.hex()}" if hash else GENESIS


class HeadFile:
    """The head file of one log. Created with mode 0600; several processes may write to one."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as exc:
            raise LogReadOnly(f"{path}: head file cannot be opened ({exc.strerror}): check its folder") from exc

    def records(self) -> list[tuple[int, str]]:
        """The readable records, (event id, head), newest first.

        Raises LogError where the file holds something else.
        """
        raw = os.pread(self._file, 2 * _WIDTH + 1, 0)
        lines = [raw[i : i + _WIDTH].decode("ascii", "replace") for i in (0, _WIDTH)]
        found = [(int(match.group(1)), match.group(2)) for match in map(_LINE.fullmatch, lines) if match]
        if (raw.strip(b"\x00 \n") and not found) or len(raw) > 2 * _WIDTH:
            raise LogError(f"{self.path}: not a head file: give another path, or move it away to start anew")
        return sorted(found, reverse=True)

    def write(self, id: int, hash: bytes) -> None:
        """Record an event that is durable already; durable on return.

        The event cannot be taken back, so a failure is a warning: the older record stays a valid ancestor.
        """
        line = f"{id:012d} {head_text(hash)}\n".encode("ascii")
        try:
            os.pwrite(self._file, line, (id % 2) * _WIDTH)
            os.fsync(self._file)
        except OSError as exc:
            warnings.warn(f"{self.path}: head not recorded ({exc.strerror}): free space", RuntimeWarning, stacklevel=3)

    def close(self) -> None:
        """Release the file; closing twice is fine."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
