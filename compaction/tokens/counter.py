"""Exact counts of the rendered request.

Invariant: `request` is the length of the ids the model is sent. `additive` is claimed only where probing has shown that
ids of a conversation are the ids of its messages one after the other: each further message leaves the ids before it as
they were, adds the same ids whatever stands before it, and is parted from its neighbours by a special token, over which
no merge of a tokenizer can reach.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from compaction.errors import EngineError
from compaction.tokens.template import ChatTemplate

__all__ = ["TemplateCounter"]

_Message = Mapping[str, Any]
_SYSTEM: _Message = {"role": "system", "content": "s"}
_USER: _Message = {"role": "user", "content": "u"}
_REPLY: _Message = {"role": "assistant", "content": "a"}
_HEADS = 64


def _call(call_id: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "look_up", "arguments": arguments}}


_TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {"type": "object"}}}]
_PARTS = [{"type": "text", "text": "one"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
_KINDS: tuple[_Message, ...] = (
    {"role": "user", "content": "What is 12?"},
    {"role": "user", "content": "\n  edges \n\n"},
    {"role": "user", "content": _PARTS, "name": "ann"},
    {"role": "user", "content": "<tool_response>\nx\n</tool_response>"},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "It's 12."},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwelve", "reasoning_content": "hm, hm"},
    {"role": "assistant", "content": None, "tool_calls": [_call("call_1", '{"a": 1}')]},
    {"role": "assistant", "content": "Both", "tool_calls": [_call("call_1", "{}"), _call("call_2", "not JSON")]},
    {"role": "assistant", "content": ""},
    {"role": "tool", "tool_call_id": "call_1", "name": "look_up", "content": "found 3"},
    {"role": "tool", "tool_call_id": "call_2", "content": " \n"},
    {"role": "system", "content": "Note."},
    {"role": "developer", "content": "Note."},
)
_LEADING: tuple[tuple[_Message, ...], ...] = (
    (),
    ({"role": "system", "content": "Be brief."},),
    ({"role": "system", "content": "Be brief.\n"}, {"role": "developer", "content": ""}),
)


class TemplateCounter:
    """Counts with a model's own tokenizer and template; implements `compaction.ports.Counter`, exactly.

    For a template that is not additive, `message` is what the message adds behind a short conversation that is legal
    for its role: an estimate of its share. `request` is exact always. Safe to use from many threads.
    """

    exact = True

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.name = f"template:{template.fingerprint}"
        self._heads: OrderedDict[bytes, int] = OrderedDict()
        self._lock = Lock()
        self._opening = (_SYSTEM, _USER) if template.profile.system else (_USER,)
        self._openings: dict[bool, int] = {}
        self.additive: bool = True
        self.additive = self._probe()

    def head(self, leading: Sequence[_Message], tools: Sequence[_Message] | None) -> int:
        """Tokens of leading messages, tools, template overhead and generation prompt; cached for equal inputs."""
        key = _key(leading, tools)
        with self._lock:
            if key in self._heads:
                self._heads.move_to_end(key)
                return self._heads[key]
        tokens = max(0, self._length([*leading, _USER], tools) - self.message(_USER))
        with self._lock:
            self._heads[key] = tokens
            while len(self._heads) > _HEADS:
                self._heads.popitem(last=False)
        return tokens

    def message(self, message: _Message) -> int:
        """Tokens one further message adds; exact where `additive`, its share otherwise."""
        after_reply = not self.additive and message.get("role") not in ("assistant", "tool", "function")
        opening = (*self._opening, _REPLY) if after_reply else self._opening
        if after_reply not in self._openings:
            self._openings[after_reply] = self._length(opening, None)
        return max(0, self._length([*opening, message], None) - self._openings[after_reply])

    def request(self, messages: Sequence[_Message], tools: Sequence[_Message] | None) -> int:
        """Tokens of the whole request. An empty list costs its head: what stands there once a message comes."""
        return self._length(messages, tools) if messages else self.head((), tools)

    def text(self, text: str) -> int:
        """Tokens of bare text, encoded by itself."""
        return len(self.template.text_ids(text))

    def _length(self, messages: Sequence[_Message], tools: Sequence[_Message] | None) -> int:
        return len(self.template.ids(messages, tools))

    def _probe(self) -> bool:
        """Whether the sum of heads and messages is the whole, for every order of kinds, and must be."""
        try:
            return self._segments_add_up() and all(
                self._sums([*leading, *rest], len(leading), tools)
                for tools in (None, _TOOLS)
                for leading in _LEADING
                for rest in _conversations()
                if leading or rest
            )
        except EngineError:
            return False

    def _sums(self, messages: Sequence[_Message], leading: int, tools: Sequence[_Message] | None) -> bool:
        parts = self.head(messages[:leading], tools) + sum(self.message(message) for message in messages[leading:])
        return parts == self._length(messages, tools)

    def _segments_add_up(self) -> bool:
        """Each message is one run of ids, the same after every other, parted from it by a special token."""
        special = frozenset(self.template.specials.values())
        opening = self.template.ids(self._opening, None, generation_prompt=False)
        prompted = self.template.ids(self._opening, None)
        if prompted[: len(opening)] != opening:
            return False
        prompt = prompted[len(opening) :]
        runs: list[list[int]] = []
        for kind in _KINDS:
            run = self._run(opening, [*self._opening, kind], prompt)
            if not run:
                return False
            runs.append(run)
        for first, first_run in zip(_KINDS, runs, strict=True):
            for second, second_run in zip(_KINDS, runs, strict=True):
                if self._run([*opening, *first_run], [*self._opening, first, second], prompt) != second_run:
                    return False
        begins = all(run[0] in special for run in [*runs, *([prompt] if prompt else [])])
        ends = all(run[-1] in special for run in [*runs, opening])
        return begins or ends

    def _run(self, before: list[int], messages: Sequence[_Message], prompt: list[int]) -> list[int] | None:
        """What the last message adds to the ids before it; None where it changes them or the generation prompt."""
        ids = self.template.ids(messages, None, generation_prompt=False)
        if ids[: len(before)] != before or self.template.ids(messages, None) != ids + prompt:
            return None
        return ids[len(before) :]


def _conversations() -> list[tuple[_Message, ...]]:
    """Conversations that start with every kind, end with every kind, and hold every one; and none at all."""
    kinds = [kind for kind in _KINDS if kind["role"] not in ("system", "developer")]
    singles: list[tuple[_Message, ...]] = [(kind,) for kind in kinds]
    return [(), *singles, _KINDS[:12], (*reversed(kinds), *_KINDS), (_USER, *_KINDS[::2], *_KINDS[1::2])]


def _key(leading: Sequence[_Message], tools: Sequence[_Message] | None) -> bytes:
    return hashlib.sha256(json.dumps([list(leading), list(tools or ())]).encode("ascii")).digest()
