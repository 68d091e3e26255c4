"""Deciding every logged decision again, from the log alone.

Invariant: no tokenizer and no model is loaded; counts and summaries are the recorded ones, in the order asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compaction.budget import Limits
from compaction.decide import Decision, Scores, decide
from compaction.errors import BudgetUnsatisfiable, CompactionError, InvalidPolicy, LogMissing
from compaction.events import Event
from compaction.messages import canonical
from compaction.plan import Digest
from compaction.plugins import make_policy
from compaction.ports import Log, Policy, Summary
from compaction.state import State, load, without_refs
from compaction.view import Entry, View

__all__ = ["Replay", "Verdict", "replay"]

MakePolicy = Callable[[str, Mapping[str, Any]], Policy]


class _Diverged(Exception):
    """The policy asked for something that was not recorded."""


@dataclass
class _Player:
    """Feeds recorded answers back; a policy that asks more or other than was recorded diverges."""

    answers: Sequence[int]
    fulfilled: Sequence[Summary]
    scored: Mapping[str, Scores]
    entries: Sequence[Entry]
    asked: int = 0
    digests: int = 0
    used: set[str] = field(default_factory=set)

    def _next(self) -> int:
        if self.asked == len(self.answers):
            raise _Diverged(f"asks for more than the {len(self.answers)} counts recorded")
        self.asked += 1
        return self.answers[self.asked - 1]

    def message(self, message: Mapping[str, Any]) -> int:
        """The next recorded count."""
        del message
        return self._next()

    def request(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """The next recorded count."""
        del messages
        return self._next()

    def text(self, text: str) -> int:
        """The next recorded count."""
        del text
        return self._next()

    def scores(self, kind: str) -> Mapping[str, float]:
        """The recorded scores of this kind."""
        if kind not in self.scored:
            raise _Diverged(f"asks for {kind} scores, which were not recorded")
        self.used.add(kind)
        return self.scored[kind].by_entry(self.entries)

    def digest(self, action: Digest, view: View) -> Summary:
        """The next recorded summary."""
        del action, view
        if self.digests == len(self.fulfilled):
            raise _Diverged(f"asks for more than the {len(self.fulfilled)} summaries recorded")
        self.digests += 1
        return self.fulfilled[self.digests - 1]

    def left(self) -> str:
        """Which recorded answers nobody asked for; "" where all were."""
        if unused := sorted(self.scored.keys() - self.used):
            return f"does not ask for the {unused[0]} scores recorded"
        if (self.asked, self.digests) == (len(self.answers), len(self.fulfilled)):
            return ""
        return f"asks for {self.asked} of the {len(self.answers)} counts recorded"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One decision again: "identical", "different" or "not_replayable", with the reason for the last two."""

    conversation: str
    seq: int
    result: str
    reason: str = ""


@dataclass
class Replay:
    """All verdicts of a log."""

    verdicts: list[Verdict] = field(default_factory=list)

    def count(self, result: str) -> int:
        """How many decisions came out so."""
        return sum(verdict.result == result for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """The keys scripts read, and every decision that is not identical with its reason."""
        return {
            "decisions": len(self.verdicts),
            "identical": self.count("identical"),
            "different": self.count("different"),
            "not_replayable": self.count("not_replayable"),
            "reasons": [
                {"conversation": v.conversation, "seq": v.seq, "result": v.result, "reason": v.reason}
                for v in self.verdicts
                if v.result != "identical"
            ],
        }


def replay(
    log: Log,
    conversations: Iterable[str],
    *,
    make: MakePolicy = make_policy,
    on_decision: Callable[[Verdict], None] | None = None,
) -> Replay:
    """Decide every committed decision of these conversations again and compare the bytes."""
    result = Replay()
    for conversation in conversations:
        state = State(conversation)
        for event in log.events(conversation):
            if event.kind == "decision_committed":
                verdict = _again(log, state, event, make)
                result.verdicts.append(verdict)
                if on_decision is not None:
                    on_decision(verdict)
            state = _step(log, state, event)
    return result


def _step(log: Log, state: State, event: Event) -> State:
    source = event.payload.get("forked_from") if event.kind == "opened" else None
    if source:
        state = load(log, source["conversation"], source["seq"])
        state.conversation = event.conversation
    if event.kind == "rewound":
        return load(log, event.conversation, event.seq)
    state.apply(event, log.text)
    return state


def _again(log: Log, state: State, event: Event, make: MakePolicy) -> Verdict:
    def verdict(result: str, reason: str = "") -> Verdict:
        return Verdict(event.conversation, event.seq, result, reason)

    try:
        recorded = without_refs(event.payload, log.text)
        fulfilled = [
            Summary(log.text(bytes.fromhex(item["text"]["t"])), item["finish_reason"])
            for item in event.payload.get("fulfilled", ())
        ]
        scored = {item["kind"]: _scores(log, item) for item in event.payload.get("scores", ())}
    except LogMissing as exc:
        return verdict("not_replayable", f"redacted: {exc}")
    named = recorded["policy"]
    try:
        policy = make(named["name"], named["params"])
    except InvalidPolicy as exc:
        return verdict("not_replayable", str(exc))
    if policy.version != named["version"]:
        return verdict(
            "not_replayable", f"policy {named['name']!r} is version {policy.version}, not {named['version']}"
        )
    view = state.view()
    player = _Player(recorded["answers"], fulfilled, scored, view.entries)
    limits = Limits.from_json(recorded["limits"])
    try:
        outcome = decide(view, limits, policy, player, trigger=recorded["trigger"])
    except (_Diverged, BudgetUnsatisfiable, CompactionError) as exc:
        return verdict("different", f"policy {named['name']!r} {exc}")
    if not isinstance(outcome, Decision):
        return verdict("different", f"policy {named['name']!r} plans nothing now")
    made = outcome.to_json()
    for key, value in made.items():
        if canonical(value) != canonical(recorded[key]):
            return verdict("different", f"{key}: recorded {_short(recorded[key])}, now {_short(value)}")
    if left := player.left():
        return verdict("different", f"policy {named['name']!r} {left}")
    return verdict("identical")


def _scores(log: Log, item: Mapping[str, Any]) -> Scores:
    error = item["error"]
    return Scores(item["kind"], tuple(item["values"]), None if error is None else log.text(bytes.fromhex(error["t"])))


def _short(value: Any) -> str:
    text = canonical(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
