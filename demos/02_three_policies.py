"""Three policies side by side: the same conversation, the same budget, the same model; what each keeps and costs.

Plays demos/data/support.jsonl three times. Expect a table with one line a policy, and demo-output/three_policies.png:
all three lines stay under the budget where the dotted one (no compaction) leaves it.
"""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

from common import conversations, output
from matplotlib import pyplot
from matplotlib.axes import Axes

from compaction import Budget, SessionManager
from compaction.engines import TransformersEngine
from compaction.policies import SlidingWindow, Summarize, Truncate
from compaction.store import AuditLog, UsageRow

BUDGET = 1024
POLICIES = (Truncate(), SlidingWindow(), Summarize(max_tokens=96))


def main() -> None:
    """Play, print, draw."""
    (talk,) = conversations("support.jsonl")
    engine = TransformersEngine("smollm2")
    figure, axes = pyplot.subplots(figsize=(10, 5), dpi=120)
    print(f"{talk.id}: {len(talk.messages)} messages, budget {BUDGET:,} tokens\n")
    columns = f"{'policy':15} {'compactions':>11} {'spans':>6} {'tokens':>7} {'peak':>6} {'prefilled':>9} {'reused':>7}"
    print(columns)
    with AuditLog(output("three_policies.db")) as log:
        for policy in POLICIES:
            manager = SessionManager(engine=engine, policy=policy, budget=Budget(tokens=BUDGET), log=log)
            session = manager.session(policy.name)
            whole = []
            for message in talk.messages:
                if message["role"] == "assistant":
                    session.probe(max_new_tokens=4)  # the model runs; the conversation goes on as recorded
                    whole.append(engine.counter.request(talk.messages[: len(session.state.history)], None))
                session.append(message)
            manager.release(policy.name)
            turns, spans = log.usage(policy.name), log.spans(policy.name)
            draw(axes, policy.name, turns)
            gone, peak = sum(span.tokens for span in spans), max(turn.peak_tokens or 0 for turn in turns)
            fed, reused = sum(turn.prefilled or 0 for turn in turns), sum(turn.reused or 0 for turn in turns)
            cuts = len(log.decisions(policy.name))
            print(f"{policy.name:15} {cuts:11} {len(spans):6} {gone:7,} {peak:6,} {fed:9,} {reused:7,}")
    axes.plot(range(1, len(whole) + 1), whole, ":", color="grey", label="no compaction")
    axes.axhline(BUDGET, linestyle="--", color="#c62828", label=f"budget {BUDGET:,}")
    axes.set(xlabel="turn", ylabel="tokens of the largest pass", ylim=(0, 2 * BUDGET), title=talk.id)
    axes.legend(loc="lower right")
    plot = output("three_policies.png")
    figure.savefig(plot)
    print(f"\nplot: {plot}")


def draw(axes: Axes, name: str, turns: list[UsageRow]) -> None:
    """One line."""
    axes.plot(range(1, len(turns) + 1), [turn.peak_tokens or 0 for turn in turns], marker="o", markersize=3, label=name)


if __name__ == "__main__":
    main()
