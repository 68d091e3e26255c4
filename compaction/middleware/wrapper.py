"""Putting any `call_model(messages, **kw)` behind sessions.

Invariant: the function sees requests that fit and nothing else changes for its caller: the list and the keywords handed
in are not touched, the result is handed back as it came, and the log holds the caller's history plus every reply.
A divergence is found by comparing messages, never guessed, and logged. This module knows no provider, policy or log.

    manager = SessionManager(budget=Budget(tokens=8_000), log=AuditLog("audit.db"))

    @manager.wrap(conversation=lambda messages, **kw: kw["thread_id"])
    def call_model(messages, *, thread_id, **kw):
        return client.chat.completions.create(model="gpt-4o", messages=messages, **kw)

    messages = [{"role": "user", "content": "Where is order 7712?"}]
    reply = call_model(messages, thread_id="t1", tools=TOOLS, max_tokens=500)
    messages.append(reply.choices[0].message)         # the whole history goes in again the next time

`call_model` may be a function, `async def`, a (sync or async) generator, or return an iterator of pieces: text, or
chat-completions chunks. Make it `async def` in async programs: then the session's work runs in worker threads.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from compaction.errors import BudgetUnsatisfiable, InvalidInput
from compaction.middleware.matching import reconcile
from compaction.middleware.overflow import too_long
from compaction.middleware.streaming import AsyncStream, Stream, stream_kind
from compaction.middleware.turns import Place, Turns, settled
from compaction.prepared import Prepared
from compaction.session import Session

__all__ = ["Sessions", "Wrapper"]

Messages = list[dict[str, Any]]
Send = Callable[[Messages], Any]
REPLY_LIMITS = ("max_completion_tokens", "max_tokens", "max_new_tokens")


class Sessions(Protocol):
    """What a wrapper needs of a manager."""

    def session(self, conversation: str, tools: Sequence[Mapping[str, Any]] | None = None) -> Session:
        """The session of that conversation."""


class Turn:
    """One call of the model: its place in the conversation's queue, its request, and how it ends."""

    def __init__(self, wrapper: Wrapper, place: Place, kw: Mapping[str, Any]) -> None:
        self._wrapper = wrapper
        self._place = place
        self._kw = kw
        self._prepared: Prepared | None = None
        self._session: Session | None = None
        self._retried = False
        self._running = False

    @property
    def session(self) -> Session:
        """The session of the call's conversation."""
        if self._session is None:
            tools = self._kw.get("tools")
            sent = list(tools) if isinstance(tools, (list, tuple)) else []
            self._session = self._wrapper.manager.session(self._place.name, tools=sent)
        return self._session

    def request(self, messages: Sequence[object]) -> Messages:
        """The messages to send for the caller's list."""
        reconcile(self.session, messages)
        limit = _reply_limit(self._kw)
        self._prepared = self.session.prepare(max_new_tokens=limit)
        self.session.started(self._prepared, limit)
        self._running = True
        return self._prepared.messages

    def again(self, error: Exception) -> Messages:
        """A strictly smaller request, once, where the provider said "too long"; else raises `error`."""
        if self._retried or self._prepared is None or not self._wrapper.overflow(error):
            raise error
        self._retried = True
        limit = _reply_limit(self._kw)
        try:
            smaller = self.session.prepare(max_new_tokens=limit, trigger="overflow")
        except BudgetUnsatisfiable as exc:  # nothing smaller can be sent: the provider's own words say more
            raise error from exc
        if smaller.tokens >= self._prepared.tokens:  # a hook said no
            raise error
        self.session.started(smaller, limit)
        return smaller.messages

    def record(self, reply: object) -> None:
        """Append the reply."""
        self.session.record({"role": "assistant", "content": reply} if isinstance(reply, str) else reply)
        self._running = False

    def interrupt(self, text: str) -> None:
        """Keep a reply that was cut off, as an event only."""
        self._running = False
        self.session.interrupt(text)

    def touch(self) -> None:
        """Note who reads the reply."""
        self._place.touch()

    def leave(self) -> None:
        """Let the next call on this conversation begin; a call that ended without a reply leaves `interrupted`."""
        try:
            if self._running:
                self.interrupt("")
        finally:
            self._wrapper.turns.leave(self._place)

    def lend(self, stream: Stream | AsyncStream) -> None:
        """Keep the place until the stream ends."""
        self._place.stream = weakref.ref(stream)


