"""Replies in pieces: passed through, recorded whole, or kept as interrupted."""

from __future__ import annotations

import asyncio
import gc
import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from compaction.errors import InvalidInput
from compaction.manager import SessionManager
from tests.builders import assistant, user
from tests.middleware.scripted import Chunk, Refused, chunk, history, kinds, make_manager, verified

ONE = [user("one")]
LONG = [user(f"{n} " + "word " * 40) if n % 2 == 0 else assistant(f"{n} " + "reply " * 30) for n in range(19)]


def interrupted(manager: SessionManager) -> list[str]:
    """The texts of the conversation's `interrupted` events."""
    events = [event for event in manager.log.events("c") if event.kind == "interrupted"]
    return [manager.log.text(bytes.fromhex(event.payload["text"])) for event in events]


def letters(messages: Any, **kw: Any) -> Iterator[str]:
    """A sync generator."""
    yield from "abc"


def handed_out(messages: Any, **kw: Any) -> Iterator[str]:
    """A function that returns an iterator."""
    return iter("abc")


async def aletters(messages: Any, **kw: Any) -> AsyncIterator[str]:
    """An async generator."""
    for piece in "abc":
        await asyncio.sleep(0)
        yield piece


async def ahanded_out(messages: Any, **kw: Any) -> AsyncIterator[str]:
    """A coroutine that returns an async iterator."""
    return aletters(messages)


async def opened(ask: Callable[..., Any]) -> Any:
    """The stream of an async call, of either kind."""
    stream = ask(ONE)
    return await stream if inspect.isawaitable(stream) else stream


@pytest.mark.parametrize("model", [letters, handed_out])
def test_a_stream_passes_through_and_is_recorded_whole(model: Callable[..., Any]) -> None:
    """The pieces come as they were; the reply is appended once, after the last."""
    manager = make_manager()
    stream = manager.wrap(conversation="c")(model)(ONE)
    first = next(stream)
    during = history(manager.session("c"))
    rest = list(stream)

    assert (first, rest, during) == ("a", ["b", "c"], ONE)
    assert history(manager.session("c")) == [*ONE, assistant("abc")]
    assert list(stream) == [] and "interrupted" not in kinds(manager)


@pytest.mark.parametrize("model", [aletters, ahanded_out])
async def test_an_async_stream_passes_through_and_is_recorded_whole(model: Callable[..., Any]) -> None:
    """The same for async generators and coroutines that return an async iterator."""
    manager = make_manager()
    stream = await opened(manager.wrap(conversation="c")(model))

    assert [piece async for piece in stream] == ["a", "b", "c"]
    assert history(manager.session("c")) == [*ONE, assistant("abc")]


async def test_a_plain_function_may_return_an_async_iterator() -> None:
    """`lambda messages: agen(messages)` streams as well."""
    manager = make_manager()
    ask = manager.wrap(conversation="c")(lambda messages, **kw: aletters(messages))

    assert [piece async for piece in ask(ONE)] == ["a", "b", "c"]
    assert history(manager.session("c")) == [*ONE, assistant("abc")]


def test_closing_early_keeps_the_partial_reply_as_interrupted_only() -> None:
    """What came before `close()` is in the log; nothing is appended, the model's own generator is closed."""
    manager, ended = make_manager(), []

    def model(messages: Any) -> Iterator[str]:
        try:
            yield from "abc"
        finally:
            ended.append(True)

    with manager.wrap(conversation="c")(model)(ONE) as stream:
        next(stream), next(stream)

    assert interrupted(manager) == ["ab"] and ended == [True]
    assert history(manager.session("c")) == ONE and list(stream) == [] and verified(manager)


@pytest.mark.parametrize("model", [aletters, ahanded_out])
async def test_closing_an_async_stream_early(model: Callable[..., Any]) -> None:
    """The same for `aclose()`."""
    manager = make_manager()
    stream = await opened(manager.wrap(conversation="c")(model))
    await stream.__anext__()
    await stream.aclose()

    assert interrupted(manager) == ["a"] and history(manager.session("c")) == ONE


@pytest.mark.parametrize("model", [aletters, ahanded_out])
async def test_cancelling_the_reader_cancels_the_reply(model: Callable[..., Any]) -> None:
    """A cancelled task leaves an `interrupted` event, and the conversation free for the next call."""
    manager, started = make_manager(), asyncio.Event()

    @manager.wrap(conversation="c")
    async def call_model(messages: Any) -> AsyncIterator[str]:
        yield "a"
        started.set()
        await asyncio.Event().wait()

    async def read() -> None:
        async for _ in call_model(ONE):
            pass

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert interrupted(manager) == ["a"] and history(manager.session("c")) == ONE
    async for _ in await asyncio.wait_for(opened(manager.wrap(conversation="c")(model)), 5):
        pass


