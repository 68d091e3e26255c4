"""`compaction run` and `chat` on the real model, by real processes: whole, stopped in every way, and repeated."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from compaction.events import NewEvent
from compaction.store import AuditLog
from tests.builders import assistant, system, user
from tests.cli.harness import (
    NAME,
    TALK,
    as_json,
    cli,
    generating,
    kinds,
    logged,
    start,
    stop,
    verified,
    wait_for,
    write_talk,
)

pytestmark = pytest.mark.model

KEYS = [
    "conversations", "messages", "turns", "compactions", "discarded_spans", "discarded_tokens",
    "budget_tokens", "peak_tokens", "budget_kv_bytes", "kv_bytes", "peak_kv_bytes", "prefilled_tokens", "reused_tokens",
    "generated_tokens", "summary_tokens", "failed_summaries", "unsatisfiable", "skipped", "interrupted",
    "ttft_ms_p50", "ttft_ms_p95", "tpot_ms_p50",
    "reuse_violations", "resumed_messages", "apply", "spliced_turns", "refused_splices", "model", "policy", "log",
]  # fmt: skip


def run_of(talk: Path, db: Path, new: int = 4) -> list[object]:
    """The arguments of a run with small figures."""
    return ["run", talk, "--budget", 400, "--policy", "sliding_window", "--max-new-tokens", new, "--log", db]


def test_a_run_keeps_its_promises(talk: Path, tmp_path: Path) -> None:
    """Within the budget at every pass, reused as promised, verified, replayed alike, all messages logged, and drawn."""
    db, picture = tmp_path / "a.db", tmp_path / "a.png"

    found = as_json(*run_of(talk, db), "--plot", picture)

    assert list(found) == KEYS
    assert (found["messages"], found["turns"], found["unsatisfiable"]) == (len(TALK), 5, 0)
    assert 0 < found["peak_tokens"] <= 400 and found["compactions"] > 0 and found["reused_tokens"] > 0
    assert found["reuse_violations"] == 0 and 0 < found["kv_bytes"] <= found["peak_kv_bytes"]
    assert logged(db) == TALK
    assert as_json("audit", "verify", db)["ok"]
    replayed = as_json("replay", db)
    assert replayed["identical"] == replayed["decisions"] == found["compactions"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_can_splice(tmp_path: Path) -> None:
    """The same promises with a cache that is edited in place, and each turn says how it was brought there."""
    said = [(user(f"And order {n}? {'please ' * 8}"), assistant(f"Order {n} is in Zürich.")) for n in range(14)]
    talk = write_talk(tmp_path, [system("You are terse."), *(message for turn in said for message in turn)])
    found = as_json(*run_of(talk, tmp_path / "a.db", new=1), "--apply", "splice")

    assert (found["apply"], found["refused_splices"], found["reuse_violations"]) == ("splice", 0, 0)
    assert found["spliced_turns"] > 0 and found["compactions"] > 0 and 0 < found["peak_tokens"] <= 400
    assert found["prefilled_tokens"] < 800 < found["prefilled_tokens"] + found["reused_tokens"]
    assert as_json("audit", "verify", tmp_path / "a.db")["ok"]


def test_a_run_quantizes_before_it_drops(tmp_path: Path) -> None:
    """Under --kv-budget: all messages stay, measured bytes stay within it, and audit show says what was done."""
    questions = [f"Parcel {n} of order 7712: what is known? " + "It was scanned in Zürich. " * 9 for n in range(6)]
    talk = [message for text in questions for message in (user(text), assistant("Nothing yet."))]
    db, most = tmp_path / "a.db", 12 * 2**20

    found = as_json(
        "run", write_talk(tmp_path, talk), "--kv-budget", "12MiB", "--policy", "quantize:then=truncate",
        "--max-new-tokens", 2, "--log", db,
    )  # fmt: skip

    assert (found["compactions"], found["discarded_spans"], found["unsatisfiable"]) == (1, 0, 0)
    assert found["budget_kv_bytes"] == most and found["peak_tokens"] > found["budget_tokens"]
    assert found["kv_bytes"] <= most and found["reuse_violations"] == 0
    with AuditLog(db) as log:
        applied = [event.payload["applied"] for event in log.events(NAME) if event.kind == "usage"]
    done = next(item["quantize"] for item in applied if "quantize" in (item or {}))
    assert done["bytes_after"] < done["bytes_before"] <= most and done["storage"] == "k8v4"
    shown = cli("audit", "show", db).stdout
    assert "bytes before words (k8v4, KV " in " ".join(shown.split())
    assert as_json("audit", "show", db)["decisions"][0]["reasons"] == ["bytes before words"]
    assert as_json("replay", db)["identical"] == 1 and verified(db)


def test_a_run_without_a_log_says_so(talk: Path) -> None:
    """Where the log was in memory, nothing is said to be in it."""
    shown = cli("run", talk, "--budget", 400, "--max-new-tokens", 4).stdout

    assert "in memory, gone now" in shown and "all in the log" not in shown


def test_another_policy_may_go_on(talk: Path, tmp_path: Path) -> None:
    """A finished log is read again whatever the policy; the figures are those of the whole log."""
    db = tmp_path / "a.db"
    first = as_json(*run_of(talk, db))

    again = as_json("run", talk, "--budget", 400, "--policy", "truncate", "--max-new-tokens", 4, "--log", db)

    assert (again["resumed_messages"], again["compactions"]) == (len(TALK), first["compactions"])


def test_killed_and_repeated(talk: Path, tmp_path: Path) -> None:
    """After kill -9 the log verifies, and the same command completes it: every message once, the totals whole."""
    db = tmp_path / "a.db"
    process = start(*run_of(talk, db, 60))
    wait_for(db, generating, process)

    assert stop(process, signal.SIGKILL)[0] == -signal.SIGKILL
    assert verified(db)
    held = len(logged(db))
    found = as_json(*run_of(talk, db))

    assert logged(db) == TALK
    assert found["resumed_messages"] == held > 0
    assert (found["messages"], found["turns"], found["unsatisfiable"]) == (len(TALK), 5, 0)
    assert found["reuse_violations"] == 0 and verified(db)


def test_interrupted_and_repeated(talk: Path, tmp_path: Path) -> None:
    """Ctrl-C in the middle of a turn is one line and exit code 130; the log verifies and a re-run completes it."""
    db = tmp_path / "a.db"
    process = start(*run_of(talk, db, 60))
    wait_for(db, generating, process)

    code, stderr = stop(process, signal.SIGINT)

    assert code == 130
    assert stderr.startswith("interrupted: ") and stderr.count("\n") == 1 and "run the same command again" in stderr
    assert verified(db)
    assert as_json(*run_of(talk, db))["messages"] == len(TALK)
    assert logged(db) == TALK and verified(db)


def test_two_writers(talk: Path, tmp_path: Path) -> None:
    """Where another process writes to the conversation meanwhile, the run stops with one line and doubles nothing."""
    db = tmp_path / "a.db"
    process = start(*run_of(talk, db, 60))
    wait_for(db, generating, process)

    with AuditLog(db) as log:
        log.commit(NAME, log.seq(NAME), [NewEvent("reanchored", "2026-01-01T00:00:00+00:00", {"reason": "test"})])
    stderr = process.communicate(timeout=120)[1]

    assert process.returncode == 2
    assert stderr.startswith(f"error: conversation '{NAME}' is being written by another process")
    assert stderr.count("\n") == 1
    assert logged(db) == TALK[: len(logged(db))] and verified(db)


def test_chat_by_pipe(tmp_path: Path) -> None:
    """Lines are answered, slash commands work, a bad one is one line, and the log resumes the conversation."""
    db = tmp_path / "chat.db"
    options = ["chat", "--budget", 200, "--max-new-tokens", 4, "--log", db]
    typed = "What is a cat?\n/pin\n/history\n/usage\n/bogus\n/compact\n/quit\nnot read\n"

    done = cli(*options, "--system", "Be terse.", stdin=typed, code=2)

    assert "new conversation 'chat'" in done.stdout and "/200 tokens" in done.stdout and "pinned" in done.stdout
    assert done.stderr.splitlines() == [line for line in done.stderr.splitlines() if "unknown command /bogus" in line]
    found = as_json(*options, stdin="Why?\n")
    assert (found["resumed_messages"], len(found["replies"]), found["errors"]) == (3, 1, 0)
    assert kinds(db)["pinned"] == 1 and kinds(db)["appended"] == 5 and verified(db)


def test_ctrl_c_ends_only_the_reply(tmp_path: Path) -> None:
    """Ctrl-C during a reply keeps what came as `interrupted`; the chat goes on with the next line."""
    db = tmp_path / "chat.db"
    process = start("chat", "--budget", 1500, "--max-new-tokens", 1000, "--log", db)
    if process.stdin is None:
        raise AssertionError("no stdin")
    process.stdin.write("Tell me a long story about a cat and a dog.\n")
    process.stdin.flush()
    wait_for(db, lambda counts: counts.get("generation_started", 0) == 1, process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate("/pin\n/quit\n", timeout=120)

    assert (process.returncode, stderr) == (0, "")
    assert "(interrupted: " in stdout and "is pinned" in stdout
    assert kinds(db)["pinned"] == 1 and kinds(db)["appended"] == 1 and verified(db)