class Wrapper:
    """The decorator `SessionManager.wrap` returns. Functions it decorates take turns on each conversation.

    Args:
        manager: gives the sessions.
        conversation: names the conversation of a call: a function of (messages, **kw), or one name for all.
        overflow: tells a provider's "too long" from other errors; it starts one smaller retry.
    """

    def __init__(
        self,
        manager: Sessions,
        conversation: Callable[..., str] | str,
        *,
        overflow: Callable[[BaseException], bool] = too_long,
    ) -> None:
        if not callable(conversation) and not (isinstance(conversation, str) and conversation):
            raise InvalidInput(f"conversation must be a name or a function of (messages, **kw), not {conversation!r}")
        self.manager = manager
        self.overflow = overflow
        self.turns = Turns()
        self._conversation = conversation

    def __call__(self, function: Callable[..., Any]) -> Any:
        """`function` behind sessions: same name, same signature, same result; `.session(name)` is the session."""
        if not callable(function):
            raise InvalidInput("wrap(conversation=…) makes a decorator: put it on the function that calls the model")
        if _is(inspect.isasyncgenfunction, function):
            wrapped: Any = self._async_generator(function)
        elif _is(inspect.iscoroutinefunction, function):
            wrapped = self._coroutine(function)
        else:
            wrapped = self._plain(function)
        wrapped.session = self.manager.session
        return wrapped

    # -- one wrapper for each kind of function --------------------------------------------------------------------

    def _plain(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kw: Any) -> Any:
            messages, send, rest = _arguments(function, args, kw)
            return self._run(self._name(messages, rest), messages, send, rest)

        return wrapped

    def _coroutine(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def wrapped(*args: Any, **kw: Any) -> Any:
            messages, send, rest = _arguments(function, args, kw)
            return await self._arun(self._name(messages, rest), messages, send, rest)

        return wrapped

    def _async_generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def wrapped(*args: Any, **kw: Any) -> AsyncIterator[Any]:
            messages, send, rest = _arguments(function, args, kw)
            async with await self._arun(self._name(messages, rest), messages, send, rest) as stream:
                async for piece in stream:
                    yield piece

        return wrapped

    # -- one call -------------------------------------------------------------------------------------------------

    def _run(self, name: str, messages: Sequence[object], send: Send, kw: Mapping[str, Any]) -> Any:
        self._make_way(name)
        turn = Turn(self, self.turns.enter(name), kw)
        lent = False
        try:
            request = turn.request(messages)
            try:
                result = send(request)
            except Exception as exc:  # noqa: BLE001  whatever the model raised: `again` raises what it does not mend
                result = send(turn.again(exc))
            if inspect.isawaitable(result):
                getattr(result, "close", lambda: None)()
                raise InvalidInput("call_model returned an awaitable: declare it `async def` and await it there")
            lent = stream_kind(result) is not None
            if lent:
                return self._stream(turn, send, result)
            turn.record(result)
            return result
        finally:
            if not lent:
                turn.leave()

    async def _arun(self, name: str, messages: Sequence[object], send: Send, kw: Mapping[str, Any]) -> Any:
        await self._amake_way(name)
        turn = Turn(self, await self.turns.aenter(name), kw)
        lent = False
        try:
            request = await settled(turn.request, messages)
            try:
                result = await _awaited(send(request))
            except Exception as exc:  # noqa: BLE001  whatever the model raised: `again` raises what it does not mend
                result = await _awaited(send(await settled(turn.again, exc)))
            lent = stream_kind(result) is not None
            if lent:
                return self._stream(turn, send, result)
            await settled(turn.record, result)
            return result
        finally:
            if not lent:
                turn.leave()

    def _stream(self, turn: Turn, send: Send, result: Any) -> Stream | AsyncStream:
        if stream_kind(result) == "sync":
            stream = Stream(turn, result, lambda error: send(turn.again(error)))
            turn.lend(stream)
            return stream

        async def again(error: Exception) -> Any:
            return await _awaited(send(await settled(turn.again, error)))

        astream = AsyncStream(turn, result, again)
        turn.lend(astream)
        return astream

    # -- turns ----------------------------------------------------------------------------------------------------

    def _name(self, messages: Sequence[object], kw: Mapping[str, Any]) -> str:
        return self._conversation if isinstance(self._conversation, str) else self._conversation(messages, **kw)

    def _make_way(self, name: str) -> None:
        """Close the stream this very thread has left open on the conversation, instead of waiting for it for ever."""
        place = self.turns.holder(name)
        if place is None or not place.blocks_me:
            return
        stream = place.stream() if place.stream else None
        if place.mine and isinstance(stream, Stream):
            stream.supersede()
        elif place.stream is None or stream is not None:
            raise InvalidInput(_busy(name))

    async def _amake_way(self, name: str) -> None:
        place = self.turns.holder(name)
        if place is None or not place.mine:
            return
        stream = place.stream() if place.stream else None
        if isinstance(stream, AsyncStream):
            await stream.supersede()
        elif isinstance(stream, Stream):
            await settled(stream.supersede)
        elif place.stream is None:
            raise InvalidInput(_busy(name))


def _busy(name: str) -> str:
    return (
        f"conversation {name!r} is in the middle of a call that only this thread can finish: await it, or close its "
        "stream first, or use another conversation for a call within a call"
    )


def _is(kind: Callable[[object], bool], function: Any) -> bool:
    """Whether a function, what it decorates, or a callable object's `__call__` is of that kind."""
    candidates = (function, inspect.unwrap(function), getattr(function, "__call__", None))  # noqa: B004
    return any(kind(candidate) for candidate in candidates)


def _arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kw: dict[str, Any]
) -> tuple[Any, Send, dict[str, Any]]:
    """The caller's list, how to call the function with another one, and the other keywords."""
    if args:
        return args[0], lambda messages: function(messages, *args[1:], **kw), kw
    if "messages" not in kw:
        raise TypeError("call_model() needs the list of messages, first or as messages=")
    rest = {key: value for key, value in kw.items() if key != "messages"}
    return kw["messages"], lambda messages: function(messages=messages, **rest), rest


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _reply_limit(kw: Mapping[str, Any]) -> int:
    given = (kw.get(name) for name in REPLY_LIMITS)
    return next((value for value in given if isinstance(value, int) and not isinstance(value, bool)), 0)