def test_an_error_in_the_middle_is_the_callers() -> None:
    """An exception after some pieces passes through; the pieces are kept as interrupted, and it is not retried."""
    manager, calls = make_manager(), []

    def model(messages: Any) -> Iterator[str]:
        calls.append(messages)
        yield "half an ans"
        raise Refused("maximum context length")

    with pytest.raises(Refused):
        list(manager.wrap(conversation="c")(model)(LONG))
    assert interrupted(manager) == ["half an ans"] and len(calls) == 1
    assert history(manager.session("c")) == LONG


def test_a_forgotten_stream_is_closed() -> None:
    """A loop that is left with `break` needs no close(): the next call finds the conversation free."""
    manager = make_manager()
    ask = manager.wrap(conversation="c")(letters)
    for _ in ask(ONE):
        break
    gc.collect()
    pieces = list(ask(ONE))

    assert pieces == ["a", "b", "c"] and interrupted(manager) == ["a"]


async def test_a_forgotten_async_stream_is_closed() -> None:
    """The same for an async iterator nobody reads any more."""
    manager = make_manager()
    ask = manager.wrap(conversation="c")(ahanded_out)
    await (await ask(ONE)).__anext__()
    gc.collect()
    pieces = [piece async for piece in await asyncio.wait_for(ask(ONE), 5)]

    assert pieces == ["a", "b", "c"] and interrupted(manager) == ["a"]


def test_a_newer_call_of_the_same_reader_takes_over() -> None:
    """A stream left open in a variable does not hang the next call: it is cut off, and reading on says so."""
    manager = make_manager()
    ask = manager.wrap(conversation="c")(letters)
    old = ask(ONE)
    next(old)
    new = list(ask(ONE))

    assert new == ["a", "b", "c"] and interrupted(manager) == ["a"]
    with pytest.raises(InvalidInput, match="newer call"):
        next(old)


async def test_a_newer_call_in_a_task_closes_a_sync_stream() -> None:
    """A sync stream left open in a task does not hang an async call there."""
    manager = make_manager()
    wrap = manager.wrap(conversation="c")
    old = wrap(letters)(ONE)
    next(old)
    new = [piece async for piece in wrap(aletters)(ONE)]

    assert new == ["a", "b", "c"] and interrupted(manager) == ["a"]


async def test_an_async_stream_is_a_context_manager() -> None:
    """Leaving the block, or `close()`, cuts the reply off once; reading on then simply ends."""
    manager = make_manager()
    async with await manager.wrap(conversation="c")(ahanded_out)(ONE) as stream:
        await stream.__anext__()
    await stream.close()

    assert [piece async for piece in stream] == [] and interrupted(manager) == ["a"]


async def test_a_newer_call_of_the_same_task_takes_over() -> None:
    """The same for async streams, in one task."""
    manager = make_manager()
    ask = manager.wrap(conversation="c")(ahanded_out)
    old = await ask(ONE)
    await old.__anext__()
    new = [piece async for piece in await ask(ONE)]

    assert new == ["a", "b", "c"] and interrupted(manager) == ["a"]
    with pytest.raises(InvalidInput, match="newer call"):
        await old.__anext__()


@pytest.mark.parametrize("at_call", [True, False])
def test_a_stream_refused_before_its_first_piece_is_retried(at_call: bool) -> None:
    """One smaller request, whether the call says "too long" or its first piece; the reader sees one stream."""
    manager, sent = make_manager(), []

    def model(messages: Any) -> Iterator[str]:
        sent.append(messages)
        if len(sent) == 1 and at_call:
            raise Refused("prompt is too long")
        return pieces(len(sent))

    def pieces(call: int) -> Iterator[str]:
        if call == 1:
            raise Refused("prompt is too long")
        yield "ok"

    assert list(manager.wrap(conversation="c")(model)(LONG)) == ["ok"]
    assert len(str(sent[1])) < len(str(sent[0])) and history(manager.session("c")) == [*LONG, assistant("ok")]


async def test_an_async_stream_refused_before_its_first_piece_is_retried_once() -> None:
    """Async: the second refusal is the caller's."""
    manager, sent = make_manager(), []

    @manager.wrap(conversation="c")
    async def call_model(messages: Any) -> AsyncIterator[str]:
        sent.append(messages)
        if messages:
            raise Refused("prompt is too long")
        yield ""

    with pytest.raises(Refused):
        async for _ in call_model(LONG):
            pass
    assert len(sent) == 2 and history(manager.session("c")) == LONG


