"""A session at its edges: replies that are cut off, pins without an end, hooks that append, and who is held back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from compaction.budget import Target
from compaction.errors import EngineError, InvalidMessage
from compaction.plan import Drop, Plan
from compaction.policies import Truncate
from compaction.ports import Generated, Generation
from compaction.store import MemoryLog
from compaction.testing import FakeCounter
from compaction.tokens import EstimateCounter
from compaction.view import Pin, View
from tests.builders import assistant, system, user
from tests.crash.scripted_engine import ScriptedEngine
from tests.planned import Planned, kinds, make_manager

CUT = ["opened", "appended", "generation_started", "interrupted"]


@dataclass
class Slow:
    """A reply that waits, before its second piece, until it is told to go on."""

    reply: Generation
    begun: threading.Event
    go_on: threading.Event

    @property
    def result(self) -> Generated | None:
        return self.reply.result

    def __iter__(self) -> Iterator[str]:
        for number, piece in enumerate(self.reply):
            if number == 1:
                self.begun.set()
                self.go_on.wait(10)
            yield piece

    def close(self) -> None:
        self.reply.close()


@dataclass(frozen=True)
class SlowEngine(ScriptedEngine):
    """Its replies wait in their middle; releasing a conversation closes its reply."""

    begun: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    running: dict[str, Any] = field(default_factory=dict)

    def generate(
        self,
        conversation: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        max_new_tokens: int,
    ) -> Any:
        reply = super().generate(conversation, messages, tools, max_new_tokens=max_new_tokens)
        self.running[conversation] = Slow(reply, self.begun, self.go_on)
        return self.running[conversation]

    def release(self, conversation: str) -> None:
        self.running[conversation].close()


async def test_a_cancelled_agenerate_appends_nothing() -> None:
    """What came so far is kept as `interrupted`, and the conversation takes the next reply."""
    engine, log = SlowEngine(), MemoryLog()
    session = make_manager(log, engine=engine).session("c")
    session.append(user("hi"))
    task = asyncio.create_task(session.agenerate())
    await asyncio.to_thread(engine.begun.wait, 10)
    task.cancel()
    engine.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert kinds(log) == CUT and len(session.state.history) == 1
    reply = await session.agenerate()
    assert list(session.state.history.values())[-1].data == assistant(reply.text)


async def test_an_agenerate_that_is_not_cancelled_is_generate() -> None:
    """The same text, the same events."""
    logs = MemoryLog(), MemoryLog()
    one, two = (make_manager(log, engine=ScriptedEngine()).session("c") for log in logs)
    for session in (one, two):
        session.append(user("hi"))

    assert (await one.agenerate()).text == two.generate().text
    assert kinds(logs[0]) == kinds(logs[1]) == ["opened", "appended", "generation_started", "appended", "usage"]


async def test_an_astream_left_early_appends_nothing() -> None:
    """The engine does not run ahead of its reader, however slow that is; closing cuts the reply off at once."""
    log = MemoryLog()
    session = make_manager(log, engine=ScriptedEngine()).session("c")
    session.append(user("hi"))
    stream: Any = session.astream()
    first = await anext(stream)
    await asyncio.sleep(0.05)
    await stream.aclose()
    assert kinds(log)[-1] == "interrupted"  # cut off once `aclose` returns, so that a blocking call may follow
    session.generate()
    cut = list(log.events("c"))[len(CUT) - 1]

    assert kinds(log) == [*CUT, "generation_started", "appended", "usage"]
    assert log.text(bytes.fromhex(cut.payload["text"])).startswith(first)
    assert len(log.text(bytes.fromhex(cut.payload["text"]))) <= 2 * len(first)


def test_a_conversation_released_while_it_streams_appends_nothing() -> None:
    """A reply that the engine cut off is not taken for a whole one: the reader is told, the log has `interrupted`."""
    engine, log = SlowEngine(), MemoryLog()
    engine.go_on.set()
    manager = make_manager(log, engine=engine)
    session = manager.session("c")
    session.append(user("hi"))
    stream = session.stream()
    next(stream)
    manager.release("c")

    with pytest.raises(EngineError, match="was cancelled"):
        list(stream)

    assert kinds(log) == CUT and len(session.state.history) == 1


def test_a_reported_prompt_of_no_tokens_is_kept_and_scales_nothing() -> None:
    """A provider that reports 0 prompt tokens corrects no estimate; its reply is appended."""
    log = MemoryLog()
    session = make_manager(log, counter=EstimateCounter()).session("c")
    session.append(user("hi"))
    before = session.state.opened["counter"]
    usage = {"prompt_tokens": 0, "completion_tokens": 1}
    session.record({"choices": [{"message": assistant("r")}], "usage": usage})

    assert kinds(log) == ["opened", "appended", "appended", "usage"]
    assert session.state.opened["counter"] == before


def test_a_pin_without_an_end_reaches_to_the_end_of_the_text() -> None:
    """`pin(id, start)` takes the rest of the text at its path, not of the message's JSON."""
    session = make_manager().session("c")
    plain = session.append(user("hello world"))
    parts = session.append(user([{"type": "text", "text": "in a part"}]))
    session.pin(plain, 6)
    session.pin(parts, 3, path="/content/0/text")
    session.pin(plain, end=5)

    assert session.state.pins == [
        Pin(plain, "/content", 6, 11),
        Pin(parts, "/content/0/text", 3, 9),
        Pin(plain, "/content", 0, 5),
    ]


