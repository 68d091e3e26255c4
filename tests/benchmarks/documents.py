"""Real text for quality measurements: windows of recorded conversations, and keys hidden in them.

Invariant: equal arguments give equal documents, on every machine: sources in a fixed order, windows that begin at a
message, evenly spread over each file. A document's context is what a method may compress before it knows what follows;
its tail is fed afterwards, token by token as it was written.
Rendered in ChatML, message text encoded without control tokens, tool calls as JSON lines behind the content.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compaction.transcripts import Transcript, read

__all__ = ["CONTEXT", "DATA", "TAIL", "Document", "documents", "passkeys"]

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
CONTEXT, TAIL = 1024, 96
SOURCES = (
    "tau_bench_airline_gpt4o",
    "aider_chat_history",
    "swe_agent_trajectories",
    "memorybank_en",
    "openhands_multi_swe_bench",
    "bfcl_multi_turn_executed",
)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
_LINES = 64  # tokens: lines are joined to, or cut in, pieces of at most so many


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids of a context and its tail.

    `messages` and `lines` are slot ranges `(start, end)` that partition the context: whole messages, and lines joined
    or cut to pieces of at most 64 tokens. `answer` is how many of the tail's last tokens are a key to be found; with 0
    all of it is text.
    """

    name: str
    context: tuple[int, ...]
    tail: tuple[int, ...]
    messages: tuple[tuple[int, int], ...]
    lines: tuple[tuple[int, int], ...]
    answer: int = 0
    depth: float = 0.0


@dataclass(slots=True)
class _Text:
    """Ids of a rendered conversation, and where its messages and lines begin."""

    ids: list[int]
    messages: list[int]
    lines: list[int]


def documents(tokenizer: Any, count: int = 64, *, context: int = CONTEXT, tail: int = TAIL) -> list[Document]:
    """`count` documents, taken from the sources in turn. Needs the recorded conversations at `DATA`."""
    queues = [_windows(tokenizer, source, -(-count // len(SOURCES)), context + tail) for source in SOURCES]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*queues))
    made = [_document(name, text, start, context, tail) for name, text, start in filter(None, in_turn)]
    return made[:count]


def passkeys(tokenizer: Any, count: int = 8, *, context: int = CONTEXT) -> list[Document]:
    """A five-digit key in one sentence, at each depth of `count` real texts; the tail asks for it.

    The question comes after the context, so that no method can know it while it compresses.
    """
    made = []
    for index, filler in enumerate(documents(tokenizer, count, context=context)):
        key = str(10_000 + (index * 7_919 + 31_337) % 90_000)
        sentence = _encode(tokenizer, f"\nThe pass key is {key}. Remember it: {key} is the pass key.\n")
        digits = _encode(tokenizer, key)
        tail = _encode(tokenizer, "\nWhat is the pass key? The pass key is ") + digits
        for depth in DEPTHS:
            at = min((start for start, _ in filler.lines), key=lambda start: abs(start - depth * context))
            ids = [*filler.context[:at], *sentence, *filler.context[at:]][:context]
            lines = [start + len(sentence) * (start >= at) for start, _ in filler.lines] + [at]
            starts = [start + len(sentence) * (start > at) for start, _ in filler.messages]
            made.append(
                Document(
                    f"key in {filler.name}",
                    tuple(ids),
                    tuple(tail),
                    _ranges(starts, context),
                    _ranges(lines, context),
                    len(digits),
                    depth,
                )
            )
    return made


def _windows(tokenizer: Any, source: str, count: int, length: int) -> Iterator[tuple[str, _Text, int]]:
    """Windows of a source: the middle one of each conversation, then its neighbours; never two that begin alike."""
    transcripts = [t for t in read(DATA / f"{source}.jsonl.gz") if sum(map(_characters, t.messages)) > 6 * length]
    texts = [(t, _text(tokenizer, t)) for t in transcripts[:: max(1, len(transcripts) // max(1, 2 * count))]]
    starts = [list(_starts(text, length)) for _, text in texts]
    for around in range(max(map(len, starts), default=0)):
        for (transcript, text), places in zip(texts, starts, strict=True):
            middle_first = sorted(range(len(places)), key=lambda i: (abs(i - len(places) // 2), i))
            if around < len(middle_first):
                start = places[middle_first[around]]
                yield f"{source} {transcript.id} +{start}", text, start


def _starts(text: _Text, length: int) -> Iterator[int]:
    """Where windows of `length` tokens may begin: at messages, without overlap."""
    free = 0
    for start in text.messages:
        if start >= free and start + length <= len(text.ids):
            yield start
            free = start + length


def _document(name: str, text: _Text, start: int, context: int, tail: int) -> Document:
    end = start + context
    messages = [at - start for at in text.messages if start <= at < end]
    lines = [at - start for at in sorted({*text.lines, *text.messages}) if start <= at < end]
    ids, pieces = text.ids[start : end + tail], _joined(lines, context)
    return Document(
        name, tuple(ids[:context]), tuple(ids[context:]), _ranges(messages, context), _ranges(pieces, context)
    )


def _joined(starts: Sequence[int], context: int) -> list[int]:
    """Lines that together have at most `_LINES` tokens stay together; a longer line is cut."""
    kept: list[int] = []
    for start, end in itertools.pairwise([*starts, context]):
        if not kept or end - kept[-1] > _LINES:
            kept += range(start, end, _LINES)
    return kept


def _ranges(starts: Sequence[int], end: int) -> tuple[tuple[int, int], ...]:
    return tuple(itertools.pairwise([*sorted({start for start in starts if start < end}), end]))


def _text(tokenizer: Any, transcript: Transcript) -> _Text:
    opening, closing = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    newline = _encode(tokenizer, "\n")
    text = _Text([], [], [])
    for message in transcript.messages:
        text.messages.append(len(text.ids))
        body = f"{message['role']}\n{_content(message)}"
        # verbose: a conversation longer than the model's window is no mistake here, only parts of it are run.
        encoded = tokenizer(
            body, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=True, verbose=False
        )
        begin = len(text.ids) + 1
        text.lines += [begin + i for i, (a, _) in enumerate(encoded["offset_mapping"]) if a and body[a - 1] == "\n"]
        text.ids += [opening, *encoded["input_ids"], closing, *newline]
    return text


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _content(message: Mapping[str, Any]) -> str:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join([message.get("content") or "", *calls]).strip()


def _characters(message: Mapping[str, Any]) -> int:
    return len(_content(message))
