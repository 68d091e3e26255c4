"""A conversation's state together with the log it is written to.

Invariant: the state changes only by folding what the log has committed. The loser of a race reads again and rebuilds
its events on what it finds, so nothing another writer appended is lost.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compaction.budget import Budget, Window
from compaction.counting import Tally
from compaction.decide import policy_id
from compaction.errors import EngineError, InvalidInput, LogConflict, PendingToolCalls
from compaction.events import Event, Kind, NewEvent, Text, seal
from compaction.grammar import LEADING
from compaction.messages import Message, dumps
from compaction.ports import (
    Apply,
    Clock,
    Counter,
    Engine,
    Ids,
    LintsTemplate,
    Log,
    Policy,
    QuantizesKV,
    Rng,
    SplicingEngine,
    Summarizer,
    storages_of,
)
from compaction.state import State, load
from compaction.view import Pin

__all__ = ["Build", "Ledger", "Observer", "Settings"]

RETRIES = 16
SETTINGS = ("policy", "counter", "budget", "window", "user_first", "template", "kv_bytes_per_token", "storages")

Build = Callable[[], tuple[list[NewEvent], list[Text]]]
"""Makes events and their texts out of the current state; called again where somebody else was first."""
Observer = Callable[[str, str, object, float], None]
"""Told of each attempt to compact: conversation, trigger, what came of it (a Decision, a Held, or the CompactionError
that is raised), and seconds, summaries included."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a manager gives each of its sessions."""

    log: Log
    policy: Policy
    budget: Budget
    counter: Counter
    clock: Clock
    ids: Ids
    rng: Rng
    engine: Engine | None = None
    window: Window | None = None
    summarizer: Summarizer | None = None
    observer: Observer | None = None
    apply: Apply = "exact"
    divergence_rate: float = 0.0

    @property
    def splicing(self) -> SplicingEngine | None:
        """The engine, where plans are applied to its live caches in place."""
        return self.engine if self.apply == "splice" and isinstance(self.engine, SplicingEngine) else None


