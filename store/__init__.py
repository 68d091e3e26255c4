"""The audit log: every event and every word, in one SQLite file that can be verified, queried and searched.

    from compaction.store import AuditLog

    with AuditLog("audit.db") as log:
        log.conversations(), log.spans(), log.search("order 7712"), log.verify()

`MemoryLog` is the same log over a private in-memory database: same contract, same reading, gone with the process.
"""

from __future__ import annotations

if __name__ != "compaction.store":
    raise ImportError(f"import this package as compaction.store, not as {__name__!r}: its folder is only mapped there")

from compaction.store.log import AuditLog, MemoryLog
from compaction.store.rows import (
    ConversationRow,
    DecisionRow,
    Hit,
    MessageRow,
    Problem,
    SpanRow,
    UsageRow,
    VerifyReport,
)

__all__ = [
    "AuditLog",
    "ConversationRow",
    "DecisionRow",
    "Hit",
    "MemoryLog",
    "MessageRow",
    "Problem",
    "SpanRow",
    "UsageRow",
    "VerifyReport",
]
