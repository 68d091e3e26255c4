"""The seams: what the core needs from a log, a counter, an engine, a policy and a summariser.

Third parties implement these protocols; `tests/contracts` holds one suite for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from compaction.budget import KVStorage, Target, Window
from compaction.events import Event, NewEvent, Text
from compaction.plan import Plan
from compaction.view import View

__all__ = [
    "Apply",
    "Clock",
    "Counter",
    "Divergence",
    "Engine",
    "Generated",
    "Generation",
    "Ids",
    "LintsTemplate",
    "Log",
    "Policy",
    "Quantized",
    "QuantizesKV",
    "Rng",
    "ScoresEntries",
    "Summarizer",
    "Summary",
    "Usage",
    "planned",
    "storages_of",
]

Apply = Literal["exact", "splice"]
"""How a plan reaches a live cache: longest common prefix and prefill of the rest, or edits in place."""
Clock = Callable[[], str]
"""Now, as UTC ISO 8601 text with microseconds."""
Ids = Callable[[str, int], str]
"""(conversation, seq) -> the id of the message that event appends; unique in a log file."""
Rng = Callable[[int], bytes]
"""n -> n random bytes, for salts."""


@runtime_checkable
class Log(Protocol):
    """An append-only log of events and texts, one hash chain for the whole of it."""

    def commit(
        self, conversation: str, after: int, events: Sequence[NewEvent], texts: Sequence[Text] = ()
    ) -> tuple[Event, ...]:
        """Write texts and events in ONE transaction, durable on return; seqs follow `after` without a gap.

        Raises LogConflict where the conversation's newest event is not `after`, and other LogErrors where nothing
        could be written. Either everything is written or nothing.
        """

    def events(self, conversation: str, after: int = 0) -> Iterator[Event]:
        """The conversation's events with seq > after, in order. Payloads have been checked."""

    def seq(self, conversation: str) -> int:
        """The newest event's seq; 0 where the log does not know the conversation."""

    def text(self, digest: bytes) -> str:
        """The text under a salted digest.

        Raises LogMissing where it was never written or has been erased.
        """

    def close(self) -> None:
        """Release the file. A closed log raises LogError when used."""


