"""Views made straight from messages, with a counter everybody can add up in their head.

Invariant: `make_view` follows the rules the session's state follows (units, what must stay, the floor), without a log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

from hypothesis import strategies as st

from compaction.budget import KVStorage, Target
from compaction.grammar import LEADING
from compaction.messages import Message, validate
from compaction.policies.scored_eviction import SCORES
from compaction.testing import FakeAnswers, FakeCounter
from compaction.view import Entry, Failure, Floor, Pin, View
from tests.builders import assistant, image, system, tool_batch, user

__all__ = ["PLAIN", "STORAGES", "agent_run", "chat", "make_view", "small_views", "targets", "worth"]

FAILURE = Failure(1, "summary_empty", "")
PLAIN = KVStorage("", 64)
STORAGES = {"k8v4": KVStorage("k8v4", 28, 640), "k4v2": KVStorage("k4v2", 16, 900)}


def make_view(
    messages: Sequence[Mapping[str, Any]],
    *,
    counter: FakeCounter | None = None,
    pins: Iterable[int | Pin] = (),
    user_first: bool = False,
    clamp_user: bool = False,
    slack: int = 0,
    failures: Sequence[Failure] = (),
    storage: KVStorage | None = None,
    storages: Mapping[str, KVStorage] | None = None,
) -> View:
    """The view of a conversation whose messages are called m0, m1, …; a pin is an index, or a range."""
    counter = counter or FakeCounter()
    history = {f"m{index}": Message(f"m{index}", validate(message)) for index, message in enumerate(messages)}
    leading = next((i for i, m in enumerate(messages) if m["role"] not in LEADING), len(messages))
    entries = _entries(history, counter)
    pinned = tuple(_pin(pin, history) for pin in pins)
    last_user = next((entry.id for entry in reversed(entries) if entry.role == "user"), None)
    newest = _newest_batch(entries, history)
    held = [*(pin.message_id for pin in pinned), last_user]
    units = {entry.unit for entry in entries if entry.id in held} | {newest}
    keep = {entry.id for index, entry in enumerate(entries) if entry.unit in units or index < leading}
    head = counter.head(messages[:leading], None)
    return View(
        entries=entries,
        messages=history,
        tokens=counter.request(messages, None),
        head=head,
        floor=_floor(entries, leading, keep, head, last_user, newest),
        leading=leading,
        keep=frozenset(keep),
        pins=pinned,
        last_user=last_user,
        newest_batch=newest,
        additive=counter.additive,
        user_first=user_first,
        clamp_user=clamp_user,
        slack=slack,
        failures=tuple(failures),
        answers=FakeAnswers(counter, worth=worth(history)),
        storage=storage,
        storages=storages or {},
    )


def worth(ids: Iterable[str]) -> dict[str, dict[str, float]]:
    """Scores nobody would guess, with ties."""
    known = list(ids)
    return {kind: {id: float(crc32(f"{kind}{id}".encode()) % 7) for id in known} for kind in SCORES}


def _entries(history: Mapping[str, Message], counter: FakeCounter) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    unit = ""
    for message in history.values():
        unit = unit if message.role == "tool" else message.id
        entries.append(Entry(message.id, message.role, counter.message(message.data), unit))
    return tuple(entries)


def _newest_batch(entries: Sequence[Entry], history: Mapping[str, Message]) -> str | None:
    spoke = next((entry for entry in reversed(entries) if entry.role == "assistant"), None)
    return spoke.unit if spoke is not None and history[spoke.id].call_ids else None


def _floor(
    entries: Sequence[Entry], leading: int, keep: set[str], head: int, last_user: str | None, newest: str | None
) -> Floor:
    user = batch = pins = 0
    for entry in entries[leading:]:
        if entry.id not in keep:
            continue
        if entry.id == last_user:
            user += entry.tokens
        elif entry.unit == newest:
            batch += entry.tokens
        else:
            pins += entry.tokens
    return Floor(template=head, pins=pins, last_user=user, newest_batch=batch)


def _pin(pin: int | Pin, history: Mapping[str, Message]) -> Pin:
    if isinstance(pin, Pin):
        return pin
    return Pin(f"m{pin}", "", 0, len(history[f"m{pin}"].text))


def chat(turns: int, characters: int = 200) -> list[dict[str, Any]]:
    """A system message and turns of question and answer."""
    talk = [system("You help.")]
    for turn in range(turns):
        talk += [user(f"question {turn} ".ljust(characters, "q")), assistant(f"answer {turn} ".ljust(characters, "a"))]
    return [*talk, user("and now?")]


def agent_run(batches: int, characters: int = 400, *, parallel: int = 1) -> list[dict[str, Any]]:
    """A system message, a task, and batches of calls and results with the same ids again and again."""
    run = [system("You act."), user("Fix the build.")]
    for number in range(batches):
        run += tool_batch([(f"call_{i}", f"result {number}.{i} ".ljust(characters, "r")) for i in range(parallel)])
    return run


def shapes() -> st.SearchStrategy[list[tuple[str, int]]]:
    """Conversations as (kind, characters): cheap to draw, unlike whole messages; policies see sizes, not words."""
    kinds = st.sampled_from(["user", "assistant", "batch", "wide batch", "parts", "silent", "late system"])
    return st.lists(st.tuples(kinds, st.sampled_from([0, 1, 30, 90, 250, 1200])), max_size=10)


def built(leading: int, shape: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """The messages of a shape, behind so many system messages."""
    talk = [system("You help.") for _ in range(leading)]
    for number, (kind, size) in enumerate(shape):
        text = f"{number} 漢".ljust(size, "x")[:size]
        if kind == "user":
            talk.append(user(text))
        elif kind == "parts":
            talk.append(user([{"type": "text", "text": text}, image(), {"type": "text", "text": "end"}]))
        elif kind == "assistant":
            talk.append(assistant(text))
        elif kind == "silent":
            talk.append(assistant(None))
        elif kind == "late system":
            talk += [assistant("noted"), system(text)]
        else:
            talk += tool_batch([(f"c{i}", text + "y" * i) for i in range(3 if kind == "wide batch" else 1)])
    return talk


@st.composite
def small_views(draw: st.DrawFn) -> View:
    """Views of generated conversations: pins, both kinds of counter, user first or not."""
    messages = built(draw(st.integers(0, 2)), draw(shapes()))
    pins = draw(st.lists(st.integers(0, len(messages) - 1), max_size=2, unique=True)) if messages else []
    return make_view(
        messages,
        counter=FakeCounter(merge_roles=draw(st.booleans())),
        pins=pins,
        user_first=draw(st.booleans()),
        clamp_user=draw(st.booleans()),
        slack=draw(st.sampled_from([0, 16])),
        failures=draw(st.sampled_from([(), (FAILURE,)])),
        storage=(storage := draw(st.sampled_from([None, PLAIN, STORAGES["k8v4"]]))),
        storages=draw(st.sampled_from([{}, STORAGES])) if storage else {},
    )


@st.composite
def targets(draw: st.DrawFn, view: View) -> Target:
    """Targets from what must stay to a little above what there is, in tokens or bytes."""
    floor = min(view.floor.total, view.tokens)
    must = draw(st.integers(floor, view.tokens + 20))
    want = draw(st.integers(min(floor, must), must))
    if view.storage is None or draw(st.booleans()):
        return Target(must=must, want=want)
    cap = draw(st.sampled_from([None, must + 10, (floor + must) // 2]))
    return Target(must=view.storage.bytes(must), want=view.storage.bytes(want), unit="kv_bytes", cap=cap)
