"""What must hold of a log whatever happened to the process that wrote it.

Invariant: the judge reads the log alone. `normal` strips what differs between two runs of one story (ids, times,
salts), so that a story that was killed can be compared with the same story told in one go.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compaction.messages import dumps
from compaction.plan import Span
from compaction.replay import replay
from compaction.state import State, load
from compaction.store import AuditLog
from compaction.testing import ConservationError, check_conservation

__all__ = ["Told", "problems", "snapshot", "state_of", "told"]

Told = dict[str, tuple[list[str], list[str]]]
"""For each conversation its messages as JSON, and its decisions without ids."""


def snapshot(state: State | None) -> str:
    """A digest of all that a caller can see of a state; equal where two states cannot be told apart."""
    if state is None:
        return "no conversation"
    order = {id: place for place, id in enumerate(state.history)}
    seen = [
        [message.text for message in state.history.values()],
        [[dumps(entry.render(state.history)), entry.tokens] for entry in state.entries],
        [[order[pin.message_id], pin.path, pin.start, pin.end] for pin in state.pins],
        [state.tokens, *state.head, state.decisions, state.held_at],
        state.tools_text,
    ]
    return hashlib.sha256(dumps(seen).encode()).hexdigest()


def state_of(path: Path, conversation: str) -> State | None:
    """The state a session resumes with; None where nothing of the conversation is in the log."""
    if not path.exists():
        return None
    with AuditLog(path) as log:
        return load(log, conversation) if log.seq(conversation) else None


def told(path: Path) -> Told:
    """What a log holds, in a form that two runs of one story share."""
    with AuditLog(path) as log:
        return {row.conversation: _told(log, row.conversation) for row in log.conversations()}


def _told(log: AuditLog, conversation: str) -> tuple[list[str], list[str]]:
    rows = log.messages(conversation)
    order = {row.message_id: place for place, row in enumerate(rows)}
    decisions = [_normal(e.payload, order) for e in log.events(conversation) if e.kind == "decision_committed"]
    return [row.json or "" for row in rows], decisions


def _normal(payload: Mapping[str, Any], order: Mapping[str, int]) -> str:
    spans = [[order[id], *rest] for id, *rest in payload["spans"]]
    kept = {key: payload[key] for key in ("trigger", "policy", "limits", "floor", "target", "rung", "before", "after")}
    return dumps({**kept, "do": [action["do"] for action in payload["plan"]], "spans": spans})


def problems(path: Path, stories: Mapping[str, Sequence[str]], *, complete: bool) -> list[str]:
    """What is wrong with a log that tells these stories (message JSON, in order) as far as it got."""
    if not path.exists():
        return ["there is no log"] if complete else []
    found: list[str] = []
    with AuditLog(path) as log:
        report = log.verify()
        found += [f"verify: {problem}" for problem in report.problems]
        names = [row.conversation for row in log.conversations()]
        for name in names:
            found += _conversation(log, name, stories.get(name, ()), complete=complete)
        if complete and (missing := set(stories) - set(names)):
            found.append(f"conversations are missing: {sorted(missing)}")
        result = replay(log, names)
        if result.count("identical") != len(result.verdicts):
            found += [f"replay: {reason}" for reason in result.to_json()["reasons"]]
    return found


def _conversation(log: AuditLog, name: str, story: Sequence[str], *, complete: bool) -> list[str]:
    found: list[str] = []
    held = [row.json or "" for row in log.messages(name)]
    if held != list(story[: len(held)]):
        at = next(i for i, text in enumerate(held) if i >= len(story) or text != story[i])
        found.append(f"{name}: message {at} of the log is not message {at} of the story: doubled or missing")
    if complete and len(held) != len(story):
        found.append(f"{name}: {len(held)} of {len(story)} messages")
    spans = [Span(*row[:4]) for e in log.events(name) if e.kind == "decision_committed" for row in e.payload["spans"]]
    if len({span.id for span in spans}) != len(spans):
        found.append(f"{name}: a span is out twice: a decision is doubled")
    state = load(log, name)
    try:
        check_conservation(state.history, state.entries, spans)
    except ConservationError as error:
        found.append(f"{name}: conservation: {error}")
    return found
