"""A conversation as a fold over its events.

Invariant: `State` changes only by `apply(event)`, so that a resumed session, a replayed one and a live one agree. It
needs no tokenizer: every count it uses stands in an event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from compaction.applying import apply_plan
from compaction.budget import KVStorage, Limits
from compaction.errors import InvalidInput, InvalidMessage, LogMissing
from compaction.events import Event
from compaction.grammar import LEADING, Batch, follow
from compaction.messages import Message, resolve
from compaction.plan import Plan
from compaction.ports import Log
from compaction.view import Entry, Floor, Pin, Unit, View

__all__ = ["State", "load", "with_refs", "without_refs"]

TextOf = Callable[[bytes], str]
_FREE_TEXT = ("reason", "text", "instruction")


class State:
    """History, entries, pins and running totals of one conversation.

    `entries` is only ever appended to between decisions, and replaced by a decision, so a view may keep a slice of it.
    """

    def __init__(self, conversation: str) -> None:
        self.conversation = conversation
        self.seq = 0
        self.opened: Mapping[str, Any] = {}
        self.tools_text: str | None = None
        self.history: dict[str, Message] = {}
        self.appended_at: dict[str, int] = {}
        self.entries: list[Entry] = []
        self.live: dict[str, Entry] = {}
        self.units: dict[str, list[str]] = {}
        self._rows: list[Unit] = []
        self._row_of: dict[str, int] = {}
        self.pins: list[Pin] = []
        self.storage: KVStorage | None = None
        self.storages: Mapping[str, KVStorage] = {}
        self.head: tuple[int, int, int] = (0, 0, 0)
        self.tokens = 0
        self.leading = 0
        self.last_user: str | None = None
        self.batch: Batch | None = None
        self.newest_batch: str | None = None
        self.held_at: int | None = None
        self.decisions = 0

    # -- folding ------------------------------------------------------------------------------------------------

    def apply(self, event: Event, text_of: TextOf) -> None:
        """Take one event, in order. Kinds that change no view only move `seq`."""
        payload = event.payload
        match event.kind:
            case "opened":
                self._open(payload, text_of)
            case "appended":
                text = text_of(bytes.fromhex(payload["text"]))
                self._append(Message(payload["message"], text), payload)
                self.appended_at[payload["message"]] = event.seq
            case "pinned":
                if payload["message"] in self.live:  # else written in a race, by a version that did not look again
                    self.pins.append(_pin(payload))
            case "unpinned":
                self.pins = [pin for pin in self.pins if pin != _pin(payload)]
            case "decision_committed":
                self._decide(payload, text_of)
            case "decision_failed":
                self.held_at = payload["tokens"]
            case _:
                pass
        self.seq = event.seq

    def _open(self, payload: Mapping[str, Any], text_of: TextOf) -> None:
        if any(payload[key] != self.opened.get(key) for key in ("policy", "budget")):
            self.held_at = None  # what held one policy back says nothing of another
        self.opened = payload
        self._open_storages(payload)
        self.tools_text = text_of(bytes.fromhex(payload["tools"])) if payload["tools"] else None
        self.head = _head(payload)
        self.tokens = payload["total"]
        counts = dict(payload.get("recounted", ()))
        if counts:
            self._replace([replace(e, tokens=counts.get(e.id, e.tokens)) for e in self.entries])

    def _open_storages(self, payload: Mapping[str, Any]) -> None:
        """What the engine can keep; a conversation that was quantized stays so where this engine knows the storage."""
        given = payload.get("storages") or {}
        self.storages = {name: KVStorage(name, per_token, fixed) for name, (per_token, fixed) in given.items()}
        per_token = payload.get("kv_bytes_per_token")
        held = self.storages.get(self.storage.name) if self.storage is not None else None
        self.storage = held or (KVStorage("", per_token) if per_token else None)

    def _append(self, message: Message, payload: Mapping[str, Any]) -> None:
        batch = follow(self.batch, message)
        leads = len(self.entries) == self.leading and message.role in LEADING
        unit = self.batch.unit if message.role == "tool" and self.batch else message.id
        entry = Entry(message.id, message.role, payload["tokens"], unit)
        self.history[message.id] = message
        self.entries.append(entry)
        self.live[message.id] = entry
        self.units.setdefault(unit, []).append(message.id)
        self.tokens = payload["total"]
        if leads:
            self.leading += 1
            self.head = _head(payload)
        else:
            self._add_row(entry, len(self.entries) - 1)
        self._note_last(message, batch)

    def _add_row(self, entry: Entry, index: int) -> None:
        """Keep the view's units as entries come, so that planning need not walk the conversation."""
        last = self._rows[-1] if self._rows else None
        if last is not None and self._row_of.get(entry.unit) == len(self._rows) - 1:
            self._rows[-1] = replace(last, end=index + 1, tokens=last.tokens + entry.tokens)
            return
        self._row_of[entry.unit] = len(self._rows)
        self._rows.append(Unit(index, index + 1, entry.tokens, kept=False))

    def _note_last(self, message: Message, batch: Batch | None) -> None:
        self.batch = batch
        if message.role == "user":
            self.last_user = message.id
        if message.role == "assistant":
            self.newest_batch = message.id if message.call_ids else None

    def _decide(self, payload: Mapping[str, Any], text_of: TextOf) -> None:
        full = without_refs(payload, text_of)
        counts = dict(full["changed"])
        plan = Plan.from_json(full["plan"])
        applied = apply_plan(self.entries, self.history, plan, full["summaries"], lambda entry: counts[entry.id])
        self._replace([replace(e, tokens=counts.get(e.id, e.tokens)) for e in applied.entries])
        after = payload["after"]
        self.tokens = after["tokens"]
        if plan.quantizes:
            self.storage = KVStorage(after["storage"], after["kv_bytes_per_token"], after["kv_bytes_fixed"])
        self.held_at = None
        self.decisions += 1

    def _replace(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.live = {entry.id: entry for entry in entries}
        self._rows, self._row_of = [], {}
        for index in range(self.leading, len(entries)):
            self._add_row(entries[index], index)

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def additive(self) -> bool:
        """Whether the counter's figures add up."""
        return bool(self.opened.get("additive", True))

    def kept_units(self) -> tuple[list[str], list[str], list[str]]:
        """Units that must stay, each once: pinned, the last user message's, the newest batch not answered yet."""
        seen: set[str] = set()

        def once(units: Iterable[str | None]) -> list[str]:
            fresh = [u for u in dict.fromkeys(units) if u and u not in seen]
            seen.update(fresh)
            return fresh

        pinned = (self.live[p.message_id].unit for p in self.pins if p.message_id not in self._leading_ids())
        user = self.last_user if self.last_user in self.live else None
        return once(pinned), once([user]), once([self.newest_batch])

    def _leading_ids(self) -> set[str]:
        return {entry.id for entry in self.entries[: self.leading]}

    def floor(self) -> Floor:
        """The floor by its parts, in tokens. Costs time in the number of pins, not of entries."""
        pins, user, batch = (sum(self._unit_tokens(unit) for unit in part) for part in self.kept_units())
        template, system, tools = self.head
        return Floor(template, system, tools, pins, user, batch)

    def _unit_tokens(self, unit: str) -> int:
        return sum(self.live[i].tokens for i in self.units[unit])

    def above_high(self, limits: Limits) -> bool:
        """Whether compaction is due: above the high mark and not held back by the breaker; always above room."""
        if self.tokens > limits.room:
            return True
        floor = self.floor().total
        if self.tokens <= limits.high_mark(floor):
            return False
        free = limits.room - floor
        return self.held_at is None or self.tokens >= self.held_at + max(1, free // 10)

    def view(self) -> View:
        """A read-only view of what would be sent now."""
        kept = [unit for part in self.kept_units() for unit in part]
        keep = {i for unit in kept for i in self.units[unit]} | self._leading_ids()
        rows = self._rows.copy()
        for unit in kept:
            rows[self._row_of[unit]] = replace(rows[self._row_of[unit]], kept=True)
        return View(
            entries=tuple(self.entries),
            messages=self.history,
            tokens=self.tokens,
            head=sum(self.head),
            floor=self.floor(),
            leading=self.leading,
            keep=frozenset(keep),
            pins=tuple(self.pins),
            last_user=self.last_user,
            newest_batch=self.newest_batch,
            additive=self.additive,
            user_first=bool(self.opened.get("user_first", False)),
            storage=self.storage,
            storages=self.storages,
            known_units=tuple(rows),
        )

    def check_pin(self, pin: Pin) -> None:
        """Check that a range is live.

        Raises InvalidMessage where the message is unknown, gone, or the range is not all there.
        """
        message, entry = self.history.get(pin.message_id), self.live.get(pin.message_id)
        if message is None or entry is None:
            raise InvalidMessage(f"message {pin.message_id!r} is not in the view: only what is live can be pinned")
        if pin.path == "":
            if entry.edits:
                raise InvalidMessage(f"message {pin.message_id!r} is clamped already: pin a range that is still live")
            return
        try:
            string = resolve(message.data, pin.path)
        except KeyError:
            string = None
        if not isinstance(string, str) or not 0 <= pin.start < pin.end <= len(string):
            raise InvalidMessage(f"message {pin.message_id!r} has no text {pin.path}[{pin.start}:{pin.end}]")
        if any(e.path == pin.path and e.start < pin.end and pin.start < e.end for e in entry.edits):
            raise InvalidMessage(f"{pin.path}[{pin.start}:{pin.end}] of {pin.message_id!r} is not live any more")


def load(log: Log, conversation: str, upto: int | None = None) -> State:
    """The state after the log's events (those with seq <= `upto`), forks and rewinds followed.

    Raises LogMissing for a conversation the log does not know.
    """
    events = [e for e in log.events(conversation) if upto is None or e.seq <= upto]
    if not events:
        raise LogMissing(f"conversation {conversation!r} is not in the log")
    return _fold(log, conversation, events)


def _fold(log: Log, conversation: str, events: list[Event]) -> State:
    state = State(conversation)
    first = events[0].payload if events else {}
    if source := first.get("forked_from"):
        state = load(log, source["conversation"], source["seq"])
        state.conversation = conversation
        state.appended_at = {}  # events of the source: their seqs mean nothing here
    for event in _surviving(events):
        state.apply(event, log.text)
    if events:
        state.seq = events[-1].seq
        state.pins = _pins_carried(state, events)
    return state


def _surviving(events: list[Event]) -> list[Event]:
    """The events no rewind has undone, in order. Read backwards, since a rewind undoes earlier rewinds too."""
    kept: list[Event] = []
    upto = events[-1].seq
    for event in reversed(events):
        if event.seq > upto:
            continue
        if event.kind == "rewound":
            upto = event.payload["to"]
        else:
            kept.append(event)
    return kept[::-1]


def _pins_carried(state: State, events: list[Event]) -> list[Pin]:
    """Pins are promises, not history: those made or lifted after the point rewound to still count, where live."""
    if not any(event.kind == "rewound" for event in events):
        return state.pins
    pins = [pin for pin in state.pins if state.appended_at.get(pin.message_id) is None]
    for event in events:
        if event.kind == "pinned" and _pin(event.payload) not in pins:
            pins.append(_pin(event.payload))
        elif event.kind == "unpinned":
            pins = [pin for pin in pins if pin != _pin(event.payload)]
    return [pin for pin in pins if pin.message_id in state.live]


def _head(payload: Mapping[str, Any]) -> tuple[int, int, int]:
    template, system, tools = payload["head"]
    return template, system, tools


def _pin(payload: Mapping[str, Any]) -> Pin:
    return Pin(payload["message"], payload["path"], payload["start"], payload["end"])


# -- free text in decisions stands in rows of its own --------------------------------------------------------------


def with_refs(decision: Mapping[str, Any], put: Callable[[str], str]) -> dict[str, Any]:
    """A decision's JSON with every text that may quote the conversation replaced by {"t": hex digest}."""
    out = dict(decision)
    out["plan"] = [
        {key: {"t": put(value)} if key in _FREE_TEXT else value for key, value in action.items()}
        for action in decision["plan"]
    ]
    out["failures"] = [{**failure, "detail": {"t": put(failure["detail"])}} for failure in decision["failures"]]
    out["summaries"] = [{"t": put(text)} for text in decision["summaries"]]
    return out


def without_refs(payload: Mapping[str, Any], text_of: TextOf) -> dict[str, Any]:
    """The inverse of `with_refs`.

    Raises LogMissing where a text has been erased.
    """

    def get(value: Any) -> Any:
        return text_of(bytes.fromhex(value["t"])) if isinstance(value, dict) and "t" in value else value

    out = dict(payload)
    out["plan"] = [{key: get(value) for key, value in action.items()} for action in payload["plan"]]
    out["failures"] = [{**failure, "detail": get(failure["detail"])} for failure in payload.get("failures", ())]
    out["summaries"] = [get(item) for item in payload.get("summaries", ())]
    return out


def check_known(state: State, message_id: str) -> None:
    """Raises InvalidInput for an id the conversation does not have."""
    if message_id not in state.history:
        raise InvalidInput(f"conversation {state.conversation!r} has no message {message_id!r}")
