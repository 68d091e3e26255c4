"""One pure function that decides what leaves a view: target, ladder of plans, checks.

Invariant: equal views, limits, policies and answers give equal decisions, whatever the machine. Session and replay both
call `decide`; the only effects are those of the answers object it is given. Nothing here knows a log or an engine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from compaction.budget import KVStorage, Limits, Target
from compaction.core_clamp import CoreClamp, clearable
from compaction.errors import BudgetUnsatisfiable, CompactionError, InvalidPlan, ScoresUnavailable
from compaction.messages import Message, resolve
from compaction.plan import Digest, Plan
from compaction.ports import Counter, Policy, Summary, planned, storages_of
from compaction.view import Answers, Applied, Discard, Entry, Failure, Floor, Pin, View

__all__ = ["Decision", "Held", "Oracle", "PolicyId", "Recorder", "Scores", "decide", "floor_minimum", "policy_id"]

SCORE_DIGITS = 4
"""Significant digits of a score: ranking must not hang on the order in which a machine adds."""
_NAMES = {"tokens": "tokens", "kv_bytes": "KV bytes"}
MIN_GAIN = 0.05
"""Between high water and room a plan must free at least this fraction of room - floor."""


class Oracle(Answers, Protocol):
    """Answers, and the one effect a plan may need: a summary of entries."""

    def digest(self, action: Digest, view: View) -> Summary:
        """The summary of the action's entries; a failed one says so in `finish_reason`."""


@dataclass(frozen=True, slots=True)
class PolicyId:
    """Which policy planned: enough to make it again."""

    name: str
    version: int
    params: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The identity as plain JSON values."""
        return {"name": self.name, "version": self.version, "params": dict(self.params)}


def policy_id(policy: Policy) -> PolicyId:
    """The identity of a policy."""
    return PolicyId(policy.name, policy.version, policy.params)


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan with its inputs and its outcome. `rung` 1 and 2: the policy, 3: the core's own clamp."""

    trigger: str
    policy: PolicyId
    limits: Limits
    floor: Floor
    target: Target
    rung: int
    failures: tuple[Failure, ...]
    plan: Plan
    summaries: tuple[str, ...]
    applied: Applied
    tokens_before: int
    entries_before: int
    reusable_tokens: int
    storage: KVStorage | None

    @property
    def spans(self) -> tuple[Discard, ...]:
        """What leaves the view, each span with its text."""
        return self.applied.discards

    @property
    def tokens_after(self) -> int:
        """Tokens of the request once the plan is applied."""
        return self.applied.tokens

    def to_json(self) -> dict[str, Any]:
        """The decision as plain JSON values, in a fixed order; what replay compares byte for byte."""
        return {
            "trigger": self.trigger,
            "policy": self.policy.to_json(),
            "limits": self.limits.to_json(),
            "floor": self.floor.to_json(),
            "target": self.target.to_json(),
            "rung": self.rung,
            "failures": [failure.to_json() for failure in self.failures],
            "plan": self.plan.to_json(),
            "summaries": list(self.summaries),
            "spans": [
                [d.span.message_id, d.span.path, d.span.start, d.span.end, d.action, d.tokens]
                for d in self.applied.discards
            ],
            "changed": [list(pair) for pair in self.applied.changed],
            "before": {"entries": self.entries_before, "tokens": self.tokens_before, **self._stored_before()},
            "after": {
                "entries": len(self.applied.entries),
                "tokens": self.applied.tokens,
                "reusable_tokens": self.reusable_tokens,
                "reusable_kv_bytes": self.reusable_tokens * self.storage.per_token if self.storage else None,
                "low_mark_missed": not self.applied.within(self.target),
                **self._stored_after(),
            },
        }

    def _stored_before(self) -> dict[str, Any]:
        """Bytes, where the decision is about bytes."""
        if self.storage is None or not self.in_bytes:
            return {}
        return {"kv_bytes": self.storage.bytes(self.tokens_before), "storage": self.storage.name}

    def _stored_after(self) -> dict[str, Any]:
        """The same, with what a token costs then: reading the log back needs no geometry."""
        storage = self.applied.storage
        if storage is None or not self.in_bytes:
            return {}
        return {
            "kv_bytes": self.applied.kv_bytes,
            "storage": storage.name,
            "kv_bytes_per_token": storage.per_token,
            "kv_bytes_fixed": storage.fixed,
        }

    @property
    def in_bytes(self) -> bool:
        """Whether it was judged by bytes of KV cache, or changed how they are kept."""
        return self.target.unit == "kv_bytes" or self.plan.quantizes


