"""A reply put together from the pieces of a stream.

Invariant: what was streamed as text is joined without a character more or less; a piece is read, never changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from compaction.errors import InvalidInput
from compaction.messages import dumps
from compaction.middleware.matching import plain

__all__ = ["Partial"]

TEXTS = ("content", "refusal", "reasoning_content", "reasoning")


class Partial:
    """A reply put together from text pieces, or chat-completions chunks (mappings or SDK objects).

    Of a chunk it takes `choices[0].delta` (texts are joined, tool calls by index; of other keys the last value) and
    `usage`. Other pieces are none of its business.
    """

    def __init__(self) -> None:
        self.pieces = 0
        self._understood = False
        self._texts: dict[str, list[str]] = {}
        self._fields: dict[str, Any] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._usage: object = None
        self._finish_reason: object = None

    def take(self, piece: object) -> None:
        """Add one piece."""
        self.pieces += 1
        data = piece if isinstance(piece, str) else plain(piece)
        if isinstance(data, str):
            self._understood = True
            self._texts.setdefault("content", []).append(data)
        elif isinstance(data, Mapping) and ("choices" in data or "usage" in data):
            self._understood = True
            self._usage = data.get("usage") or self._usage
            for choice in data.get("choices") or ():
                if not choice.get("index"):  # 0, or left out
                    self._finish_reason = choice.get("finish_reason") or self._finish_reason
                    self._delta(choice.get("delta") or choice.get("message") or {})

    def _delta(self, delta: Mapping[str, Any]) -> None:
        for key, value in delta.items():
            if key == "tool_calls":
                for call in value or ():
                    self._call(call)
            elif key in TEXTS and isinstance(value, str):
                self._texts.setdefault(key, []).append(value)
            elif key != "role" and value is not None:
                self._fields[key] = value

    def _call(self, delta: Mapping[str, Any]) -> None:
        index = delta.get("index")
        if index is None:  # some servers number nothing: a new id starts a new call
            index = len(self._calls) if delta.get("id") or not self._calls else len(self._calls) - 1
        call = self._calls.setdefault(index, {"id": "", "type": "function", "function": {"name": "", "arguments": []}})
        for key, value in delta.items():
            if key not in ("index", "function") and value:
                call[key] = value
        function = delta.get("function") or {}
        call["function"]["name"] = call["function"]["name"] or function.get("name") or ""
        call["function"]["arguments"].append(function.get("arguments") or "")

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message so far."""
        # A character outside the BMP may come in two pieces, one surrogate each: JSON knows it as one.
        texts: dict[str, str] = {key: json.loads(dumps("".join(parts))) for key, parts in self._texts.items()}
        content = texts.pop("content", None if self._calls or texts or self._fields else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, **texts, **self._fields}
        if self._calls:
            message["tool_calls"] = [_joined(self._calls[index]) for index in sorted(self._calls)]
        return message

    @property
    def text(self) -> str:
        """The words so far; where there is more than text, the message so far as JSON."""
        message = self.message
        return message["content"] if message.keys() == {"role", "content"} else dumps(message)

    @property
    def response(self) -> dict[str, Any]:
        """The whole as a chat-completions response, with the usage where the stream reported it.

        Raises InvalidInput where there were pieces, and none was text or a chunk.
        """
        if self.pieces and not self._understood:
            raise InvalidInput(
                "none of the stream's pieces can be recorded: yield text, or chat-completions chunks (mappings with "
                "choices[0].delta, or objects with model_dump)"
            )
        choice = {"index": 0, "message": self.message, "finish_reason": self._finish_reason}
        return {"choices": [choice], **({"usage": self._usage} if self._usage else {})}


def _joined(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {"name": function["name"], "arguments": "".join(function["arguments"])}}
