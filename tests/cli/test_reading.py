"""audit, replay, policies and help, by real processes; no model is loaded."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from compaction.events import NewEvent
from compaction.store import AuditLog
from tests.cli.harness import NAME, TALK, as_json, cli, complaint, environment, kinds, verified

COMMANDS = [
    (), ("run",), ("chat",), ("audit",), ("audit", "show"), ("audit", "spans"), ("audit", "search"),
    ("audit", "restore"), ("audit", "verify"), ("audit", "head"), ("replay",), ("policies",),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_teaches(command: tuple[str, ...]) -> None:
    """Every command's --help shows an example that begins with its own name."""
    shown = cli(*command, "--help").stdout

    assert f"compaction {' '.join(command)}".strip() in shown.split("Usage:")[1].split("\n", 1)[1]


@pytest.mark.parametrize("command", [(), ("audit",)], ids=" ".join)
def test_without_a_command_the_help_is_shown(command: tuple[str, ...]) -> None:
    """A group alone prints what its --help prints."""
    assert cli(*command).stdout == cli(*command, "--help").stdout


def test_version() -> None:
    """--version names the program and its version."""
    assert cli("--version").stdout.startswith("compaction, version 0.")


def test_show_tells_what_and_why(db: Path) -> None:
    """`audit show` lists the conversation and each decision with its reason and tokens."""
    found = as_json("audit", "show", db)
    first = found["decisions"][0]

    assert [row["messages"] for row in found["conversations"]] == [len(TALK)]
    assert first["actions"] == ["drop"] and first["reasons"] and first["discarded_tokens"] > 0
    assert first["before"]["tokens"] > first["after"]["tokens"]


def test_show_tells_what_failed(failing: Path) -> None:
    """`audit show` names the rung of a decision and the failures before it, in text and JSON."""
    first = as_json("audit", "show", failing)["decisions"][0]

    assert first["rung"] == 2 and first["failures"] == ["summary_error"]
    assert "(rung 2, after summary_error)" in cli("audit", "show", failing).stdout


def test_what_a_rewind_took_back_is_marked(db: Path) -> None:
    """`audit show` and `audit spans` mark decisions that the session was rewound past, and no others."""
    assert "(undone)" not in cli("audit", "show", db).stdout + cli("audit", "spans", db).stdout
    with AuditLog(db) as log:
        last = log.decisions()[-1].seq
        log.commit(NAME, log.seq(NAME), [NewEvent("rewound", "2026-01-01T00:00:00+00:00", {"to": last - 1})])

    decisions, spans = as_json("audit", "show", db)["decisions"], as_json("audit", "spans", db)["spans"]

    assert [row["seq"] for row in decisions if row["undone"]] == [last]
    assert {row["decision"] for row in spans if row["undone"]} == {last}
    assert "(undone)" in cli("audit", "show", db).stdout and "(undone)" in cli("audit", "spans", db).stdout


@pytest.mark.parametrize("command", ["show", "spans"])
def test_text_output_has_no_control_characters(command: str, db: Path) -> None:
    """What a conversation holds reaches the terminal without escape sequences."""
    shown = cli("audit", command, db).stdout

    assert NAME in shown
    assert "\x1b" not in shown and "\x00" not in shown


def test_every_span_is_restored_byte_for_byte(db: Path, tmp_path: Path) -> None:
    """`audit restore` writes each span's exact text, to stdout and to a file; a whole message is its JSON."""
    spans = as_json("audit", "spans", db)["spans"]
    originals = [json.dumps(message, separators=(",", ":")) for message in TALK]

    assert spans
    for span in spans:
        assert span["text"] in originals
        raw = subprocess.run(
            [sys.executable, "-m", "compaction", "audit", "restore", str(db), span["id"]],
            capture_output=True, env=environment(), check=True,
        ).stdout  # fmt: skip
        assert raw == span["text"].encode()
    cli("audit", "restore", db, spans[0]["id"], "-o", tmp_path / "out.json")
    assert (tmp_path / "out.json").read_text() == spans[0]["text"]


def test_search_finds_what_was_discarded(db: Path) -> None:
    """`audit search` finds the span that holds the words."""
    hits = as_json("audit", "search", db, "Zürich parcel")["hits"]

    assert {hit["conversation"] for hit in hits} == {NAME}
    assert "no" not in cli("audit", "search", db, "Zürich parcel").stdout.split()
    assert as_json("audit", "search", db, "unheard")["hits"] == []