@pytest.mark.parametrize(
    ("start", "end", "path"), [(0, 0, "/content"), (11, None, "/content"), (3, None, "/name"), (0, None, "/content/0")]
)
def test_a_pin_of_nothing_is_refused(start: int, end: int | None, path: str) -> None:
    """An empty range, and a path without a text, pin nothing; an end of 0 is not taken for none."""
    session = make_manager().session("c")
    message_id = session.append(user("hello world"))

    with pytest.raises(InvalidMessage, match="has no text"):
        session.pin(message_id, start, end, path)

    assert session.state.pins == []


def test_what_a_hook_appends_belongs_to_the_next_request() -> None:
    """The request that `prepare` returns is the one that was made to fit, whatever `after_compaction` does."""
    session = make_manager(tokens=200, policy=Truncate()).session("c")
    session.extend([user("x" * 500), assistant("y" * 300), user("z")])
    session.on("after_compaction", lambda session, decision: session.append(system("n" * 1000)))

    prepared = session.prepare()

    assert system("n" * 1000) not in prepared.messages
    assert prepared.tokens == FakeCounter().request(prepared.messages, None) <= 200
    assert session.entries[-1].role == "system"


def drop_oldest(view: View, target: Target) -> Plan:
    """Drop what may go, down to the goal."""
    return Plan((Drop(view.droppable(view.leading, view.cut_to(target.want)), "old"),))


@pytest.mark.parametrize("params", [{"opts": {"t": "ab" * 32}}, {"t": "cd" * 32}, {"many": [{"t": "ef" * 32}]}])
def test_a_policys_parameters_may_look_like_anything(params: dict[str, Any]) -> None:
    """Parameters in the shape of a reference to a text are no reference: opened, decided, resumed and verified."""
    log, policy = MemoryLog(), Planned(drop_oldest, params=params)
    session = make_manager(log, tokens=200, policy=policy).session("c")
    session.extend([user("x" * 500), assistant("y" * 300), user("z")])

    prepared = session.prepare()

    assert prepared.decision is not None and dict(prepared.decision.policy.params) == params
    assert session.state.opened["policy"]["params"] == params and log.verify().ok
    assert make_manager(log, tokens=200, policy=policy).session("c").entries == session.entries
    assert kinds(log).count("opened") == 1


def fail(view: View, target: Target) -> Plan:
    """A policy that cannot plan."""
    raise RuntimeError("oops")


def test_what_held_one_policy_back_says_nothing_of_another() -> None:
    """After a failed decision the same policy waits for growth; another policy, or a budget, is asked at once."""
    log, failing = MemoryLog(), Planned(fail, name="failing")
    session = make_manager(log, tokens=200, policy=failing).session("c")
    session.extend([user("x" * 300), assistant("y" * 300), user("z" * 100)])
    assert session.prepare().decision is None
    same = make_manager(log, tokens=200, policy=failing).session("c")
    assert same.prepare().decision is None
    assert kinds(log)[-1] == "decision_failed" and kinds(log).count("decision_failed") == 1

    other = make_manager(log, tokens=200, policy=Truncate()).session("c")

    assert other.prepare().decision is not None
