"""The ladder of plans at its ends: counts that do not add up, templates with wishes, policies that break the rules."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from compaction import Session
from compaction.budget import Target, Window
from compaction.errors import BudgetUnsatisfiable, InvalidInput, InvalidPlan, LogLocked, PendingToolCalls
from compaction.plan import Clamp, Digest, Drop, Plan, Replace, marker
from compaction.policies import NoOp, Pipeline, Summarize, Truncate
from compaction.ports import Policy
from compaction.prepared import Prepared
from compaction.store import MemoryLog
from compaction.testing import FakeCounter, ScriptedSummarizer, check_conservation
from compaction.view import View
from tests.builders import assistant, roles, system, tool_batch, user
from tests.conftest import ROOT
from tests.crash.scripted_engine import ScriptedEngine
from tests.planned import Planned, kinds, make_manager

Message = dict[str, Any]
MERGING = FakeCounter(merge_roles=True)


def counted(prepared: Prepared, counter: FakeCounter | None = None) -> int:
    """What a request takes when it is counted as it is sent."""
    return (counter or FakeCounter()).request(prepared.messages, prepared.tools)


def with_results(*results: str) -> list[Message]:
    """A question, and one batch of calls with these results."""
    return [user("u"), *tool_batch([(str(number), result) for number, result in enumerate(results)])]


def cleared(messages: Sequence[Message]) -> list[Message]:
    """The same with each result as short as the core makes it."""
    return [m | {"content": marker(len(m["content"]))} if m["role"] == "tool" else m for m in messages]


# -- the floor and the core's own clamp ------------------------------------------------------------------------------


def test_a_result_a_policy_has_replaced_can_still_be_cleared() -> None:
    """Where the newest result reads a policy's own long text, a smaller budget clears that too."""

    def rewrite(view: View, target: Target) -> Plan:
        fresh = [entry for entry in view.entries if entry.role == "tool" and not entry.edits]
        return Plan(tuple(Replace(entry.id, "/content", 0, 800, "R" * 200, "shorter") for entry in fresh))

    log, policy = MemoryLog(), Planned(rewrite)
    session = make_manager(log, tokens=160, policy=policy).session("c")
    session.extend(with_results("z" * 800))
    first = session.prepare()
    later = make_manager(log, tokens=45, policy=policy).session("c")

    prepared = later.prepare()

    assert first.messages[-1]["content"] == "R" * 200 and prepared.messages == cleared(with_results("z" * 800))
    assert prepared.tokens == counted(prepared) <= 45
    assert first.decision is not None and prepared.decision is not None
    spans = [*first.decision.spans, *prepared.decision.spans]
    check_conservation(later.state.history, later.entries, spans)


def test_the_floor_of_counts_that_do_not_add_up_is_the_cleared_request() -> None:
    """Many small results that share what is around them are cleared although each one's share is less than a marker."""
    messages = with_results(*["z" * 40] * 20)
    least = MERGING.request(cleared(messages), None)
    session = make_manager(counter=MERGING, tokens=least).session("c")
    session.extend(messages)

    prepared = session.prepare()

    assert prepared.tokens == counted(prepared, MERGING) == least
    with pytest.raises(BudgetUnsatisfiable, match=f"needs {least}"):
        make_manager(session._ledger.settings.log, counter=MERGING, tokens=least - 1).session("c").prepare()


