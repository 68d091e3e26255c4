"""Which text of an entry may be edited, and how much of it is live.

Invariant: only strings the grammar calls editable, of messages without a pin; a range that is out already is no work.
"""

from __future__ import annotations

from dataclasses import dataclass

from compaction.grammar import editable
from compaction.messages import Message
from compaction.view import Entry

__all__ = ["Text", "longest_text"]


@dataclass(frozen=True, slots=True)
class Text:
    """One editable string of a message; `live` counts the code points of it that the view still shows."""

    path: str
    string: str
    live: int


def longest_text(entry: Entry, message: Message) -> Text | None:
    """The editable string with the most live code points, the first of equals; None where nothing is live.

    One string only: a plan touches an entry once. Others of the same message come with the next compaction.
    """
    best: Text | None = None
    for path, string in _strings(message):
        live = len(string) - sum(edit.end - edit.start for edit in entry.edits if edit.path == path)
        if live > (best.live if best else 0) and editable(message, path):
            best = Text(path, string, live)
    return best


def _strings(message: Message) -> list[tuple[str, str]]:
    content = message.data.get("content")
    if isinstance(content, str):
        return [("/content", content)]
    if not isinstance(content, list):
        return []
    return [
        (f"/content/{index}/text", part["text"])
        for index, part in enumerate(content)
        if isinstance(part.get("text"), str)
    ]
