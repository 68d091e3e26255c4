"""The meter of `chat`: how full the context is, and what the last turn cost, on one line."""

from __future__ import annotations

from compaction.cli.output import counted, mib
from compaction.session import Session

__all__ = ["meter"]

_BAR = 12


def meter(session: Session, limit: int, written: int = 0) -> str:
    """One line; `limit` in tokens, `written` pieces of the reply that is running (0: none is)."""
    usage = session.usage
    tokens = usage.tokens + written
    filled = min(_BAR, -(-_BAR * tokens // limit))
    parts = [
        f"[{'█' * filled}{'░' * (_BAR - filled)}] {tokens:,}/{limit:,} tokens",
        f"{mib(usage.kv_bytes)} KV",
        counted(session.state.decisions, "compaction"),
    ]
    if not written and usage.ttft_ms is not None:
        parts.append(f"TTFT {usage.ttft_ms:,.0f} ms")
    if not written and usage.tpot_ms is not None:
        parts.append(f"{usage.tpot_ms:,.0f} ms/token")
    return " · ".join(parts)
