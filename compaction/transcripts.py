"""Recorded conversations from `.json`, `.jsonl` and `.jsonl.gz` files.

Invariant: what is yielded has been validated whole, and whatever is wrong with a file is one InvalidTranscript naming
file and line. JSON lines are streamed: memory follows the longest line, not the file. This module knows nothing about
sessions, budgets or tool-call pairing (a transcript may be an excerpt).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from compaction.errors import InvalidMessage, InvalidTranscript
from compaction.messages import dumps, validate

__all__ = ["Transcript", "read"]

_SUFFIXES = (".jsonl.gz", ".jsonl", ".json")


@dataclass(frozen=True, slots=True)
class Transcript:
    """One conversation as recorded: its id, messages as given, the line it began on (from 1) and its tool schemas."""

    id: str
    messages: tuple[dict[str, Any], ...]
    line: int
    tools: tuple[dict[str, Any], ...] | None = None


class _Line(BaseModel):
    """A conversation as one JSON object; keys that are not ours are left alone."""

    model_config = ConfigDict(extra="ignore", strict=True)
    id: Annotated[str, Field(min_length=1)] | int | None = None
    messages: list[Any]
    tools: list[dict[str, Any]] | None = None


def read(path: str | PathLike[str]) -> Iterator[Transcript]:
    """The conversations of a file, one after the other.

    A line of `.jsonl` or `.jsonl.gz` is `{"id": …, "messages": […], "tools"?: […]}` or a bare list of messages; a
    `.json` file is one of these, or a list of them. A conversation without an id is called after the file and its
    line ("tau-17"; in a `.json` list, its place). Blank lines are skipped; a file without a conversation yields
    nothing.

    Raises InvalidTranscript at the first thing that is wrong; what came before it has been yielded.
    """
    file = Path(path)
    if not file.name.endswith(_SUFFIXES):
        kind = "a folder" if file.is_dir() else "unknown kind of file"
        raise InvalidTranscript(str(file), None, f"{kind}: use one of {', '.join(_SUFFIXES)}")
    return _json(file) if file.name.endswith(".json") else _json_lines(file)


def _json_lines(file: Path) -> Iterator[Transcript]:
    number = 0
    with _named(file) as fail, _opened(file) as raw:
        while True:
            fail.line = number + 1
            line = raw.readline()
            if not line:
                return
            number += 1
            if line.strip():
                yield _conversation(file, number, number, _parsed(file, number, line))


def _json(file: Path) -> Iterator[Transcript]:
    with _named(file), file.open("rb") as raw:
        content = raw.read()
    if not content.strip():
        return
    value = _parsed(file, 1, content)
    several = isinstance(value, list) and all(_is_conversation(item) for item in value[:1])
    for place, item in enumerate(value if several else [value], 1):
        yield _conversation(file, 1, place, item, f"conversation {place}: " if several else "")


def _is_conversation(value: object) -> bool:
    """Whether an item of a list is a conversation rather than a message; the first one decides for all."""
    return isinstance(value, list) or (isinstance(value, dict) and "messages" in value and "role" not in value)


class _Place:
    """The line being read, for the error of whatever fails while it is read."""

    line = 1


@contextmanager
def _named(file: Path) -> Iterator[_Place]:
    """Turn what the operating system and gzip say into InvalidTranscript."""
    place = _Place()
    try:
        yield place
    except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
        raise InvalidTranscript(str(file), place.line, f"broken gzip data: {exc}") from exc
    except OSError as exc:
        raise InvalidTranscript(str(file), None, f"cannot be read: {exc.strerror or exc}") from exc


def _opened(file: Path) -> IO[bytes] | gzip.GzipFile:
    """The file's bytes, unpacked where it is a .gz."""
    if file.suffix == ".gz":
        return gzip.open(file, "rb")
    return file.open("rb")


def _parsed(file: Path, line: int, raw: bytes) -> Any:
    """One JSON value. Raises InvalidTranscript for undecodable bytes, malformed JSON, NaN and duplicate keys."""
    try:
        text = raw.decode("utf-8-sig").rstrip(" \t\r\n")  # else JSON that was cut is faulted on the line after it
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except UnicodeDecodeError as exc:
        before = raw[: exc.start]
        reason = f"not UTF-8: 0x{raw[exc.start]:02x} is byte {exc.start - before.rfind(10)} of the line"
        raise InvalidTranscript(str(file), line + before.count(10), reason) from exc
    except json.JSONDecodeError as exc:
        reason = f"not JSON: {exc.msg} at column {exc.colno}"
        raise InvalidTranscript(str(file), line + exc.lineno - 1, reason) from exc
    except (ValueError, RecursionError) as exc:
        raise InvalidTranscript(str(file), line, f"not JSON: {exc}") from exc


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, refused where a key stands twice: keeping one of the two would lose words silently."""
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return data


def _conversation(file: Path, line: int, place: int, value: Any, where: str = "") -> Transcript:
    """Check one conversation; `place` names it where it has no id, `where` begins the reason of an error."""
    data = {"messages": value} if isinstance(value, list) else value
    try:
        shape = _Line.model_validate(data)
        dumps(shape.tools)
        for index, message in enumerate(shape.messages):
            validate(message, index=index)
    except ValidationError as exc:
        raise InvalidTranscript(str(file), line, where + _first_problem(exc)) from exc
    except InvalidMessage as exc:
        raise InvalidTranscript(str(file), line, where + " ".join(str(exc).split())) from exc
    except ValueError as exc:
        raise InvalidTranscript(str(file), line, f"{where}tools: not JSON: {exc}") from exc
    name = f"{_stem(file)}-{place}" if shape.id is None else str(shape.id)
    tools = None if shape.tools is None else tuple(shape.tools)
    return Transcript(id=name, messages=tuple(shape.messages), line=line, tools=tools)


def _first_problem(exc: ValidationError) -> str:
    first = exc.errors(include_url=False)[0]
    if not first["loc"]:
        return "a conversation is an object with messages, or a list of messages"
    # Without the names pydantic gives to the members of a union.
    where = [str(part) for part in first["loc"] if part in _Line.model_fields or isinstance(part, int)]
    return f"{'.'.join(where)}: {first['msg']}"


def _stem(file: Path) -> str:
    """The file's name without its (double) suffix."""
    return next(file.name.removesuffix(suffix) for suffix in _SUFFIXES if file.name.endswith(suffix))
