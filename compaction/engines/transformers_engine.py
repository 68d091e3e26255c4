"""A transformers model in process, one live KV cache per conversation.

Invariant: before a reply starts, the conversation's cache stands for exactly the ids its template renders: the longest
common prefix is kept, the rest prefilled, and the logits equal those of a fresh prefill. Nothing is fed for a request
whose prompt and reply would not fit the window. Knows nothing about budgets, policies or logs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from compaction.budget import KVStorage, Window
from compaction.engines.aligning import put_between
from compaction.engines.decode_step import Decode, DecodeStep, step_for
from compaction.engines.detokenize import Detokenizer
from compaction.engines.divergence import compare
from compaction.engines.forward import Forward
from compaction.engines.generation import Prefilled, TransformersGeneration
from compaction.engines.live_cache import LiveCache, common_prefix
from compaction.engines.loading import config_of, load, window_of
from compaction.engines.pooling import CachePool, PooledCache
from compaction.engines.reasons import Held, Request, why_prefilled
from compaction.engines.sampling import Sampling, greedy
from compaction.engines.scoring import Scoring
from compaction.engines.segments import Segment, Segmenter
from compaction.engines.splicing import Applied, Splicing
from compaction.engines.storing import Storing
from compaction.errors import CannotRotate, CannotSplice, EngineError, InvalidInput, PoolFull
from compaction.kv.geometry import KVGeometry
from compaction.kv.residency.fingerprint import Identity, tokenizer_digest
from compaction.kv.residency.pool import Pool
from compaction.kv.residency.sizes import CacheSizes
from compaction.kv.slot_map import DRIFT_BUDGET
from compaction.ports import Apply, Counter, Divergence, Generated, Quantized
from compaction.tokens.counter import TemplateCounter
from compaction.tokens.lint import LintReport, lint
from compaction.tokens.template import ChatTemplate

__all__ = ["TransformersEngine"]

_LOG = logging.getLogger(__name__)
_Messages = Sequence[Mapping[str, Any]]
_Tools = Sequence[Mapping[str, Any]] | None
_TALK = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


@dataclass(slots=True)
class _Conversation:
    """A live cache and what its ids were: the first `prompt` a prompt rendered from `request`, the rest a reply.

    `layout` says which ids are which messages', where that has been asked for; `logits` (shape [vocabulary]) are those
    behind the prompt, `lost` why a parked cache did not come back for the turn under way.
    """

    live: LiveCache
    lock: threading.RLock = field(default_factory=threading.RLock)
    prompt: int = 0
    request: Request | None = None
    layout: tuple[Segment, ...] = ()
    reply: TransformersGeneration | None = None
    logits: torch.Tensor | None = None
    lost: str = ""

    @property
    def running(self) -> bool:
        return self.reply is not None and self.reply.result is None


class TransformersEngine:
    """Implements `ports.Engine` on a local causal language model. Safe to use from many threads.

    Args:
        model: "smollm2", a folder, a hub id, or a model that is already built (then give its `tokenizer`).
        tokenizer: instead of the model's own.
        device: "cuda", "mps", "cpu", …; None: the best there is.
        dtype: a torch dtype or its name; None: bfloat16, or float32 where weights or hardware want it.
        window: tokens for prompt + reply; None: what the model's config says.
        sampling: how tokens are drawn; None: greedy, which is deterministic.
        prefill_chunk: tokens of a prompt per forward pass.
        decode: "model", or "compiled": replies are decoded by an own step where the model is one that it understands
            (docs/decoding.md), quantized caches are read by compiled code. Compiling takes some ten seconds, here and
            at the first read; `step` then tells what is used.
        drift_budget: how often a splice may move a token's keys before they are computed afresh.
        clock: seconds, for the measured times.

    Raises ModelNotFound for an unknown name, EngineError for a model that cannot be loaded, InvalidInput for arguments
    that make no sense.
    """

    def __init__(
        self,
        model: Any = "smollm2",
        *,
        tokenizer: Any = None,
        device: str | None = None,
        dtype: Any = None,
        window: int | None = None,
        sampling: Sampling | None = None,
        prefill_chunk: int = 512,
        decode: Decode = "model",
        drift_budget: int = DRIFT_BUDGET,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if prefill_chunk < 1:
            raise InvalidInput(f"prefill_chunk is {prefill_chunk}: it must be at least 1")
        loaded = load(model, tokenizer, device=device, dtype=dtype)
        self.model, self.tokenizer, self.name = loaded.model, loaded.tokenizer, loaded.name
        self.window: Window = window_of(self.model, window)
        self.template = ChatTemplate(self.tokenizer, name=self.name)
        self.template_report: LintReport = _linted(self.tokenizer, self.name)
        counter = TemplateCounter(self.template)
        self.counter: Counter = counter
        self.user_first: bool = self.template.profile.user_first
        self._sampling, self._chunk, self._clock = sampling, prefill_chunk, clock
        self.step: DecodeStep | None = step_for(self.model, decode)
        compiled = self.step is not None and self.step.kind == "compiled"
        self._forward = Forward(self.model, self.step, compiled=compiled)
        self._conversations: dict[str, _Conversation] = {}
        self._table_lock, self._model_lock = threading.Lock(), threading.Lock()
        self.pool: CachePool | None = None
        self._opening, self._stop = self._read_template()
        self._segmenter = Segmenter(self.template, counter, self._opening)
        trained = getattr(config_of(self.model), "max_position_embeddings", None)
        self._splicing = Splicing(
            self._forward, self._model_lock, chunk=prefill_chunk, trained=trained, drift_budget=drift_budget
        )
        self._scoring = Scoring(self._forward, self._model_lock, lambda: self._splicing.plan, self.template)
        self.geometry: KVGeometry = KVGeometry.from_config(config_of(self.model).to_dict(), self.model.dtype.itemsize)
        self.kv_bytes_per_token: int = self.geometry.bytes_per_token
        self._storing = Storing(self._forward, self._model_lock, lambda: self._splicing.plan, self.kv_bytes_per_token)

    def __repr__(self) -> str:
        return f"TransformersEngine({self.name!r}, device={str(self.model.device)!r}, window={self.window.tokens:,})"

    @property
    def template_lint(self) -> dict[str, Any]:
        """What `template_report` comes to, for the log."""
        report = self.template_report
        return {
            "fingerprint": report.fingerprint,
            "prefix_stable": report.prefix_stable,
            "history_stable": report.history_stable,
            "findings": [finding.code for finding in report.costs],
        }

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a reply: the generation config's, the tokenizer's, and the template's end of a turn."""
        return self._stop

    def use_pool(self, pool: Pool) -> CachePool:
        """Hold the caches of all conversations within these bytes from now on, and park what does not fit.

        Raises InvalidInput where conversations are held already, or within another pool, and InvalidBudget where the
        pool's folder cannot be used.
        """
        if self.pool is None and self._conversations:
            raise InvalidInput(
                "an engine takes a pool before its first conversation, and holds some already: give pool= to its first "
                "manager, or release() them"
            )
        if self.pool is None:
            sizes = CacheSizes.learn(lambda: self._forward.new_cache(self.window.tokens), self._forward)
            identity = Identity.of(self.model, tokenizer_digest(self.tokenizer), name=self.name)
            self.pool = CachePool(pool, sizes, lambda: identity.again(self.model))
        elif self.pool.budget != pool:
            raise InvalidInput(f"this engine has a pool already, {self.pool.budget}: give the same, or leave pool= out")
        return self.pool

    def generate(
        self,
        conversation: str,
        messages: _Messages,
        tools: _Tools,
        *,
        max_new_tokens: int,
        why: str = "",
        apply: Apply = "exact",
    ) -> TransformersGeneration:
        """Bring the conversation's cache to these messages and start a reply.

        `apply="exact"`: longest common prefix + prefill, equal to a fresh prefill. "splice": messages that went are
        evicted in place, new ones between kept ones encoded against their prefix, and only the new tail prefilled;
        where that cannot be done, exact, and the usage's `applied` says why. The prompt is prefilled and the first
        token chosen on return. `why` is the caller's own reason for having changed earlier messages ("compaction").

        Raises EngineError, before any forward pass, where prompt + reply exceed the window or where the conversation's
        last reply is still running.
        """
        wanted = self._wanted(messages, tools, _at_least_one(max_new_tokens))
        started = self._clock()
        request = Request.of(messages, tools)
        layout, refused = self._layout(messages, tools, request, wanted) if apply == "splice" else ((), "")
        spare = self._beside(conversation, layout)
        # The last token of a reply is not fed.
        with self._idle(conversation, len(wanted) + max_new_tokens - 1, max_new_tokens, spare=spare) as held:
            reason = self._reason(held, wanted, messages, request, why)
            applied = self._bring(held, wanted, layout, max_new_tokens, refused)
            held.prompt, held.request, held.layout, held.reply = len(wanted), request, layout, None
            held.logits = self._prefill(held.live, wanted[len(held.live) :])
            removed, reason = _changed(reason), held.lost or _overruled(reason, applied.cause)
            prefilled = Prefilled(held.logits, len(wanted), applied, reason, started, removed)
            held.reply = self._start(held.live, prefilled, held.lock, max_new_tokens)
            return held.reply

    def forget_reply(self, conversation: str) -> None:
        """Take the newest reply's ids out of the cache again; the prompt's stay. A running reply is cancelled."""
        held = self._conversations.get(conversation)
        if held is None:
            return
        with held.lock:
            if held.reply is not None:
                held.reply.close()
            if len(held.live) > held.prompt:
                held.live.crop(held.prompt)
        if self.pool is not None:
            self.pool.crop(conversation, held.prompt)

    def complete(self, messages: _Messages, *, max_new_tokens: int) -> Generated:
        """One reply outside any conversation, its cache freed on return.

        Raises EngineError where prompt + reply exceed the window.
        """
        wanted = self._wanted(messages, None, _at_least_one(max_new_tokens))
        started = self._clock()
        with self._visiting(len(wanted) + max_new_tokens - 1, max_new_tokens) as live:
            live.start_turn(len(wanted) + max_new_tokens - 1)
            prefilled = Prefilled(self._prefill(live, wanted), len(wanted), Applied(), "first", started)
            reply = self._start(live, prefilled, threading.RLock(), max_new_tokens)
            for _ in reply:
                pass
            return _result(reply)

    def logits(self, messages: _Messages, tools: _Tools = None) -> torch.Tensor:
        """What a fresh prefill of this request ends in: float32 on the CPU, shape [vocabulary].

        Raises EngineError where the prompt exceeds the window.
        """
        wanted = self._wanted(messages, tools, 0)
        with self._visiting(len(wanted)) as live:
            live.start_turn(len(wanted))
            return self._prefill(live, wanted).float().cpu()

    def summarize(
        self,
        conversation: str,
        messages: _Messages,
        tools: _Tools,
        instruction: str,
        *,
        need: int,
        max_new_tokens: int,
        limit: int,
    ) -> Generated:
        """Answer an instruction behind the first `need` messages, out of the cache, which is as before afterwards.

        What stands behind them waits on the host meanwhile. Where layers slide over a window, the instruction comes
        behind all that is held. Raises CannotSplice where the cache does not stand for these messages, or prompt +
        reply exceed `limit`, window or trained length; EngineError while a reply is running.
        """
        with self._idle(conversation) as held:
            live, started = held.live, self._clock()
            wanted = self._asked_behind(held, messages, tools, instruction, need)
            kept = common_prefix(live.ids, wanted)
            total = len(wanted) + _at_least_one(max_new_tokens)
            if total > min(limit, self.window.tokens) or not self._splicing.reaches(live, kept, total - kept):
                raise CannotSplice(f"{total:,} tokens for a summary out of the live cache are too many")
            live.start_turn(max(len(live), total - 1))
            with live.aside(kept):
                live.peak_tokens = kept
                logits = self._prefill(live, wanted[kept:])
                applied = Applied("splice", why="out of the live cache", kept=kept)
                prefilled = Prefilled(logits, len(wanted), applied, "", started)
                reply = self._start(live, prefilled, held.lock, max_new_tokens)
                for _ in reply:
                    pass
            live.end_turn()
            return _result(reply)

    def _asked_behind(
        self, held: _Conversation, messages: _Messages, tools: _Tools, instruction: str, need: int
    ) -> list[int]:
        """Ids of the first messages and an instruction, which share with the cache what a summary is to be made of."""
        known = len(held.request.messages) if held.request and len(held.live) else 0
        slides = any(getattr(layer, "is_sliding", False) for layer in held.live.layers)
        for count in (need,) if not slides else sorted({max(known, need), max(known + 1, need)}):
            if known and count <= len(messages):
                asked = {"role": "user", "content": instruction}
                wanted = self.template.ids([*messages[:count], asked], tools)
                shared = common_prefix(held.live.ids, wanted)
                if 0 < shared < len(wanted) and (not slides or shared == len(held.live)):
                    return wanted
        raise CannotSplice("the live cache does not stand for these messages")

    def purge(self, conversation: str) -> int:
        """Compute afresh whatever carries traces of text that a splice evicted; returns how many tokens were fed.

        Afterwards the cache equals a fresh prefill of its ids. Raises EngineError while a reply is running.
        """
        with self._idle(conversation) as held:
            live = held.live
            ids, clean = list(live.ids), live.clean
            if clean == len(ids):
                return 0
            live.crop(clean)
            live.record_past(False)
            live.start_turn(len(ids))
            again = len(ids) - len(live)
            logits = self._prefill(live, ids[len(live) :])
            held.logits = logits if len(ids) == held.prompt else None
            live.end_turn()
            return again

    def divergence(self, conversation: str, tokens: int = 8) -> Divergence:
        """How far the live cache is from a fresh prefill of its ids, over the next `tokens` tokens.

        The fresh cache stands beside the live one for as long as this takes. The last forward pass is `tokens` tokens
        longer than the cache. A quantized cache cannot go on and come back: of it, the one token behind the prompt.
        Raises EngineError where nothing is held, while a reply is running, and CannotSplice where the cache could not
        be put back as it was.
        """
        coming = self._length(conversation) + _at_least_one(tokens)
        with self._visiting(coming) as fresh, self._idle(conversation, coming) as held:
            live = held.live
            if live.storage and held.logits is not None:
                fresh.start_turn(held.prompt)
                exact = self._prefill(fresh, live.ids[: held.prompt])
                return compare(live, held.logits, fresh, exact, feed=self._feed, tokens=1)
            pending = held.reply.result.ids[-1:] if held.reply and held.reply.result else ()
            behind = [] if len(live) == held.prompt else list(pending)  # the last token of a reply is not fed
            if not len(live) or (held.logits is None and not behind) or tokens + len(live) > self.window.tokens:
                raise EngineError(
                    f"conversation {conversation!r} holds nothing to go on from, or {tokens:,} tokens more pass its "
                    "window: measure after a reply, over fewer tokens"
                )
            for cache in (fresh, live):
                cache.start_turn(len(live) + tokens)
            with live.aside():
                fresh_logits = self._prefill(fresh, [*live.ids, *behind])
                logits = held.logits if not behind and held.logits is not None else self._feed(live, behind)
                found = compare(live, logits, fresh, fresh_logits, feed=self._feed, tokens=tokens)
            live.end_turn()
            return found

    def storage(self, name: str) -> KVStorage:
        """What a conversation costs at most when its cache is kept as "k8v4", "tq4", "k8v4:window=128", …

        Raises InvalidInput for a name that is none, EngineError where no layer of the model can be kept so.
        """
        return self._storing.cost(name)

    def quantize(self, conversation: str, storage: str) -> Quantized | None:
        """Keep the conversation's cache in this storage from now on; "": in the model's number format.

        What it holds is coded in place, once: where it was coded before, or the pool has no room for that, it is
        dropped and prefilled again. None: it was kept so already. Raises InvalidInput for a name that is none,
        EngineError while a reply is running, or where memory does not suffice (the cache is empty then).
        """
        known = self._conversations.get(conversation)
        if (known.live.storage if known else "") == storage:
            return None
        more = 0
        if storage and self.pool is not None:  # codes beside what they are made from, and a copy of one layer
            more = self.storage(storage).fixed + 3 * self.pool.layer * self._length(conversation)
        try:
            with self._idle(conversation, more=more) as held:
                return self._keep_as(held, storage)
        except PoolFull:
            with self._idle(conversation) as held:
                return self._keep_as(held, storage, drop=True)

    def _keep_as(self, held: _Conversation, storage: str, *, drop: bool = False) -> Quantized | None:
        done = self._storing.convert(held.live, storage, drop=drop)
        if done is not None:
            held.logits = None  # the cache that made them is gone
        if done is not None and not len(held.live):
            held.prompt, held.request, held.layout = 0, None, ()
        return done

    def scores(
        self, conversation: str, kind: str, messages: _Messages, tools: _Tools, *, limit: int
    ) -> list[float | None]:
        """What each message is worth, read from the live cache: "keydiff", "expected" or "kvzip"; higher is worth more.

        None for messages the cache does not hold. It is as it was, bit for bit; no forward pass holds more than `limit`
        tokens. Raises EngineError for another kind, where nothing is held, or while a reply is running; CannotScore and
        CannotSplice where model, cache or template do not allow it.
        """
        wanted = self.template.ids(messages, tools)
        segments = self._segmenter.split(messages, tools, Request.of(messages, tools), wanted)
        with self._idle(conversation, min(limit, self.window.tokens) - 1 if kind == "kvzip" else 0) as held:
            most = min(limit, self.window.tokens)
            return self._scoring.of(held.live, kind, segments, wanted, limit=most)

    @contextmanager
    def _idle(
        self, conversation: str, tokens: int = 0, reply: int = 0, more: int = 0, spare: int = 0
    ) -> Iterator[_Conversation]:
        """The conversation, locked, its cache where the model is; in a pool with room for `tokens` and `more` bytes.

        And, if possible, for `spare` bytes of blocks that are encoded beside it.
        Raises EngineError while a reply is running, and PoolFull.
        """
        held = self._conversation(conversation)
        with self._room(conversation, held, tokens, reply, more, spare) as held.lost, held.lock:
            if held.running:
                raise EngineError(f"conversation {conversation!r} is still generating: finish that reply or close() it")
            yield held

    def _room(
        self, conversation: str, held: _Conversation, tokens: int, reply: int, more: int, spare: int
    ) -> AbstractContextManager[str]:
        """Room in the pool; gives why a parked cache did not come back, if so."""
        if self.pool is None or not isinstance(held.live, PooledCache):
            return nullcontext("")
        return self.pool.turn(conversation, held.live, held.lock, tokens, reply, more, spare, lambda: held.running)

    def _beside(self, conversation: str, layout: tuple[Segment, ...]) -> int:
        """Bytes of a pool that are needed beside the cache for what is put between kept messages."""
        held = self._conversations.get(conversation)
        count = put_between(held.layout, layout) if held is not None and self.pool is not None else 0
        if self.pool is None or not count:
            return 0
        return self.pool.beside(sum(len(segment.ids) for segment in layout), count)

    @contextmanager
    def _visiting(self, tokens: int, reply: int = 0) -> Iterator[LiveCache]:
        """A cache outside any conversation, freed on leaving; within a pool with room for `tokens`."""
        live = self._new_live()
        if self.pool is None or not isinstance(live, PooledCache):
            yield live
            return
        with self.pool.visit(live, tokens, reply):
            yield live

    def _length(self, conversation: str) -> int:
        """Tokens that the conversation's cache stands for, wherever it is."""
        parked = self.pool.parked(conversation) if self.pool else 0
        return parked or len(self.cached_ids(conversation))

    def kv_bytes(self, conversation: str) -> int:
        """Bytes of KV cache the conversation holds, measured from distinct tensor storages; 0 where it is parked."""
        held = self._conversations.get(conversation)
        if held is None:
            return 0
        with held.lock:
            return held.live.bytes

    def cached_ids(self, conversation: str) -> tuple[int, ...]:
        """The token ids the conversation's cache stands for now; none where it is parked."""
        held = self._conversations.get(conversation)
        if held is None:
            return ()
        with held.lock:
            return tuple(held.live.ids)

    def release(self, conversation: str) -> None:
        """Free the conversation's cache; the next turn prefills again. A running reply is cancelled."""
        with self._table_lock:
            held = self._conversations.pop(conversation, None)
        if held is None:
            return
        with held.lock:
            if held.reply is not None:
                held.reply.close()
            held.live.clear()
        if self.pool is not None and isinstance(held.live, PooledCache):
            self.pool.forget(conversation, held.live)

    def close(self) -> None:
        """Free the caches of all conversations. The engine can be used on."""
        for conversation in list(self._conversations):
            self.release(conversation)

    def _conversation(self, conversation: str) -> _Conversation:
        with self._table_lock:
            held = self._conversations.get(conversation)
            if held is None:
                held = self._conversations[conversation] = _Conversation(self._new_live())
            return held

    def _new_live(self) -> LiveCache:
        if self.pool is not None:
            return PooledCache(self._forward, self.window.tokens, self.pool)
        return LiveCache(self._forward, self.window.tokens)

    def _wanted(self, messages: _Messages, tools: _Tools, max_new_tokens: int) -> list[int]:
        """The request's ids, once it is certain that prompt and reply fit the window."""
        wanted = self.template.ids(messages, tools)
        if len(wanted) + max_new_tokens > self.window.tokens:
            raise EngineError(
                f"prompt {len(wanted):,} + reply {max_new_tokens:,} tokens exceed the window of {self.window.tokens:,} "
                f"({self.window.source}): compact first, or lower max_new_tokens"
            )
        return wanted

    def _reason(self, held: _Conversation, wanted: list[int], messages: _Messages, request: Request, hint: str) -> str:
        """Why some of what is held is of no use for the wanted ids as they stand."""
        said = held.reply.result.text if held.reply and held.reply.result else None
        stood = Held(held.live.ids, held.prompt, self._opening, held.request, said)
        shared = common_prefix(held.live.ids, wanted)
        return why_prefilled(stood, wanted, shared, messages, request, hint=hint, decode=self._text_of)

    def _layout(
        self, messages: _Messages, tools: _Tools, request: Request, wanted: list[int]
    ) -> tuple[tuple[Segment, ...], str]:
        """Which ids are which messages'; where that cannot be told, nothing and why."""
        try:
            return self._segmenter.split(messages, tools, request, wanted), ""
        except CannotSplice as exc:
            return (), exc.reason

    def _bring(
        self, held: _Conversation, wanted: list[int], layout: tuple[Segment, ...], reply: int, refused: str
    ) -> Applied:
        """Make the cache stand for the beginning of the wanted ids, with room for the rest and a reply."""
        live = held.live
        if layout and held.layout and len(live):
            try:
                done = self._splicing.bring(live, held.layout, layout, wanted, opening=self._opening, reply=reply)
                if done is not None:
                    return done
            except (CannotSplice, CannotRotate) as exc:
                refused = exc.reason
        stood = min(len(live), held.prompt - self._opening)
        applied = self._crop(live, wanted)
        live.start_turn(len(wanted) + reply - 1)  # the last token of a reply is not fed
        return replace(applied, refused=refused if applied.kept < stood else "")  # else there was nothing to splice

    def _crop(self, live: LiveCache, wanted: list[int]) -> Applied:
        """Crop the cache to what it shares with the wanted ids and is as a fresh prefill would have made it."""
        shared = common_prefix(live.ids, wanted)
        cause = "spliced" if shared > live.clean else ""
        keep = min(shared, live.clean, len(wanted) - 1)  # one token at least is fed: without it there are no logits
        grows_only = live.stateful and len(wanted) - keep > 1  # many such layers continue by single tokens only
        if grows_only or not live.crop(keep):
            live.clear()
            cause = "uncroppable" if keep else cause
        live.record_past(False)
        return Applied(kept=len(live), cause=cause)

    def _prefill(self, live: LiveCache, ids: list[int]) -> torch.Tensor:
        """Feed ids in chunks; returns the last one's logits, shape [vocabulary]."""
        chunk = len(ids) if live.stateful else self._chunk
        logits: torch.Tensor | None = None
        for start in range(0, len(ids), chunk):
            logits = self._feed(live, ids[start : start + chunk])
        if logits is None:
            raise EngineError("the chat template rendered no token at all")
        return logits

    def _feed(self, live: LiveCache, ids: list[int]) -> torch.Tensor:
        with self._model_lock:
            return live.feed(ids)

    def _start(
        self, live: LiveCache, prefilled: Prefilled, lock: threading.RLock, max_new_tokens: int
    ) -> TransformersGeneration:
        return TransformersGeneration(
            live,
            prefilled,
            feed=self._feed,
            choose=self._sampling.chooser() if self._sampling else greedy,
            stop=self._stop,
            max_new_tokens=max_new_tokens,
            detokenizer=Detokenizer(self.tokenizer),
            lock=lock,
            clock=self._clock,
        )

    def _text_of(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def _read_template(self) -> tuple[int, frozenset[int]]:
        """Tokens of the generation prompt, and the ids that end a reply."""
        asked = self.template.ids(_TALK[:1], None, generation_prompt=False)
        opening = len(self.template.ids(_TALK[:1], None)) - len(asked)
        stop: set[int] = set()
        configured = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        for eos in (configured, config_of(self.model).eos_token_id, self.tokenizer.eos_token_id):
            stop.update(eos if isinstance(eos, (list, tuple)) else () if eos is None else (eos,))
        special = set(self.template.specials.values())
        for token in reversed(self.template.ids(_TALK, None, generation_prompt=False)):
            if token in special:
                stop.add(token)
                break
            if self.tokenizer.decode([token]).strip():
                break  # the reply's own text: the template closes a turn with no token of its own
        return max(0, opening), frozenset(stop)


def _result(reply: TransformersGeneration) -> Generated:
    if reply.result is None:
        raise EngineError("the reply ended without a result")
    return reply.result


def _changed(reason: str) -> bool:
    """Whether messages that stood in the cache are gone or other ones."""
    return reason in ("compaction", "edited")


def _overruled(reason: str, cause: str) -> str:
    """Why tokens were prefilled, where the cache itself may have been the cause."""
    return cause if cause == "uncroppable" else reason or cause


def _linted(tokenizer: Any, name: str) -> LintReport:
    """The template linter's report; what costs the cache is said once, at load."""
    report = lint(tokenizer, name=name)
    for finding in report.costs:
        _LOG.warning("%s: its chat template %s; this engine %s", name, finding.says, finding.remedy)
    return report


def _at_least_one(max_new_tokens: int) -> int:
    if max_new_tokens < 1:
        raise InvalidInput(f"max_new_tokens is {max_new_tokens}: a reply needs at least one token")
    return max_new_tokens
