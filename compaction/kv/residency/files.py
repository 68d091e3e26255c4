"""A parcel as one safetensors file: written whole or not at all, read only where it is what it should be.

Invariant: under its final name a file is complete and on the disk (temporary file, fsync, rename), readable by its
owner only. Nothing of a file is used before its fingerprint and the digest over all of its bytes have been checked.
Written and read tensor by tensor, so that no second copy of a cache stands in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from compaction.errors import CacheRefused
from compaction.kv.residency.parcel import Parcel

__all__ = ["file_bytes", "read_parcel", "write_parcel"]

_FORMAT = "kv-compaction/1"
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_NO_DIGEST = "0" * 64
_PIECE = 1 << 20
_LONGEST_HEADER = 100_000_000  # safetensors' own limit


def file_bytes(parcel: Parcel, fingerprint: Mapping[str, str]) -> int:
    """How long the file of a parcel will be, before it is written."""
    return len(_header(parcel, fingerprint, _NO_DIGEST)) + parcel.nbytes


def write_parcel(path: Path, parcel: Parcel, fingerprint: Mapping[str, str]) -> None:
    """Write atomically. Raises OSError where the file cannot be written; then none is left.

    Raises CacheRefused, before a file is there, for a number format that safetensors does not know.
    """
    temporary = path.with_suffix(".part")
    digest = hashlib.blake2b(digest_size=32)
    blank = _header(parcel, fingerprint, _NO_DIGEST)
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for piece in _pieces(blank, parcel):
                digest.update(piece)
                file.write(piece)
            file.seek(0)
            file.write(_header(parcel, fingerprint, digest.hexdigest()))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_parcel(path: Path, fingerprint: Mapping[str, str]) -> Parcel:
    """Check a file whole, then hand out its tensors one by one as they are asked for.

    Raises CacheRefused: "missing", "corrupted" (truncated, extended, changed anywhere), "fingerprint" (not this one).
    """
    try:
        with path.open("rb") as file:
            header = _read_header(path, file)
            found = _json(path, header.metadata, "fingerprint")
            if found != dict(fingerprint):
                names = sorted(name for name in {*found, *fingerprint} if found.get(name) != fingerprint.get(name))
                raise CacheRefused("fingerprint", f"{path.name} is of another {', '.join(names)}")
            _check_digest(path, file, header)
    except OSError as exc:
        raise CacheRefused("missing", f"{path.name} cannot be read ({exc.strerror or exc})") from exc
    return Parcel(_FileTensors(path, header), _json(path, header.metadata, "meta"))


@dataclass(frozen=True, slots=True)
class _Header:
    """A file's header: raw bytes with their length in front, the tensors' places, and the text metadata."""

    raw: bytes
    places: dict[str, dict[str, Any]]
    metadata: dict[str, str]


class _FileTensors(Mapping[str, torch.Tensor]):
    """Tensors that are read when they are asked for."""

    def __init__(self, path: Path, header: _Header) -> None:
        self._path, self._places, self._start = path, header.places, len(header.raw)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self._places[name]
        begin, end = place["data_offsets"]
        with torch.inference_mode(False):
            raw = torch.empty(end - begin, dtype=torch.uint8)
        try:
            with self._path.open("rb") as file:
                file.seek(self._start + begin)
                count = file.readinto(raw.numpy().data) if end > begin else 0
        except OSError as exc:
            raise CacheRefused("missing", f"{self._path.name} cannot be read ({exc.strerror or exc})") from exc
        if count != end - begin:
            raise CacheRefused("corrupted", f"{self._path.name} ends within {name}")
        return raw.view(_DTYPES[place["dtype"]]).view(place["shape"])


def _header(parcel: Parcel, fingerprint: Mapping[str, str], digest: str) -> bytes:
    """The header with its length in front; as long for one digest as for another."""
    texts = {
        "format": "pt",
        "kind": _FORMAT,
        "digest": digest,
        "fingerprint": json.dumps(dict(fingerprint), sort_keys=True),
        "meta": json.dumps(parcel.meta),
    }
    header: dict[str, Any] = {"__metadata__": texts}
    at = 0
    for name, tensor in _ordered(parcel):
        if tensor.dtype not in _NAMES:
            raise CacheRefused("unsupported", f"{name} is of {tensor.dtype}, which safetensors does not know")
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _ordered(parcel: Parcel) -> list[tuple[str, torch.Tensor]]:
    """Wide elements first, so that each tensor is aligned for readers that map the file."""
    return sorted(parcel.tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))


def _pieces(header: bytes, parcel: Parcel) -> Iterator[bytes | memoryview]:
    yield header
    for _, tensor in _ordered(parcel):
        if tensor.numel():
            yield tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _read_header(path: Path, file: BinaryIO) -> _Header:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
        raise CacheRefused("corrupted", f"{path.name} has no whole header")
    raw = file.read(length)
    try:
        places = json.loads(raw)
        metadata = places.pop("__metadata__")
        ends = [_size(place) for place in places.values()]
        if metadata["kind"] != _FORMAT or size != 8 + length + max(ends, default=0):
            raise ValueError(f"{size:,} bytes do not hold what its header says")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
        raise CacheRefused("corrupted", f"{path.name} is truncated or no cache file ({exc})") from exc
    return _Header(length.to_bytes(8, "little") + raw, places, metadata)


def _size(place: Mapping[str, Any]) -> int:
    """Where a tensor ends. Raises ValueError where its shape and its bytes disagree."""
    begin, end = place["data_offsets"]
    elements = 1
    for extent in place["shape"]:
        elements *= extent
    if not 0 <= begin <= end or elements * _DTYPES[place["dtype"]].itemsize != end - begin:
        raise ValueError("shapes and offsets disagree")
    return int(end)


def _json(path: Path, metadata: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        found = json.loads(metadata[name])
    except (ValueError, KeyError, TypeError) as exc:
        raise CacheRefused("corrupted", f"{path.name} says nothing of its {name}") from exc
    if not isinstance(found, dict):
        raise CacheRefused("corrupted", f"{path.name} says nothing of its {name}")
    return found


def _check_digest(path: Path, file: BinaryIO, header: _Header) -> None:
    """Digest over all bytes, the digest's own taken as zeros."""
    stated = str(header.metadata.get("digest"))
    digest = hashlib.blake2b(header.raw.replace(stated.encode(), _NO_DIGEST.encode(), 1), digest_size=32)
    while piece := file.read(_PIECE):
        digest.update(piece)
    if digest.hexdigest() != stated:
        raise CacheRefused("corrupted", f"{path.name} is not what was written")


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
