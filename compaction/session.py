"""One conversation inside its budget: append, measure, decide, log, apply.

Invariant: a message is durable once `append` returns, and a decision before its spans leave the context; a failure at
any point leaves the old state or the new one. A session knows no policy by name and no database.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compaction.asynchronous import Turnstile, in_thread
from compaction.budget import Budget, Limits, Window
from compaction.counting import Tally
from compaction.decide import Decision, Held, Recorder, decide, policy_id
from compaction.errors import CompactionCancelled, InvalidInput, LogConflict, PendingToolCalls
from compaction.events import Event, NewEvent, Text, seal
from compaction.fulfil import fulfil
from compaction.messages import JSON, Message, dumps, validate
from compaction.plan import Digest
from compaction.ports import Clock, Counter, Engine, Generation, Ids, Log, Policy, Rng, Summarizer, Summary, Usage
from compaction.prepared import Prepared, Reply, SessionUsage
from compaction.state import State, check_known, load, with_refs
from compaction.view import Entry, Pin, View

__all__ = ["Session", "Settings"]

RETRIES = 16
HOOKS = ("before_compaction", "after_compaction", "compaction_failed")


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


class Session:
    """A conversation that stays inside its budget. Made by `SessionManager.session`. Safe to use from many threads."""

    def __init__(self, conversation: str, settings: Settings, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self.id = conversation
        self._set = settings
        self._lock = threading.RLock()
        self._turn = Turnstile(conversation)
        self._hooks: dict[str, list[Callable[..., Any]]] = {name: [] for name in HOOKS}
        self._last_usage: Usage | None = None
        self._resumed = settings.log.seq(conversation) > 0
        self.state = load(settings.log, conversation) if self._resumed else State(conversation)
        self._set_tools(self.state.tools_text if tools is None else _tools_json(tools))
        if not self._resumed or self._settings_changed():
            self._commit(self._opened)

    def use_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """From now on requests carry these tool schemas; they are counted, and the change is logged."""
        text = _tools_json(tools)
        with self._lock:
            if text != self._tools_text:
                self._set_tools(text)
                self._commit(self._opened)

    def _set_tools(self, text: str | None) -> None:
        self._tools_text = text
        self._tally = Tally(self._set.counter, json.loads(text) if text else None)

    # -- the log ------------------------------------------------------------------------------------------------

    def _seal(self, body: str) -> Text:
        return seal(body, self._set.rng(16))

    def _commit(self, build: Callable[[], tuple[list[NewEvent], list[Text]]]) -> tuple[Event, ...]:
        """Write what `build` makes of the current state, then fold it. The loser of a race reads again and rebuilds."""
        attempt = 0
        while True:
            attempt += 1
            try:
                events, texts = build()
                written = self._set.log.commit(self.id, self.state.seq, events, texts) if events else ()
            except LogConflict:
                if attempt == RETRIES:
                    raise
                self.state = load(self._set.log, self.id)
                continue
            self._fold(written, texts)
            return written

    def _fold(self, written: Sequence[Event], texts: Sequence[Text]) -> None:
        bodies = {text.digest: text.body for text in texts}
        for event in written:
            self.state.apply(event, lambda digest: bodies[digest] if digest in bodies else self._set.log.text(digest))

    def _event(self, kind: Any, payload: Mapping[str, Any]) -> NewEvent:
        return NewEvent(kind, self._set.clock(), payload)

    def _settings_changed(self) -> bool:
        payload, _ = self._opened_payload()
        keys = ("policy", "counter", "budget", "window", "user_first", "kv_bytes_per_token")
        same = all(payload[key] == self.state.opened.get(key) for key in keys)
        return not same or self._tools_text != self.state.tools_text

    def _opened_payload(self, **extra: JSON) -> tuple[dict[str, Any], list[Text]]:
        engine, window = self._set.engine, self._set.window
        tools = self._seal(self._tools_text) if self._tools_text else None
        payload = {
            "policy": policy_id(self._set.policy).to_json(),
            "counter": self._set.counter.name,
            "additive": self._set.counter.additive,
            "budget": self._set.budget.to_json(),
            "window": {"tokens": window.tokens, "source": window.source} if window else None,
            "engine": engine.name if engine else None,
            "kv_bytes_per_token": engine.kv_bytes_per_token if engine else None,
            "user_first": engine.user_first if engine else False,
            "tools": tools.digest.hex() if tools else None,
            **extra,
        }
        return payload, [tools] if tools else []

    def _opened(self) -> tuple[list[NewEvent], list[Text]]:
        """The first event, or a later one where tools, counter, policy or budget changed: entries are counted again."""
        state = self.state
        leading = [entry.render(state.history) for entry in state.entries[: state.leading]]
        head = self._tally.head(leading)
        rest = state.entries[state.leading :]
        extra: dict[str, Any] = {"head": list(head), "total": sum(head)}
        if rest and self._set.counter.name == state.opened.get("counter"):
            extra["total"] = state.tokens - sum(state.head) + sum(head)
        elif rest:
            counts = [(entry.id, self._set.counter.message(entry.render(state.history))) for entry in rest]
            extra |= {"recounted": [list(pair) for pair in counts], "total": sum(head) + sum(n for _, n in counts)}
        if not self._set.counter.additive and state.entries:
            extra["total"] = self._tally.request([entry.render(state.history) for entry in state.entries])
        payload, texts = self._opened_payload(**extra)
        return [self._event("opened", payload)], texts

    # -- history ------------------------------------------------------------------------------------------------

    def append(self, message: Mapping[str, Any]) -> str:
        """Add one message; durable on return. Returns its id.

        Raises InvalidMessage, with nothing changed, where it is no message or cannot follow the ones before.
        """
        return self.extend([message])[0]

    def extend(self, messages: Sequence[Mapping[str, Any]]) -> list[str]:
        """Add messages in one transaction: all of them or none."""
        texts = [validate(m, index=None if len(messages) == 1 else i) for i, m in enumerate(messages)]
        with self._lock:
            if not texts:
                return []
            written = self._commit(lambda: self._appended(texts, []))
            return [event.payload["message"] for event in written if event.kind == "appended"]

    def _appended(self, texts: Sequence[str], more: Sequence[NewEvent]) -> tuple[list[NewEvent], list[Text]]:
        start = self.state.seq + 1
        messages = [Message(self._set.ids(self.id, start + i), text) for i, text in enumerate(texts)]
        sealed = [self._seal(text) for text in texts]
        payloads = self._tally.appended(self.state, messages)
        events = [
            self._event("appended", {"message": m.id, "text": t.digest.hex(), "role": m.role, **payload})
            for m, t, payload in zip(messages, sealed, payloads, strict=True)
        ]
        return [*events, *more], sealed

    def pin(self, message_id: str, start: int | None = None, end: int | None = None, path: str = "/content") -> None:
        """Keep a message, or code points [start, end) of its text, byte-identical in every view."""
        with self._lock:
            check_known(self.state, message_id)
            whole = start is None and end is None
            length = len(self.state.history[message_id].text)
            pin = Pin(message_id, "", 0, length) if whole else Pin(message_id, path, start or 0, end or length)
            self.state.check_pin(pin)
            if pin not in self.state.pins:
                self._commit(lambda: ([self._event("pinned", _range(pin))], []))

    def unpin(self, message_id: str) -> None:
        """Let go of all pins on a message."""
        with self._lock:
            check_known(self.state, message_id)
            pins = [pin for pin in self.state.pins if pin.message_id == message_id]
            if pins:
                self._commit(lambda: ([self._event("unpinned", _range(pin)) for pin in pins], []))

    def rewind(self, seq: int) -> None:
        """Go back to how the conversation stood after event `seq`; later messages stay in the log.

        Pins stay. Raises InvalidInput where there is no such event, and LogConflict where another writer was first.
        """
        with self._lock:
            if not 1 <= seq <= self.state.seq:
                raise InvalidInput(f"cannot rewind {self.id!r} to event {seq}: it has events 1 to {self.state.seq}")
            try:
                self._set.log.commit(self.id, self.state.seq, [self._event("rewound", {"to": seq})])
            finally:
                self.state = load(self._set.log, self.id)
            if self._settings_changed():
                self._commit(self._opened)

    def fork(self, conversation: str | None = None) -> Session:
        """A new conversation that shares the history so far; nothing is copied in the log."""
        with self._lock:
            name = conversation or f"{self.id}-fork-{self.state.seq}"
            if self._set.log.seq(name):
                raise InvalidInput(f"conversation {name!r} exists already: fork under another name")
            source = {"conversation": self.id, "seq": self.state.seq}
            payload, texts = self._opened_payload(
                forked_from=source, head=list(self.state.head), total=self.state.tokens
            )
            self._set.log.commit(name, 0, [self._event("opened", payload)], texts)
        return Session(name, self._set, self._tally.tools)

    # -- compaction ---------------------------------------------------------------------------------------------

    def on(self, event: str, function: Callable[..., Any]) -> None:
        """Call `function` around compactions: `before_compaction(session, trigger)` may return False to cancel,
        `after_compaction(session, decision)`, `compaction_failed(session, failures)`.
        """
        if event not in self._hooks:
            raise InvalidInput(f"unknown hook {event!r}: use one of {', '.join(HOOKS)}")
        self._hooks[event].append(function)

    def limits(self, max_new_tokens: int = 0) -> Limits:
        """The figures one request has to keep."""
        engine = self._set.engine
        per_token = engine.kv_bytes_per_token if engine else None
        return self._set.budget.limits(
            window=self._set.window, max_new_tokens=max_new_tokens, kv_bytes_per_token=per_token
        )

    def prepare(self, *, max_new_tokens: int = 0, trigger: str = "auto") -> Prepared:
        """The request to send now, compacted first where it must be.

        Raises PendingToolCalls where calls wait for results, and BudgetUnsatisfiable where nothing can fit; both with
        nothing changed.
        """
        with self._lock:
            if self.state.batch and self.state.batch.pending:
                raise PendingToolCalls(self.state.batch.pending)
            limits = self.limits(max_new_tokens)
            decision = None
            if trigger != "auto" or self.state.above_high(limits):
                decision = self._compact(limits, trigger)
            return Prepared.of(self.state, self._tally.tools, decision)

    def compact_now(self, *, max_new_tokens: int = 0) -> Decision | None:
        """Compact down to the low mark whatever the high mark says; None where the policy finds nothing to do."""
        return self.prepare(max_new_tokens=max_new_tokens, trigger="manual").decision

    def _compact(self, limits: Limits, trigger: str) -> Decision | None:
        if any(hook(self, trigger) is False for hook in self._hooks["before_compaction"]):
            if self.state.tokens > limits.room:
                raise CompactionCancelled(
                    f"a before_compaction hook cancelled, but {self.state.tokens:,} tokens do not fit {limits.room:,}"
                )
            return None
        outcome: Decision | Held | None = None

        def build() -> tuple[list[NewEvent], list[Text]]:
            nonlocal outcome
            recorder = Recorder(self._set.counter, self._tally.tools, self._summarize(limits))
            planned = self.state
            outcome = decide(planned.view(), limits, self._set.policy, recorder, trigger=trigger)
            if self.state is not planned:  # somebody appended while a summary was being written
                raise LogConflict(self.id, planned.seq, self.state.seq)
            return self._outcome_events(outcome, recorder)

        self._commit(build)
        if isinstance(outcome, Decision):
            for hook in self._hooks["after_compaction"]:
                hook(self, outcome)
            return outcome
        if isinstance(outcome, Held) and outcome.failures:
            for hook in self._hooks["compaction_failed"]:
                hook(self, outcome.failures)
        return None

    def _summarize(self, limits: Limits) -> Callable[[Digest, View], Summary] | None:
        summarizer = self._set.summarizer
        if summarizer is None:
            return None

        def ask(action: Digest, view: View) -> Summary:
            started = {"tokens": view.tokens, "summarizer": summarizer.name, "entries": list(action.entries)}
            self._commit(lambda: ([self._event("decision_started", started)], []))
            return fulfil(summarizer, action, view, limit=limits.limit, count=self._set.counter.text)

        return ask

    def _outcome_events(self, outcome: Decision | Held, recorder: Recorder) -> tuple[list[NewEvent], list[Text]]:
        notes: dict[str, Text] = {}

        def put(text: str) -> str:
            if text not in notes:
                notes[text] = self._seal(text)
            return notes[text].digest.hex()

        if isinstance(outcome, Held):
            if not outcome.failures:
                return [], []
            failures = [{**failure.to_json(), "detail": {"t": put(failure.detail)}} for failure in outcome.failures]
            failed = {"tokens": self.state.tokens, "failures": failures, "fulfilled": _fulfilled(recorder, put)}
            return [self._event("decision_failed", failed)], list(notes.values())
        payload = with_refs(outcome.to_json(), put)
        payload |= {"answers": recorder.answers, "fulfilled": _fulfilled(recorder, put)}
        return [self._event("decision_committed", payload)], list(notes.values())

    # -- generation ---------------------------------------------------------------------------------------------

    def generate(self, *, max_new_tokens: int = 128) -> Reply:
        """Compact where needed, generate a reply on the engine, append it. Returns it with its usage."""
        stream = self.stream(max_new_tokens=max_new_tokens)
        while True:
            try:
                next(stream)
            except StopIteration as stop:
                reply: Reply = stop.value
                return reply

    def stream(self, *, max_new_tokens: int = 128) -> Generator[str, None, Reply]:
        """As `generate`, piece by piece. Closing the iterator early keeps the partial reply as `interrupted` only."""
        with self._turn:
            generation, prepared = self._start(max_new_tokens)
            yield from self._pieces(generation)
            made = generation.result
            if made is None:
                raise InvalidInput("the engine ended its reply without a result")
            message = dumps({"role": "assistant", "content": made.text})
            usage, used = self._used(made.usage, prepared)
            with self._lock:
                written = self._commit(lambda: self._appended([message], used))
            return Reply(written[0].payload["message"], made.text, made.finish_reason, usage, prepared.decision)

    def probe(self, *, max_new_tokens: int = 32) -> Reply:
        """As `generate`, but the reply is taken out of the cache again and kept as a `probe` event only."""
        with self._turn:
            generation, prepared = self._start(max_new_tokens)
            for _ in self._pieces(generation):
                pass
            made = generation.result
            if made is None or self._set.engine is None:
                raise InvalidInput("the engine ended its reply without a result")
            self._set.engine.forget_reply(self.id)
            text = self._seal(made.text)
            probe = self._event("probe", {"text": text.digest.hex(), "finish_reason": made.finish_reason})
            usage, used = self._used(made.usage, prepared)
            with self._lock:
                self._commit(lambda: ([probe, *used], [text]))
            return Reply("", made.text, made.finish_reason, usage, prepared.decision)

    def _start(self, max_new_tokens: int) -> tuple[Generation, Prepared]:
        if self._set.engine is None:
            raise InvalidInput("this session has no engine: use prepare() and record(), or SessionManager(engine=…)")
        with self._lock:
            prepared = self.prepare(max_new_tokens=max_new_tokens)
            self.started(prepared, max_new_tokens)
        messages, tools = prepared.messages, prepared.tools
        return self._set.engine.generate(self.id, messages, tools, max_new_tokens=max_new_tokens), prepared

    def started(self, prepared: Prepared, max_new_tokens: int) -> None:
        """Write that a generation of this request begins; before its first token, so that a crash is visible."""
        payload = {"tokens": prepared.tokens, "max_new_tokens": max_new_tokens}
        with self._lock:
            self._commit(lambda: ([self._event("generation_started", payload)], []))

    def _pieces(self, generation: Generation) -> Iterator[str]:
        """The reply's pieces; whatever ends them early (close, Ctrl-C, an error) leaves an `interrupted` event."""
        pieces: list[str] = []
        try:
            for piece in generation:
                pieces.append(piece)
                yield piece
        except BaseException:
            generation.close()
            self.interrupt("".join(pieces))
            raise

    def _used(self, usage: Usage, prepared: Prepared) -> tuple[Usage, list[NewEvent]]:
        """The usage with why tokens were prefilled again, where the session knows better, and its events."""
        if prepared.decision is not None and usage.reused:
            usage = replace(usage, why="compaction")
        self._last_usage = usage
        events = [self._event("usage", usage.to_json())]
        if self._resumed and usage.reused == 0:
            events.append(self._event("reanchored", {"reason": "resumed", "tokens": usage.prefilled}))
        self._resumed = False
        return usage, events

    def interrupt(self, text: str) -> None:
        """Keep a reply that was cut off as an `interrupted` event; it is not appended."""
        sealed = self._seal(text)
        with self._lock:
            self._commit(lambda: ([self._event("interrupted", {"text": sealed.digest.hex()})], [sealed]))

    # -- a model of the caller's own ------------------------------------------------------------------------------

    def record(self, response: object) -> str:
        """Append a provider's reply (a chat-completions response, as object or mapping) and its reported usage.

        Returns the message's id. Raises InvalidInput where the response has no message.
        """
        message, usage = _reply_of(response)
        text = validate(message)
        with self._lock:
            events: list[NewEvent] = []
            if usage:
                events.append(self._event("usage", {**usage, "reported": True, "counted": self.state.tokens}))
                self._recalibrate(usage["prompt_tokens"])
            written = self._commit(lambda: self._appended([text], events))
            return str(written[0].payload["message"])

    def _recalibrate(self, reported: int) -> None:
        counter: Any = self._set.counter
        off = abs(reported - self.state.tokens)
        if counter.exact or not hasattr(counter, "calibrated") or off <= 0.05 * reported:
            return
        scaled = counter.calibrated(reported, self.state.tokens)
        self._set = _with_counter(self._set, scaled)
        self._set_tools(self._tools_text)
        self._commit(self._opened)

    # -- async twins ------------------------------------------------------------------------------------------------

    async def aprepare(self, *, max_new_tokens: int = 0, trigger: str = "auto") -> Prepared:
        """`prepare` in a worker thread."""
        return await asyncio.to_thread(self.prepare, max_new_tokens=max_new_tokens, trigger=trigger)

    async def agenerate(self, *, max_new_tokens: int = 128) -> Reply:
        """`generate` in a worker thread."""
        return await asyncio.to_thread(self.generate, max_new_tokens=max_new_tokens)

    async def astream(self, *, max_new_tokens: int = 128) -> AsyncIterator[str]:
        """`stream` in one worker thread; closing the iterator cancels the reply there."""
        async for piece in in_thread(lambda: self.stream(max_new_tokens=max_new_tokens)):
            yield piece

    @property
    def usage(self) -> SessionUsage:
        """Tokens and KV bytes now (bytes measured from the tensors), the budget, and the last turn's figures."""
        engine, last = self._set.engine, self._last_usage
        return SessionUsage(
            tokens=self.state.tokens,
            kv_bytes=engine.kv_bytes(self.id) if engine else None,
            budget=self._set.budget,
            ttft_ms=last.ttft_ms if last else None,
            tpot_ms=last.tpot_ms if last else None,
            prefilled=last.prefilled if last else None,
            reused=last.reused if last else None,
        )

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tool schemas each request carries, fresh copies."""
        return json.loads(self._tools_text) if self._tools_text else []

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The view's entries now."""
        return tuple(self.state.entries)