CALL = [
    chunk(role="assistant", content=None),
    chunk(tool_calls=[{"index": 1, "id": "b", "function": {"name": "run", "arguments": ""}}]),
    chunk(
        tool_calls=[{"index": 0, "id": "a", "type": "function", "function": {"name": "lookup", "arguments": '{"q"'}}]
    ),
    chunk(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}, {"index": 1, "function": {"arguments": "{}"}}]),
    chunk(finish_reason="tool_calls"),
    chunk(usage={"prompt_tokens": 7, "completion_tokens": 3}),
]


@pytest.mark.parametrize("wrap", [dict, lambda fields: Chunk(**fields)], ids=["mappings", "objects"])
def test_chunks_are_put_together(wrap: Callable[..., Any]) -> None:
    """Tool calls are joined by index, usage is recorded, and the chunks handed through are the very objects."""
    manager, chunks = make_manager(), [wrap(fields) for fields in CALL]
    got = list(manager.wrap(conversation="c")(lambda messages: iter(chunks))(ONE))
    calls = [
        {"id": "a", "type": "function", "function": {"name": "lookup", "arguments": '{"q": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "run", "arguments": "{}"}},
    ]
    usage = next(event.payload for event in manager.log.events("c") if event.kind == "usage")

    assert all(a is b for a, b in zip(got, chunks, strict=True))
    assert history(manager.session("c"))[1] == assistant(None, calls=calls)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 3)


def test_only_the_first_choice_counts() -> None:
    """Of several choices the first is the conversation's; text and refusal are joined."""
    other = {"choices": [{"index": 1, "delta": {"content": "no"}}]}
    for chunks, message in (
        ([chunk(content="y"), other, chunk(content="es")], assistant("yes")),
        ([chunk(refusal="I "), chunk(refusal="won't")], {**assistant(None), "refusal": "I won't"}),
        ([chunk(content="\ud83d"), chunk(content="\ude00")], assistant("😀")),
        ([], assistant("")),
        (
            [
                chunk(tool_calls=[{"id": "a", "function": {"name": "f"}}]),
                chunk(tool_calls=[{"function": {"arguments": "{}"}}]),
            ],
            assistant(None, calls=[{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]),
        ),
        ([chunk(content="hm", audio={"id": "x"})], {**assistant("hm"), "audio": {"id": "x"}}),
    ):
        manager = make_manager()
        list(manager.wrap(conversation="c")(lambda messages, pieces=chunks: iter(pieces))(ONE))

        assert history(manager.session("c"))[1] == message


def test_a_cut_tool_call_is_kept_as_json() -> None:
    """An interrupted reply that is more than text is kept whole, as JSON."""
    manager = make_manager()
    with manager.wrap(conversation="c")(lambda messages: iter(CALL))(ONE) as stream:
        for _ in range(3):
            next(stream)

    assert '"arguments":"{\\"q\\""' in interrupted(manager)[0] and history(manager.session("c")) == ONE


def test_pieces_that_cannot_be_recorded_are_an_error_at_the_end() -> None:
    """Foreign pieces pass through; a stream of nothing else raises, with nothing appended."""
    manager = make_manager()
    stream = manager.wrap(conversation="c")(lambda messages: iter([b"a", 7]))(ONE)

    assert [next(stream), next(stream)] == [b"a", 7]
    with pytest.raises(InvalidInput, match="recorded"):
        next(stream)
    assert history(manager.session("c")) == ONE


def test_the_models_stream_stays_reachable() -> None:
    """Attributes of the model's own stream object (a response, headers) are passed on."""

    class Source:
        response = "headers"

        def __iter__(self) -> Iterator[str]:
            return iter("ab")

    stream = make_manager().wrap(conversation="c")(lambda messages: Source())(ONE)

    assert stream.response == "headers" and list(stream) == ["a", "b"]
    with pytest.raises(AttributeError):
        _ = stream.missing


async def test_the_loop_is_not_blocked_by_the_log() -> None:
    """While a session's work takes its time in a worker thread, other tasks run."""
    manager = make_manager()
    manager.session("c").on("before_compaction", lambda session, trigger: time.sleep(0.3))
    call_model = manager.wrap(conversation="c")(aletters)
    manager.session("c").extend(LONG)
    slow = manager.wrap(conversation="c", overflow=lambda error: True)

    @slow
    async def refused_once(messages: Any, fail: list[int]) -> str:
        if fail.pop():
            raise Refused("too long")
        return "ok"

    ticks, task = 0, asyncio.create_task(refused_once(LONG, fail=[0, 1]))
    while not task.done():
        await asyncio.sleep(0.01)
        ticks += 1

    assert await task == "ok" and ticks > 5 and call_model is not None