class Counter(Protocol):
    """Counts tokens of the rendered request: template + tools + generation prompt.

    The *leading* messages are the run of system/developer messages a list starts with. Where `additive`,
    `request(messages, tools) == head(leading, tools) + sum(message(m) for m in the others)`, always.
    """

    @property
    def name(self) -> str:
        """Which counter; stands in every `appended` event."""

    @property
    def exact(self) -> bool:
        """Whether the figures are the engine's own; else they are a labelled estimate."""

    @property
    def additive(self) -> bool:
        """Whether figures add up as said above."""

    def head(self, leading: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> int:
        """Tokens of everything but the other messages: leading ones, tools, template overhead, generation prompt."""

    def message(self, message: Mapping[str, Any]) -> int:
        """Tokens one further message adds. Costs time in proportion to that message alone."""

    def request(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> int:
        """Tokens of the whole request, rendered and encoded anew."""

    def text(self, text: str) -> int:
        """Tokens of bare text: an estimate of what it adds to a message."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one generation cost.

    `prefilled` + `reused` = `prompt_tokens`. `peak_tokens` is the largest cache length of any forward pass. Bytes are
    measured from the tensors' storages (None where the engine is remote). `why` says why tokens were prefilled that
    stood in the cache before: "" (only new ones), "first", "compaction", "edited", "template", "retokenized",
    "uncroppable" (a sliding or stateful layer could not be cut back), "spliced" (it had been edited in place); where
    the cache had been parked and did not come back, "parked away", "fingerprint", "corrupted" or "missing".
    `applied` says how the cache was brought to the prompt (docs/splice.md); None where the engine does not tell.
    """

    prompt_tokens: int
    completion_tokens: int
    prefilled: int
    reused: int
    peak_tokens: int
    kv_bytes: int | None
    peak_kv_bytes: int | None
    ttft_ms: float | None
    tpot_ms: float | None
    why: str = ""
    applied: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The figures as plain JSON values, in a fixed order."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Generated:
    """A finished (or cut) reply. `finish_reason`: "stop", "length" or "cancelled"."""

    text: str
    ids: tuple[int, ...]
    finish_reason: str
    usage: Usage


class Generation(Protocol):
    """A running reply: iterate for pieces of text, then read `result`. `close()` cancels and crops the cache."""

    @property
    def result(self) -> Generated | None:
        """The finished or cut reply; None while it runs."""

    def __iter__(self) -> Iterator[str]:
        """Pieces of text as they are generated."""

    def close(self) -> None:
        """Stop; `result` then says "cancelled" with the text so far. The cache holds the prompt only."""


class Engine(Protocol):
    """What renders, counts, generates and holds one live KV cache per conversation. Safe to use from many threads."""

    @property
    def name(self) -> str:
        """Which model; stands in the log."""

    @property
    def counter(self) -> Counter:
        """Counts exactly what this engine is sent."""

    @property
    def window(self) -> Window:
        """Tokens the model can hold, with the source."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache a token costs."""

    @property
    def user_first(self) -> bool:
        """Whether the chat template wants a user message first."""

    def generate(
        self,
        conversation: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        max_new_tokens: int,
    ) -> Generation:
        """Bring the conversation's cache to these messages (longest common prefix + prefill) and start a reply."""

    def forget_reply(self, conversation: str) -> None:
        """Take the newest reply's ids out of the cache again; the prompt's stay."""

    def complete(self, messages: Sequence[Mapping[str, Any]], *, max_new_tokens: int) -> Generated:
        """One reply outside any conversation, its cache freed on return."""

    def kv_bytes(self, conversation: str) -> int:
        """Bytes of KV cache the conversation holds now, measured from distinct tensor storages."""

    def release(self, conversation: str) -> None:
        """Free the conversation's cache; the next turn prefills again."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """What keeping a conversation's cache in another storage did.

    Bytes are measured from the tensors' storages; both are 0 where the cache was empty. The errors are those of the
    keys and values that were converted, root mean square relative to their own; None where nothing was converted, but
    the cache dropped, to be prefilled again.
    """

    storage: str
    bytes_before: int
    bytes_after: int
    key_error: float | None = None
    value_error: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The figures as plain JSON values, in a fixed order."""
        return {name: getattr(self, name) for name in self.__slots__}


@runtime_checkable
class QuantizesKV(Protocol):
    """What an engine that can keep caches in narrower storages adds to `Engine`."""

    def storage(self, name: str) -> KVStorage:
        """What a conversation costs at most when its cache is kept so.

        Raises InvalidInput for a name that is none, EngineError where this model's cache cannot be kept so.
        """

    def quantize(self, conversation: str, storage: str) -> Quantized | None:
        """Keep the conversation's cache so from now on: what it holds is converted in place, or dropped.

        `storage` "" is the model's own number format. None: it was kept so already, and nothing changed.
        Raises EngineError where memory does not suffice; the cache is empty then, and kept so from the next token on.
        """


@runtime_checkable
class LintsTemplate(Protocol):
    """What an engine that knows what its chat template costs a KV cache adds to `Engine`."""

    @property
    def template_lint(self) -> Mapping[str, Any]:
        """`fingerprint`, `prefix_stable`, `history_stable`, and `findings`: codes of what makes tokens go in again."""


@runtime_checkable
class ScoresEntries(Protocol):
    """What an engine that can tell what messages are worth adds to `Engine`."""

    def scores(
        self,
        conversation: str,
        kind: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        limit: int,
    ) -> Sequence[float | None]:
        """One figure for each message, higher is worth more; None for one the cache does not hold. It stays as it is.

        No forward pass holds more than `limit` tokens. Raises EngineError for an unknown kind, or where model or
        cache cannot be scored.
        """


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a live cache is from a fresh prefill of the same ids, over the next `tokens` tokens.

    `kl` is the mean KL divergence of the live distribution from the fresh one, nats per token; `top1` the fraction of
    tokens at which both have the same favourite.
    """

    kl: float
    top1: float
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """The figures as plain JSON values, KL to six digits."""
        return {"kl": round(self.kl, 6), "top1": round(self.top1, 4), "tokens": self.tokens}


@runtime_checkable
class SplicingEngine(Engine, Protocol):
    """An engine that can edit its live caches in place."""

    def generate(
        self,
        conversation: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        max_new_tokens: int,
        apply: Apply = "exact",
    ) -> Generation:
        """As `Engine.generate`; with `apply="splice"`, edited in place where that can be done, else exact."""

    def summarize(
        self,
        conversation: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        instruction: str,
        *,
        need: int,
        max_new_tokens: int,
        limit: int,
    ) -> Generated:
        """Answer an instruction behind what the live cache holds, at least `need` messages, and take it out again.

        Raises CannotSplice where that cannot be done within `limit` tokens.
        """

    def purge(self, conversation: str) -> int:
        """Compute afresh whatever carries traces of text that was evicted; returns how many tokens were fed."""

    def divergence(self, conversation: str, tokens: int = 8) -> Divergence:
        """How far the live cache is from a fresh prefill, which is made for the purpose beside it."""


class Policy(Protocol):
    """A pure function from a read-only view and a target to a plan.

    Equal views and targets give equal plans, whatever the hash seed, thread count or Python. A policy that understands
    targets in KV bytes says so: `units = frozenset({"tokens", "kv_bytes"})`; any other is given them in tokens.
    """

    @property
    def name(self) -> str:
        """The name it is made again under."""

    @property
    def version(self) -> int:
        """Raised whenever equal inputs may give another plan."""

    @property
    def needs(self) -> frozenset[str]:
        """What it may use: "summarizer"; "storage:NAME" to quantize to; "scores:KIND" of the entries."""

    @property
    def params(self) -> Mapping[str, Any]:
        """What makes this policy again, through its factory; plain JSON."""

    def plan(self, view: View, target: Target) -> Plan:
        """What to discard so that the view reaches the target. Failures of earlier plans are in `view.failures`."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A summariser's answer. `finish_reason` "stop" is the only usable one."""

    text: str
    finish_reason: str = "stop"
    usage: Usage | None = None


class Summarizer(Protocol):
    """Turns source text into a summary. Its name goes into the decision."""

    @property
    def name(self) -> str:
        """Stands in the log."""

    def __call__(self, source: str, *, instruction: str, max_tokens: int, limit: int) -> Summary:
        """Summarise `source` in at most `max_tokens`; no forward pass of its own may exceed `limit` tokens."""


def planned(policy: Policy, view: View, target: Target) -> Plan:
    """The policy's plan, asked for in a unit it understands."""
    units = getattr(policy, "units", ("tokens",))
    return policy.plan(view, target if target.unit in units else target.in_tokens(view.storage))


def storages_of(policy: Policy) -> frozenset[str]:
    """Names of the storages a policy may quantize to."""
    needs: frozenset[str] = getattr(policy, "needs", frozenset())
    return frozenset(need.removeprefix("storage:") for need in needs if need.startswith("storage:"))
