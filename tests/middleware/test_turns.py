"""One call at a time for each conversation; different conversations side by side."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from compaction.errors import InvalidInput
from compaction.middleware.turns import Turns, settled
from tests.builders import assistant, user
from tests.middleware.scripted import history, make_manager, verified


class Busy:
    """Counts how many calls of a conversation, and in all, run at the same time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now: dict[str, int] = {}
        self.most: dict[str, int] = {}

    def enter(self, name: str) -> None:
        """One more."""
        with self.lock:
            for key in (name, "all"):
                self.now[key] = self.now.get(key, 0) + 1
                self.most[key] = max(self.most.get(key, 0), self.now[key])

    def leave(self, name: str) -> None:
        """One less."""
        with self.lock:
            for key in (name, "all"):
                self.now[key] -= 1


def test_threads_take_turns_on_a_conversation() -> None:
    """Eight threads on two conversations: never two calls of one conversation at once, but two in all."""
    manager, busy = make_manager(), Busy()

    @manager.wrap(conversation=lambda messages, **kw: kw["thread"])
    def call_model(messages: Any, thread: str, n: int) -> str:
        busy.enter(thread)
        time.sleep(0.02)
        busy.leave(thread)
        return f"reply {n}"

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(call_model, [user(f"{n}")], thread="ab"[n % 2], n=n) for n in range(16)]
        [job.result() for job in jobs]

    assert (busy.most["a"], busy.most["b"], busy.most["all"]) == (1, 1, 2)
    question, reply = history(manager.session("a"))
    assert reply == assistant(f"reply {question['content']}") and verified(manager)


async def test_tasks_take_turns_on_a_conversation() -> None:
    """Tasks of two conversations: none of the same overlap, each comes in its order."""
    manager, busy, order = make_manager(), Busy(), []

    @manager.wrap(conversation=lambda messages, **kw: kw["thread"])
    async def call_model(messages: Any, thread: str, n: int) -> str:
        busy.enter(thread)
        order.append((thread, n))
        await asyncio.sleep(0.01)
        busy.leave(thread)
        return "ok"

    calls = [call_model([user(f"{n}")], thread="ab"[n % 2], n=n) for n in range(16)]
    await asyncio.wait_for(asyncio.gather(*calls), 30)

    assert (busy.most["a"], busy.most["b"], busy.most["all"]) == (1, 1, 2)
    assert [n for thread, n in order if thread == "a"] == list(range(0, 16, 2))
    assert history(manager.session("a")) == [user("14"), assistant("ok")]


async def test_waiting_tasks_use_no_thread() -> None:
    """More tasks wait than the pool has threads, and the one whose turn it is still gets a thread to work in."""
    turns = Turns()

    async def work() -> None:
        place = await turns.aenter("c")
        await settled(time.sleep, 0)
        turns.leave(place)

    await asyncio.wait_for(asyncio.gather(*(work() for _ in range(200))), 30)
    assert turns.holder("c") is None


async def test_threads_and_tasks_share_the_turns() -> None:
    """A sync and an async function decorated by one wrapper do not interleave on a conversation."""
    manager, busy = make_manager(), Busy()
    wrap = manager.wrap(conversation="c")

    @wrap
    def in_thread(messages: Any) -> str:
        busy.enter("c")
        time.sleep(0.01)
        busy.leave("c")
        return "thread"

    @wrap
    async def in_task(messages: Any) -> str:
        busy.enter("c")
        await asyncio.sleep(0.01)
        busy.leave("c")
        return "task"

    calls = [asyncio.to_thread(in_thread, [user("x")]) if n % 2 else in_task([user("y")]) for n in range(10)]
    await asyncio.wait_for(asyncio.gather(*calls), 30)
    assert busy.most["c"] == 1


async def test_a_cancelled_waiter_steps_out_of_the_queue() -> None:
    """Who is cancelled while waiting is skipped, even at the moment the turn is handed over."""
    turns = Turns()
    place = await turns.aenter("c")
    waiting = [asyncio.create_task(turns.aenter("c")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    turns.leave(place)
    waiting[1].cancel()
    third = await asyncio.wait_for(waiting[2], 5)
    turns.leave(third)
    turns.leave(third)

    assert waiting[0].cancelled() and waiting[1].cancelled()
    assert turns.holder("c") is None


async def test_a_cancelled_call_waits_for_what_it_writes() -> None:
    """Cancelling (twice) while a worker thread writes is answered when it has written, and still is a cancellation."""
    done: list[bool] = []

    def write() -> None:
        time.sleep(0.1)
        done.append(True)

    task = asyncio.create_task(settled(write))
    for _ in range(2):
        await asyncio.sleep(0.02)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [True]


async def test_a_cancelled_call_appends_no_reply() -> None:
    """Cancelling while the model works leaves the caller's list in the history, and the conversation free."""
    manager, started = make_manager(), asyncio.Event()

    @manager.wrap(conversation="c")
    async def call_model(messages: Any, wait: bool) -> str:
        if wait:
            started.set()
            await asyncio.Event().wait()
        return "ok"

    task = asyncio.create_task(call_model([user("one")], wait=True))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert history(manager.session("c")) == [user("one")]
    assert await asyncio.wait_for(call_model([user("one")], wait=False), 5) == "ok"


def test_a_call_within_a_call_is_refused_rather_than_hung() -> None:
    """A model that calls itself on the same conversation would wait for itself: it is told so."""
    manager = make_manager()
    wrap = manager.wrap(conversation="c")
    ask = wrap(lambda messages: ask(messages))

    with pytest.raises(InvalidInput, match="call within a call"):
        ask([user("one")])
    assert wrap(lambda messages: "ok")([user("one")]) == "ok"


async def test_an_async_call_within_a_call_is_refused_rather_than_hung() -> None:
    """The same in a task; a sync call in the loop's own thread cannot wait for a task either."""
    manager = make_manager()
    wrap = manager.wrap(conversation="c")

    @wrap
    async def ask(messages: Any, inner: Any) -> Any:
        result = inner(messages)
        return await result if asyncio.iscoroutine(result) else result

    sync = wrap(lambda messages: "ok")
    for inner in (lambda messages: ask(messages, None), sync):
        with pytest.raises(InvalidInput, match="call within a call"):
            await ask([user("one")], inner)