def test_verify_and_head(db: Path) -> None:
    """An untouched log verifies, also against the head it had; a head it never had is a problem."""
    head = cli("audit", "head", db).stdout.strip()

    assert as_json("audit", "verify", db, "--head", head) | {"events": 0} == {
        "ok": True, "events": 0, "problems": [], "head": head, "unanchored": 0,
    }  # fmt: skip
    assert as_json("audit", "verify", db)["unanchored"] is None
    strange = as_json("audit", "verify", db, "--head", "sha256:" + "1" * 64, code=1)
    assert not strange["ok"] and strange["problems"]
    told = cli("audit", "verify", db, "--head", "sha256:" + "1" * 64, code=1).stdout
    assert told.startswith("NOT ok: 1 problem in ")


def test_a_changed_byte_fails_verify(db: Path) -> None:
    """One changed character makes `audit verify` exit 1 and name table and row."""
    connection = sqlite3.connect(db)
    for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='trigger'").fetchall():
        connection.execute(f"DROP TRIGGER {name}")
    connection.execute("UPDATE texts SET body = replace(body, 'terse', 'verbose') WHERE body LIKE '%terse%'")
    connection.commit()
    connection.close()

    problems = as_json("audit", "verify", db, code=1)["problems"]

    assert any(problem["table"] == "texts" for problem in problems)
    assert cli("audit", "verify", db, code=1).stdout.startswith("NOT ok: ")


def test_replay_is_identical_and_loads_no_model(db: Path) -> None:
    """Every decision is decided again alike, without torch, transformers or tiktoken."""
    script = (
        "import sys; from compaction.cli import main; code = main(sys.argv[1:]);"
        "print(sorted({'torch', 'transformers', 'tiktoken'} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "replay", str(db), "--json"], capture_output=True, text=True, env=environment()
    )
    found = json.loads(done.stdout)

    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert found["identical"] == found["decisions"] > 0 and found["reasons"] == []


def test_replay_names_the_decision_that_differs(db: Path) -> None:
    """A policy with another constant is `different`: exit code 1, and the first decision and key are named."""
    script = (
        "import sys; from compaction.policies import SlidingWindow; from compaction.cli import main;"
        "cut = SlidingWindow._cut; SlidingWindow._cut = lambda self, view, goal, sinks: cut(self, view, goal, 0);"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "replay", str(db)], capture_output=True, text=True, env=environment()
    )

    assert done.returncode == 1
    assert f"first different: event {_first_decision(db)} of 'talk-1': " in done.stdout


def _first_decision(db: Path) -> int:
    with AuditLog(db) as log:
        return log.decisions()[0].seq


def test_policies_lists_parameters_with_defaults() -> None:
    """`policies` names what is installed; one policy is told in full."""
    listed = as_json("policies")["policies"]

    assert {"sliding_window", "truncate", "summarize", "default"} <= {row["name"] for row in listed}
    assert as_json("policies", "sliding_window")["parameters"]["sinks"] == {"type": "int", "default": 1}
    assert complaint("policies", "nonesuch").startswith("error: unknown policy 'nonesuch': there are clamp_oversized, ")


@pytest.mark.parametrize("command", [("audit", "show"), ("audit", "verify"), ("replay",)], ids=" ".join)
def test_a_log_that_is_not_there_is_not_created(command: tuple[str, ...], tmp_path: Path) -> None:
    """Reading a log that does not exist is one clear line and leaves no file."""
    assert "no such log, and none was created" in complaint(*command, tmp_path / "none.db")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"hello, not a database, but long enough to be one"])
def test_a_file_that_is_no_log(content: bytes, tmp_path: Path) -> None:
    """A file that is no log is refused and left as it was."""
    path = tmp_path / "notes.db"
    path.write_bytes(content)

    assert "not a compaction log" in complaint("audit", "show", path)
    assert path.read_bytes() == content


def test_unknown_span_and_conversation(db: Path) -> None:
    """An id the log does not know is named."""
    assert "no span '00ff': `compaction audit spans DB` lists" in complaint("audit", "restore", db, "00ff")
    assert "no decision 999 in the log" in complaint("audit", "spans", db, "--decision", 999)
    assert "conversation 'nobody' is not in the log" in complaint("replay", db, "--conversation", "nobody")
    assert "is no head" in complaint("audit", "verify", db, "--head", "abc")


def test_a_reader_that_goes_away_is_no_error(db: Path) -> None:
    """`… | head` ends quietly."""
    command = f"{sys.executable} -m compaction audit spans {db} --json | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment())

    assert done.stderr == ""


def test_reading_changes_no_event(db: Path) -> None:
    """Looking, proving, searching and replaying write no event."""
    before = kinds(db)
    for command in (("audit", "show"), ("audit", "spans"), ("audit", "verify"), ("replay",)):
        cli(*command, db)
    cli("audit", "search", db, "order")

    assert kinds(db) == before and verified(db)