def _tools_json(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Raises InvalidInput where tool schemas are no JSON."""
    try:
        return dumps([dict(tool) for tool in tools]) if tools else None
    except (TypeError, ValueError) as exc:
        raise InvalidInput(f"tools must be a list of JSON tool schemas: {exc}") from exc


def _range(pin: Pin) -> dict[str, Any]:
    return {"message": pin.message_id, "path": pin.path, "start": pin.start, "end": pin.end}


def _fulfilled(recorder: Recorder, put: Callable[[str], str]) -> list[dict[str, Any]]:
    return [
        {"text": {"t": put(s.text)}, "finish_reason": s.finish_reason, "usage": s.usage.to_json() if s.usage else None}
        for s in recorder.fulfilled
    ]


def _with_counter(settings: Settings, counter: Counter) -> Settings:
    return replace(settings, counter=counter)


def _reply_of(response: object) -> tuple[Mapping[str, Any], dict[str, int] | None]:
    """The message and usage of a chat-completions response."""
    dump = getattr(response, "model_dump", None)
    data = dump(exclude_unset=True) if callable(dump) else response
    if not isinstance(data, Mapping):
        raise InvalidInput(f"record() takes a chat-completions response, not {type(response).__name__}")
    message = data if "role" in data else ((data.get("choices") or [{}])[0] or {}).get("message")
    if not isinstance(message, Mapping):
        raise InvalidInput("record(): the response has no choices[0].message")
    usage = data.get("usage") or {}
    if not isinstance(usage.get("prompt_tokens"), int):
        return message, None
    return message, {
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": int(usage.get("completion_tokens") or 0),
    }