class Ledger:
    """State, settings and log of one conversation. Safe to use from many threads: whoever commits holds `lock`."""

    def __init__(self, conversation: str, settings: Settings, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self.id = conversation
        self.settings = settings
        self.lock = threading.RLock()
        self.overtaken = 0
        self._foreign = False
        self.resumed = settings.log.seq(conversation) > 0
        self.state = load(settings.log, conversation) if self.resumed else State(conversation)
        self._use(self.state.tools_text if tools is None else _tools_json(tools))
        if not self.resumed or self._settings_changed():
            self.commit(self._opened)

    def check_answered(self) -> None:
        """Raises PendingToolCalls where the last batch waits for results."""
        if self.state.batch and self.state.batch.pending:
            raise PendingToolCalls(self.state.batch.pending)

    # -- writing ------------------------------------------------------------------------------------------------

    def seal(self, body: str) -> Text:
        """A text with a fresh salt."""
        return seal(body, self.settings.rng(16))

    def event(self, kind: Kind, payload: Mapping[str, Any]) -> NewEvent:
        """An event of now."""
        return NewEvent(kind, self.settings.clock(), payload)

    def commit(self, build: Build) -> tuple[Event, ...]:
        """Write what `build` makes of the current state in one transaction, then fold it."""
        with self.lock:
            for _ in range(RETRIES - 1):
                try:
                    return self._commit_once(build)
                except LogConflict:
                    self._catch_up()
            return self._commit_once(build)

    def _commit_once(self, build: Build) -> tuple[Event, ...]:
        if self._foreign and self._settings_changed():  # what another writer opened is not what this one sends
            self._write(self._opened)
        self._foreign = False
        return self._write(build)

    def _write(self, build: Build) -> tuple[Event, ...]:
        events, texts = build()
        written = self.settings.log.commit(self.id, self.state.seq, events, texts) if events else ()
        bodies = {text.digest: text.body for text in texts}
        try:
            for event in written:
                self.state.apply(event, lambda d: bodies[d] if d in bodies else self.settings.log.text(d))
        except BaseException:  # Ctrl-C in the middle of a fold: half an event must not be folded again
            self.state = load(self.settings.log, self.id)
            raise
        return written

    def _catch_up(self) -> None:
        """Fold what others wrote meanwhile. Only that is read: a loser that reads all again loses the next race too."""
        self.overtaken += 1
        fresh = list(self.settings.log.events(self.id, self.state.seq))
        self._foreign = self._foreign or any(event.kind in ("opened", "rewound") for event in fresh)
        if any(event.kind == "rewound" or "forked_from" in event.payload for event in fresh):
            self.state = load(self.settings.log, self.id)
            return
        for event in fresh:
            self.state.apply(event, self.settings.log.text)

    def note(self, kind: Kind, payload: Mapping[str, Any]) -> None:
        """Write one event that has no text."""
        self.commit(lambda: ([self.event(kind, payload)], []))

    def note_text(self, kind: Kind, body: str, more: Sequence[NewEvent] = (), **payload: Any) -> None:
        """Write one event about a text, and perhaps more after it."""
        text = self.seal(body)
        self.commit(lambda: ([self.event(kind, {"text": text.digest.hex(), **payload}), *more], [text]))

    def append(self, texts: Sequence[str], more: Sequence[NewEvent] = ()) -> list[str]:
        """Append messages given as JSON texts, all or none, and further events after them. Returns the ids.

        Raises InvalidMessage where one cannot follow the ones before.
        """

        def build() -> tuple[list[NewEvent], list[Text]]:
            start = self.state.seq + 1
            messages = [Message(self.settings.ids(self.id, start + i), text) for i, text in enumerate(texts)]
            sealed = [self.seal(text) for text in texts]
            payloads = self.tally.appended(self.state, messages)
            events = [
                self.event("appended", {"message": m.id, "text": t.digest.hex(), "role": m.role, **payload})
                for m, t, payload in zip(messages, sealed, payloads, strict=True)
            ]
            return [*events, *more], sealed

        return [event.payload["message"] for event in self.commit(build) if event.kind == "appended"]

    def pin(self, kind: Kind, pins: Sequence[Pin]) -> None:
        """Write that these ranges are pinned or unpinned."""
        ranges = [{"message": p.message_id, "path": p.path, "start": p.start, "end": p.end} for p in pins]

        def build() -> tuple[list[NewEvent], list[Text]]:
            for pin in pins if kind == "pinned" else ():
                self.state.check_pin(pin)  # again: another writer may have discarded it meanwhile
            return [self.event(kind, payload) for payload in ranges], []

        self.commit(build)

    def rewind(self, seq: int) -> None:
        """Write that the conversation goes back to event `seq`, and read it so.

        Raises LogConflict where another writer was first: which messages it meant is then for the caller to say.
        """
        with self.lock:
            there = load(self.settings.log, self.id, seq)
            for pin in self.state.pins:
                if pin.message_id in there.history:
                    there.check_pin(pin)
            try:
                self.settings.log.commit(self.id, self.state.seq, [self.event("rewound", {"to": seq})])
            finally:
                self.state = load(self.settings.log, self.id)
            if self._settings_changed():
                self.commit(self._opened)

    def fork(self, name: str) -> None:
        """Open another conversation that begins as this one stands.

        Raises InvalidInput where the name is taken.
        """
        with self.lock:
            if self.settings.log.seq(name):
                raise InvalidInput(f"conversation {name!r} exists already: fork under another name")
            source = {"conversation": self.id, "seq": self.state.seq}
            payload, texts = self._described()
            payload |= {"forked_from": source, "head": list(self.state.head), "total": self.state.tokens}
            self.settings.log.commit(name, 0, [self.event("opened", payload)], texts)

    # -- tools and counter ----------------------------------------------------------------------------------------

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tool schemas each request carries, fresh copies."""
        return json.loads(self._tools_text) if self._tools_text else []

    def use_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """From now on requests carry these tool schemas: the change is counted and logged."""
        text = _tools_json(tools)
        with self.lock:
            if text != self._tools_text:
                self._use(text)
                try:
                    self.commit(self._opened)
                except BaseException:
                    self._use(self.state.tools_text)
                    raise

    def use_counter(self, counter: Counter) -> None:
        """Count with another counter from now on: entries are counted again, and the change is logged."""
        with self.lock:
            before = self.settings
            self.settings = replace(self.settings, counter=counter)
            self._use(self._tools_text)
            try:
                self.commit(self._opened)
            except BaseException:
                self.settings = before
                self._use(self._tools_text)
                raise

    def _use(self, tools: str | None) -> None:
        self._tools_text = tools
        self.tally = Tally(self.settings.counter, json.loads(tools) if tools else None)

    # -- opening --------------------------------------------------------------------------------------------------

    def _settings_changed(self) -> bool:
        payload, _ = self._described()
        same = all(payload.get(key) == self.state.opened.get(key) for key in SETTINGS)
        return not same or self._tools_text != self.state.tools_text

    def _described(self) -> tuple[dict[str, Any], list[Text]]:
        """The settings as an `opened` payload, without the counts."""
        settings = self.settings
        engine, window = settings.engine, settings.window
        tools = self.seal(self._tools_text) if self._tools_text else None
        payload = {
            "policy": policy_id(settings.policy).to_json(),
            "counter": settings.counter.name,
            "additive": settings.counter.additive,
            "budget": settings.budget.to_json(),
            "window": {"tokens": window.tokens, "source": window.source} if window else None,
            "engine": engine.name if engine else None,
            "kv_bytes_per_token": engine.kv_bytes_per_token if engine else None,
            "storages": self._storages(),
            "user_first": engine.user_first if engine else False,
            "template": dict(engine.template_lint) if isinstance(engine, LintsTemplate) else None,
            "tools": tools.digest.hex() if tools else None,
        }
        if settings.apply != "exact":
            payload["apply"] = settings.apply
        return payload, [tools] if tools else []

    def _storages(self) -> dict[str, list[int]] | None:
        """What the policy may quantize to and what the cache is kept in: name -> [bytes a token, bytes besides]."""
        engine: object = self.settings.engine
        if not isinstance(engine, QuantizesKV):
            return None
        names = storages_of(self.settings.policy) | ({self.state.storage.name} if self.state.storage else set())
        found: dict[str, list[int]] = {}
        for name in sorted(names - {""}):
            try:
                storage = engine.storage(name)
            except (EngineError, InvalidInput):  # what this model cannot keep, the policy does without
                continue
            found[name] = [storage.per_token, storage.fixed]
        return found or None

    def _opened(self) -> tuple[list[NewEvent], list[Text]]:
        """The first event, or a later one where a setting changed; with another counter, entries are counted again."""
        state, counter = self.state, self.settings.counter
        shown = [entry.render(state.history) for entry in state.entries]
        head = self.tally.head(shown[: state.leading])
        payload, texts = self._described()
        payload |= {"head": list(head), "total": sum(head)}
        rest = list(zip(state.entries, shown, strict=True))[state.leading :]
        if rest and counter.name == state.opened.get("counter"):
            payload["total"] = state.tokens - sum(state.head) + sum(head)
        elif rest:
            payload["recounted"] = [[entry.id, counter.message(message)] for entry, message in rest]
            payload["total"] += sum(tokens for _, tokens in payload["recounted"])
        leads = len(shown) > state.leading and shown[state.leading]["role"] in LEADING
        if shown and (leads or not counter.additive):
            payload["total"] = self.tally.request(shown)
        return [self.event("opened", payload)], texts


def _tools_json(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Raises InvalidInput where tool schemas are no JSON."""
    try:
        return dumps([dict(tool) for tool in tools]) if tools else None
    except (TypeError, ValueError) as exc:
        raise InvalidInput(f"tools must be a list of JSON tool schemas: {exc}") from exc
