"""Counting a conversation as it grows: what each message adds, and what the whole comes to.

Invariant: with an additive counter an append costs time in proportion to that message; the total it gives equals a
count of everything rendered anew. Figures go into events; nothing here is needed to read them back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compaction.errors import InvalidMessage
from compaction.grammar import LEADING, Batch, follow
from compaction.messages import Message
from compaction.ports import Counter
from compaction.state import State

__all__ = ["Tally"]


class Tally:
    """A counter together with the tools each request carries."""

    def __init__(self, counter: Counter, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self.counter = counter
        self.tools = [dict(tool) for tool in tools] if tools else None

    def head(self, leading: Sequence[Mapping[str, Any]]) -> tuple[int, int, int]:
        """Tokens of (template, leading system messages, tools); their sum is the counter's head, exactly."""
        bare = self.counter.head([], None)
        system = self.counter.head(leading, None) if leading else bare
        full = self.counter.head(leading, self.tools) if self.tools else system
        template = min(bare, system, full)
        return template, max(0, min(system, full) - template), full - max(template, min(system, full))

    def request(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Tokens of the whole request."""
        return self.counter.request(messages, self.tools)

    def appended(self, state: State, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """What the `appended` events of these messages say: tokens, counter, total, and the head where it changes.

        Raises InvalidMessage, with its index, where one cannot follow the ones before.
        """
        batch = state.batch
        leads = len(state.entries) == state.leading
        leading = [entry.render(state.history) for entry in state.entries] if leads else []
        total, head, rendered = state.tokens, state.head, None
        payloads: list[dict[str, Any]] = []
        for index, message in enumerate(messages):
            batch = _follow(batch, message, index if len(messages) > 1 else None)
            leads = leads and message.role in LEADING
            payload: dict[str, Any] = {}
            tokens = 0
            if leads:
                leading.append(message.fresh())
                old, head = sum(head), self.head(leading)
                tokens, total = max(0, sum(head) - old), total - old + sum(head)
                payload["head"] = list(head)
            elif self.counter.additive:
                tokens = self.counter.message(message.data)
                total += tokens
            if not self.counter.additive:
                rendered = rendered or [entry.render(state.history) for entry in state.entries]
                rendered.append(message.fresh())
                before, total = total, self.request(rendered)
                tokens = max(0, total - before)
            payloads.append({"tokens": tokens, "counter": self.counter.name, "total": total, **payload})
        return payloads


def _follow(batch: Batch | None, message: Message, index: int | None) -> Batch | None:
    try:
        return follow(batch, message)
    except InvalidMessage as exc:
        raise InvalidMessage(exc.reason, index=index) from exc
