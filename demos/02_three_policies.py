"""Three policies side by side: the same conversation, the same budget, the same model; what each keeps and costs.

Plays demos/data/support.jsonl three times. Expect a table with one line a policy, and demo-output/three_policies.png:
all three lines stay under the budget where the dotted one (no compaction) leaves it. A summary that does not end within
its tokens is not used: `summarize` then drops the oldest as `truncate` does, so "summaries" may be below "compactions".
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
# Asked for little, a 135M model more often ends its summary; one that does not end is not used.
SHORT = "Say in one short sentence what the customer has and wants. Stop after that sentence."
POLICIES = (Truncate(), SlidingWindow(), Summarize(max_tokens=96, instruction=SHORT))


def main() -> None:
    """Play, print, draw."""
    (talk,) = conversations("support.jsonl")
    engine = TransformersEngine("smollm2")
    figure, axes = pyplot.subplots(figsize=(10, 5), dpi=120)
    print(f"{talk.id}: {len(talk.messages)} messages, budget {BUDGET:,} tokens\n")
    columns = ("compactions", "summaries", "spans", "tokens", "peak", "prefilled", "reused")
    print(f"{'policy':15}", *(f"{column:>11}" for column in columns))
    whole: list[int] = []  # tokens of each turn without compaction
    with AuditLog(output("three_policies.db")) as log:
        for policy in POLICIES:
            manager = SessionManager(engine=engine, policy=policy, budget=Budget(tokens=BUDGET), log=log)
            session = manager.session(policy.name)
            whole.clear()
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
            drawn = [row for row in log.decisions(policy.name) if "digest" in row.actions]
            figures = (cuts, len(drawn), len(spans), gone, peak, fed, reused)
            print(f"{policy.name:15}", *(f"{figure:11,}" for figure in figures))
            for span in [span for span in spans if span.action == "digest"][:1]:
                print(f"   its first summary: {span.replaced_by}")
    axes.plot(range(1, len(whole) + 1), whole, ":", color="grey", label="no compaction")
    axes.axhline(BUDGET, linestyle="--", color="#c62828", label=f"budget {BUDGET:,}")
    axes.set(xlabel="turn", ylabel="tokens of the largest pass", ylim=(0, 2 * BUDGET), title=talk.id)
    axes.legend(loc="upper left")
    plot = output("three_policies.png")
    figure.savefig(plot)
    print(f"\nplot: {plot}")


def draw(axes: Axes, name: str, turns: list[UsageRow]) -> None:
    """One line."""
    axes.plot(range(1, len(turns) + 1), [turn.peak_tokens or 0 for turn in turns], marker="o", markersize=3, label=name)


if __name__ == "__main__":
    main()
