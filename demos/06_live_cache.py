"""The live KV cache: edited in place, kept in fewer bits, and many caches under one budget of bytes.

Three parts on SmolLM2. First one talk twice under the same budget of tokens: applied exactly (what follows the first
change is prefilled again) and spliced (what goes is taken out of the cache, only what is new is computed). Then a
budget of KV bytes under which the cache is quantized before a word has to go. Then three talks under a pool that holds
one or two of their caches: the others wait in host memory and come back.
"""

from __future__ import annotations

from itertools import zip_longest

from common import conversations, output

from compaction import Budget, Pool, Session, SessionManager
from compaction.engines import TransformersEngine
from compaction.policies import Quantize, SlidingWindow
from compaction.store import AuditLog
from compaction.transcripts import Transcript


def play(session: Session, talk: Transcript) -> list[str]:
    """One talk, four tokens generated at each of the assistant's turns; a line for each decision."""
    lines = []
    for message in talk.messages:
        if message["role"] == "assistant":
            reply = session.probe(max_new_tokens=4)
            if reply.decision:
                usage, decision = reply.usage, reply.decision
                lines.append(
                    f"  {decision.tokens_before:5} -> {decision.tokens_after:4} tokens, "
                    f"{len(session.entries):2} messages left, {usage.prefilled:4} prefilled, "
                    f"first token after {usage.ttft_ms or 0:5.0f} ms, {usage.kv_bytes or 0:10,} bytes"
                )
        session.append(message)
    return lines


def splicing(engine: TransformersEngine, talk: Transcript) -> None:
    """The same decisions, reached in two ways."""
    for apply in ("exact", "splice"):
        with AuditLog(output(f"live_{apply}.db")) as log:
            manager = SessionManager(
                engine=engine, policy=SlidingWindow(), budget=Budget(tokens=1024), log=log, apply=apply
            )
            print(f"\napply={apply!r}")
            print("\n".join(play(manager.session(f"{talk.id} {apply}"), talk)))
            print("  verifies:", log.verify().ok)


def quantizing(engine: TransformersEngine, talk: Transcript) -> None:
    """Bytes before words."""
    with AuditLog(output("live_quantized.db")) as log:
        policy = Quantize(storage="k8v4", then=SlidingWindow())
        manager = SessionManager(engine=engine, policy=policy, budget=Budget(kv_bytes="24MiB"), log=log)
        print("\n24 MiB of KV cache, quantized to 8-bit keys and 4-bit values first, messages dropped later")
        print("\n".join(play(manager.session(f"{talk.id} quantized"), talk)))
        for row in log.decisions():
            print(f"  decision {row.seq}: {row.actions}")


def pooling(engine: TransformersEngine, talks: list[Transcript]) -> None:
    """Three caches, bytes for one."""
    manager = SessionManager(engine=engine, budget=Budget(tokens=2048), pool=Pool(device="24MiB", host="1GiB"))
    for row in zip_longest(*(talk.messages for talk in talks)):
        for talk, message in zip(talks, row, strict=True):
            if message is not None:
                session = manager.session(f"{talk.id} pooled")
                if message["role"] == "assistant":
                    session.probe(max_new_tokens=4)
                session.append(message)
    print("\nThree talks under a pool of 24 MiB of live caches")
    if manager.pool is not None:
        for name, value in manager.pool.usage().to_json().items():
            print(f"  {name}: {value}")


def main() -> None:
    """All three parts."""
    talk = conversations("support.jsonl")[0]
    engine = TransformersEngine("smollm2")
    splicing(engine, talk)
    quantizing(engine, talk)
    pooling(TransformersEngine("smollm2"), conversations("support_short.jsonl"))


if __name__ == "__main__":
    main()
