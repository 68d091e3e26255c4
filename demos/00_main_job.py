"""The main job, on real input: keep recorded conversations inside a budget, then prove that nothing was lost.

Plays conversations of the tau-bench airline runs (or, where ../shared/data is not there, the sample in demos/data)
through SmolLM2 with a live KV cache, by the commands a user would type. Then every discarded span is taken back and
compared with the file it came from. Options: `--limit N`, `--budget N`, `--max-new-tokens N`, `--policy P`, and
another transcript. It took 50 s of processor time where this was written. Expect a summary that ends with

    recovered     42 of 42 spans, byte for byte
    replay        15 of 15 decisions identical
    log           verifies: 179 events, demo-output/main_job.db

and the plot's name. Exits 1 where anything is not as promised.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from common import DATA, HERE, output

from compaction.cli import main as compaction
from compaction.messages import dumps, resolve
from compaction.plugins import policies
from compaction.store import AuditLog
from compaction.transcripts import read

TAU = HERE.parent.parent / "shared" / "data" / "tau_bench_airline_gpt4o.jsonl.gz"
SAMPLE = DATA / "support.jsonl"
LAYERS = 30
KV_BYTES_PER_TOKEN = LAYERS * 2 * 3 * 64 * 2  # SmolLM2-135M: K and V, heads, their size, bytes of a bf16


def command(*words: object) -> dict[str, Any]:
    """Run a `compaction …` command in this process, say so, and return the JSON it prints."""
    args = [str(word) for word in words]
    print(f"$ compaction {shlex.join(args)}", flush=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = compaction([*args, "--json"])
    if not printed.getvalue():
        sys.exit(code or 1)
    result: dict[str, Any] = json.loads(printed.getvalue())
    return result


def recovered(db: Path, transcript: Path, limit: int) -> tuple[int, int]:
    """How many discarded spans there are, and how many come back exactly as they stand in the transcript."""
    originals = {talk.id: talk.messages for _, talk in zip(range(limit), read(transcript), strict=False)}
    spans = same = 0
    with AuditLog(db) as log:
        for name, messages in originals.items():
            place = {row.message_id: index for index, row in enumerate(log.messages(name))}
            for span in log.spans(name):
                message = messages[place[span.message_id]]
                whole = dumps(message) if span.path == "" else resolve(message, span.path)
                spans += 1
                same += log.restore(span.id) == whole[span.start : span.end]
    return spans, same


def main() -> int:
    """Run, verify, replay, restore; print the summary."""
    parser = argparse.ArgumentParser(description="The main job, end to end.")
    parser.add_argument("transcript", nargs="?", type=Path, default=TAU if TAU.exists() else SAMPLE)
    parser.add_argument("--limit", type=int, default=3, help="conversations")
    parser.add_argument("--budget", type=int, default=None, help="tokens; default 2048, for the sample 1024")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--policy", default="default")
    asked = parser.parse_args()
    budget = asked.budget or (1024 if asked.transcript == SAMPLE else 2048)
    db, plot = output("main_job.db"), output("main_job.png")
    factory = policies().get(asked.policy.partition(":")[0])
    about = (inspect.getdoc(factory) or "").partition("\n")[0] if factory else "unknown"
    print(f"Input:  {asked.transcript.name}, the first {asked.limit} conversations")
    print(f"Budget: {budget:,} tokens for prompt + reply\nPolicy: {asked.policy}: {about}\n")
    began = time.monotonic()
    how = ("--limit", asked.limit, "--policy", asked.policy, "--max-new-tokens", asked.max_new_tokens)
    run = command("run", asked.transcript, "--model", "smollm2", "--budget", budget, *how, "--log", db, "--plot", plot)
    verified, replayed = command("audit", "verify", db), command("replay", db)
    spans, same = recovered(db, asked.transcript, asked.limit)
    allowed, held, peak = budget * KV_BYTES_PER_TOKEN, run["kv_bytes"], run["peak_kv_bytes"]
    seconds, verifies = time.monotonic() - began, "verifies" if verified["ok"] else "DOES NOT VERIFY"
    print(f"""
conversations {run["conversations"]}, {run["messages"]} messages, {run["turns"]} turns in {seconds:.0f} s
compactions   {run["compactions"]}: {run["discarded_spans"]} spans of {run["discarded_tokens"]:,} tokens left
peak tokens   {run["peak_tokens"]:,} of {run["budget_tokens"]:,}, over every forward pass
KV cache      {held:,} bytes measured at rest; the budget comes to {allowed:,}
peak KV cache {peak:,} bytes, while one layer's arena grew
prefilled     {run["prefilled_tokens"]:,} tokens; {run["reused_tokens"]:,} more were in the cache already
could not fit {run["unsatisfiable"]} turns
recovered     {same} of {spans} spans, byte for byte
replay        {replayed["identical"]} of {replayed["decisions"]} decisions identical
log           {verifies}: {verified["events"]:,} events, {db}
plot          {plot}""")
    grown = peak <= allowed + allowed // LAYERS  # at most one layer's arena more, and only while it grows
    kept = grown and run["peak_tokens"] <= budget and held <= allowed and not run["unsatisfiable"]
    proven = verified["ok"] and same == spans == run["discarded_spans"]
    again = replayed["identical"] == replayed["decisions"] == run["compactions"]
    return 0 if kept and proven and again and run["compactions"] else 1


if __name__ == "__main__":
    sys.exit(main())
