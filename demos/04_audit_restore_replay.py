"""Audit, restore, replay: what a log can answer afterwards, and what happens when somebody touches it.

No model is needed. Expect the decisions with their reasons, one span restored and compared with the file, a search hit,
"verifies: True", every decision identical on replay, and then two things that are found out: one changed byte
(`verify` names the row) and one changed constant of the policy (`replay` names the decision).
"""

from __future__ import annotations

import shutil
import sqlite3
from typing import Any

from common import conversations, output

from compaction import Budget, SessionManager
from compaction.messages import dumps, resolve
from compaction.plugins import make_policy
from compaction.policies import ClearToolResults
from compaction.ports import Policy
from compaction.replay import replay
from compaction.store import AuditLog


def other(name: str, params: Any) -> Policy:
    """Make policies as always, but with one more tool result kept: what an edited constant does."""
    return make_policy(name, {**params, "keep_last": params["keep_last"] + 1})


def main() -> None:
    """Write a log, ask it, prove it, then tamper with a copy."""
    (talk,) = conversations("support.jsonl")
    path, copy = output("audit.db"), output("audit_touched.db")
    with AuditLog(path) as log:
        session = SessionManager(policy=ClearToolResults(), budget=Budget(tokens=1500), log=log).session(talk.id)
        ids = []
        for message in talk.messages:
            if message["role"] == "assistant":
                session.prepare(max_new_tokens=64)
            ids.append(session.append(message))

        print("Decisions:")
        for row in log.decisions(talk.id):
            print(f"  event {row.seq}: {row.actions[0]}, {row.before['tokens']} → {row.after['tokens']} tokens")
        span = log.spans(talk.id)[0]
        original = talk.messages[ids.index(span.message_id)]
        whole = dumps(original) if span.path == "" else resolve(original, span.path)
        print(f"\nSpan {span.id}: {span.path}[{span.start}:{span.end}], because: {span.reason}")
        print(f"  restored equals the file: {log.restore(span.id) == whole[span.start : span.end]}")
        print(f"  search 'delay of one day': {' '.join(log.search('delay of one day')[0].snippet.split())}")
        print(f"\nLog verifies: {log.verify().ok}, head {log.head()}")
        again = replay(log, [talk.id])
        print(f"Replay: {again.count('identical')} of {len(again.verdicts)} decisions identical")
        changed = replay(log, [talk.id], make=other)
        first = next(verdict for verdict in changed.verdicts if verdict.result == "different")
        print(f"Replay with one constant changed: event {first.seq} differs: {first.reason[:110]}…")

    shutil.copy(path, copy)
    touched = sqlite3.connect(copy)
    touched.executescript("DROP TRIGGER texts_update; UPDATE texts SET body = replace(body, 'HC-7712', 'HC-7713')")
    touched.close()
    with AuditLog(copy) as log:
        report = log.verify()
        print(f"\nA copy with one order number changed verifies: {report.ok}")
        for problem in report.problems[:2]:
            print(f"  {str(problem)[:120]}")


if __name__ == "__main__":
    main()
