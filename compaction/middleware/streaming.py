"""Replies that come in pieces: passed through unchanged, put together beside it, recorded whole.

Invariant: the consumer gets the model's own pieces and nothing else; the reply is recorded once, after its last piece.
A stream that ends any other way (closed, forgotten, cancelled, broken) leaves an `interrupted` event and no message.
This module knows nothing about sessions: a `Sink` is told how the reply ended.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterable, Iterator
from typing import Any, Literal, Protocol

from compaction.errors import InvalidInput
from compaction.middleware.pieces import Partial
from compaction.middleware.turns import settled

__all__ = ["AsyncStream", "Sink", "Stream", "stream_kind"]


class Sink(Protocol):
    """Who wants to know how a reply ended. `leave` follows `record` or `interrupt`, whatever they raise."""

    def record(self, reply: object) -> None:
        """The reply is complete."""

    def interrupt(self, text: str) -> None:
        """The reply was cut off after `text`."""

    def leave(self) -> None:
        """The call is over."""

    def touch(self) -> None:
        """The current thread and task go on reading."""


def stream_kind(result: object) -> Literal["sync", "async"] | None:
    """Whether a model's result is a stream; None: a whole response (text, mappings, SDK objects, lists)."""
    if isinstance(result, (str, Collection)) or hasattr(result, "model_dump"):
        return None
    if hasattr(result, "__aiter__"):
        return "async"
    return "sync" if hasattr(result, "__iter__") else None


class _Base:
    """What both kinds of stream share: the pieces so far and how they ended. Other attributes are the model's own."""

    def __init__(self, sink: Sink, pieces: Any) -> None:
        self._sink = sink
        self._source = pieces
        self._partial = Partial()
        self._done = False
        self._superseded = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)

    def _stopped(self) -> bool:
        if self._superseded:
            raise InvalidInput("this stream was cut off: its reader began a newer call on the same conversation")
        return self._done

    def _complete(self) -> None:
        try:
            self._sink.record(self._partial.response)
        finally:
            self._sink.leave()

    def _cut(self) -> None:
        try:
            self._sink.interrupt(self._partial.text)
        finally:
            self._sink.leave()

    def __del__(self) -> None:
        # Never here: a collector may run inside any lock, the log's included.
        if not self.__dict__.get("_done", True):
            self._done = True
            with contextlib.suppress(RuntimeError):  # the interpreter is going down: nothing of the reply is in the log
                threading.Thread(target=_forget, args=(self._source, self._sink, self._partial)).start()


class Stream(_Base, Iterator[Any]):
    """An iterator over a reply's pieces; also a context manager. `close()` cuts the reply off.

    `again(error)` gives a second stream where the first fails before its first piece, or raises.
    """

    def __init__(self, sink: Sink, pieces: Iterable[Any], again: Callable[[Exception], Iterable[Any]]) -> None:
        super().__init__(sink, pieces)
        self._again = again
        self._iterator: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._stopped():
            raise StopIteration
        self._sink.touch()
        try:
            piece = self._step()
            self._partial.take(piece)
        except StopIteration:
            self._done = True
            self._complete()
            raise
        except BaseException:
            self.close()
            raise
        return piece

    def _step(self) -> Any:
        try:
            self._iterator = self._iterator or iter(self._source)
            return next(self._iterator)
        except StopIteration:
            raise
        except Exception as exc:  # whatever the model raised: `_again` raises what it does not mend
            if self._partial.pieces:
                raise
            self._source = self._again(exc)
            self._iterator = iter(self._source)
            return next(self._iterator)

    def close(self) -> None:
        """End the reply here; what came so far is kept as `interrupted` only."""
        if self._done:
            return
        self._done = True
        try:
            _close(self._source)
        finally:
            self._cut()

    def supersede(self) -> None:
        """Close because the reader began a newer call; reading on says so."""
        self._superseded = not self._done
        self.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(_Base, AsyncIterator[Any]):
    """`Stream` for async iterators. `aclose()` cuts the reply off. The log is written in worker threads."""

    def __init__(self, sink: Sink, pieces: AsyncIterable[Any], again: Callable[[Exception], Any]) -> None:
        super().__init__(sink, pieces)
        self._again = again
        self._iterator: AsyncIterator[Any] | None = None

    async def __anext__(self) -> Any:
        if self._stopped():
            raise StopAsyncIteration
        self._sink.touch()
        try:
            piece = await self._step()
            self._partial.take(piece)
        except StopAsyncIteration:
            self._done = True
            await settled(self._complete)
            raise
        except BaseException:
            await self.aclose()
            raise
        return piece

    async def _step(self) -> Any:
        try:
            iterator = self._iterator = self._iterator or self._source.__aiter__()
            return await iterator.__anext__()
        except StopAsyncIteration:
            raise
        except Exception as exc:  # whatever the model raised: `_again` raises what it does not mend
            if self._partial.pieces:
                raise
            self._source = await self._again(exc)
            iterator = self._iterator = self._source.__aiter__()
            return await iterator.__anext__()

    async def aclose(self) -> None:
        """End the reply here; what came so far is kept as `interrupted` only."""
        if self._done:
            return
        self._done = True
        try:
            await _aclose(self._source)
        finally:
            await settled(self._cut)

    async def supersede(self) -> None:
        """Close because the reader began a newer call; reading on says so."""
        self._superseded = not self._done
        await self.aclose()

    async def close(self) -> None:
        """`aclose`, under the name SDKs use."""
        await self.aclose()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _close(source: object) -> None:
    close = getattr(source, "close", None)
    if callable(close):
        close()


async def _aclose(source: object) -> None:
    close = getattr(source, "aclose", None) or getattr(source, "close", None)
    closing = close() if callable(close) else None
    if inspect.isawaitable(closing):
        await closing


def _forget(source: object, sink: Sink, partial: Partial) -> None:
    """Close a stream nobody reads any more. An async source is left to its own loop, which closes it when collected."""
    try:
        if not hasattr(source, "__aiter__"):
            _close(source)
        sink.interrupt(partial.text)
    finally:
        sink.leave()
