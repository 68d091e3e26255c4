"""A transformers model in process, one live KV cache per conversation.

Invariant: before a reply starts, the conversation's cache stands for exactly the ids its template renders: the longest
common prefix is kept, the rest prefilled, and the logits equal those of a fresh prefill. Nothing is fed for a request
whose prompt and reply would not fit the window. Knows nothing about budgets, policies or logs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from compaction.budget import Window
from compaction.engines.detokenize import Detokenizer
from compaction.engines.forward import Forward
from compaction.engines.generation import Prefilled, TransformersGeneration
from compaction.engines.live_cache import LiveCache, common_prefix
from compaction.engines.loading import config_of, load, window_of
from compaction.engines.reasons import Held, Request, why_prefilled
from compaction.engines.sampling import Sampling, greedy
from compaction.errors import EngineError, InvalidInput
from compaction.kv.geometry import KVGeometry
from compaction.ports import Counter, Generated
from compaction.tokens.counter import TemplateCounter
from compaction.tokens.template import ChatTemplate

__all__ = ["TransformersEngine"]

_Messages = Sequence[Mapping[str, Any]]
_Tools = Sequence[Mapping[str, Any]] | None
_TALK = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


@dataclass(slots=True)
class _Conversation:
    """A live cache and what its ids were: the first `prompt` a prompt rendered from `request`, the rest a reply."""

    live: LiveCache
    lock: threading.RLock = field(default_factory=threading.RLock)
    prompt: int = 0
    request: Request | None = None
    reply: TransformersGeneration | None = None

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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if prefill_chunk < 1:
            raise InvalidInput(f"prefill_chunk is {prefill_chunk}: it must be at least 1")
        loaded = load(model, tokenizer, device=device, dtype=dtype)
        self.model, self.tokenizer, self.name = loaded.model, loaded.tokenizer, loaded.name
        self.window: Window = window_of(self.model, window)
        self.template = ChatTemplate(self.tokenizer, name=self.name)
        self.counter: Counter = TemplateCounter(self.template)
        self.user_first: bool = self.template.profile.user_first
        self._sampling, self._chunk, self._clock = sampling, prefill_chunk, clock
        self._forward = Forward(self.model)
        self._conversations: dict[str, _Conversation] = {}
        self._table_lock, self._model_lock = threading.Lock(), threading.Lock()
        self._opening, self._stop = self._read_template()
        self.geometry: KVGeometry = KVGeometry.from_config(config_of(self.model).to_dict(), self.model.dtype.itemsize)
        self.kv_bytes_per_token: int = self.geometry.bytes_per_token

    def __repr__(self) -> str:
        return f"TransformersEngine({self.name!r}, device={str(self.model.device)!r}, window={self.window.tokens:,})"

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a reply: the generation config's, the tokenizer's, and the template's end of a turn."""
        return self._stop

    def generate(
        self,
        conversation: str,
        messages: _Messages,
        tools: _Tools,
        *,
        max_new_tokens: int,
        why: str = "",
    ) -> TransformersGeneration:
        """Bring the conversation's cache to these messages (longest common prefix + prefill) and start a reply.

        The prompt is prefilled and the first token chosen on return. `why` is the caller's own reason for having
        changed earlier messages ("compaction"); it is reported where that made tokens be prefilled again.

        Raises EngineError, before any forward pass, where prompt + reply exceed the window or where the conversation's
        last reply is still running.
        """
        wanted = self._wanted(messages, tools, _at_least_one(max_new_tokens))
        held = self._conversation(conversation)
        started = self._clock()
        with held.lock:
            if held.running:
                raise EngineError(f"conversation {conversation!r} is still generating: finish that reply or close() it")
            request = Request.of(messages, tools)
            reason, kept = self._align(held, wanted, messages, request, why)
            held.live.start_turn(len(wanted) + max_new_tokens - 1)  # the last token of a reply is not fed
            held.prompt, held.request, held.reply = len(wanted), request, None
            logits = self._prefill(held.live, wanted[kept:])
            prefilled = Prefilled(logits, len(wanted), kept, reason, started)
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

    def complete(self, messages: _Messages, *, max_new_tokens: int) -> Generated:
        """One reply outside any conversation, its cache freed on return.

        Raises EngineError where prompt + reply exceed the window.
        """
        wanted = self._wanted(messages, None, _at_least_one(max_new_tokens))
        live, started = self._new_live(), self._clock()
        live.start_turn(len(wanted) + max_new_tokens - 1)
        prefilled = Prefilled(self._prefill(live, wanted), len(wanted), 0, "first", started)
        reply = self._start(live, prefilled, threading.RLock(), max_new_tokens)
        for _ in reply:
            pass
        if reply.result is None:
            raise EngineError("the reply ended without a result")
        return reply.result

    def logits(self, messages: _Messages, tools: _Tools = None) -> torch.Tensor:
        """What a fresh prefill of this request ends in: float32 on the CPU, shape [vocabulary].

        Raises EngineError where the prompt exceeds the window.
        """
        return self._prefill(self._new_live(), self._wanted(messages, tools, 0)).float().cpu()

    def kv_bytes(self, conversation: str) -> int:
        """Bytes of KV cache the conversation holds now, measured from distinct tensor storages."""
        held = self._conversations.get(conversation)
        if held is None:
            return 0
        with held.lock:
            return held.live.bytes

    def cached_ids(self, conversation: str) -> tuple[int, ...]:
        """The token ids the conversation's cache stands for now."""
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

    def _align(
        self, held: _Conversation, wanted: list[int], messages: _Messages, request: Request, hint: str
    ) -> tuple[str, int]:
        """Crop the cache to what it shares with the wanted ids; returns why tokens go in again, and how many stay."""
        live = held.live
        shared = min(common_prefix(live.ids, wanted), live.clean)
        said = held.reply.result.text if held.reply and held.reply.result else None
        stood = Held(live.ids, held.prompt, self._opening, held.request, said)
        why = why_prefilled(stood, wanted, shared, messages, request, hint=hint, decode=self._text_of)
        keep = min(shared, len(wanted) - 1)  # one token at least is fed: without it there are no logits
        grows_only = live.stateful and len(wanted) - keep > 1  # many such layers continue by single tokens only
        if grows_only or not live.crop(keep):
            live.clear()
            why, keep = ("uncroppable" if keep else why), 0
        live.record_past(False)
        return why, keep

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


def _at_least_one(max_new_tokens: int) -> int:
    if max_new_tokens < 1:
        raise InvalidInput(f"max_new_tokens is {max_new_tokens}: a reply needs at least one token")
    return max_new_tokens
