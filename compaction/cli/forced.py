"""Recorded conversations through a live session, teacher-forced: what was recorded is the conversation.

Invariant: every recorded message is in the log exactly once, whenever the process is stopped and however often the run
is repeated: what the log holds is matched with the recording before anything is added, and a second writer to the same
conversation is refused by the log's own check instead of being worked around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from compaction.cli.recordings import Recording
from compaction.errors import BudgetUnsatisfiable, InvalidInput, LogConflict, LogError, PendingToolCalls
from compaction.events import Event, NewEvent, Text
from compaction.manager import SessionManager
from compaction.messages import Message, canonical
from compaction.ports import Log
from compaction.prepared import Reply
from compaction.session import Session

__all__ = ["Misfit", "OneWriter", "Player", "ReuseViolation"]

SLACK = 8
"""Tokens a turn may prefill beyond what is new and the generation prompt."""


class OneWriter:
    """A log through which one process at a time writes a conversation: a conflict is an error, not a reason to retry.

    A session that loses a race reads again and appends behind the other's messages. That is right for a chat; two runs
    of one recording would each append all of it.
    """

    def __init__(self, log: Log) -> None:
        self._log = log

    def commit(
        self, conversation: str, after: int, events: Sequence[NewEvent], texts: Sequence[Text] = ()
    ) -> tuple[Event, ...]:
        """As the log's own. Raises LogError where somebody else wrote to the conversation meanwhile."""
        try:
            return self._log.commit(conversation, after, events, texts)
        except LogConflict as exc:
            raise LogError(
                f"conversation {conversation!r} is being written by another process: nothing was doubled; "
                "let that one finish, then run this again"
            ) from exc

    def events(self, conversation: str, after: int = 0) -> Iterator[Event]:
        """As the log's own."""
        return self._log.events(conversation, after)

    def seq(self, conversation: str) -> int:
        """As the log's own."""
        return self._log.seq(conversation)

    def text(self, digest: bytes) -> str:
        """As the log's own."""
        return self._log.text(digest)

    def close(self) -> None:
        """As the log's own."""
        self._log.close()


@dataclass(frozen=True, slots=True)
class Misfit:
    """A turn that could not fit: message `index` of a conversation, and the session's words."""

    conversation: str
    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReuseViolation:
    """A turn that prefilled more than it may."""

    conversation: str
    index: int
    prefilled: int
    allowed: int

    def __str__(self) -> str:
        where = f"message {self.index} of {self.conversation!r}"
        return f"{where}: {self.prefilled:,} tokens prefilled where {self.allowed:,} are new or follow a change"


@dataclass
class Player:
    """Plays recordings. `generation_prompt`: tokens of the model's generation prompt, for the check of reuse.

    `on_message(tokens, compactions)` is called after each message that is in the log.
    """

    manager: SessionManager
    max_new_tokens: int
    generation_prompt: int
    on_message: Callable[[int, int], None]
    resumed: int = 0
    misfits: list[Misfit] = field(default_factory=list)
    violations: list[ReuseViolation] = field(default_factory=list)

    def play(self, recording: Recording) -> None:
        """One conversation from where the log stands to its end.

        Raises InvalidInput where the log knows a different conversation under this id.
        """
        tools = recording.transcript.tools
        session = self.manager.session(recording.id, list(tools) if tools is not None else None)
        done = _matched(recording, list(session.state.history.values()))
        self.resumed += done
        for _ in range(done):
            self.on_message(session.state.tokens, session.state.decisions)
        cached = 0
        for index, message in enumerate(recording.messages[done:], done):
            if message["role"] == "assistant":
                cached = self._turn(session, recording, index, cached)
            session.append(message)
            self.on_message(session.state.tokens, session.state.decisions)
        self.manager.release(recording.id)

    def _turn(self, session: Session, recording: Recording, index: int, cached: int) -> int:
        """Generate where the recording has a reply; returns the tokens the cache stands for afterwards."""
        try:
            reply = session.probe(max_new_tokens=self.max_new_tokens)
        except BudgetUnsatisfiable as exc:
            self.misfits.append(Misfit(recording.id, index, str(exc)))
            return cached
        except PendingToolCalls:
            return cached
        applied = reply.usage.applied or {}
        stated = applied.get("refused") or applied.get("reanchored")  # then more is prefilled, and the log says why
        if not stated and (allowed := self._allowed(reply, cached)) < reply.usage.prefilled:
            self.violations.append(ReuseViolation(recording.id, index, reply.usage.prefilled, allowed))
        return reply.usage.prompt_tokens

    def _allowed(self, reply: Reply, cached: int) -> int:
        """Tokens this turn may prefill: what follows the first changed entry, or what the cache did not hold yet."""
        kept = min(cached, reply.decision.reusable_tokens) if reply.decision else cached
        return max(0, reply.usage.prompt_tokens - kept) + self.generation_prompt + SLACK


def _matched(recording: Recording, logged: Sequence[Message]) -> int:
    """How many messages the log holds already.

    Raises InvalidInput at the first that differs.
    """
    for index, message in enumerate(logged):
        if index == len(recording.messages):
            differs = f"the log goes on with message {index}, where {recording.file} ends"
        elif canonical(message.data) != canonical(recording.messages[index]):
            differs = f"message {index} of the log is not that of {recording.file}:{recording.transcript.line}"
        else:
            continue
        raise InvalidInput(
            f"conversation {recording.id!r} is in the log already and differs: {differs}; "
            "give another --log, or the transcript it was made from"
        )
    return len(logged)
