"""Prometheus metrics of a manager's conversations, under the names people know from vLLM.

Invariant: counters are a fold over the events this process commits, so they say what the log says, each event once; KV
bytes are measured from the tensors when somebody looks. No message text becomes a label; conversation names do, of the
heaviest few only, and none where `conversations=0`. prometheus-client is imported when a `Metrics` is made, not before.

    metrics = Metrics()
    manager = metrics.attach(SessionManager(engine=engine, budget=Budget(tokens=2048), log=AuditLog("audit.db")))
    metrics.text()                    # the exposition format, or:
    with metrics.serve(port=9464):    # http://127.0.0.1:9464/metrics
        ...
"""

from __future__ import annotations

from compaction.metrics.attaching import PORT, Metrics, Server
from compaction.metrics.watching import WatchedLog

__all__ = ["PORT", "Metrics", "Server", "WatchedLog"]
