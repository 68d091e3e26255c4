"""Taking turns: one call at a time for each conversation, first come first served, for threads and tasks alike.

Invariant: a place is handed to exactly one waiter, and a waiter that gives up passes it on. Waiting tasks occupy no
thread (else a few of them would fill the pool that the one whose turn it is needs to finish). A place belongs to no
thread: a stream may be opened in one and closed in another.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["Place", "Turns", "settled"]

T = TypeVar("T")


class Place:
    """The right to use one conversation, until `Turns.leave`.

    It remembers who used it last (thread and task), and the stream it was lent to, weakly: a forgotten stream must be
    collected, which closes it.
    """

    __slots__ = ("left", "name", "stream", "task", "thread")

    def __init__(self, name: str) -> None:
        self.name = name
        self.left = False
        self.stream: weakref.ref[Any] | None = None
        self.touch()

    def touch(self) -> None:
        """Note that the current thread and task use it."""
        self.thread = threading.get_ident()
        self.task = _task()

    @property
    def mine(self) -> bool:
        """Whether the current thread and task used it last: waiting for it would be waiting for oneself."""
        return self.thread == threading.get_ident() and self.task is _task()

    @property
    def blocks_me(self) -> bool:
        """Whether the current thread used it last: blocking that thread would wait for itself."""
        return self.thread == threading.get_ident()


class Turns:
    """The places of all conversations, and who waits for them. A conversation nobody uses costs nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, Place] = {}
        self._waiting: dict[str, deque[tuple[Future[Place], Place]]] = {}

    def holder(self, name: str) -> Place | None:
        """The place of that conversation while somebody has it."""
        return self._held.get(name)

    def enter(self, name: str) -> Place:
        """Wait, blocking this thread, until it is our turn."""
        future = self._ask(name)
        try:
            return future.result()
        except BaseException:  # Ctrl-C while waiting
            self._give_up(future)
            raise

    async def aenter(self, name: str) -> Place:
        """Wait, without blocking anything, until it is our turn."""
        future = self._ask(name)
        try:
            return await asyncio.wrap_future(future)
        except BaseException:  # cancelled while waiting
            self._give_up(future)
            raise

    def leave(self, place: Place) -> None:
        """Hand the conversation to the next who waits. Leaving twice does nothing."""
        with self._lock:
            if place.left:
                return
            place.left = True
            queue = self._waiting.get(place.name)
            while queue:
                future, following = queue.popleft()
                if future.set_running_or_notify_cancel():
                    self._held[place.name] = following
                    future.set_result(following)
                    return
            self._waiting.pop(place.name, None)
            del self._held[place.name]

    def _ask(self, name: str) -> Future[Place]:
        future: Future[Place] = Future()
        place = Place(name)
        with self._lock:
            if name in self._held:
                self._waiting.setdefault(name, deque()).append((future, place))
            else:
                self._held[name] = place
                future.set_running_or_notify_cancel()
                future.set_result(place)
        return future

    def _give_up(self, future: Future[Place]) -> None:
        if not future.cancel():  # handed over at the very moment we gave up
            self.leave(future.result())


async def settled(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)` in a worker thread. A cancelled caller waits until it is done, for a thread cannot be stopped:
    what it writes must not overlap with the next turn.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                continue
        if not work.cancelled():
            work.exception()  # looked at, so that asyncio does not report it as lost; the cancellation wins
        raise


def _task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no running loop in this thread
        return None
