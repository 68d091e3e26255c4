"""A count without any vocabulary: character classes, weighted.

Invariant: the same text costs the same integer everywhere (integer arithmetic only), a non-empty text at least one
token, and the whole is labelled an estimate. Time is linear: 10 MB take well under a second.

Weights are fitted (least relative squares) to the geometric mean of the counts of two vocabularies of different
families, tiktoken's cl100k_base (100k entries) and SmolLM2's (49k), over 2,323 pieces of 2,000 to 4,000 characters:
real conversations with tools, code in four languages, JSON, hex, base64, numbers, emoji, prose in 30 human languages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compaction.errors import InvalidInput
from compaction.tokens.rules import REPLY_TOKENS, TOOLS_TOKENS, message_texts, tools_text

__all__ = ["EstimateCounter"]

BOUND = 0.55
_VERSION = 1
_LIMIT = 4

# Classes of UTF-8 bytes: l, u letters; d digits; p punctuation; s space; t tab; n line ends; then the first bytes of
# a accented Latin, k Greek, c Cyrillic, r other two-byte scripts, i Indic and Thai, v Georgian, Vietnamese and others,
# e symbols, j kana, h Han, g Hangul, f full width, m emoji and rare Han; _ any following byte.
_CLASSES = bytearray(b"_" * 256)
for _first, _last, _class in (
    (0x00, 0x7F, "p"),
    (0x61, 0x7A, "l"),
    (0x41, 0x5A, "u"),
    (0x30, 0x39, "d"),
    (0x20, 0x20, "s"),
    (0x09, 0x09, "t"),
    (0x0A, 0x0A, "n"),
    (0x0D, 0x0D, "n"),
    (0xC0, 0xCD, "a"),
    (0xCE, 0xCF, "k"),
    (0xD0, 0xD3, "c"),
    (0xD4, 0xDF, "r"),
    (0xE0, 0xE0, "i"),
    (0xE1, 0xE1, "v"),
    (0xE2, 0xE2, "e"),
    (0xE3, 0xE3, "j"),
    (0xE4, 0xE9, "h"),
    (0xEA, 0xED, "g"),
    (0xEE, 0xEF, "f"),
    (0xF0, 0xFF, "m"),
):
    _CLASSES[_first : _last + 1] = _class.encode("ascii") * (_last + 1 - _first)
_TABLE = bytes(_CLASSES)


def _pairs(before: str, after: str) -> tuple[bytes, ...]:
    return tuple((one + two).encode("ascii") for one in before for two in after)


# Thousandths of a token for each occurrence of a run of classes. Runs of one class do not overlap, so a negative weight
# takes back part of what its members cost one by one, never more.
_WEIGHTS: tuple[tuple[int, tuple[bytes, ...]], ...] = (
    (69, (b"l",)),
    (287, (b"u",)),
    (606, _pairs("dpstn_", "lu")),
    (761, (b"lu",)),
    (415, (b"ul",)),
    (555, (b"llllllll",)),
    (783, (b"d",)),
    (797, _pairs("lupstn_", "d")),
    (-800, (b"ddd",)),
    (445, (b"p",)),
    (403, _pairs("ludstn_", "p")),
    (-1000, (b"ppp",)),
    (897, (b"ss",)),
    (-1600, (b"ssss",)),
    (510, (b"t",)),
    (485, _pairs("ludpst_", "n")),
    (2456, (b"a",)),
    (1012, (b"k",)),
    (700, (b"c",)),
    (996, (b"r",)),
    (1493, (b"i",)),
    (1981, (b"v",)),
    (1645, (b"e",)),
    (1391, (b"j",)),
    (1447, (b"h",)),
    (1789, (b"g",)),
    (1500, (b"f",)),
    (3020, (b"m",)),
)


class EstimateCounter:
    """Estimates by character classes; implements `compaction.ports.Counter`, additive by construction, never exact.

    Measured on 1,160 whole real conversations of 200 tokens or more: the true count of cl100k is 0.75 to 1.19 times the
    estimate (median 0.92), that of SmolLM2's small vocabulary, which takes digits one by one, 0.93 to 1.55 (median
    1.15). On prose in 30 other languages cl100k's is 0.6 to 1.45 times the estimate, SmolLM2's 0.75 to 1.95.

    Args:
        milli: factor by which everything is scaled, in thousandths; see `calibrated`.

    Attributes:
        name: "estimate:1", with the factor where there is one ("estimate:1*1.084").
        bound: 0.55: with factor 1, the true tokens of each of those conversations lie within 55 % of the estimate.
    """

    exact = False
    additive = True
    bound = BOUND

    def __init__(self, milli: int = 1000) -> None:
        if milli < 1:
            raise InvalidInput(f"an estimate's factor is {milli} thousandths: it must be positive")
        self.milli = milli
        self.name = f"estimate:{_VERSION}" + (f"*{milli / 1000:.3f}" if milli != 1000 else "")

    def head(self, leading: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> int:
        """Tokens of leading messages, tools and what primes the reply."""
        fixed = REPLY_TOKENS + (TOOLS_TOKENS if tools else 0)
        own = self._tokens(fixed * 1000 + (_milli(tools_text(tools)) if tools else 0))
        return own + sum(map(self.message, leading))

    def message(self, message: Mapping[str, Any]) -> int:
        """Tokens one message adds; images, audio and files by rule."""
        counted = message_texts(message)
        return self._tokens(counted.fixed * 1000 + sum(map(_milli, counted.texts)))

    def request(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> int:
        """Tokens of the whole request."""
        return self.head(messages, tools)

    def text(self, text: str) -> int:
        """Tokens of bare text."""
        return self._tokens(_milli(text))

    def calibrated(self, reported: int, estimated: int) -> EstimateCounter:
        """A counter scaled so that what this one estimated comes to what a provider reported, in tokens.

        A factor beyond 4 or below 1/4 is not believed and clipped. Raises InvalidInput for figures below 1.
        """
        if reported < 1 or estimated < 1:
            raise InvalidInput(f"cannot calibrate on {reported} reported and {estimated} estimated tokens")
        wanted = (self.milli * reported + estimated // 2) // estimated
        return EstimateCounter(min(max(wanted, 1000 // _LIMIT), 1000 * _LIMIT))

    def _tokens(self, milli: int) -> int:
        return -(-milli * self.milli // 1_000_000)


def _milli(text: str) -> int:
    """Thousandths of a token."""
    if not text:
        return 0
    classes = text.encode("utf-8", "surrogatepass").translate(_TABLE)
    total = sum(weight * sum(map(classes.count, runs)) for weight, runs in _WEIGHTS)
    return max(1000, total)
