"""Many conversations on one model: each has its own live KV cache, its own measured bytes and its own decisions.

Three support calls take turns on one SmolLM2. Expect a line a turn: few tokens prefilled each time, because every
conversation's cache is still there when its turn comes again. Then one is released (its bytes go, its log stays) and
resumed: the next turn prefills everything once.
"""

from __future__ import annotations

from itertools import zip_longest

from common import conversations, output

from compaction import Budget, SessionManager
from compaction.engines import TransformersEngine
from compaction.store import AuditLog


def main() -> None:
    """Round robin, message by message."""
    talks = conversations("support_short.jsonl")
    engine = TransformersEngine("smollm2")
    with AuditLog(output("many.db")) as log:
        manager = SessionManager(engine=engine, budget=Budget(kv_bytes="12MiB"), log=log)
        print(f"Each may hold 12 MiB of KV cache: {12 * 2**20 // engine.kv_bytes_per_token} tokens\n")
        for row in zip_longest(*(talk.messages for talk in talks)):
            for talk, message in zip(talks, row, strict=True):
                if message is None:
                    continue
                session = manager.session(talk.id)
                if message["role"] == "assistant":
                    reply = session.probe(max_new_tokens=4)
                    done = "compacted" if reply.decision else ""
                    usage = reply.usage
                    held = engine.kv_bytes(talk.id)
                    print(f"{talk.id:13} prefilled {usage.prefilled:4} reused {usage.reused:4} KV {held:10,} B {done}")
                session.append(message)
        print("\nKV bytes measured now:", {talk.id: engine.kv_bytes(talk.id) for talk in talks})

        first = talks[0].id
        manager.release(first)
        print(f"{first} released: {engine.kv_bytes(first)} bytes; its log has {len(log.messages(first))} messages")
        session = manager.session(first)
        session.append({"role": "user", "content": "One more question: do I get a reminder?"})
        reply = session.generate(max_new_tokens=8)
        print(f"{first} resumed: {reply.usage.prefilled} tokens prefilled, {engine.kv_bytes(first):,} bytes")
        print(
            "decisions:", {row.conversation: row.decisions for row in log.conversations()}, "verifies:", log.verify().ok
        )


if __name__ == "__main__":
    main()
