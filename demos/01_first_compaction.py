"""A first compaction: talk to SmolLM2 until the conversation no longer fits, and see what left and where it is now.

Expect four replies of the model (a 135M model: fluent, not clever), one or more lines "compacted: … tokens", the spans
that left with the beginning of their text, and a fact from a discarded message found again in the log.
"""

from __future__ import annotations

from common import output

from compaction import Budget, Session, SessionManager
from compaction.decide import Decision
from compaction.engines import TransformersEngine
from compaction.store import AuditLog

ASKED = [
    "My name is Zoë and my order is HC-7712: a mountain bike, a folding lock and a pair of pedals. The bike came on "
    "11 March with a dented box. Since then I have ridden it for 35 km, always on dry roads, once up to the castle.",
    "It clicks when I ride uphill in the two biggest gears. It fell over once, in the hallway, on its right side. "
    "What is a derailleur hanger, and can a fall like that have bent it?",
    "I can come to the workshop on Thursday after four. On Monday I cannot. What should I bring along? I have the "
    "invoice, the manual, the dented box, and a photo of the frame number.",
    "And the lock is too short for my rack; I have not used it. How do people usually send such things back?",
]


def report(session: Session, decision: Decision) -> None:
    """Called after each compaction."""
    print(f"   compacted {session.id}: {decision.tokens_before} → {decision.tokens_after} tokens")


def main() -> None:
    """Four turns in a budget of 300 tokens."""
    engine = TransformersEngine("smollm2")
    with AuditLog(output("first_compaction.db")) as log:
        manager = SessionManager(engine=engine, budget=Budget(tokens=300), log=log)
        session = manager.session("zoe")
        session.on("after_compaction", report)
        for text in ASKED:
            session.append({"role": "user", "content": text})
            reply = session.generate(max_new_tokens=32)
            usage = session.usage
            print(f"you:   {text[:90]}…\nmodel: {' '.join(reply.text.split())}")
            print(
                f"   {usage.tokens} tokens, {usage.kv_bytes:,} bytes of KV cache, {usage.prefilled} tokens prefilled\n"
            )

        print("What left the context, and is in the log:")
        for span in log.spans("zoe"):
            print(f"   {span.id}  {span.tokens:3} tokens  {span.action}: {str(span.text)[:70]}…")
        hit = log.search("hallway")[0] if log.search("hallway") else log.search("castle")[0]
        print(f"found again: {hit.snippet}")


if __name__ == "__main__":
    main()
