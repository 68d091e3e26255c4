"""What the decorated function sees, hands back, and what happens where the provider refuses."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest

from compaction.errors import BudgetUnsatisfiable, InvalidInput
from compaction.middleware.overflow import too_long
from compaction.store import AuditLog
from tests.builders import assistant, tool_schema, user
from tests.middleware.scripted import Chunk, Model, Refused, history, kinds, make_manager, verified

LONG = [user(f"{n} " + "word " * 40) if n % 2 == 0 else assistant(f"{n} " + "reply " * 30) for n in range(19)]
TOO_LONG = "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens."


def test_name_documentation_and_session_stay_at_hand() -> None:
    """The decorated function keeps name and docstring, and gives the session."""
    manager = make_manager()

    @manager.wrap(conversation="c")
    def call_model(messages: Any, **kw: Any) -> str:
        """Ask the model."""
        return "ok"

    call_model([user("one")])
    assert (call_model.__name__, call_model.__doc__) == ("call_model", "Ask the model.")
    assert call_model.session("c") is manager.session("c")


def test_the_callers_list_and_keywords_are_not_touched() -> None:
    """Compaction happens in what is sent; the caller's list, its messages and keywords stay as they were."""
    manager, model = make_manager(tokens=600), Model()
    messages, tools = copy.deepcopy(LONG), [tool_schema()]
    manager.wrap(conversation="c")(model)(messages, tools=tools, temperature=0.5, max_tokens=50)

    assert messages == LONG and len(model.sent[0]) < len(LONG)
    assert model.keywords == [{"tools": [tool_schema()], "temperature": 0.5, "max_tokens": 50}]
    assert model.keywords[0]["tools"] is tools


def test_keywords_reserve_room_and_count_tools() -> None:
    """The reply's limit is reserved, under any of its usual names, and declared tools are part of the request."""
    manager = make_manager(tokens=600)
    for name in ("max_tokens", "max_completion_tokens", "max_new_tokens"):
        with pytest.raises(BudgetUnsatisfiable):
            manager.wrap(conversation=name)(Model())([user("one")], **{name: 599})
    with pytest.raises(BudgetUnsatisfiable):
        manager.wrap(conversation="tools")(Model())([user("one")], tools=[tool_schema(description="x " * 2000)])


def test_sentinels_for_not_given_are_nothing() -> None:
    """What an SDK passes for "not given" counts neither as tools nor as a limit, and reaches the function as it is."""
    manager, model, not_given = make_manager(), Model(), object()
    manager.wrap(conversation="c")(model)([user("one")], tools=not_given, max_tokens=not_given)

    assert model.keywords == [{"tools": not_given, "max_tokens": not_given}]


def test_messages_may_come_by_keyword() -> None:
    """`call_model(messages=…)` is the same call."""
    manager, model = make_manager(), Model()
    ask = manager.wrap(conversation=lambda messages, **kw: kw["thread_id"])(model)
    ask(messages=[user("one")], thread_id="c")

    assert model.sent == [[user("one")]] and model.keywords == [{"thread_id": "c"}]
    with pytest.raises(TypeError, match="messages"):
        ask(thread_id="c")


