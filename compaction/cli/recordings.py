"""The conversations of a run, read and checked whole before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from compaction.errors import InvalidInput, InvalidMessage, InvalidTranscript
from compaction.grammar import Batch, follow
from compaction.messages import Message, dumps
from compaction.transcripts import Transcript, read

__all__ = ["Recording", "read_all"]


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded conversation and the file it came from."""

    file: str
    transcript: Transcript

    @property
    def id(self) -> str:
        """The conversation's id, here and in the log."""
        return self.transcript.id

    @property
    def messages(self) -> Sequence[dict[str, Any]]:
        """The messages as recorded."""
        return self.transcript.messages

    def skipped_turns(self) -> int:
        """How many assistant messages stand where calls still wait for results: nothing can be generated there.

        Raises InvalidTranscript for a tool result without its call.
        """
        batch: Batch | None = None
        skipped = 0
        for index, data in enumerate(self.messages):
            message = Message(str(index), dumps(data))
            skipped += message.role == "assistant" and bool(batch and batch.pending)
            try:
                batch = follow(batch, message)
            except InvalidMessage as exc:
                raise self.fault(index, exc.reason) from exc
        return skipped

    def fault(self, index: int, reason: str) -> InvalidTranscript:
        """An error about message `index`, with file and line."""
        return InvalidTranscript(self.file, self.transcript.line, f"message {index} of {self.id!r}: {reason}")


def read_all(paths: Sequence[str], limit: int | None) -> list[Recording]:
    """The first `limit` conversations of these files.

    Raises InvalidTranscript for what cannot be read, for a tool result without its call, and for an id that stands
    twice (a log knows a conversation by its id), InvalidInput where there is no conversation at all.
    """
    found: dict[str, Recording] = {}
    for recording in islice(_each(paths), limit):
        other = found.get(recording.id)
        if other is not None:
            first = f"{other.file}:{other.transcript.line}"
            reason = f"conversation {recording.id!r} stands at {first} already: give each an id of its own"
            raise InvalidTranscript(recording.file, recording.transcript.line, reason)
        recording.skipped_turns()
        found[recording.id] = recording
    if not found:
        raise InvalidInput(f'no conversation in {", ".join(paths)}: each line is {{"id": …, "messages": […]}}')
    return list(found.values())


def _each(paths: Sequence[str]) -> Iterator[Recording]:
    for path in paths:
        for transcript in read(path):
            yield Recording(path, transcript)
