"""One process's own folder for parked caches, inside the one that the user names.

Invariant: a folder belongs to the process that holds the lock on its lock file; a lock that nobody holds is a dead
process's, and its files go when the next one opens. Only names of ours are ever removed, and no link is followed.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import weakref
from contextlib import suppress
from pathlib import Path

from compaction.errors import InvalidBudget

__all__ = ["Folder"]

_OURS = re.compile(r"kv-compaction-[0-9a-f]{16}")


class Folder:
    """A fresh folder inside `parent`, gone with `close()` or the end of the process.

    Raises InvalidBudget where `parent` is not a folder one can write to.
    """

    def __init__(self, parent: Path) -> None:
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_strays(parent)
            self.path = parent / f"kv-compaction-{secrets.token_hex(8)}"
            lock = _lock(self.path.with_suffix(".lock"))
            self.path.mkdir(mode=0o700)
        except OSError as exc:
            raise InvalidBudget(f"a pool cannot park caches in {str(parent)!r}: {exc.strerror or exc}") from exc
        # Also at exit of the interpreter; a forked child has a copy of this object, and the files are not its own.
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Remove the folder with its files."""
        self._end()


def _lock(path: Path) -> int:
    """A descriptor that holds the lock on a lock file of this name; the cleaner may remove it before it is locked."""
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)


def _remove_strays(parent: Path) -> None:
    """Remove what processes that are gone have left."""
    for path in parent.glob("kv-compaction-*.lock"):
        if not _OURS.fullmatch(path.stem) or path.is_symlink():
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # gone by now, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its process lives
            os.close(descriptor)
            continue
        _remove(path.with_suffix(""), descriptor, os.getpid())


def _remove(folder: Path, lock: int, owner: int) -> None:
    """Remove the folder, then its lock file, then let the lock go."""
    if os.getpid() != owner:
        return
    if folder.is_dir() and not folder.is_symlink():
        with suppress(OSError):  # somebody else's files are in it
            for path in folder.iterdir():
                if path.suffix in {".safetensors", ".part"}:
                    path.unlink(missing_ok=True)
            folder.rmdir()
    folder.with_suffix(".lock").unlink(missing_ok=True)
    os.close(lock)
