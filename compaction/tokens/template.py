"""A tokenizer's chat template, rendered to exact token ids.

Invariant: `ids` equals `tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=True,
return_dict=False)` token for token wherever the template takes the request as it stands and no message quotes a control
token; text that quotes one is encoded as text, and fields a template cannot take are folded
(`compaction.tokens.folding`).
Equal requests give equal ids on every day: a template that writes the date gets a fixed one.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from compaction.errors import EngineError, InvalidInput
from compaction.tokens.control import Encoder
from compaction.tokens.folding import RULES, fold
from compaction.tokens.profile import PLAIN, TemplateProfile, probe

__all__ = ["FROZEN_DATE", "ChatTemplate"]

FROZEN_DATE = datetime.date(2025, 1, 1)
"""The date that templates write; a parameter of `ChatTemplate`, because a date that moves would move every prefix."""

_STRFTIME = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>.*?)(?P=quote)\s*\)""")
_FINGERPRINT_TEXT = "The quick brown fox, 12345 + 678!\n\n\tdef f(x): return x  "
_FINGERPRINT_TEXT += "\u4e2d\u6587 \u0430\u0431 \ud55c \U0001f600"
_Messages = Sequence[Mapping[str, Any]]
_Tools = Sequence[Mapping[str, Any]] | None


class ChatTemplate:
    """A transformers tokenizer with its chat template. Safe to use from many threads.

    Args:
        tokenizer: a transformers (>= 5) tokenizer that has a chat template. It is not changed.
        name: what messages call it; default: where the tokenizer was loaded from.
        date: what templates that write today's date write instead.

    Attributes:
        name: the name above.
        profile: what the template takes (probed at construction, some sixty renderings).
        fingerprint: 12 hex digits, equal for equal template, vocabulary and folding rules.

    Raises EngineError where the tokenizer has no chat template, or one that renders not even a single user message.
    """

    def __init__(self, tokenizer: Any, *, name: str | None = None, date: datetime.date = FROZEN_DATE) -> None:
        self.name: str = name or str(getattr(tokenizer, "name_or_path", "") or "tokenizer")
        self._tokenizer = tokenizer
        self._date = date
        sources = [_source(tokenizer, None), _source(tokenizer, [{}])]
        if None in sources:
            raise EngineError(f"tokenizer {self.name!r} has no chat template: set tokenizer.chat_template first")
        plain, with_tools = (str(source) for source in sources)
        dated = "strftime_now" in plain + with_tools or "date_string" in plain + with_tools
        self._plain, self._with_tools = self._frozen(plain), self._frozen(with_tools)
        self._extra = {"date_string": date.strftime("%d %b %Y")} if "date_string" in plain + with_tools else {}
        self.profile: TemplateProfile = probe(self._try, injects_date=dated)
        if "user" not in self.profile.roles:
            raise EngineError(f"the chat template of {self.name!r} does not render a user message")
        self._encoder = Encoder(tokenizer, self._skeletons())
        self.specials: Mapping[str, int] = self._encoder.specials
        self.fingerprint: str = self._fingerprint(plain, with_tools)

    @property
    def exact(self) -> bool:
        """Whether quoted control text is encoded as it stands; otherwise it is broken by an invisible character."""
        return self._encoder.by_piece

    def ids(self, messages: _Messages, tools: _Tools, *, generation_prompt: bool = True) -> list[int]:
        """Token ids of the rendered request.

        Raises InvalidInput for no message at all, EngineError where the template refuses the conversation even as
        plain alternating text.
        """
        if not messages:
            raise InvalidInput("a request needs at least one message")
        hidden = self._encoder.hide(list(messages), list(tools) if tools else None)
        text = self._render_folded(hidden.values[0], hidden.values[1], generation_prompt)
        return self._encoder.encode(text, hidden.words)

    def render(self, messages: _Messages, tools: _Tools, *, generation_prompt: bool = True) -> str:
        """The rendered request as text, to look at: control text in messages stands in it as written."""
        if not messages:
            raise InvalidInput("a request needs at least one message")
        return self._render_folded(messages, list(tools) if tools else None, generation_prompt)

    def text_ids(self, text: str) -> list[int]:
        """Token ids of bare text without control tokens: what a message's content is encoded to."""
        return self._encoder.text(text)

    def _render_folded(self, messages: _Messages, tools: _Tools, generation_prompt: bool) -> str:
        folded = fold(messages, tools, self.profile)
        try:
            return self._render(folded.messages, folded.tools, generation_prompt)
        except Exception:  # noqa: BLE001 - a template is foreign code and may raise anything; the plain form is next
            # Fits each field but not this order of messages (a result without its call, say): all of it as plain turns.
            plain = replace(PLAIN, system=self.profile.system, tools=self.profile.tools)
            folded = fold(messages, tools, plain)
        try:
            return self._render(folded.messages, folded.tools, generation_prompt)
        except Exception as exc:
            raise EngineError(f"the chat template of {self.name!r} refuses this conversation: {exc}") from exc

    def _render(self, messages: _Messages, tools: _Tools, generation_prompt: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            chat_template=self._with_tools if tools else self._plain,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **self._extra,
        )
        return str(text)

    def _try(self, messages: _Messages, tools: _Tools, generation_prompt: bool) -> str | None:
        try:
            return self._render(messages, tools, generation_prompt)
        except Exception:  # noqa: BLE001 - a template is foreign code; raising is its answer to a probe
            return None

    def _frozen(self, source: str) -> str:
        """The template with each date format it asks for written out; as keyword, transformers passes no functions."""
        return _STRFTIME.sub(lambda match: json.dumps(self._date.strftime(match["format"])), source)

    def _skeletons(self) -> list[str]:
        talk: list[dict[str, Any]] = [
            {"role": "user", "content": " What is 12 + 34?\n"},
            {"role": "assistant", "content": "It's 46."},
            {"role": "user", "content": "\u8c22\u8c22"},
        ]
        system = {"role": "system", "content": "Be brief.\n\nBe exact. "}
        tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
        renders = (
            self._render_folded(messages, tools, prompt)
            for messages in ([system, *talk], talk, [system, talk[0]])
            for tools in (None, [tool])
            for prompt in (True, False)
        )
        return list(dict.fromkeys(renders))

    def _fingerprint(self, *sources: str) -> str:
        added = {
            str(token): [index, token.special] for index, token in sorted(self._tokenizer.added_tokens_decoder.items())
        }
        parts = [*sources, len(self._tokenizer), added, self.text_ids(_FINGERPRINT_TEXT), self._date.isoformat(), RULES]
        return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()[:12]


def _source(tokenizer: Any, tools: list[dict[str, Any]] | None) -> str | None:
    """The template that apply_chat_template would take; a tokenizer may have another one for requests with tools."""
    try:
        return str(tokenizer.get_chat_template(None, tools))
    except ValueError:
        return None
