"""From rendered text to token ids, so that no text of a message can act as a control token.

Invariant: a special token is produced only where the template itself wrote one. A message that quotes `<|im_end|>` is
encoded as the ordinary text it is, and a lone surrogate or NUL in it never fails: UTF-8 knows no lone surrogates, so
they are encoded as U+FFFD. This module knows nothing about roles or messages, only about JSON values and text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

__all__ = ["Encoder", "Hidden"]

_SURROGATE = re.compile("[\ud800-\udfff]")
_JOINER = "\u2060"  # word joiner: invisible, and no vocabulary has a control token with it inside
_PROBES = (
    "plain words, 12345 numbers\tand   spaces  ",
    "  leading\n\n\ntrailing \n",
    'it\'s CamelCase snake_case() {"json": [1, 2]} // code\r\n',
    "\u4e2d\u6587\u5b57 \u3072\u3089\u304c\u306a \ud55c\uae00 \u0430\u0431\u0432 \U0001f600\u200d\U0001f525",
    "",
    " ",
    "\n",
)


@dataclass(frozen=True, slots=True)
class Hidden:
    """JSON values whose control text is hidden behind words that occur nowhere else; `words` takes each one back."""

    values: tuple[Any, ...]
    words: Mapping[str, str] = field(default_factory=dict)


class Encoder:
    """Encodes rendered requests with a Hugging Face tokenizer. Safe to use from many threads.

    Args:
        tokenizer: a transformers tokenizer; never changed: a private copy of its backend does the work.
        skeletons: texts the template rendered. Encoding piece by piece is used only where it gives, on these and on
            what can be made of their special tokens, the ids that encoding the whole text gives (`by_piece`).
            Otherwise the whole text is encoded, and control text in messages is broken by an invisible character.
    """

    def __init__(self, tokenizer: Any, skeletons: Sequence[str]) -> None:
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.specials: dict[str, int] = {
            text: tokenizer.convert_tokens_to_ids(text)
            for text in {*(token.content for token in added), *tokenizer.all_special_tokens}
            if text
        }
        self._lstrip = frozenset(token.content for token in added if token.lstrip)
        self._rstrip = frozenset(token.content for token in added if token.rstrip)
        longest_first = sorted(self.specials, key=lambda text: (-len(text), text))
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._split = re.compile(f"({self._control.pattern})")
        self._backend = _Backend(tokenizer)
        samples = _samples(skeletons, longest_first)
        self.by_piece = all(self._pieces(sample, {}) == _whole(tokenizer, sample) for sample in samples)
        if not self.by_piece:
            self._backend.match_specials()

    def hide(self, *values: Any) -> Hidden:
        """The JSON values with every control text replaced by a word, and lone surrogates by U+FFFD."""
        joined = "\n".join(_strings(values))
        surrogates = not joined.isascii() and _SURROGATE.search(joined) is not None
        if surrogates:
            joined = _SURROGATE.sub("\ufffd", joined)
        found = sorted(set(self._control.findall(joined)))
        if not found and not surrogates:
            return Hidden(values)
        stem = _unused_word(joined)
        words = {f"{stem}{index}q": text for index, text in enumerate(found)}
        of_text = {text: word for word, text in words.items()}

        def clean(text: str) -> str:
            return self._control.sub(lambda match: of_text[match.group()], _SURROGATE.sub("\ufffd", text))

        return Hidden(tuple(_map_strings(value, clean) for value in values), words)

    def encode(self, rendered: str, words: Mapping[str, str]) -> list[int]:
        """Token ids of a rendered request; `words` are those of `hide`."""
        if self.by_piece:
            return self._pieces(rendered, words)
        broken = {word: text[:1] + _JOINER + text[1:] for word, text in words.items()}
        return self._backend.ids(_restore(rendered, broken))

    def text(self, text: str) -> list[int]:
        """Token ids of bare text without any control token."""
        hidden = self.hide(text)
        return self.encode(hidden.values[0], hidden.words)

    def _pieces(self, rendered: str, words: Mapping[str, str]) -> list[int]:
        ids: list[int] = []
        pieces = self._split.split(rendered)
        for index, piece in enumerate(pieces):
            if index % 2:
                ids.append(self.specials[piece])
                continue
            if index and pieces[index - 1] in self._rstrip:
                piece = piece.lstrip()
            if index + 1 < len(pieces) and pieces[index + 1] in self._lstrip:
                piece = piece.rstrip()
            if piece:
                ids += self._backend.ids(_restore(piece, words))
        return ids


class _Backend:
    """A private tokenizer: the Rust one copied, a Python one used in place under a lock."""

    def __init__(self, tokenizer: Any) -> None:
        self._lock = Lock()
        self._slow: Any = None
        self._split = True
        rust = getattr(tokenizer, "backend_tokenizer", None)
        if rust is None:
            self._slow = tokenizer
            return
        # A copy, because a call of the tokenizer itself writes truncation, padding and `encode_special_tokens`
        # into its backend: two threads would see each other's settings.
        self._fast = type(rust).from_str(rust.to_str())
        self._fast.no_truncation()
        self._fast.no_padding()
        self._fast.encode_special_tokens = True

    def match_specials(self) -> None:
        """From now on, encode special tokens in text as themselves."""
        self._split = False
        if self._slow is None:
            self._fast.encode_special_tokens = False

    def ids(self, text: str) -> list[int]:
        if self._slow is None:
            return list(self._fast.encode(text, add_special_tokens=False).ids)
        with self._lock:
            encoded = self._slow(text, add_special_tokens=False, split_special_tokens=self._split)
        return list(encoded["input_ids"])


def _whole(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _samples(skeletons: Sequence[str], specials: Sequence[str]) -> list[str]:
    """What piece-wise encoding is tried on: rendered texts, and probes on both sides of every special they hold."""
    used = [special for special in specials if any(special in skeleton for skeleton in skeletons)]
    around = [f"{left}{special}{right}" for special in used for left in _PROBES for right in _PROBES]
    return [*skeletons, *_PROBES, *around]


def _strings(value: Any) -> Iterator[str]:
    """Every string of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


def _unused_word(text: str) -> str:
    """The stem of words that do not occur in the text. ASCII letters, which no filter of a template escapes."""
    number = 0
    while f"zqx{number}x" in text:
        number += 1
    return f"zqx{number}x"


def _restore(text: str, words: Mapping[str, str]) -> str:
    if not words:
        return text
    return re.sub("|".join(map(re.escape, words)), lambda match: words[match.group()], text)
