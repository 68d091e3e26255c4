"""Pins, tools and counters where somebody else writes too, or a write does not come about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from compaction import Session
from compaction.budget import Target
from compaction.errors import BudgetUnsatisfiable, InvalidMessage, LogConflict, LogLocked
from compaction.events import Event, NewEvent, Text
from compaction.plan import Clamp, Drop, Plan
from compaction.policies import Truncate
from compaction.prepared import Prepared
from compaction.state import load
from compaction.store import MemoryLog
from compaction.testing import FakeCounter
from compaction.view import View
from tests.builders import assistant, tool_schema, user
from tests.planned import BusyLog, Planned, RacyLog, kinds, make_manager

BIG = FakeCounter(characters=1, name="big")
TOOLS = [tool_schema("a", "d" * 400), tool_schema("b", "d" * 400)]


def counted(prepared: Prepared, counter: FakeCounter | None = None) -> int:
    """What a request takes when it is counted as it is sent."""
    return (counter or FakeCounter()).request(prepared.messages, prepared.tools)


# -- pins ------------------------------------------------------------------------------------------------------------


def test_what_another_writer_dropped_cannot_be_pinned() -> None:
    """A pin that loses the race against a compaction is refused, is not in the log, and the conversation goes on."""
    log = MemoryLog()
    one = make_manager(log, tokens=200, policy=Truncate()).session("c")
    first, *_ = one.extend([user("x" * 200), assistant("y" * 200), user("z" * 200), assistant("w" * 200)])
    make_manager(log, tokens=200, policy=Truncate()).session("c").prepare()

    with pytest.raises(InvalidMessage, match="is not in the view"):
        one.pin(first)

    assert one.state.pins == [] and "pinned" not in kinds(log)
    one.append(user("more"))
    assert one.prepare().tokens <= 200


def test_a_pin_on_nothing_in_an_older_log_is_passed_over() -> None:
    """A log in which such a race was lost is read all the same."""
    log = MemoryLog()
    session = make_manager(log, tokens=200, policy=Truncate()).session("c")
    first, *_ = session.extend([user("x" * 200), assistant("y" * 200), user("z" * 200), assistant("w" * 200)])
    session.prepare()
    length = len(session.state.history[first].text)
    late = {"message": first, "path": "", "start": 0, "end": length}
    log.commit("c", session.state.seq, [NewEvent("pinned", "2026-01-01T00:00:00.000000Z", late)])

    again = make_manager(log, tokens=200, policy=Truncate()).session("c")

    assert again.state.pins == [] and again.state.floor().pins == 0
    assert again.prepare().tokens <= 200


def clamp_first(view: View, target: Target) -> Plan:
    """Clamp the first entry."""
    first = view.entries[0]
    return Plan() if first.edits or first.id in view.keep else Plan((Clamp(first.id, "/content", 0, 300, "long"),))


def drop_first(view: View, target: Target) -> Plan:
    """Drop the first entry."""
    first = view.entries[0]
    return Plan() if first.id in view.keep else Plan((Drop((first.id,), "old"),))


@pytest.mark.parametrize("plan", [clamp_first, drop_first])
def test_a_rewind_onto_where_a_pinned_text_is_out_is_refused(plan: Callable[[View, Target], Plan]) -> None:
    """A pin is a promise: going forward to where its text is not live changes nothing until the pin is lifted."""
    log = MemoryLog()
    session = make_manager(log, tokens=150, policy=Planned(plan)).session("c")
    first = session.append(assistant("k" * 400))
    before = session.state.seq
    session.append(user("x" * 200))
    assert session.prepare().decision is not None
    after = session.state.seq
    session.rewind(before)
    session.pin(first)
    entries, written = session.entries, kinds(log)

    with pytest.raises(InvalidMessage, match=r"clamped already|not in the view"):
        session.rewind(after)

    assert (session.entries, kinds(log), len(session.state.pins)) == (entries, written, 1)
    session.unpin(first)
    session.rewind(after)
    assert list(session.entries) == load(log, "c").entries
    assert session.entries != entries


# -- two writers -----------------------------------------------------------------------------------------------------


def test_each_writer_counts_the_tools_it_sends() -> None:
    """Another writer that opens the conversation without tools takes none from the one that has some."""
    log = MemoryLog()
    one = make_manager(log).session("c", tools=TOOLS)
    one.append(user("hi"))
    make_manager(log).session("c", tools=[]).append(assistant("yo"))
    one.append(user("again"))

    prepared = one.prepare()

    assert prepared.tools == TOOLS and prepared.tokens == counted(prepared)


def test_another_writers_tools_do_not_hide_that_a_request_is_too_long() -> None:
    """The request fits the room with the tools it carries, not with those of the other writer."""
    log = MemoryLog()
    one = make_manager(log, tokens=300, high=1.0).session("c", tools=TOOLS)
    one.append(user("hi"))
    make_manager(log, tokens=300, high=1.0).session("c", tools=[]).append(assistant("y" * 300))
    one.append(user("again"))

    prepared = one.prepare()

    assert prepared.tokens == counted(prepared) <= 300


def test_each_writer_counts_with_its_own_counter() -> None:
    """Another writer with a coarser counter does not make requests look shorter."""
    log = MemoryLog()
    one = make_manager(log, counter=BIG).session("c")
    one.append(user("h" * 100))
    make_manager(log).session("c").append(assistant("y" * 100))
    one.append(user("again"))

    prepared = one.prepare()

    assert prepared.tokens == counted(prepared, BIG)
    assert load(log, "c").opened["counter"] == "big"


def test_another_writers_rewind_leaves_this_ones_tools() -> None:
    """A rewind to before `use_tools` undoes messages, not what this writer sends."""
    log = MemoryLog()
    one = make_manager(log).session("c")
    one.append(user("hi"))
    seq = one.state.seq
    one.append(assistant("gone"))
    other = make_manager(log).session("c")
    one.use_tools(TOOLS)
    with pytest.raises(LogConflict):  # it meant another state: the caller looks again, and says it again
        other.rewind(seq)
    other.rewind(seq)
    one.append(user("x"))

    prepared = one.prepare()

    assert prepared.tools == TOOLS and prepared.tokens == counted(prepared)
    assert [message["content"] for message in prepared.messages] == ["hi", "x"]


def test_a_conversation_that_is_forked_into_while_it_opens_has_the_forks_history() -> None:
    """Who loses the race for a new name finds the fork there, whole, and counts it."""
    log = RacyLog()
    source = make_manager(log, tokens=200, high=1.0).session("c")
    source.extend([user("u" * 300), assistant("a" * 300)])
    log.conversation, log.first = "x", lambda: source.fork("x")

    session = make_manager(log, tokens=200, high=1.0).session("x")
    session.append(user("hi"))

    assert [entry.id for entry in session.entries][:2] == [entry.id for entry in source.entries]
    assert session.prepare().tokens == counted(session.prepare()) <= 200
    assert list(session.entries) == load(log, "x").entries


# -- writes that do not come about -----------------------------------------------------------------------------------


def with_tools(session: Session) -> None:
    session.use_tools(TOOLS)


def with_counter(session: Session) -> None:
    session._ledger.use_counter(BIG)


@pytest.mark.parametrize("change", [with_tools, with_counter])
def test_a_change_of_settings_that_could_not_be_written_did_not_happen(change: Callable[[Session], None]) -> None:
    """Requests are sent and counted as before; the same change again is then written and counts."""
    log = BusyLog()
    session = make_manager(log).session("c")
    session.append(user("h" * 40))
    before = session.prepare()
    log.busy = True
    with pytest.raises(LogLocked):
        change(session)
    log.busy = False

    assert (session.prepare(), session.tools, kinds(log)) == (before, [], ["opened", "appended"])
    session.append(assistant("a" * 40))
    assert session.prepare().tokens == counted(session.prepare())
    change(session)
    assert kinds(log) == ["opened", "appended", "appended", "opened"]
    assert (
        session.prepare().tokens == counted(session.prepare(), BIG if change is with_counter else None) > before.tokens
    )


def test_tools_that_could_not_be_written_are_counted_at_the_second_try() -> None:
    """The manager's retry does not pass for a change that is written already."""
    log = BusyLog()
    manager = make_manager(log, tokens=200)
    manager.session("c").append(user("hi"))
    log.busy = True
    with pytest.raises(LogLocked):
        manager.session("c", tools=TOOLS)
    log.busy = False

    session = manager.session("c", tools=TOOLS)

    with pytest.raises(BudgetUnsatisfiable, match="tools 2"):
        session.prepare()
    assert session.state.tokens == FakeCounter().request([user("hi")], TOOLS)


