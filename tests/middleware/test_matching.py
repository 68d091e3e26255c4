"""Wrapped loops send the whole history each call: what is appended, rewound, refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from compaction.errors import InvalidInput, InvalidMessage, PendingToolCalls
from compaction.middleware.matching import same
from tests.builders import assistant, call, system, tool, tool_batch, user
from tests.middleware.scripted import Chunk, Model, history, kinds, make_manager, matches, verified

RETRIED_TURNS = 8


def test_a_growing_history_is_appended_and_never_rewound() -> None:
    """Three turns with the whole history each leave one `appended` event a message and no `rewound`."""
    manager, model = make_manager(), Model()
    ask = manager.wrap(conversation="c")(model)
    messages = [system("be brief"), user("one")]
    for question in ("two", "three", "four"):
        messages += [assistant(ask(messages)), user(question)]

    assert kinds(manager) == ["opened", *["appended"] * 7]
    assert model.sent[-1] == messages[:-2]


def test_the_same_list_again_appends_nothing() -> None:
    """A call that failed may be repeated: the history is the list, then the list and the reply."""
    manager = make_manager()
    ask = manager.wrap(conversation="c")(Model(ConnectionError("gone"), "here"))
    with pytest.raises(ConnectionError):
        ask([user("one")])
    before = kinds(manager)
    ask([user("one")])

    assert (before, kinds(manager)) == (
        ["opened", "appended", "interrupted"],
        ["opened", "appended", "interrupted", "appended"],
    )


def test_a_retry_without_the_last_reply_takes_it_back() -> None:
    """The reply that is not in the list any more is rewound, the new one stands in its place."""
    manager = make_manager()
    ask = manager.wrap(conversation="c")(Model("first", "second"))
    ask([user("one")])
    ask([user("one")])

    assert history(manager.session("c")) == [user("one"), assistant("second")]
    assert kinds(manager) == ["opened", "appended", "appended", "rewound", "appended"]


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda m: [*m[:2], user("two, edited")], id="the last question edited"),
        pytest.param(lambda m: [user("one, edited"), *m[1:]], id="the first message edited"),
        pytest.param(lambda m: m[:1], id="shorter"),
        pytest.param(lambda m: [m[0], assistant("another answer"), user("a branch")], id="branch"),
        pytest.param(lambda m: [system("[Summary] the user greeted"), m[-1]], id="compacted by somebody else"),
        pytest.param(lambda m: [system("new"), *m], id="a message put in front"),
    ],
)
def test_a_divergence_is_rewound_and_appended(edit: Any) -> None:
    """However the list parts from the history, the history becomes the list and the reply, and the log says so."""
    manager, model = make_manager(), Model()
    ask = manager.wrap(conversation="c")(model)
    messages = [user("one")]
    messages += [assistant(ask(messages)), user("two")]
    ask(messages)
    changed = edit(copy.deepcopy(messages))
    reply = ask(changed)

    assert history(manager.session("c")) == [*changed, assistant(reply)]
    assert model.sent[-1] == changed
    assert kinds(manager).count("rewound") == 1 and verified(manager)


def test_a_compaction_survives_a_retry_of_the_reply() -> None:
    """What was decided before the message that differs stays decided: a retry is not compacted a second time."""
    manager, model = make_manager(tokens=400), Model()
    ask = manager.wrap(conversation="c")(model)
    messages = [user(f"{n} " + "word " * 60) if n % 2 == 0 else assistant("short") for n in range(9)]
    ask(messages)
    ask(messages)

    assert kinds(manager).count("decision_committed") == 1
    assert model.sent[0] == model.sent[1]


def test_pins_survive_a_rewind() -> None:
    """A pin made after the message that differs is made again: retrying must not unpin a rule."""
    manager = make_manager()
    ask = manager.wrap(conversation="c")(Model())
    ask([user("the rule"), user("one")])
    session = manager.session("c")
    session.pin(next(iter(session.state.history)), 0, 3)
    pins = list(session.state.pins)
    ask([user("the rule"), user("one")])

    assert manager.session("c").state.pins == pins


def test_unpinning_survives_a_rewind_too() -> None:
    """What the caller let go of after the message that differs stays let go of; whole-message pins are kept."""
    manager = make_manager()
    ask = manager.wrap(conversation="c")(Model())
    ask([user("the rule"), user("one")])
    session = manager.session("c")
    rule, question = list(session.state.history)[:2]
    session.pin(rule, 0, 3)
    ask([user("the rule"), user("one"), assistant("ok 1"), user("two")])
    session.unpin(rule)
    session.pin(question)
    ask([user("the rule"), user("one"), assistant("ok 1"), user("two, edited")])

    assert [(pin.message_id, pin.path) for pin in manager.session("c").state.pins] == [(question, "")]


@pytest.mark.parametrize(
    ("bad", "index"),
    [
        pytest.param([user("edited"), {"role": "robot", "content": "x"}], 1, id="unknown role"),
        pytest.param([user("one"), tool("c9", "orphan")], 1, id="orphan result"),
        pytest.param([user("one"), user("two"), "not a message"], 2, id="no object"),
        pytest.param([user("edited"), *tool_batch([("a", "1")]), tool("a", "again")], 3, id="answered twice"),
    ],
)
def test_a_bad_list_changes_nothing(bad: list[Any], index: int) -> None:
    """A list that is not legal is refused with the position of the message, before anything is logged."""
    manager, model = make_manager(), Model()
    ask = manager.wrap(conversation="c")(model)
    ask([user("one")])
    before = kinds(manager)

    with pytest.raises(InvalidMessage) as caught:
        ask(bad)
    assert (caught.value.index, kinds(manager), len(model.sent)) == (index, before, 1)


def test_an_empty_list_discards_nothing() -> None:
    """An empty list is refused rather than taken for "forget everything"."""
    manager = make_manager()
    ask = manager.wrap(conversation="c")(Model())
    ask([user("one")])

    with pytest.raises(InvalidInput, match="empty list"):
        ask([])
    assert len(history(manager.session("c"))) == 2


def test_a_tool_loop_with_ids_that_repeat() -> None:
    """Call ids that come back in every batch are told apart by position."""
    manager, model = (
        make_manager(),
        Model(*[assistant(None, calls=[call("c0", query=str(n))]) for n in range(3)], "done"),
    )
    ask = manager.wrap(conversation="c")(model)
    messages: list[Any] = [user("go")]
    for n in range(3):
        messages += [ask(messages), tool("c0", f"result {n}")]
    ask(messages)

    assert history(manager.session("c")) == [*messages, assistant("done")]
    assert "rewound" not in kinds(manager)


def test_calls_without_results_are_named() -> None:
    """A list that ends with a pending call raises PendingToolCalls; the model is not called."""
    manager, model = make_manager(), Model()

    with pytest.raises(PendingToolCalls):
        manager.wrap(conversation="c")(model)([user("go"), assistant(None, calls=[call("c0")])])
    assert model.sent == []


def test_a_reply_object_comes_back_as_object_or_dict() -> None:
    """An SDK object recorded as a reply equals the object, its dict with nulls, and the bare role and content."""
    reply: dict[str, Any] = {"role": "assistant", "content": "hi", "refusal": None, "annotations": []}
    full = {**reply, "audio": None, "tool_calls": None}
    for comes_back in (Chunk(**reply), reply, full, assistant("hi")):
        manager = make_manager()
        ask = manager.wrap(conversation="c")(Model(Chunk(choices=[{"message": reply}])))
        ask([user("one")])
        ask([user("one"), comes_back, user("two")])

        assert "rewound" not in kinds(manager)
        assert history(manager.session("c"))[1] == reply


@pytest.mark.parametrize(
    ("known", "given", "equal"),
    [
        ({"role": "user", "content": "a"}, {"content": "a", "role": "user"}, True),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a", "name": None}, True),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a", "name": "x"}, False),
        ({"role": "user", "n": 1}, {"role": "user", "n": True}, False),
        ({"role": "user", "n": 1}, {"role": "user", "n": 1.0}, False),
        ({"role": "user", "content": ""}, {"role": "user", "content": None}, False),
        (assistant(None, calls=[call("a")]), assistant("", calls=[call("a")]), True),
        (assistant(None, calls=[call("a")]), assistant(None, calls=[call("b")]), False),
        (assistant(None, calls=[{**call("a"), "index": None}]), assistant(None, calls=[call("a")]), True),
        (assistant(None, calls=[call("a")]), {"role": "assistant", "content": None, "tool_calls": 7}, False),
        (user([{"type": "text", "text": "a", "x": None}]), user([{"type": "text", "text": "a"}]), True),
        (user([{"type": "text", "text": "a"}]), {"role": "user", "content": ({"type": "text", "text": "a"},)}, False),
        ({"role": "tool", "x": {"deep": None}}, {"role": "tool", "x": {}}, False),
        (user("a"), "a", False),
    ],
)
def test_when_two_messages_say_the_same(known: Any, given: Any, equal: bool) -> None:
    """Order of keys, nulls and empty lists say nothing; every other difference is a difference."""
    assert same(known, given) is equal


def test_a_fork_goes_on_by_itself_and_cannot_rewind_what_it_shares() -> None:
    """A fork rewinds its own messages; a list that parts from the shared history is refused by name, unlogged."""
    manager = make_manager()
    ask = manager.wrap(conversation=lambda messages, **kw: kw["thread"])(Model())
    first = assistant(ask([user("one")], thread="c"))
    manager.session("c").fork("f")
    ask([user("one"), first, user("two")], thread="f")
    reply = ask([user("one"), first, user("three")], thread="f")
    forked = history(manager.session("f"))

    assert forked == [user("one"), first, user("three"), assistant(reply)]
    with pytest.raises(InvalidInput, match="forked"):
        ask([user("other")], thread="f")
    assert matches(manager.session("c"), [user("one"), first]) and history(manager.session("f")) == forked


def test_many_retries_stay_cheap() -> None:
    """A loop that takes back each reply once: the log grows by the turn, and the last turn costs what the first did."""
    manager = make_manager()
    ask = manager.wrap(conversation="c")(Model())
    messages: list[Any] = []
    for n in range(RETRIED_TURNS):
        messages.append(user(f"{n}"))
        ask(messages)
        messages.append(assistant(ask(messages)))

    assert history(manager.session("c")) == messages and kinds(manager).count("rewound") == RETRIED_TURNS
