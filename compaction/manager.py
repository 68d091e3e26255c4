"""Many conversations, one engine, one log: where the parts are put together.

Invariant: the only core module that knows a default policy and the in-memory log.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from compaction.budget import Budget, Window
from compaction.decide import Decision
from compaction.errors import EngineError, InvalidBudget, InvalidInput, InvalidPolicy
from compaction.fulfil import CallableSummarizer, EngineSummarizer
from compaction.kv.residency.pool import Pool, PoolView
from compaction.ledger import Settings
from compaction.middleware import Wrapper
from compaction.policies import default_policy
from compaction.ports import (
    Apply,
    Clock,
    Counter,
    Engine,
    Ids,
    Log,
    Policy,
    QuantizesKV,
    Rng,
    SplicingEngine,
    Summarizer,
    storages_of,
)
from compaction.session import Session
from compaction.store import MemoryLog
from compaction.tokens import default_counter

__all__ = ["Compacted", "SessionManager", "compact", "message_id", "utc_now"]


_NAME = re.compile("[^\\x00\\ud800-\\udfff]+")


def utc_now() -> str:
    """Now, UTC, ISO 8601 with microseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def message_id(conversation: str, seq: int) -> str:
    """16 hex digits, a function of the conversation and the event that appends the message."""
    return hashlib.sha256(f"{conversation}\x00{seq}".encode("utf-8", "surrogatepass")).hexdigest()[:16]