@dataclass(frozen=True, slots=True)
class Held:
    """No plan was taken, and none was needed to fit. `failures` say why; empty: the policy planned nothing."""

    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """What an engine said the entries are worth, rounded, in the order of the view; `error` where it could not.

    None: of this entry it could not tell.
    """

    kind: str
    values: tuple[float | None, ...]
    error: str | None = None

    def by_entry(self, entries: Sequence[Entry]) -> Mapping[str, float]:
        """The figures by entry id. Raises ScoresUnavailable where there are none."""
        if self.error is not None:
            raise ScoresUnavailable(self.kind, self.error)
        pairs = zip(entries, self.values, strict=True)
        return {entry.id: value for entry, value in pairs if value is not None}


@dataclass
class Recorder:
    """A live counter, summariser and engine whose answers are written down in the order they were asked.

    `score(kind)` gives one figure for each entry of the view that is decided on.
    """

    counter: Counter
    tools: Sequence[Mapping[str, Any]] | None
    summarize: Any = None
    entries: Sequence[Entry] = ()
    score: Callable[[str], Sequence[float | None]] | None = None
    scored: dict[str, Scores] = field(default_factory=dict)
    answers: list[int] = field(default_factory=list)
    fulfilled: list[Summary] = field(default_factory=list)

    def _note(self, tokens: int) -> int:
        self.answers.append(tokens)
        return tokens

    def message(self, message: Mapping[str, Any]) -> int:
        """Tokens one message adds."""
        return self._note(self.counter.message(message))

    def request(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Tokens of a whole request."""
        return self._note(self.counter.request(messages, self.tools))

    def text(self, text: str) -> int:
        """Tokens of bare text."""
        return self._note(self.counter.text(text))

    def scores(self, kind: str) -> Mapping[str, float]:
        """What the entries are worth; measured once, rounded to what another machine would measure too."""
        if kind not in self.scored:
            self.scored[kind] = self._measured(kind)
        return self.scored[kind].by_entry(self.entries)

    def _measured(self, kind: str) -> Scores:
        if self.score is None:
            return Scores(kind, (), "there is no engine here that scores")
        try:
            values = tuple(None if value is None else _rounded(value) for value in self.score(kind))
        except Exception as exc:  # noqa: BLE001  a model may fail in any way: it is recorded, the next rung plans
            return Scores(kind, (), f"{type(exc).__name__}: {_said(exc)}")
        if len(values) != len(self.entries) or not all(value is None or math.isfinite(value) for value in values):
            return Scores(
                kind, (), f"the engine gave {len(values)} figures for {len(self.entries)} entries, or no numbers"
            )
        return Scores(kind, values)

    def digest(self, action: Digest, view: View) -> Summary:
        """Ask the summariser; its answer is recorded whatever it is."""
        if self.summarize is None:
            summary = Summary("no summarizer is configured", "error")
        else:
            summary = self.summarize(action, view)
        self.fulfilled.append(summary)
        return summary


def decide(
    view: View,
    limits: Limits,
    policy: Policy,
    answers: Oracle,
    *,
    trigger: str = "auto",
    fallback: Policy | None = None,
) -> Decision | Held:
    """Decide what leaves the view.

    Raises BudgetUnsatisfiable, before any summary is asked for, if and only if the floor at its minimum exceeds room.
    """
    view = replace(view, answers=answers, slack=limits.reserve, clamp_user=limits.clamp_user)
    target = _target(view, limits, trigger)
    over = not view.reaches(target, "must")
    ladder = [policy, policy]
    if over:
        narrower = _check_floor(view, target, policy)
        ladder.append(fallback or CoreClamp(narrower))
    failures: list[Failure] = []
    tried: list[Plan] = []
    for rung, planner in enumerate(ladder, start=1):
        plan = _plan(planner, view.with_failures(failures), target, rung, failures)
        if plan is None or (plan in tried and rung < 3):
            continue
        tried.append(plan)
        if not plan.actions and not over:
            break
        taken = _try(view, plan, target, limits, rung, failures, answers)
        if taken is not None:
            summaries, applied = taken
            first = applied.first_changed
            return Decision(
                trigger=trigger,
                policy=policy_id(policy),
                limits=limits,
                floor=view.floor,
                target=target,
                rung=rung,
                failures=tuple(failures),
                plan=plan,
                summaries=summaries,
                applied=applied,
                tokens_before=view.tokens,
                entries_before=len(view.entries),
                reusable_tokens=view.head + sum(e.tokens for e in view.entries[view.leading : first]),
                storage=view.storage,
            )
    if over:
        raise InvalidPlan(
            f"no plan fits {target.must:,} {_NAMES[target.unit]}: "
            + "; ".join(f"{f.code}: {f.detail}" for f in failures)
        )
    return Held(tuple(failures))


def _target(view: View, limits: Limits, trigger: str) -> Target:
    """Down to the low mark, in bytes where they are what limits: figures of the cache as it is kept now.

    After a provider's "too long" the window is smaller than stated: low of what there is, and in tokens.
    """
    floor, low = view.floor.total, limits.low_mark(view.floor.total)
    if trigger != "overflow":
        if limits.kv_bytes is None or view.storage is None:
            return Target(must=limits.room, want=low)
        cap = None if limits.cap is None else limits.cap - limits.reserve
        return Target(must=view.storage.bytes(limits.room), want=view.storage.bytes(low), unit="kv_bytes", cap=cap)
    must = min(limits.room, view.tokens - 1)
    return Target(must=must, want=min(low, must, floor + int(limits.low * max(0, view.tokens - floor))))


def floor_minimum(view: View) -> int:
    """Tokens of the request with all that may go gone, and each clearable text of what stays replaced by the marker."""
    kept = [entry for entry in view.entries if entry.id in view.keep]
    cleared = [view_entry for view_entry in (clearable(view, entry) for entry in kept) if view_entry]
    if view.additive:
        saved = {entry.id: view.by_id(entry.id).tokens - entry.tokens for entry in cleared}
        return view.floor.total - sum(tokens for tokens in saved.values() if tokens > 0)
    small = {entry.id: entry for entry in cleared}
    return view.ask_request([small.get(entry.id, entry) for entry in kept])


def _check_floor(view: View, target: Target, policy: Policy) -> str | None:
    """The storage without which the floor does not fit; None where it fits as the cache is kept.

    Raises BudgetUnsatisfiable where it fits in no storage the policy may choose.
    """
    room = target.in_tokens(view.storage).must
    if view.additive and view.floor.total <= room:
        return None
    minimum = floor_minimum(view)
    if minimum <= room:
        return None
    narrowest = _narrowest(view, policy)
    most = target.in_tokens(narrowest).must if narrowest else room
    if narrowest is None or minimum > most:
        raise BudgetUnsatisfiable(minimum, max(room, most), view.floor.to_json())
    return narrowest.name


def _narrowest(view: View, policy: Policy) -> KVStorage | None:
    """The narrowest storage the policy may turn the cache into; None where there is none."""
    if view.storage is None:
        return None
    names = storages_of(policy)
    found = [s for name, s in view.storages.items() if name in names and s.per_token < view.storage.per_token]
    return min(found, key=lambda storage: (storage.per_token, storage.name), default=None)


def _plan(planner: Policy, view: View, target: Target, rung: int, failures: list[Failure]) -> Plan | None:
    try:
        return _well_formed(planned(planner, view, target))
    except InvalidPlan as exc:
        failures.append(Failure(rung, "illegal", str(exc)))
    except ScoresUnavailable as exc:
        failures.append(Failure(rung, "no_scores", str(exc)))
    except Exception as exc:  # noqa: BLE001  a third party's policy may raise anything; the decision says what
        failures.append(Failure(rung, "policy_error", f"{type(exc).__name__}: {_said(exc)}"))
    return None


def _well_formed(plan: object) -> Plan:
    """The plan with its types checked, and what a policy left unfinished (a generator of ids) taken once.

    Raises InvalidPlan.
    """
    if not isinstance(plan, Plan):
        raise InvalidPlan(f"a policy returns a Plan, not {type(plan).__name__}")
    try:
        return Plan.from_json(plan.to_json())
    except (AttributeError, TypeError) as exc:
        raise InvalidPlan(f"a plan holds actions: {exc}") from exc


def _rounded(value: float) -> float:
    return float(f"{value:.{SCORE_DIGITS - 1}e}")


def _said(exc: Exception) -> str:
    try:
        return str(exc)
    except Exception:  # noqa: BLE001  an error that cannot even say what it is must not become one of ours
        return "(no words)"


def _try(
    view: View,
    plan: Plan,
    target: Target,
    limits: Limits,
    rung: int,
    failures: list[Failure],
    answers: Oracle,
) -> tuple[tuple[str, ...], Applied] | None:
    """The plan applied, its summaries written, or None with the reason added to the failures."""
    texts: list[str] = []
    try:
        draft = view.after(plan)
        problem = _check(view, draft, target, limits, last=rung == 3)
        for action in plan.digests if problem is None else ():
            summary = answers.digest(action, view)
            if code := _unusable(summary):
                problem = (
                    f"summary_{code}",
                    summary.text if code == "error" else f"finish reason {summary.finish_reason}",
                )
                break
            texts.append(summary.text.strip())
        if problem is None and plan.digests:
            allowed, draft = dict(draft.changed), view.apply(plan, texts)
            problem = _oversized(allowed, draft) or _check(view, draft, target, limits, last=rung == 3)
    except InvalidPlan as exc:
        failures.append(Failure(rung, "illegal", str(exc)))
        return None
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as exc:  # an action with values of other types
        if isinstance(exc, CompactionError):
            raise
        failures.append(Failure(rung, "illegal", f"{type(exc).__name__}: {exc}"))
        return None
    if problem is not None:
        failures.append(Failure(rung, *problem))
        return None
    return tuple(texts), draft


def _unusable(summary: Summary) -> str | None:
    if summary.finish_reason == "error":
        return "error"
    if not summary.text.strip():
        return "empty"
    if summary.finish_reason == "length":
        return "unfinished"
    return None if summary.finish_reason == "stop" else "refused"


def _oversized(allowed: Mapping[str, int], applied: Applied) -> tuple[str, str] | None:
    for entry_id, tokens in applied.changed:
        if tokens > allowed[entry_id]:
            return "summary_oversized", f"{tokens} tokens where {allowed[entry_id]} were allowed"
    return None


def _check(view: View, applied: Applied, target: Target, limits: Limits, *, last: bool) -> tuple[str, str] | None:
    """The first thing wrong with the outcome, as (code, detail)."""
    unit, free = _NAMES[target.unit], limits.room - view.floor.total
    before, after = view.tokens, applied.tokens
    if target.unit == "kv_bytes" and view.storage is not None:
        before, after, free = view.kv_bytes or 0, applied.kv_bytes or 0, free * view.storage.per_token
    if after >= before:
        return "not_smaller", f"{before} {unit} before, {after} after"
    over = not view.reaches(target, "must")
    if over and not applied.within(target, "must"):
        beside = "" if target.cap is None else f", and {applied.tokens} tokens where {target.cap} do"
        return "does_not_fit", f"{after} {unit} where {target.must} fit{beside}"
    if not over and before - after < MIN_GAIN * free:
        return "too_little", f"frees {before - after} of {free} {unit}"
    if problem := _illegal(view, applied, last=last):
        return "illegal", problem
    for pin in view.pins:
        if not _intact(pin, view, applied.entries):
            return "pin_touched", f"pinned range of message {pin.message_id!r} is not byte-identical"
    return None


def _illegal(view: View, applied: Applied, *, last: bool) -> str | None:
    live = {entry.id for entry in applied.entries}
    for unit in view.units:
        if unit.end - unit.start > 1:
            there = sum(entry.id in live for entry in view.entries[unit.start : unit.end])
            if there not in (0, unit.end - unit.start):
                return f"the batch of {view.entries[unit.start].id!r} is cut in two"
    if view.user_first and len(applied.entries) > view.leading and len(view.entries) > view.leading:
        first, was = applied.entries[view.leading], view.entries[view.leading]
        if was.role == "user" and first.role != "user" and not (last and first.id in view.keep):
            return f"the template wants a user message first, not {first.role!r}"
    return None


def _intact(pin: Pin, view: View, entries: Sequence[Entry]) -> bool:
    """Whether the pinned range reads, in the rendered entry, exactly as in the original: compared by hash."""
    entry = next((e for e in entries if e.id == pin.message_id), None)
    message: Message = view.messages[pin.message_id]
    if entry is None:
        return False
    if pin.path == "":
        return not entry.edits
    edits = [e for e in entry.edits if e.path == pin.path]
    if any(e.start < pin.end and pin.start < e.end for e in edits):
        return False
    shift = sum(len(e.text) - (e.end - e.start) for e in edits if e.end <= pin.start)
    original = resolve(message.data, pin.path)[pin.start : pin.end]
    shown = resolve(entry.render(view.messages), pin.path)[pin.start + shift : pin.end + shift]
    return _sha(original) == _sha(shown)


def _sha(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