def test_all_kinds_of_reply_are_recorded_and_handed_back() -> None:
    """Text, messages, chat-completions mappings and SDK objects come back as the very object and are appended."""
    message = {"role": "assistant", "content": "hi"}
    completion = {"choices": [{"message": message}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}
    for reply in ("hi", message, completion, Chunk(**completion)):
        manager = make_manager()
        got = manager.wrap(conversation="c")(Model(reply))([user("one")])

        assert got is reply and history(manager.session("c")) == [user("one"), message]


def test_a_reply_that_is_none_is_an_error_and_lets_the_next_call_in() -> None:
    """What cannot be recorded raises; the conversation is not blocked and nothing was appended."""
    manager = make_manager()
    ask = manager.wrap(conversation="c")(Model(42, [assistant("in a list")], "ok"))
    for _ in range(2):
        with pytest.raises(InvalidInput, match="chat-completions"):
            ask([user("one")])
    ask([user("one")])

    assert history(manager.session("c")) == [user("one"), assistant("ok")]


def test_too_long_is_retried_once_with_less() -> None:
    """The provider's "too long" starts one second, strictly smaller request."""
    manager, model = make_manager(), Model(Refused(TOO_LONG), "fits")
    reply = manager.wrap(conversation="c")(model)(LONG)
    first, second = ([m["content"] for m in sent] for sent in model.sent)

    assert reply == "fits" and len("".join(second)) < len("".join(first))
    assert history(manager.session("c"))[-1] == assistant("fits") and verified(manager)
    assert kinds(manager).count("decision_committed") == 1


def test_too_long_twice_is_the_callers() -> None:
    """A second "too long" is raised as it is, with no reply appended."""
    manager, second = make_manager(), Refused("prompt is too long: 9 tokens > 8 maximum")
    model = Model(Refused(TOO_LONG), second)

    with pytest.raises(Refused) as caught:
        manager.wrap(conversation="c")(model)(LONG)
    assert caught.value is second and len(model.sent) == 2
    assert history(manager.session("c")) == LONG


def test_other_errors_are_not_retried() -> None:
    """A rate limit is the caller's, at once."""
    manager, model = make_manager(), Model(Refused("Request too large: tokens per min (TPM)", 429))

    with pytest.raises(Refused):
        manager.wrap(conversation="c")(model)(LONG)
    assert len(model.sent) == 1 and "decision_committed" not in kinds(manager)


def test_a_hook_that_cancels_leaves_the_providers_error() -> None:
    """Where nothing could be made smaller, the same request is not sent twice."""
    manager, model = make_manager(), Model(Refused(TOO_LONG))
    ask = manager.wrap(conversation="c")(model)
    manager.session("c").on("before_compaction", lambda session, trigger: False)

    with pytest.raises(Refused):
        ask(LONG)
    assert len(model.sent) == 1


def test_what_is_too_long_may_be_told_by_the_caller() -> None:
    """`overflow=` replaces the built-in recogniser."""
    manager, model = make_manager(), Model(KeyError("house rule 7"), "ok")
    ask = manager.wrap(conversation="c", overflow=lambda error: "rule 7" in str(error))(model)

    assert ask(LONG) == "ok"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Refused(TOO_LONG), True),
        (Refused("boom", code="context_length_exceeded"), True),
        (Refused("boom", body={"error": {"type": "exceed_context_size_error"}}), True),
        (Refused("the request exceeds the available context size, try increasing it"), True),
        (Refused("The decoder prompt (length 9) is longer than the maximum model length of 8"), True),
        (Refused("input length and `max_tokens` exceed context limit: 9 + 8 > 10"), True),
        (Refused("The input token count (9) exceeds the maximum number of tokens allowed (8)."), True),
        (Refused("Your input exceeds the context window of this model."), True),
        (Refused("Input is too long for requested model."), True),
        (Refused("Request Entity Too Large", 413), True),
        (ValueError("prompt is too long"), True),
        (Refused("Rate limit reached: maximum context length", 429), False),
        (Refused("invalid api key", 401), False),
        (Refused("max_tokens is too large: 99999", 400), False),
        (TimeoutError("timed out"), False),
    ],
)
def test_which_errors_mean_too_long(error: Exception, expected: bool) -> None:
    """The words of the known providers are recognised, rate limits and other faults are not."""
    assert too_long(error) is expected


async def test_async_functions_are_wrapped_as_such() -> None:
    """`async def` stays a coroutine function; its overflow is retried too."""
    manager, model = make_manager(), Model(Refused(TOO_LONG), "fits")

    @manager.wrap(conversation="c")
    async def call_model(messages: Any, **kw: Any) -> Any:
        return model(messages, **kw)

    assert inspect.iscoroutinefunction(call_model)
    assert await call_model(LONG) == "fits"
    assert history(manager.session("c")) == [*LONG, assistant("fits")]


def test_a_hidden_coroutine_is_refused() -> None:
    """A plain function that returns an awaitable is told to be `async def`, since its waiting would block the loop."""

    async def answer() -> str:
        return "ok"

    with pytest.raises(InvalidInput, match="async def"):
        make_manager().wrap(conversation="c")(lambda messages: answer())([user("one")])


def test_a_loop_resumes_from_the_log(tmp_path: Path) -> None:
    """After a restart the same list continues the same conversation in the file."""
    messages = [user("one")]
    for question in ("two", "three"):
        with AuditLog(tmp_path / "a.db") as log:
            ask = make_manager(log=log).wrap(conversation="c")(Model())
            messages += [assistant(ask(messages)), user(question)]
    with AuditLog(tmp_path / "a.db") as log:
        manager = make_manager(log=log)

        assert history(manager.session("c")) == messages[:-1]
        assert kinds(manager) == ["opened", *["appended"] * 4] and verified(manager)


@pytest.mark.parametrize("conversation", ["", None, 7])
def test_a_conversation_needs_a_name(conversation: Any) -> None:
    """Neither an empty name nor something that is no name is taken."""
    with pytest.raises(InvalidInput):
        make_manager().wrap(conversation=conversation)