@dataclass(frozen=True)
class Interrupting(Mapping[str, Any]):
    """A payload at whose total Ctrl-C arrives."""

    payload: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        if key == "total":
            raise KeyboardInterrupt
        return self.payload[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.payload)

    def __len__(self) -> int:
        return len(self.payload)


class InterruptedLog(MemoryLog):
    """While `interrupt`, Ctrl-C arrives after a write, in the middle of its fold."""

    interrupt = False

    def commit(
        self, conversation: str, after: int, events: Sequence[NewEvent], texts: Sequence[Text] = ()
    ) -> tuple[Event, ...]:
        written = super().commit(conversation, after, events, texts)
        return tuple(replace(e, payload=Interrupting(e.payload)) for e in written) if self.interrupt else written


def test_an_event_whose_fold_was_interrupted_is_folded_once() -> None:
    """After Ctrl-C between commit and fold the session is what the log says: the message is there, once."""
    log = InterruptedLog()
    session = make_manager(log).session("c")
    session.append(user("a"))
    log.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        session.append(assistant("b"))
    log.interrupt = False
    session.append(user("c"))

    prepared = session.prepare()

    assert [message["content"] for message in prepared.messages] == ["a", "b", "c"]
    assert prepared.tokens == counted(prepared) and kinds(log) == ["opened", *["appended"] * 3]
    assert list(session.entries) == load(log, "c").entries
