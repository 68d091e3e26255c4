"""Sessions around any `call_model(messages, **kw)`: what `SessionManager.wrap` returns.

Invariant: the caller's list and keywords are never changed; each call leaves the conversation's history saying what the
list says, and every divergence is an event.
"""

from __future__ import annotations

from compaction.middleware.overflow import too_long
from compaction.middleware.wrapper import Wrapper

__all__ = ["Wrapper", "too_long"]
