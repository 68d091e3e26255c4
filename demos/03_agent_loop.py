"""An agent loop with real tools, wrapped: it reads files, calculates, asks SQLite, and outgrows its budget on the way.

A 135M model is a poor tool user, so WHICH tool is called next is scripted (`SCRIPT`). The model runs every turn all the
same: it gets the request `manager.wrap` makes fit, its words go into the conversation, and the tools really run.
The loop itself knows nothing of compaction: it keeps one list and appends to it. Expect a line a turn with the tokens
sent beside those of the whole list, "compacted" several times, and at the end the file text that left the context.
"""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from agent_tools import TOOLS, run_tool, sales_table
from common import DATA, output

from compaction import Budget, SessionManager
from compaction.engines import TransformersEngine
from compaction.store import AuditLog

TASK = "Read the notes in the folder and tell me: what do the pallets cost, and which product sold best?"
SCRIPT: list[tuple[str, dict[str, Any]] | None] = [
    ("list_files", {}),
    *[("read_file", {"name": name}) for name in ("meeting.txt", "prices.txt", "returns.txt", "route.txt")],
    ("calculate", {"expression": "40 * 12.50"}),
    ("query", {"sql": "SELECT product, sum(pieces) AS sold FROM sales GROUP BY product ORDER BY sold DESC"}),
    None,  # an answer; then the user asks on
    ("read_file", {"name": "workshop.txt"}),
    ("calculate", {"expression": "(14 - 9) * 45 / 2 ** 2"}),
    ("query", {"sql": "SELECT month, round(sum(pieces * price), 2) AS income FROM sales GROUP BY month"}),
    ("read_file", {"name": "meeting.txt"}),
    None,
]  # fmt: skip


def main() -> None:
    """The loop."""
    engine = TransformersEngine("smollm2")
    database = sales_table(sqlite3.connect(":memory:"))
    log = AuditLog(output("agent.db"))
    manager = SessionManager(engine=engine, budget=Budget(tokens=1024), log=log)

    choices = iter(SCRIPT)

    @manager.wrap("agent")
    def call_model(messages: list[dict[str, Any]], *, tools: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
        reply = engine.generate("agent", messages, tools, max_new_tokens=max_tokens)
        text = "".join(reply)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if choice := next(choices):
            function = {"name": choice[0], "arguments": json.dumps(choice[1])}
            message["tool_calls"] = [{"id": f"call_{choice[0]}", "type": "function", "function": function}]
        made = reply.result.usage if reply.result else None
        usage = {"prompt_tokens": made.prompt_tokens, "completion_tokens": made.completion_tokens} if made else {}
        return {"choices": [{"message": message}], "usage": usage}

    history: list[dict[str, Any]] = [{"role": "system", "content": "You work with files, numbers and a database."}]
    history.append({"role": "user", "content": TASK})
    done = 0
    for turn in range(1, len(SCRIPT) + 1):
        response = call_model(history, tools=TOOLS, max_tokens=12)
        message = response["choices"][0]["message"]
        history.append(message)
        sent, whole = response["usage"]["prompt_tokens"], engine.counter.request(history, TOOLS)
        decisions, what = len(log.decisions("agent")), "answers"
        for call in message.get("tool_calls", []):
            what = f"{call['function']['name']} {call['function']['arguments']}"
            result = run_tool(call["function"], DATA / "notes", database)
            history.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        note = "compacted" if decisions > done else ""
        print(f"turn {turn:2}: sent {sent:4} of {whole:4} tokens {note:9} {what[:70]}")
        done = decisions
        if not message.get("tool_calls"):
            history.append({"role": "user", "content": "Thanks. Now the workshop, and the income of each month."})
    spans = log.spans("agent")
    print(f"\n{done} compactions; the loop's own list still has all {len(history)} messages, and the log what left:")
    for span in spans[:6]:
        print(f"  {span.tokens:4} tokens  {span.action:8} {' '.join(str(span.text).split())[:80]}")
    print(f"log verifies: {log.verify().ok}")


if __name__ == "__main__":
    main()
