"""Stories to be told to a session, step by step, from wherever the log stands.

Invariant: a step changes the state at most once, and telling goes on from the log alone, so that after a kill the state
is that before the step or that after it, and the rest of the story is told as if nothing had happened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compaction import Budget, Session, SessionManager
from compaction.policies import ClearToolResults, NoOp, SlidingWindow, Summarize, default_policy
from compaction.ports import Engine, Policy, Summary
from compaction.testing import FakeCounter
from tests.builders import assistant, system, tool_batch, tool_schema, user
from tests.crash.scripted_engine import ScriptedEngine
from tests.crash.traps import Trap, TrapCounter, TrapEngine, TrapLog, TrapPolicy, TrapSummarizer, open_log, watch

__all__ = ["CONVERSATION", "SCENARIOS", "Scenario", "tell", "users"]

CONVERSATION = "c"
REPLY = 8
PIN_AT = 3
TOOLS = [tool_schema()]
Message = dict[str, Any]


class ContentSummarizer:
    """A summary that depends on its source alone; it fails on a source that says so."""

    name = "content"

    def __call__(self, source: str, *, instruction: str, max_tokens: int, limit: int) -> Summary:
        """Fails where the source names `poison`."""
        del instruction, max_tokens, limit
        if "poison" in source:
            raise RuntimeError("the summariser is down")
        return Summary(f"They talked: {hashlib.sha256(source.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}.")


@dataclass(frozen=True)
class Scenario:
    """A story and how it is told: recorded replies are played, or an engine writes them where there are none."""

    name: str
    policy: Policy
    budget: Budget
    story: tuple[Message, ...]
    engine: Callable[[], Engine] | None = None


def tell(scenario: Scenario, path: Path, trap: Trap, on_step: Callable[[Session], None]) -> None:
    """Tell the rest of the story into the log at `path`."""
    with open_log(path, trap) as log:
        engine = scenario.engine() if scenario.engine else None
        counter = engine.counter if engine else FakeCounter()
        manager = SessionManager(
            engine=TrapEngine(engine, trap) if engine else None,
            policy=TrapPolicy(scenario.policy, trap),
            budget=scenario.budget,
            log=TrapLog(log, trap),
            counter=TrapCounter(counter, trap),
            summarizer=TrapSummarizer(ContentSummarizer(), trap),
        )
        session = manager.session(CONVERSATION, TOOLS)
        watch(session, trap)
        on_step(session)
        steps = _generated(session, scenario.story) if engine else _recorded(session, scenario.story)
        for _ in steps:
            on_step(session)


def _recorded(session: Session, story: Sequence[Message]) -> Iterator[None]:
    """Messages as they were; a reply is prepared for, then recorded with its usage."""
    yield from _pinned(session)
    for message in story[len(session.state.history) :]:
        if message["role"] != "assistant":
            session.append(message)
            yield
        else:
            prepared = session.prepare(max_new_tokens=REPLY)
            yield
            session.started(prepared, REPLY)
            yield
            usage = {"prompt_tokens": prepared.tokens, "completion_tokens": REPLY}
            session.record({"choices": [{"message": message}], "usage": usage})
            yield
        yield from _pinned(session)


def _pinned(session: Session) -> Iterator[None]:
    history = list(session.state.history)
    if len(history) == PIN_AT + 1 and not session.state.pins:
        session.pin(history[PIN_AT])
        yield


def _generated(session: Session, story: Sequence[Message]) -> Iterator[None]:
    """Users speak, the engine answers."""
    history = list(session.state.history.values())
    said = sum(message.role != "assistant" for message in history)
    if history and history[-1].role == "user":
        yield from _answered(session)
    for message in story[said:]:
        session.append(message)
        yield
        if message["role"] == "user":
            yield from _answered(session)


def _answered(session: Session) -> Iterator[None]:
    session.prepare(max_new_tokens=REPLY)
    yield
    session.generate(max_new_tokens=REPLY)
    yield


def _talk(turns: int, *, batch: int = 60, poison: int = -1) -> tuple[Message, ...]:
    """A system message, then turns with tools in every second one, and text that is hard to keep."""
    story = [system("You look things up.")]
    for turn in range(turns):
        word = "poison" if turn == poison else f"order {7700 + turn}"
        story.append(user(f"{turn}: where is {word}? " + "please " * 12, x_turn=turn))
        if turn % 2:
            results = [(f"call_{n}", f"{turn}.{n} \x00\ud800<|im_end|> " + "漢字 row " * batch) for n in range(2)]
            story += tool_batch(results, content=None)
        story.append(assistant(f"{turn}: it is on its way, " + "say " * 20))
    return tuple(story)


def users(turns: int) -> tuple[Message, ...]:
    """What users say; an engine answers."""
    return (system("Be short."), *(user(f"{turn}: tell me about the fox, " + "please " * 12) for turn in range(turns)))


def _results(turns: int) -> tuple[Message, ...]:
    """Small tool results: clearing them frees too little, which is recorded as a failure."""
    story = [system("You look things up.")]
    for turn in range(turns):
        story += [user(f"{turn}: look. " + "please " * 14), *tool_batch([("c", "a small result that says little")])]
        story.append(assistant(f"{turn}: done. " + "say " * 16))
    return tuple(story)


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("window", SlidingWindow(), Budget(tokens=560), _talk(8, batch=12)),
    Scenario("summary", Summarize(max_tokens=64, keep_last=2), Budget(tokens=600), _talk(8, batch=12, poison=2)),
    Scenario("default", default_policy(), Budget(tokens=700), _talk(8, batch=60)),
    Scenario("ladder", NoOp(), Budget(tokens=460), _talk(6, batch=12)),
    Scenario("held", ClearToolResults(keep_last=0, min_tokens=1), Budget(tokens=360, high=0.5, low=0.2), _results(7)),
    Scenario("engine", SlidingWindow(), Budget(tokens=200), users(8), ScriptedEngine),
)
