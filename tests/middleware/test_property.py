"""Whatever a caller does to its list, the history follows it."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from compaction.errors import BudgetUnsatisfiable
from tests.builders import assistant, user
from tests.middleware.scripted import Model, make_manager, matches, verified
from tests.strategies import conversations, texts

EDIT = st.sampled_from(["append", "retry", "edit", "cut", "branch", "replace", "null", "same"])


@st.composite
def edited(draw: st.DrawFn, messages: list[Any]) -> list[Any]:
    """A caller's next list, made from its last one."""
    kind, at = draw(EDIT), draw(st.integers(0, max(0, len(messages) - 1)))
    if kind == "append":
        return [*messages, *draw(conversations(max_blocks=2)), user(draw(texts()))]
    if kind == "retry":
        return messages[:-1] or messages
    if kind == "edit" and messages[at]["role"] in ("user", "system"):
        return [*messages[:at], {**messages[at], "content": draw(texts())}, *messages[at + 1 :]]
    if kind == "null":
        return [{**message, "audio": None, "annotations": []} for message in messages]
    if kind == "cut":
        while at and messages[at]["role"] == "tool":
            at -= 1
        return [*messages[:at], user(draw(texts()))]
    if kind == "branch":
        return (
            [*messages[:1], assistant("another way"), user(draw(texts()))]
            if messages[0]["role"] != "tool"
            else messages
        )
    return [user(draw(texts()))] if kind == "replace" else messages


def _waits(messages: list[Any]) -> bool:
    """Whether the list ends with calls or results that a reply may not follow."""
    return messages[-1]["role"] == "tool" or bool(messages[-1].get("tool_calls"))


@settings(max_examples=40)
@given(st.data(), st.sampled_from([250, 2_000, 100_000]))
def test_the_history_is_always_the_last_list_and_the_reply(data: st.DataObject, tokens: int) -> None:
    """For random edits of the list, under any budget: the history says what the list says, then the reply; the list is
    not touched, what is sent fits, and the log verifies.
    """
    manager, model = make_manager(tokens), Model()
    ask = manager.wrap(conversation="c")(model)
    messages: list[Any] = [user("start")]
    for _ in range(data.draw(st.integers(1, 6))):
        messages = data.draw(edited(messages))
        if _waits(messages):
            messages = [*messages, user("go on")]
        before = copy.deepcopy(messages)
        with suppress(BudgetUnsatisfiable):
            messages = [*messages, assistant(ask(messages))]
        assert messages[: len(before)] == before
        assert matches(manager.session("c"), messages)
        assert all(manager.settings.counter.request(sent, None) <= tokens for sent in model.sent)

    assert verified(manager)