class SessionManager:
    """Makes and keeps sessions that share an engine, a policy, a budget and a log.

    Args:
        engine: holds the model and the live KV caches; None where the model is the caller's own.
        policy: what to discard; None: `default_policy()`.
        budget: what each conversation may hold.
        log: where events go; None: an in-memory log under the same contract.
        counter: None: the engine's, else tiktoken where its vocabulary is at hand, else a labelled estimate.
        window: tokens the model can hold; None: what the engine says.
        summarizer: named callable for policies that summarise; None: the policy's own, else the engine.
        apply: how a decision reaches the engine's live cache: "exact" prefills what follows the first change, "splice"
            evicts and inserts in place (docs/splice.md), and falls back to exact where that cannot be done.
        divergence_rate: the fraction of spliced turns, drawn by `rng`, whose divergence from exact is measured and
            logged; each costs a prefill and a second cache for the moment.
        pool: bytes that the caches of all conversations may hold together, "2GiB" on the device or a `Pool` of tiers
            (docs/residency.md); whose turn it is not may then be parked. It is the engine's: one for all its managers.
        clock, ids, rng: injected for determinism.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        policy: Policy | None = None,
        budget: Budget | None = None,
        log: Log | None = None,
        counter: Counter | None = None,
        *,
        window: int | None = None,
        summarizer: Summarizer | None = None,
        apply: Apply = "exact",
        divergence_rate: float = 0.0,
        pool: Pool | int | str | None = None,
        clock: Clock = utc_now,
        ids: Ids = message_id,
        rng: Rng = secrets.token_bytes,
    ) -> None:
        if budget is None:
            raise InvalidBudget("a manager needs budget=Budget(tokens=…) or Budget(kv_bytes=…)")
        policy = policy if policy is not None else default_policy()
        _check_parts(engine, policy, budget, log, counter)
        _check_apply(apply, engine, divergence_rate)
        _check_storages(policy, engine)
        if budget.kv_bytes is not None and not (engine and engine.kv_bytes_per_token):
            raise InvalidBudget(
                "kv_bytes needs an engine that knows the bytes of a token: pass engine=…, or use tokens="
            )
        stated = Window(window, "user") if window else None
        self.settings = Settings(
            log=log if log is not None else MemoryLog(),
            policy=policy,
            budget=budget,
            counter=counter or (engine.counter if engine else default_counter()),
            clock=clock,
            ids=ids,
            rng=rng,
            engine=engine,
            window=stated or (engine.window if engine else None),
            summarizer=_summarizer(policy, engine, summarizer),
            apply=apply,
            divergence_rate=divergence_rate,
        )
        self._pool = _pooled(engine, Pool.of(pool)) if pool is not None else None
        self._sessions: dict[str, Session] = {}
        self._lock = threading.RLock()

    @property
    def log(self) -> Log:
        """The log all sessions write to."""
        return self.settings.log

    @property
    def pool(self) -> PoolView | None:
        """The pool at work: figures, where a conversation's cache is, pins. None where none was given."""
        return self._pool

    @property
    def conversations(self) -> tuple[str, ...]:
        """Conversations that have a session here now."""
        with self._lock:
            return tuple(self._sessions)

    def session(self, conversation: str, tools: Sequence[Mapping[str, Any]] | None = None) -> Session:
        """The session of that conversation; resumed from the log if the log knows it. Tools are counted."""
        if not isinstance(conversation, str) or not conversation or not _NAME.fullmatch(conversation):
            raise InvalidInput(f"a conversation needs a name without NUL and lone surrogates, not {conversation!r}")
        with self._lock:
            known = self._sessions.get(conversation)
            if known is None:
                known = self._sessions[conversation] = Session(conversation, self.settings, tools)
            elif tools is not None:
                known.use_tools(tools)
            return known

    def release(self, conversation: str) -> None:
        """Forget the session here and free its KV cache; the log keeps everything."""
        with self._lock:
            self._sessions.pop(conversation, None)
            if self.settings.engine is not None:
                self.settings.engine.release(conversation)

    def wrap(self, conversation: Callable[..., str] | str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        """A decorator that puts any `call_model(messages, **kw)` behind sessions: sync, async or streaming.

        `conversation` names the conversation of a call: a function of (messages, **kw), or one name for all calls.
        """
        return Wrapper(self, conversation, **options)


def _check_parts(
    engine: Engine | None, policy: Policy, budget: Budget, log: Log | None, counter: Counter | None
) -> None:
    """Raises where a part is of the wrong kind: here, and not deep inside a later call."""
    if engine is not None and not callable(getattr(engine, "generate", None)):
        raise InvalidInput(f"engine is an engine, for example TransformersEngine('smollm2'), not {engine!r}")
    if not isinstance(budget, Budget):
        raise InvalidBudget(f"budget is a Budget, for example Budget(tokens=4096), not {budget!r}")
    if isinstance(policy, type) or not callable(getattr(policy, "plan", None)):
        raise InvalidPolicy(f"policy is an object with plan(view, target), for example Truncate(), not {policy!r}")
    if log is not None and not isinstance(log, Log):
        raise InvalidInput(f"log is a log, for example AuditLog('audit.db'), not {log!r}")
    if counter is not None and not callable(getattr(counter, "request", None)):
        raise InvalidInput(f"counter is a counter, for example TiktokenCounter(), not {counter!r}")


def _pooled(engine: object, pool: Pool) -> PoolView:
    """Raises InvalidInput where there are no caches that could be parked."""
    use: Callable[[Pool], PoolView] | None = getattr(engine, "use_pool", None)
    if use is None:
        raise InvalidInput("pool= needs an engine that holds live caches: pass engine=TransformersEngine(…)")
    return use(pool)


def _check_storages(policy: Policy, engine: object) -> None:
    """Raises InvalidPolicy for a storage whose name means nothing to the engine; one it cannot offer is no error."""
    if not isinstance(engine, QuantizesKV):
        return
    for name in sorted(storages_of(policy)):
        try:
            engine.storage(name)
        except InvalidInput as exc:
            raise InvalidPolicy(f"policy {policy.name!r}: {exc}") from exc
        except EngineError:
            continue


def _check_apply(apply: str, engine: Engine | None, divergence_rate: float) -> None:
    """Raises InvalidInput where caches cannot be edited as asked for."""
    if apply not in ("exact", "splice"):
        raise InvalidInput(f"apply is 'exact' or 'splice', not {apply!r}")
    if apply == "splice" and not isinstance(engine, SplicingEngine):
        raise InvalidInput("apply='splice' needs an engine that holds live caches: pass engine=TransformersEngine(…)")
    number = isinstance(divergence_rate, (int, float)) and not isinstance(divergence_rate, bool)
    if not number or not 0 <= divergence_rate <= 1:
        raise InvalidInput(f"divergence_rate is {divergence_rate!r}: give a fraction of turns, 0 to 1")
    if divergence_rate and apply == "exact":
        raise InvalidInput("divergence_rate measures spliced turns: give apply='splice' too, or leave it out")


def _summarizer(policy: Policy, engine: Engine | None, given: Summarizer | None) -> Summarizer | None:
    """Who writes summaries: who was given, else the policy's own callable, else the engine.

    Raises InvalidPolicy where the policy summarises and there is nobody to do it.
    """
    function: Any = given or getattr(policy, "summarizer_fn", None)
    if function is None:
        if "summarizer" in getattr(policy, "needs", ()) and engine is None:
            raise InvalidPolicy(f"policy {policy.name!r} summarises: pass engine=, or summarizer= a named callable")
        named = getattr(policy, "summarizer", "engine")
        if named != "engine":
            raise InvalidPolicy(f"policy {policy.name!r} names the summarizer {named!r}: pass it as summarizer=")
        return EngineSummarizer(engine) if engine is not None else None
    if hasattr(function, "name"):
        summarizer: Summarizer = function
        return summarizer
    return CallableSummarizer(getattr(function, "__name__", type(function).__name__), function)


@dataclass(frozen=True, slots=True)
class Compacted:
    """`messages` that fit and their `tokens`; `decision` (None: nothing was done) holds every span with its text."""

    messages: list[dict[str, Any]]
    tokens: int
    decision: Decision | None


def compact(
    messages: Sequence[Mapping[str, Any]],
    *,
    budget: Budget,
    tools: Sequence[Mapping[str, Any]] | None = None,
    counter: Counter | None = None,
    policy: Policy | None = None,
    window: int | None = None,
    summarizer: Summarizer | None = None,
) -> Compacted:
    """Compact a list of messages once, without keeping anything: the caller is the log. The list is not changed.

    Raises InvalidMessage, PendingToolCalls and BudgetUnsatisfiable as a session does.
    """
    manager = SessionManager(policy=policy, budget=budget, counter=counter, window=window, summarizer=summarizer)
    session = manager.session("compact", tools)
    session.extend(messages)
    prepared = session.prepare()
    return Compacted(prepared.messages, prepared.tokens, prepared.decision)
