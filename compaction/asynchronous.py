"""Running a blocking iterator for async callers.

Invariant: the iterator lives in one thread from its first step to its last; locks it holds stay with that thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TypeVar

from compaction.errors import InvalidInput

__all__ = ["Turnstile", "in_thread"]

T = TypeVar("T")


class Turnstile:
    """One reply at a time. Unlike a lock it may be left by another thread than the one that entered.

    Raises InvalidInput where the thread that would wait is the one that holds it: that wait would never end.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._holder: int | None = None

    def __enter__(self) -> None:
        if self._holder == threading.get_ident():
            raise InvalidInput(f"a reply in {self._name!r} is being streamed: read it to its end or close it first")
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *exc: object) -> None:
        self._holder = None
        self._lock.release()


async def in_thread(start: Callable[[], Iterator[T]]) -> AsyncGenerator[T, None]:
    """The items of `start()`, produced in a thread of its own. Leaving early closes the iterator in that thread."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[bool, T | BaseException | None]] = asyncio.Queue()
    cancelled = threading.Event()
    taken = threading.Semaphore(0)

    def put(done: bool, item: T | BaseException | None) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, (done, item))

    def work() -> None:
        try:
            items = start()
            for item in items:
                put(False, item)
                taken.acquire()  # a reply must not run ahead of its reader: leaving early has to cut it off
                if cancelled.is_set():
                    break
            close = getattr(items, "close", None)
            if close is not None:
                close()
            put(True, None)
        except BaseException as exc:  # noqa: BLE001  whatever ends the iterator is raised again in the caller's task
            put(True, exc)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            done, item = await queue.get()
            if done:
                if isinstance(item, BaseException):
                    raise item
                return
            yield item  # type: ignore[misc]
            taken.release()
    finally:
        cancelled.set()
        taken.release()
        await asyncio.to_thread(thread.join)
