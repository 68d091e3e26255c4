"""Which ranges of which messages are out, as the events say.

Invariant: no code point is ever out twice. A rewind takes a conversation back to what was out as of that event, so the
states form a tree: each step knows the one before it, and only a rewind walks back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from compaction.plan import Span

__all__ = ["Outside"]


@dataclass(frozen=True, slots=True)
class _Step:
    before: _Step | None
    spans: tuple[Span, ...]
    restored: bool


class Outside:
    """The spans of one conversation that are out. Feed it the events in order."""

    def __init__(self) -> None:
        self._step: _Step | None = None
        self._seqs: list[int] = []
        self._steps: list[_Step | None] = []
        self._out: dict[str, list[Span]] = {}

    def take(self, seq: int, spans: Iterable[Span]) -> list[tuple[int, str]]:
        """A decision takes spans out; returns (position, what is wrong) for each that is out already."""
        taken = tuple(spans)
        wrong = [(position, clash) for position, span in enumerate(taken) if (clash := self._add(span))]
        self._record(seq, _Step(self._step, taken, False))
        return wrong

    def restore(self, seq: int, span: Span) -> None:
        """What overlaps this range is in the view again."""
        self._remove(span)
        self._record(seq, _Step(self._step, (span,), True))

    def rewind(self, seq: int, to: int) -> None:
        """The conversation is as it was after event `to`."""
        self._go(seq, self._at(to))

    def fork(self, source: Outside, to: int) -> None:
        """A new conversation begins with what was out of another one after its event `to`."""
        self._go(0, source._at(to))

    def _at(self, seq: int) -> _Step | None:
        index = bisect_right(self._seqs, seq) - 1
        return self._steps[index] if index >= 0 else None

    def _go(self, seq: int, target: _Step | None) -> None:
        path: list[_Step] = []
        step = target
        while step is not None:
            path.append(step)
            step = step.before
        self._out = {}
        for step in reversed(path):
            for span in step.spans:
                self._remove(span) if step.restored else self._add(span)
        self._record(seq, target)

    def _record(self, seq: int, step: _Step | None) -> None:
        self._step = step
        self._seqs.append(seq)
        self._steps.append(step)

    def _add(self, span: Span) -> str:
        present = self._out.setdefault(span.message_id, [])
        for other in present:
            if other.path == "" or (other.path == span.path and span.path != "" and _overlap(other, span)):
                present.append(span)
                return f"overlaps span {other.id}, which is out already"
        present.append(span)
        return ""

    def _remove(self, span: Span) -> None:
        present = self._out.get(span.message_id, [])
        self._out[span.message_id] = [
            other
            for other in present
            if not (other.path == span.path and (span.path == "" or other == span or _overlap(other, span)))
        ]


def _overlap(one: Span, other: Span) -> bool:
    return one.start < other.end and other.start < one.end
