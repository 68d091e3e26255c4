"""Text out of tokens, one token at a time.

Invariant: a piece once given out never changes, no piece ends in half a character, and the pieces joined are the text.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Detokenizer"]

_HALF = "\ufffd"
_CONTEXT = 6  # tokens decoded along with the new ones: some tokenizers drop the space of a text's first word
_WAIT = 8  # tokens a half character may take before it is taken for what the model meant


class Detokenizer:
    """Collects tokens, gives out text as soon as it is final."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._from = 0  # context starts here
        self._done = 0  # everything before is given out
        self._text: list[str] = []

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._text)

    def push(self, token: int) -> str:
        """One more token; returns the text that is final now, often one word, sometimes nothing."""
        self._ids.append(token)
        return self._give(final=False)

    def flush(self) -> str:
        """The rest, without the bytes of a character that was never finished."""
        return self._give(final=True)

    def _give(self, *, final: bool) -> str:
        known = self._decode(self._ids[self._from : self._done])
        now = self._decode(self._ids[self._from :])
        new = now[len(known) :]
        if final:
            new = new.rstrip(_HALF)
        elif new.endswith(_HALF) and len(self._ids) - self._done < _WAIT:
            return ""
        if not new and not final:
            return ""
        self._done = len(self._ids)
        self._from = max(0, self._done - _CONTEXT)
        self._text.append(new)
        return new

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
