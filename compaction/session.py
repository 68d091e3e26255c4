"""One conversation inside its budget: append, measure, decide, log, apply.

Invariant: a message is durable once `append` returns, and a decision before its spans leave the context; a failure at
any point leaves the old state or the new one. A session knows no policy by name and no database.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from compaction.asynchronous import Turnstile, in_thread
from compaction.budget import Limits
from compaction.compacting import compact_once
from compaction.decide import Decision, Held
from compaction.errors import CompactionCancelled, EngineError, InvalidInput
from compaction.events import NewEvent
from compaction.ledger import Ledger, Settings
from compaction.messages import dumps, resolve, validate
from compaction.ports import Divergence, Engine, Generated, Generation, QuantizesKV, SplicingEngine, Usage
from compaction.prepared import Prepared, Reply, SessionUsage
from compaction.responses import message_of, usage_of
from compaction.state import State, check_known
from compaction.view import Entry, Pin

__all__ = ["Session"]

HOOKS = ("before_compaction", "after_compaction", "compaction_failed")
DIVERGENCE_TOKENS = 8
CALIBRATE_ABOVE = 0.05
"""An estimate that is off by more than this fraction of the reported prompt tokens is scaled."""


class Session:
    """A conversation that stays inside its budget. Made by `SessionManager.session`. Safe to use from many threads."""

    def __init__(self, conversation: str, settings: Settings, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self.id = conversation
        self._ledger = Ledger(conversation, settings, tools)
        self._turn = Turnstile(conversation)
        self._hooks: dict[str, list[Callable[..., Any]]] = {name: [] for name in HOOKS}
        self._last_usage: Usage | None = None
        self._reanchor = self._ledger.resumed
        self._applied: dict[str, Any] = {}

    @property
    def state(self) -> State:
        """The conversation as the log tells it."""
        return self._ledger.state

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tool schemas each request carries, fresh copies."""
        return self._ledger.tools

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The view's entries now."""
        return tuple(self.state.entries)

    def use_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """From now on requests carry these tool schemas: the change is counted and logged."""
        self._ledger.use_tools(tools)

    # -- history ------------------------------------------------------------------------------------------------

    def append(self, message: Mapping[str, Any]) -> str:
        """Add one message; durable on return. Returns its id.

        Raises InvalidMessage, with nothing changed, where it is no message or cannot follow the ones before.
        """
        return self.extend([message])[0]

    def extend(self, messages: Sequence[Mapping[str, Any]]) -> list[str]:
        """Add messages in one transaction: all of them or none. Returns their ids."""
        given: object = messages
        if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
            raise InvalidInput(f"messages are a list, not {type(given).__name__}")
        texts = [validate(m, index=None if len(messages) == 1 else i) for i, m in enumerate(messages)]
        return self._ledger.append(texts) if texts else []

    def pin(self, message_id: str, start: int | None = None, end: int | None = None, path: str = "/content") -> None:
        """Keep a message, or code points [start, end) of its text, byte-identical in every view.

        Raises InvalidMessage where that is not live any more.
        """
        with self._ledger.lock:
            check_known(self.state, message_id)
            text = self.state.history[message_id].text
            whole = start is None and end is None
            pin = Pin(message_id, "", 0, len(text))
            if not whole:
                end = len(self._text(message_id, path)) if end is None else end
                pin = Pin(message_id, path, start or 0, end)
            self.state.check_pin(pin)
            if pin not in self.state.pins:
                self._ledger.pin("pinned", [pin])

    def _text(self, message_id: str, path: str) -> str:
        try:
            found = resolve(self.state.history[message_id].data, path)
        except KeyError:
            found = None
        return found if isinstance(found, str) else ""

    def unpin(self, message_id: str) -> None:
        """Let go of all pins on a message."""
        with self._ledger.lock:
            check_known(self.state, message_id)
            self._ledger.pin("unpinned", [pin for pin in self.state.pins if pin.message_id == message_id])

    def rewind(self, seq: int) -> None:
        """Go back to how the conversation stood after event `seq`; later messages stay in the log, pins stay in force.

        Raises InvalidInput where there is no such event, and LogConflict where another writer was first.
        """
        with self._ledger.lock:
            if not isinstance(seq, int) or not 1 <= seq <= self.state.seq:
                raise InvalidInput(f"cannot rewind {self.id!r} to event {seq}: it has events 1 to {self.state.seq}")
            self._ledger.rewind(seq)

    def fork(self, conversation: str | None = None) -> Session:
        """A new conversation that shares the history so far; nothing is copied in the log.

        Raises InvalidInput where the name is taken.
        """
        with self._ledger.lock:
            name = conversation or f"{self.id}-fork-{self.state.seq}"
            self._ledger.fork(name)
            return Session(name, self._ledger.settings, self.tools)

    # -- compaction ---------------------------------------------------------------------------------------------

    def on(self, event: str, function: Callable[..., Any]) -> None:
        """Call `function` around compactions: `before_compaction(session, trigger)` may return False to cancel,
        `after_compaction(session, decision)`, `compaction_failed(session, failures)`.
        """
        if event not in self._hooks:
            raise InvalidInput(f"unknown hook {event!r}: use one of {', '.join(HOOKS)}")
        if not callable(function):
            raise InvalidInput(f"a hook is a function, not {function!r}")
        self._hooks[event].append(function)

    def limits(self, max_new_tokens: int = 0) -> Limits:
        """The figures one request has to keep."""
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
            raise InvalidInput(f"max_new_tokens must be a whole number of tokens, not {max_new_tokens!r}")
        settings, storage = self._ledger.settings, self.state.storage
        return settings.budget.limits(
            window=settings.window,
            max_new_tokens=max_new_tokens,
            kv_bytes_per_token=storage.per_token if storage else None,
            kv_bytes_fixed=storage.fixed if storage else 0,
        )

    def prepare(self, *, max_new_tokens: int = 0, trigger: str = "auto") -> Prepared:
        """The request to send now, compacted first where it must be.

        Raises PendingToolCalls where calls wait for results, and BudgetUnsatisfiable where nothing can fit; both with
        nothing changed.
        """
        with self._ledger.lock:
            self._ledger.check_answered()
            limits = self.limits(max_new_tokens)
            due = trigger != "auto" or self.state.above_high(limits)
            outcome = self._compact(limits, trigger) if due else None
            decision = outcome if isinstance(outcome, Decision) else None
            prepared = Prepared.of(self.state, self._ledger.tally.tools, decision)
        self._tell(outcome)
        return prepared

    def compact_now(self, *, max_new_tokens: int = 0) -> Decision | None:
        """Compact down to the low mark whatever the high mark says; None where the policy finds nothing to do."""
        return self.prepare(max_new_tokens=max_new_tokens, trigger="manual").decision

    def _compact(self, limits: Limits, trigger: str) -> Decision | Held | None:
        if any(hook(self, trigger) is False for hook in self._hooks["before_compaction"]):
            if self.state.tokens > limits.room:
                raise CompactionCancelled(
                    f"a before_compaction hook cancelled, but {self.state.tokens:,} tokens do not fit {limits.room:,}"
                )
            return None
        return compact_once(self._ledger, limits, trigger)

    def _tell(self, outcome: Decision | Held | None) -> None:
        """Call the hooks, once the request is made: what they append belongs to the next one."""
        if isinstance(outcome, Decision):
            for hook in self._hooks["after_compaction"]:
                hook(self, outcome)
        elif outcome is not None and outcome.failures:
            for hook in self._hooks["compaction_failed"]:
                hook(self, outcome.failures)

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
            made = _finished(generation)
            usage, events = self._used(made, prepared)
            ids = self._ledger.append([dumps({"role": "assistant", "content": made.text})], events)
            return Reply(ids[0], made.text, made.finish_reason, usage, prepared.decision)

    def probe(self, *, max_new_tokens: int = 32) -> Reply:
        """As `generate`, but the reply is taken out of the cache again and kept as a `probe` event only."""
        with self._turn:
            generation, prepared = self._start(max_new_tokens)
            for _ in self._pieces(generation):
                pass
            made = _finished(generation)
            usage, events = self._used(made, prepared)
            if self._ledger.settings.engine is not None:
                self._ledger.settings.engine.forget_reply(self.id)
            self._ledger.note_text("probe", made.text, events, finish_reason=made.finish_reason)
            return Reply("", made.text, made.finish_reason, usage, prepared.decision)

    def _start(self, max_new_tokens: int) -> tuple[Generation, Prepared]:
        engine = self._ledger.settings.engine
        if engine is None:
            raise InvalidInput("this session has no engine: use prepare() and record(), or SessionManager(engine=…)")
        with self._ledger.lock:
            prepared = self.prepare(max_new_tokens=max_new_tokens)
            self._store()
            self.started(prepared, max_new_tokens)
        try:
            return self._generation(engine, prepared, max_new_tokens), prepared
        except BaseException:
            self.interrupt("")
            raise

    def _store(self) -> None:
        """Have the engine keep the cache as the decisions say, before anything is fed; after a resume as well."""
        engine: object = self._ledger.settings.engine
        if isinstance(engine, QuantizesKV) and self.state.storage is not None:
            changed = engine.quantize(self.id, self.state.storage.name)
            if changed is not None:
                self._applied["quantize"] = changed.to_json()

    def _generation(self, engine: Engine, prepared: Prepared, max_new_tokens: int) -> Generation:
        messages, tools, splicing = prepared.messages, prepared.tools, self._ledger.settings.splicing
        if splicing is not None:
            return splicing.generate(self.id, messages, tools, max_new_tokens=max_new_tokens, apply="splice")
        return engine.generate(self.id, messages, tools, max_new_tokens=max_new_tokens)

    def started(self, prepared: Prepared, max_new_tokens: int) -> None:
        """Write that a generation of this request begins; before its first token, so that a crash is visible."""
        self._ledger.note("generation_started", {"tokens": prepared.tokens, "max_new_tokens": max_new_tokens})

    def interrupt(self, text: str) -> None:
        """Keep a reply that was cut off as an `interrupted` event; it is not appended."""
        self._ledger.note_text("interrupted", text)

    def _pieces(self, generation: Generation) -> Iterator[str]:
        """The reply's pieces; whatever ends them early (close, Ctrl-C, an error) leaves an `interrupted` event."""
        pieces: list[str] = []
        try:
            for piece in generation:
                pieces.append(piece)
                yield piece
        except BaseException:
            generation.close()
            self._give_up("".join(pieces))
            raise
        if generation.result is not None and generation.result.finish_reason == "cancelled":
            self.interrupt("".join(pieces))
            raise EngineError(f"the reply in {self.id!r} was cancelled: what came so far is kept as interrupted")

    def _give_up(self, text: str) -> None:
        """Keep what came as `interrupted`; where all had come, the cache holds it still: the next prompt has none."""
        self.interrupt(text)
        if self._ledger.settings.engine is not None:
            self._ledger.settings.engine.forget_reply(self.id)

    def _used(self, made: Generated, prepared: Prepared) -> tuple[Usage, list[NewEvent]]:
        """The usage with why tokens were prefilled again, where the session knows better, and its events."""
        usage = made.usage
        if prepared.decision is not None and prepared.decision.spans and usage.reused:
            usage = replace(usage, why="compaction")
        try:
            usage = self._with_applied(usage)
        except BaseException:  # Ctrl-C while a divergence is measured
            self._give_up(made.text)
            raise
        self._last_usage = usage
        events = [self._ledger.event("usage", usage.to_json())]
        if self._reanchor and usage.reused == 0:
            events.append(self._ledger.event("reanchored", {"reason": "resumed", "tokens": usage.prefilled}))
        elif again := (usage.applied or {}).get("reanchored"):
            events.append(self._ledger.event("reanchored", {"reason": "drift", "tokens": again}))
        self._reanchor = False
        return usage, events

    def _with_applied(self, usage: Usage) -> Usage:
        """The usage with what the session did to the cache, and, where this turn is drawn for it, the divergence."""
        more, self._applied = self._applied, {}
        if (usage.applied or {}).get("how") == "splice" and self._sampled():
            left = self.limits().limit - usage.prompt_tokens - usage.completion_tokens
            more["divergence"] = self._measured(max(1, min(DIVERGENCE_TOKENS, left)))
        return replace(usage, applied={**(usage.applied or {}), **more}) if more else usage

    def _measured(self, tokens: int) -> dict[str, Any]:
        try:
            return self.divergence(tokens).to_json()
        except EngineError as exc:  # no reply is lost to a figure about it
            return {"refused": str(exc)}

    def _sampled(self) -> bool:
        rate = self._ledger.settings.divergence_rate
        return rate > 0 and int.from_bytes(self._ledger.settings.rng(4), "big") < rate * 2**32

    # -- the live cache -------------------------------------------------------------------------------------------

    def divergence(self, tokens: int = DIVERGENCE_TOKENS) -> Divergence:
        """How far the live cache is from a fresh prefill of its ids, over the next `tokens` tokens.

        Of a quantized cache, over the one token behind the last prompt. Raises InvalidInput where nothing is spliced or
        quantized here, EngineError where the engine holds nothing.
        """
        engine: object = self._ledger.settings.engine
        if self.state.storage is not None and self.state.storage.name and isinstance(engine, SplicingEngine):
            return engine.divergence(self.id, tokens)
        return self._splicing().divergence(self.id, tokens)

    def purge(self) -> int:
        """Compute afresh what carries traces of evicted text, so that the cache equals a fresh prefill; logged.

        Returns how many tokens were fed. Raises InvalidInput where nothing is spliced here.
        """
        splicing = self._splicing()
        with self._turn:
            tokens = splicing.purge(self.id)
            if tokens:
                self._ledger.note("reanchored", {"reason": "purged", "tokens": tokens})
            return tokens

    def _splicing(self) -> SplicingEngine:
        splicing = self._ledger.settings.splicing
        if splicing is None:
            raise InvalidInput("nothing is spliced here: SessionManager(engine=…, apply='splice') does")
        return splicing

    # -- a model of the caller's own ------------------------------------------------------------------------------

    def record(self, response: object) -> str:
        """Append a provider's reply (a chat-completions response, as object or mapping) and its reported usage.

        Returns the message's id. Raises InvalidInput where the response has no message.
        """
        text, usage = validate(message_of(response)), usage_of(response)
        with self._ledger.lock:
            events: list[NewEvent] = []
            if usage:
                reported = {**usage, "reported": True, "counted": self.state.tokens}
                events.append(self._ledger.event("usage", reported))
                self._recalibrate(usage["prompt_tokens"])
            return self._ledger.append([text], events)[0]

    def _recalibrate(self, reported: int) -> None:
        counter: Any = self._ledger.settings.counter
        off = abs(reported - self.state.tokens)
        if reported > 0 and not counter.exact and hasattr(counter, "calibrated") and off > CALIBRATE_ABOVE * reported:
            self._ledger.use_counter(counter.calibrated(reported, self.state.tokens))

    # -- async twins ------------------------------------------------------------------------------------------------

    async def aprepare(self, *, max_new_tokens: int = 0, trigger: str = "auto") -> Prepared:
        """`prepare` in a worker thread."""
        return await asyncio.to_thread(self.prepare, max_new_tokens=max_new_tokens, trigger=trigger)

    async def agenerate(self, *, max_new_tokens: int = 128) -> Reply:
        """`generate` in a worker thread."""
        made: list[Reply] = []

        def run() -> Iterator[str]:
            made.append((yield from self.stream(max_new_tokens=max_new_tokens)))

        async for _ in in_thread(run):
            pass
        return made[0]

    async def astream(self, *, max_new_tokens: int = 128) -> AsyncIterator[str]:
        """`stream` in one worker thread; closing the iterator cancels the reply there."""
        async with aclosing(in_thread(lambda: self.stream(max_new_tokens=max_new_tokens))) as pieces:
            async for piece in pieces:
                yield piece

    @property
    def usage(self) -> SessionUsage:
        """Tokens and KV bytes now (bytes measured from the tensors), the budget, and the last turn's figures."""
        engine, last = self._ledger.settings.engine, self._last_usage
        return SessionUsage(
            tokens=self.state.tokens,
            kv_bytes=engine.kv_bytes(self.id) if engine else None,
            budget=self._ledger.settings.budget,
            ttft_ms=last.ttft_ms if last else None,
            tpot_ms=last.tpot_ms if last else None,
            prefilled=last.prefilled if last else None,
            reused=last.reused if last else None,
        )


def _finished(generation: Generation) -> Generated:
    if generation.result is None:
        raise EngineError("the engine ended its reply without a result")
    return generation.result
