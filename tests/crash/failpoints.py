"""One kill at each place of each story: afterwards the old state or the new one, and the story goes on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from compaction.session import Session
from tests.crash.checks import problems, snapshot, state_of, told
from tests.crash.processes import spawn
from tests.crash.results import Outcome
from tests.crash.scenarios import CONVERSATION, Scenario, tell
from tests.crash.traps import Trap

__all__ = ["Reference", "Strike", "arrow", "in_order", "reference", "strike", "strikes"]

CHANGES = ("opened", "appended", "pinned", "decision_committed", "decision_failed")
"""Events that change what a session holds."""
ARROWS = {
    "create": "create the log",
    "opened": "log opened",
    "counter": "append → measure",
    "appended": "log message",
    "pinned": "log pin",
    "hook before": "above the high mark",
    "policy before": "view → plan",
    "policy after": "plan → fulfil",
    "decision_started": "log decision started",
    "summarizer before": "fulfil, asked",
    "summarizer after": "fulfil → check",
    "policy before again": "failed → plan again",
    "policy after again": "failed → plan again",
    "decision_failed": "log decision failed",
    "decision_committed": "log decision",
    "hook after": "apply → engine",
    "generation_started": "log generation started",
    "engine before": "apply → engine",
    "engine piece": "engine, mid-stream",
    "engine end": "engine → record usage",
}
"""Places and events in the order of the design's picture, and what the table calls them."""
WHEN = {"before": "before commit", "sql": "in the transaction", "vm": "in a statement", "after": "after commit"}


@dataclass(frozen=True)
class Strike:
    """Where to kill: the nth time the story comes to a place."""

    place: str
    nth: int


@dataclass(frozen=True)
class Reference:
    """The story told in one go: the state after each step, how often each place is reached, and what is logged."""

    scenario: Scenario
    states: tuple[str, ...]
    reached: Counter[str]
    story: tuple[str, ...]
    decisions: tuple[str, ...]


def arrow(place: str) -> str:
    """The arrow of the design's picture a place lies on."""
    name, when = _parts(place)
    return f"{ARROWS[name]}: {WHEN[when]}" if when else ARROWS[name]


def _parts(place: str) -> tuple[str, str]:
    if place in ARROWS:
        return place, ""
    layer, kind, *when = place.split()
    return kind, when[0] if when else layer


def in_order(places: Iterable[str]) -> list[str]:
    """Places in the order of the picture."""
    names, times = list(ARROWS), ["", *WHEN]
    return sorted(places, key=lambda place: (names.index(_parts(place)[0]), times.index(_parts(place)[1])))


def reference(scenario: Scenario, folder: Path) -> Reference:
    """Tell the story without a kill, in this process."""
    path, trap = folder / f"{scenario.name}.db", Trap()
    states = [snapshot(None)]
    tell(scenario, path, trap, lambda session: states.append(snapshot(session.state)))
    messages, decisions = told(path)[CONVERSATION]
    return Reference(scenario, tuple(states), trap.reached, tuple(messages), tuple(decisions))


def strikes(ref: Reference, most: int, rng: random.Random) -> Iterator[Strike]:
    """Each place at most so many times, drawn at random from those it is reached, the first always among them."""
    for place in in_order(ref.reached):
        rest = range(2, ref.reached[place] + 1)
        chosen = [1, *(rest if len(rest) < most else rng.sample(rest, most - 1))]
        yield from (Strike(place, nth) for nth in sorted(chosen))


def strike(ref: Reference, at: Strike, path: Path) -> Outcome:
    """Kill the story there, look at the log, and tell the rest."""
    progress, report = path.with_suffix(".steps"), path.with_suffix(".txt")
    progress.write_bytes(b"")

    def note(_: Session) -> None:
        with progress.open("ab") as file:
            file.write(b".")

    trap = Trap(at.place, at.nth)
    ended = spawn(lambda: tell(ref.scenario, path, trap, note), report).wait()
    name = f"{ref.scenario.name}: {at.place} #{at.nth}"
    if ended != "killed":
        return Outcome(arrow(at.place), name, "", (f"was not killed: {ended}",))
    stories = {CONVERSATION: ref.story}
    found = problems(path, stories, complete=False)
    state, wrong = _which(ref, at.place, len(progress.read_bytes()), path)
    found += wrong
    ended = spawn(lambda: tell(ref.scenario, path, Trap(), lambda _: None), report).wait()
    if ended != "done":
        found.append(f"does not go on: {ended}")
    found += problems(path, stories, complete=True)
    if told(path).get(CONVERSATION, ([], []))[1] != list(ref.decisions):
        found.append("the decisions are not those of the story told in one go")
    if snapshot(state_of(path, CONVERSATION)) != ref.states[-1]:
        found.append("the last state is not that of the story told in one go")
    _remove(path)
    return Outcome(arrow(at.place), name, state, tuple(found))


def _which(ref: Reference, place: str, steps: int, path: Path) -> tuple[str, list[str]]:
    """Whether the log holds the state before the step that was cut or the one after it, and whether it had to."""
    old, new = ref.states[steps], ref.states[min(steps + 1, len(ref.states) - 1)]
    now = snapshot(state_of(path, CONVERSATION))
    if now not in (old, new):
        return "", [f"neither the state before step {steps} nor the one after it"]
    state = "old" if now == old else "new"
    committed = place == "hook after" or place in {f"log {kind} after" for kind in CHANGES}
    expected = new if committed else old
    # SQLite may ask between the commit and its return whether to go on: then the state is the new one already.
    if now != expected and not place.startswith("vm "):
        return state, [f"the {state} state of step {steps}, not the {'new' if committed else 'old'} one"]
    return state, []


def _remove(path: Path) -> None:
    for file in path.parent.glob(f"{path.stem}.*"):
        file.unlink()
