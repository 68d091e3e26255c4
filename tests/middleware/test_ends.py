"""How a wrapped call ends: with a reply, or with `interrupted`; and what the next one counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from compaction.errors import BudgetUnsatisfiable
from compaction.testing import FakeCounter
from tests.builders import assistant, tool_schema, user
from tests.middleware.scripted import Model, Refused, history, kinds, make_manager, verified

LONG = [user(f"{n} " + "word " * 40) if n % 2 == 0 else assistant(f"{n} " + "reply " * 30) for n in range(19)]
TOO_LONG = "This model's maximum context length is 5 tokens"


@pytest.mark.parametrize("later", [{}, {"tools": None}, {"tools": []}])
def test_a_call_without_tools_counts_none(later: dict[str, Any]) -> None:
    """What an earlier call declared is not part of a request that does not carry it."""
    manager = make_manager()
    ask = manager.wrap(conversation="c")(Model("ok"))
    messages = [user("hi")]
    ask(messages, tools=[tool_schema(description="d" * 200)])
    with_tools = manager.session("c").state.tokens
    ask([*messages, assistant("ok"), user("x")], **later)

    sent = [*messages, assistant("ok"), user("x")]
    session = manager.session("c")
    session.rewind(session.state.seq - 1)  # to before the second reply
    assert session.state.tokens == FakeCounter().request(sent, None) < with_tools


def test_too_long_with_only_the_floor_left_is_the_providers_error() -> None:
    """Where nothing smaller can be sent, the caller reads the provider's own words, with ours as the cause."""
    manager, error = make_manager(tokens=1000), Refused(TOO_LONG)
    model = Model(error)

    with pytest.raises(Refused) as caught:
        manager.wrap(conversation="c")(model)([user("hello")])

    assert caught.value is error and isinstance(error.__cause__, BudgetUnsatisfiable)
    assert len(model.sent) == 1 and history(manager.session("c")) == [user("hello")]


async def test_too_long_with_only_the_floor_left_is_the_providers_error_for_coroutines_too() -> None:
    """The same, where the call is awaited."""
    manager, error = make_manager(tokens=1000), Refused(TOO_LONG)

    @manager.wrap(conversation="c")
    async def call_model(messages: Any) -> str:
        raise error

    with pytest.raises(Refused) as caught:
        await call_model([user("hello")])

    assert caught.value is error and kinds(manager) == ["opened", "appended", "interrupted"]


@pytest.mark.parametrize("error", [ConnectionError("down"), Refused("invalid api key", 401), KeyboardInterrupt()])
def test_a_call_that_fails_leaves_interrupted(error: BaseException) -> None:
    """A generation that began has an end in the log, and the next call begins."""
    manager = make_manager()
    ask = manager.wrap(conversation="c")(Model(error, "ok"))

    with pytest.raises(type(error)):
        ask([user("one")])

    assert kinds(manager) == ["opened", "appended", "interrupted"]
    assert ask([user("one")]) == "ok" and kinds(manager)[-2:] == ["interrupted", "appended"]
    assert verified(manager)


def test_a_retry_that_fails_too_leaves_one_interrupted() -> None:
    """Two requests of one call end once."""
    manager = make_manager()

    with pytest.raises(Refused):
        manager.wrap(conversation="c")(Model(Refused(TOO_LONG), Refused(TOO_LONG)))(LONG)

    assert kinds(manager).count("interrupted") == 1 and kinds(manager)[-1] == "interrupted"


async def test_a_call_that_is_cancelled_leaves_interrupted() -> None:
    """A deadline around the call ends the generation in the log as well."""
    manager, started = make_manager(), asyncio.Event()

    @manager.wrap(conversation="c")
    async def call_model(messages: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(call_model([user("one")]))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert kinds(manager) == ["opened", "appended", "interrupted"]


def test_a_call_with_a_reply_leaves_none() -> None:
    """A reply, at once or after one refusal, is the end of its generation."""
    manager = make_manager()
    manager.wrap(conversation="c")(Model(Refused(TOO_LONG), "fits"))(LONG)

    assert "interrupted" not in kinds(manager) and kinds(manager)[-1] == "appended"


def test_a_call_that_cannot_begin_leaves_none() -> None:
    """Where no request is sent, nothing was interrupted."""
    manager = make_manager(tokens=100)

    with pytest.raises(BudgetUnsatisfiable):
        manager.wrap(conversation="c")(Model())([user("x" * 4000)])

    assert "interrupted" not in kinds(manager)