@dataclass(frozen=True)
class Wrapped(FakeCounter):
    """A template that wraps each run of results: what clearing one of them saves is less than its share."""

    name: str = "wrapped"

    @property
    def additive(self) -> bool:
        return False

    def request(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> int:
        before = ["", *roles(messages)]
        runs = sum(now == "tool" != was for was, now in zip(before, roles(messages), strict=False))
        return super().request(messages, tools) + 30 * runs


@pytest.mark.parametrize("extra", [0, 10, 20, 40, 60, 80])
def test_the_clamp_fits_whatever_a_counter_shares(extra: int) -> None:
    """Whenever the cleared request fits, a request is sent: an estimate that is too high stops no clearing."""
    messages, counter = with_results("z" * 400, "z" * 399), Wrapped()
    room = counter.request(cleared(messages), None) + extra
    session = make_manager(counter=counter, tokens=room).session("c")
    session.extend(messages)

    prepared = session.prepare()

    assert prepared.tokens == counted(prepared, counter) <= room


# -- templates -------------------------------------------------------------------------------------------------------


def drop_to_goal(view: View, target: Target) -> Plan:
    """Drop what may go, down to the goal, in one plan."""
    ids = view.droppable(view.leading, view.cut_to(target.want))
    return Plan((Drop(ids, "old"),)) if ids else Plan()


USER_FIRST = ScriptedEngine(window=Window(10_000, "model config"), user_first=True)
BATCH_KEPT = [user("u1"), *tool_batch([("1", "r" * 20)]), user("u2" * 60), assistant("a" * 400), user("u3")]


@pytest.mark.parametrize("policy", [NoOp(), Planned(drop_to_goal), Truncate()], ids=lambda policy: str(policy.name))
def test_a_user_message_opens_what_is_kept_where_the_template_wants_one(policy: Policy) -> None:
    """A pinned batch at the beginning keeps the question it answers, whichever rung plans."""
    session = make_manager(tokens=120, policy=policy, engine=USER_FIRST).session("c")
    session.pin(session.extend(BATCH_KEPT)[2])

    prepared = session.prepare()

    assert roles(prepared.messages) == ["user", "assistant", "tool", "user"]
    assert prepared.tokens == counted(prepared) <= 120


def test_fitting_wins_over_a_user_message_first() -> None:
    """Where no opener fits, the request is sent without one: only the core's own rung may do that."""
    session = make_manager(tokens=60, policy=Truncate(), engine=USER_FIRST).session("c")
    session.pin(session.extend([user("u1" * 100), *BATCH_KEPT[1:]])[2])

    prepared = session.prepare()

    assert prepared.decision is not None and prepared.decision.rung == 3
    assert roles(prepared.messages) == ["assistant", "tool", "user"]


def test_a_conversation_without_a_user_goes_on() -> None:
    """Where a summary opens the request, whoever compacts next may drop it or keep it, and every request fits."""

    def digest(view: View, target: Target) -> Plan:
        return Plan((Digest(tuple(entry.id for entry in view.entries[:3]), 10, "sum", "old"),))

    log, script = MemoryLog(), ScriptedSummarizer(default="ok")
    first = make_manager(
        log, tokens=200, high=0.5, low=0.2, policy=Planned(digest), engine=USER_FIRST, summarizer=script
    ).session("c")
    first.extend([assistant(f"{number} " + "x" * 200) for number in range(4)])
    first.prepare()
    session = make_manager(log, tokens=200, engine=USER_FIRST).session("c")

    for _ in range(8):
        session.append(assistant("y" * 200))
        prepared = session.prepare()

        assert prepared.messages[0]["role"] == "user" and prepared.tokens == counted(prepared) <= 200


@dataclass(frozen=True)
class OneBlock(FakeCounter):
    """All leading messages share one block, as in templates with one system turn."""

    name: str = "one block"

    def head(self, leading: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> int:
        block = 12 - self.around * (len(leading) - 1) if leading else 0
        return super().head(leading, tools) + block


@pytest.mark.parametrize(
    ("messages", "gone"),
    [
        ([system("A" * 20), user("u1" * 100), system("B" * 20), user("u2" * 60), assistant("a"), user("u3")], 1),
        ([assistant("a" * 200), system("B" * 20), user("u2" * 60), user("u3")], 0),
    ],
)
def test_a_later_system_message_that_comes_to_lead_is_counted_as_it_is_rendered(
    messages: list[Message], gone: int
) -> None:
    """Its count is exact right after the drop, after the next message, and after a resume."""
    log, counter = MemoryLog(), OneBlock()
    dropped = Planned(lambda view, target: Plan((Drop((f"c:{gone + 2}",), "old"),)))
    session = make_manager(log, counter=counter, tokens=120, high=0.3, low=0.1, policy=dropped).session("c")
    session.extend(messages)

    prepared = session.prepare()

    assert prepared.messages == [message for index, message in enumerate(messages) if index != gone]
    assert prepared.tokens == counted(prepared, counter)
    for writer in (session, make_manager(log, counter=counter).session("c")):
        writer.append(assistant("later"))
        assert writer.state.tokens == counter.request([e.render(writer.state.history) for e in writer.entries], None)


# -- policies --------------------------------------------------------------------------------------------------------


def overfull(function: Callable[[View, Target], Any], content: Any = "x" * 600) -> Session:
    """A session that has to compact, by this policy."""
    session = make_manager(tokens=100, policy=Planned(function)).session("c")
    session.extend([user(content), assistant("y" * 300), user("z")])
    return session


def clamp(start: Any = 0, end: Any = 100, path: Any = "/content") -> Callable[[View, Target], Plan]:
    return lambda view, target: Plan((Clamp(view.entries[0].id, path, start, end, "long"),))


@pytest.mark.parametrize(
    "function",
    [
        lambda view, target: [Drop((view.entries[0].id,), "old")],
        lambda view, target: None,
        clamp(start=0.0),
        clamp(start=False),
        clamp(end="100"),
        clamp(path=None),
        clamp(path="/content/0/text"),
        lambda view, target: Plan((Drop((7,), "old"),)),  # type: ignore[arg-type]
        lambda view, target: Plan((Drop((["a"],), "old"),)),  # type: ignore[arg-type]
        lambda view, target: Plan((Drop((view.entries[0].id,), None),)),  # type: ignore[arg-type]
        lambda view, target: Plan((Digest((view.entries[0].id,), 20, None, "old"),)),  # type: ignore[arg-type]
        lambda view, target: Plan(("drop",)),  # type: ignore[arg-type]
    ],
)
def test_a_plan_of_other_types_is_overruled(function: Callable[[View, Target], Any]) -> None:
    """What is no plan, and an action with values of other types, is a failure of the policy and not of the session."""
    prepared = overfull(function).prepare()

    assert prepared.decision is not None and prepared.decision.rung == 3
    assert {failure.code for failure in prepared.decision.failures} == {"illegal"}
    assert prepared.tokens == counted(prepared) <= 100


def test_ids_that_come_from_a_generator_are_taken_once() -> None:
    """What is counted is what is dropped."""
    prepared = overfull(lambda view, target: Plan((Drop((e.id for e in view.entries[:2]), "old"),))).prepare()  # type: ignore[arg-type]

    assert prepared.tokens == counted(prepared) and len(prepared.messages) == 1


class Mute(Exception):
    """An error that fails to say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_without_words_is_still_only_the_policys() -> None:
    """The last rung takes over."""

    def planned(view: View, target: Target) -> Plan:
        raise Mute

    prepared = overfull(planned).prepare()

    assert prepared.decision is not None and prepared.decision.failures[0].detail == "Mute: (no words)"


@pytest.mark.parametrize("path", ["/content/²/text", "/content/00/text", "/content/-1/text", "/content/0/type"])
def test_only_the_one_path_of_a_text_can_be_clamped(path: str) -> None:
    """Another way to write a part's index, or another string of the part, is no path."""
    prepared = overfull(clamp(path=path), [{"type": "text", "text": "x" * 600}]).prepare()

    assert prepared.decision is not None and prepared.decision.rung == 3
    assert {failure.code for failure in prepared.decision.failures} == {"illegal"}


@pytest.mark.parametrize(
    "error",
    [
        InvalidInput("my own check failed"),
        BudgetUnsatisfiable(1, 0, {}),
        InvalidPlan("not today"),
        LogLocked("busy"),
        PendingToolCalls(("1",)),
        KeyError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_policy_may_raise_anything(error: Exception) -> None:
    """The library's own errors too are, coming from a policy, the policy's: they are recorded, and the request fits."""

    def fail(view: View, target: Target) -> Plan:
        raise error

    prepared = overfull(fail).prepare()

    assert prepared.decision is not None and prepared.decision.rung == 3
    assert len(prepared.decision.failures) == 2 and prepared.tokens <= 100


def test_an_alias_of_a_clamped_path_takes_nothing_out_twice() -> None:
    """`/content/00/text` after `/content/0/text` is refused: each code point is live or in one span."""

    def again(view: View, target: Target) -> Plan:
        first = view.entries[0]
        return Plan((Clamp(first.id, f"/content/{'00' if first.edits else '0'}/text", 0, 600, "long"),))

    log = MemoryLog()
    session = make_manager(log, tokens=200, policy=Planned(again)).session("c")
    text = "".join(f"{number:04d}" for number in range(300))
    session.extend([{"role": "assistant", "content": [{"type": "text", "text": text}]}, user("z")])
    first = session.prepare(trigger="manual")
    second = session.prepare(trigger="manual")

    assert first.decision is not None and second.messages == first.messages
    assert kinds(log)[-1] == "decision_failed" and log.verify().ok
    check_conservation(session.state.history, session.entries, first.decision.spans)


REFUSED = """
from compaction.plan import Drop, Plan
from tests.builders import assistant, system, user
from tests.planned import Planned, make_manager

everything = Planned(lambda view, target: Plan((Drop(tuple(entry.id for entry in view.entries), "all"),)))
session = make_manager(tokens=200, policy=everything).session("c")
session.extend([*map(system, "abcd"), user("x" * 400), assistant("y" * 300), user("z")])
session.pin("c:7")
print([failure.detail for failure in session.prepare().decision.failures])
"""


def test_failure_details_do_not_depend_on_the_hash_seed() -> None:
    """Another process says the same words of the same refused plan: replay compares them."""
    said = {
        subprocess.run(
            [sys.executable, "-c", REFUSED],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in "1234"
    }

    assert said == {"[\"entry 'c:2' must stay (leading, pinned, last user message or newest batch)\"]\n"}


def test_an_unwritten_summary_is_counted_at_its_limit_by_later_stages() -> None:
    """In a pipeline whose counts do not add up, the stage after a summary sees what it may take, and may digest too."""
    seen: list[tuple[int, int, int]] = []

    def look(view: View, target: Target) -> Plan:
        last = view.entries[-2]
        dropped = view.after(Plan((Drop((last.id,), "look"),))).tokens
        digested = view.after(Plan((Digest((last.id,), 10, "sum", "look"),))).tokens
        seen.append((view.tokens, dropped, digested))
        return Plan()

    stages = Pipeline((Summarize(max_tokens=100, keep_last=8), Planned(look), Truncate()))
    session = make_manager(counter=MERGING, tokens=300, policy=stages, summarizer=ScriptedSummarizer()).session("c")
    session.extend([message for _ in range(10) for message in (user("q" * 80), assistant("a" * 80))])
    session.append(user("z"))
    last = MERGING.message(assistant("a" * 80))
    prepared = session.prepare()
    tokens, dropped, digested = seen[0]

    assert prepared.decision is not None and prepared.decision.failures == ()
    assert tokens - last - MERGING.around <= dropped < tokens and dropped < digested
    assert prepared.tokens == counted(prepared, MERGING) <= 300
