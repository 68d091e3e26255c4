"""Fulfilling a digest: the only effect a plan may ask for.

Invariant: the summariser's own input is bounded, its failures come back as failures and never as content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compaction.errors import EngineError
from compaction.messages import dumps, is_blob
from compaction.plan import Digest
from compaction.ports import Engine, SplicingEngine, Summarizer, Summary, Usage
from compaction.view import View

__all__ = ["CacheSummarizer", "CallableSummarizer", "EngineSummarizer", "fulfil", "source_text"]

MAX_CHUNKS = 8
_PROMPT_SLACK = 64
_MIN_SUMMARY = 24
_QUOTED = 80


@dataclass(frozen=True)
class EngineSummarizer:
    """Summaries by the engine's own model, outside any conversation's cache."""

    engine: Engine

    @property
    def name(self) -> str:
        """The engine's name stands in the decision."""
        return f"engine:{self.engine.name}"

    def __call__(self, source: str, *, instruction: str, max_tokens: int, limit: int) -> Summary:
        """Raises what the engine raises; `fulfil` turns it into a failure."""
        messages = [{"role": "user", "content": f"{instruction}\n\n{source}"}]
        made = self.engine.complete(messages, max_new_tokens=min(max_tokens, limit - 1))
        return Summary(made.text, made.finish_reason, made.usage)


@dataclass(frozen=True)
class CacheSummarizer(EngineSummarizer):
    """Summaries by the engine's own model out of a conversation's live cache: what it holds is not read again."""

    engine: SplicingEngine
    conversation: str
    tools: Sequence[Mapping[str, Any]] | None

    def from_cache(self, action: Digest, view: View, *, limit: int) -> Summary:
        """Ask behind the live cache, which is as before afterwards.

        Raises EngineError where that cannot be done; the summary is then to be made outside.
        """
        last = view.position(action.entries[-1])
        messages = [entry.render(view.messages) for entry in view.entries]
        begins = _lines(messages[last])[:_QUOTED]
        asked = f"{action.instruction}\n\nIt is the conversation above, up to and including what begins with: {begins}"
        made = self.engine.summarize(
            self.conversation,
            messages,
            self.tools,
            asked,
            need=last + 1,
            max_new_tokens=min(action.max_tokens, limit - 1),
            limit=limit,
        )
        return Summary(made.text, made.finish_reason, made.usage)


@dataclass(frozen=True)
class CallableSummarizer:
    """Summaries by any function of the source text, under a name of its own."""

    name: str
    function: Callable[[str], str | Summary]

    def __call__(self, source: str, *, instruction: str, max_tokens: int, limit: int) -> Summary:
        """Ask the function; a bare string counts as finished."""
        del instruction, max_tokens, limit
        made = self.function(source)
        return made if isinstance(made, Summary) else Summary(made)


def source_text(action: Digest, view: View) -> str:
    """What the summariser reads: the entries as lines of `role: text`, tool calls included, blobs named only."""
    return "\n\n".join(_lines(view.by_id(entry_id).render(view.messages)) for entry_id in action.entries)


def _lines(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(f"[{part.get('type')}]" if is_blob(part) else str(part.get("text", "")) for part in content)
    calls = [dumps(call.get("function", call)) for call in message.get("tool_calls") or ()]
    return "\n".join([f"{message['role']}: {content or ''}", *calls])


def fulfil(
    summarizer: Summarizer,
    action: Digest,
    view: View,
    *,
    limit: int,
    count: Callable[[str], int],
) -> Summary:
    """Ask the summariser, in chunks of which each pass fits `limit` tokens; their notes are joined as they are.

    Where more than `MAX_CHUNKS` would be needed, each chunk is cut in the middle first. A summariser with a live cache
    is asked there first.
    """
    if isinstance(summarizer, CacheSummarizer):
        try:
            return summarizer.from_cache(action, view, limit=limit)
        except EngineError as exc:
            made = _outside(summarizer, action, view, limit=limit, count=count)
            refused = {"how": "exact", "refused": getattr(exc, "reason", str(exc))}
            return replace(made, usage=replace(made.usage, applied=refused)) if made.usage else made
    return _outside(summarizer, action, view, limit=limit, count=count)


def _outside(summarizer: Summarizer, action: Digest, view: View, *, limit: int, count: Callable[[str], int]) -> Summary:
    source = source_text(action, view)
    space = limit - action.max_tokens - count(action.instruction) - _PROMPT_SLACK
    if space < _MIN_SUMMARY:
        return Summary(f"no room for a summary: {space} tokens are left for its source", "error")
    needed = -(-count(source) // space)
    parts = max(1, min(needed, MAX_CHUNKS, action.max_tokens // _MIN_SUMMARY))
    chunks = [_fitted(chunk, space, count) for chunk in _chunks(source, parts)]
    allowance = action.max_tokens // len(chunks)
    made: list[Summary] = []
    for chunk in chunks:
        made.append(_ask(summarizer, chunk, action, allowance, limit))
        if made[-1].finish_reason != "stop":
            return replace(made[-1], usage=_total(made))
        if not made[-1].text.strip():
            return Summary("", "stop", _total(made))
    return Summary("\n".join(part.text.strip() for part in made), "stop", _total(made))


def _ask(summarizer: Summarizer, chunk: str, action: Digest, max_tokens: int, limit: int) -> Summary:
    try:
        return summarizer(chunk, instruction=action.instruction, max_tokens=max_tokens, limit=limit)
    except Exception as exc:  # noqa: BLE001  a model may fail in any way: it is recorded, the next rung plans
        return Summary(f"{type(exc).__name__}: {exc}", "error")


def _chunks(source: str, parts: int) -> list[str]:
    parts = max(1, parts)
    size = -(-len(source) // parts) or 1
    return [source[at : at + size] for at in range(0, len(source), size)] or [""]


def _fitted(chunk: str, space: int, count: Callable[[str], int]) -> str:
    """The chunk, its middle cut out until it takes at most `space` tokens."""
    text, size = chunk, len(chunk)
    while (tokens := count(text)) > space:
        size = min(size - 1, int(size * space / tokens * 0.9))
        text = chunk[: size // 2] + "\n[…]\n" + chunk[len(chunk) - size // 2 :]
    return text


def _total(made: Sequence[Summary]) -> Usage | None:
    usages = [part.usage for part in made if part.usage is not None]
    if not usages:
        return None
    return replace(
        usages[0],
        prompt_tokens=sum(u.prompt_tokens for u in usages),
        completion_tokens=sum(u.completion_tokens for u in usages),
        prefilled=sum(u.prefilled for u in usages),
        reused=sum(u.reused for u in usages),
        peak_tokens=max(u.peak_tokens for u in usages),
        peak_kv_bytes=max((u.peak_kv_bytes or 0 for u in usages), default=None),
    )
