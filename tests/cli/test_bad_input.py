"""Bad input is one clear line that names the thing, the place and the next step; the log stays whole."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.harness import NAME, TALK, complaint, environment, kinds, verified, write_talk


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--budget", 400, "--policy", "slide"), ("unknown policy 'slide'", "sliding_window", "truncate")),
        (("--budget", 400, "--policy", "truncate:keep=2"), ("truncate: unknown parameter 'keep'", "keep_last")),
        (("--budget", 400, "--policy", "truncate:keep_last=x"), ("truncate: keep_last", "'x'")),
        ((), ("--budget", "--kv-budget")),
        (("--budget", 0), ("--budget", "x>=1")),
        (("--kv-budget", "lots"), ("cannot read 'lots' as bytes", "8GiB")),
        (("--budget", 400, "--plot", "nowhere/a.png"), ("nowhere/a.png", "folder does not exist")),
        (("--budget", 400, "--bogus"), ("--bogus", "compaction run --help")),
    ],
)
def test_options(options: tuple[object, ...], words: tuple[str, ...], talk: Path) -> None:
    """An option that makes no sense is named with what would."""
    line = complaint("run", talk, *options)

    assert line.startswith("error: ") and all(word in line for word in words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{"id": "a", "messages": [{"role": "user", "content": "x"}]}\n{"id": "b", "messages": [}\n',
            (":2: not JSON",),
        ),
        ('{"messages": [{"role": "wizard", "content": "x"}]}\n', (":1: message 0: role 'wizard'", "assistant")),
        ('\n{"messages": [{"role": "tool", "tool_call_id": "z", "content": "x"}]}\n', (":2: message 0", "'z'")),
        (
            '{"id": "a", "messages": []}\n{"id": "a", "messages": []}\n',
            (":2: conversation 'a' stands at", ":1 already"),
        ),
        ("\n", ("no conversation in",)),
    ],
)
def test_transcripts(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """A malformed line is named by file and line before a model is loaded or a log created."""
    path = tmp_path / "bad.jsonl"
    path.write_text(text)

    line = complaint("run", path, "--budget", 400, "--log", tmp_path / "new.db")

    assert str(path) in line and all(word in line for word in words)
    assert not (tmp_path / "new.db").exists()


def test_a_missing_transcript(tmp_path: Path) -> None:
    """A file that is not there is named."""
    assert "none.jsonl: cannot be read" in complaint("run", tmp_path / "none.jsonl", "--budget", 400)


@pytest.mark.model
def test_an_unknown_model(talk: Path) -> None:
    """A model that is nowhere is named with what could be given."""
    assert "'./nonesuch' does not exist: give 'smollm2'" in complaint(
        "run", talk, "--budget", 400, "--model", "./nonesuch"
    )


def test_a_locked_log(db: Path, talk: Path) -> None:
    """A log another process holds is named, and verifies afterwards."""
    holder = sqlite3.connect(db, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    try:
        line = complaint("run", talk, "--budget", 400, "--log", db)
    finally:
        holder.close()

    assert "another process is writing to it" in line
    assert verified(db)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write whatever the permissions say")
def test_a_read_only_log(db: Path, talk: Path) -> None:
    """A log that cannot be written is named."""
    db.chmod(0o400)

    assert "cannot be written" in complaint("run", talk, "--budget", 400, "--log", db)


def test_a_log_in_a_folder_that_is_not_there(talk: Path, tmp_path: Path) -> None:
    """The folder of a new log must exist."""
    assert "its folder does not exist" in complaint("run", talk, "--budget", 400, "--log", tmp_path / "no" / "a.db")


def test_a_file_that_is_not_a_log(talk: Path) -> None:
    """A file that is no log is refused and left as it was."""
    before = talk.read_bytes()

    assert "not a compaction log" in complaint("run", talk, "--budget", 400, "--log", talk)
    assert talk.read_bytes() == before


def test_a_log_of_a_newer_version(db: Path, talk: Path) -> None:
    """A log that a newer version wrote is refused with the advice to upgrade."""
    connection = sqlite3.connect(db)
    step = ("compaction", "m999_from_the_future", "2099-01-01")
    connection.execute("INSERT INTO _sqlite_migrations(migration_set, name, applied_at) VALUES (?, ?, ?)", step)
    connection.commit()
    connection.close()

    assert "written by a newer version" in complaint("run", talk, "--budget", 400, "--log", db)


@pytest.mark.model
def test_a_full_disk(tmp_path: Path) -> None:
    """Where no space is left the line says so, the exit code is 2, and the log verifies."""
    disk = tmp_path / "disk"
    disk.mkdir()
    big = write_talk(tmp_path, [{"role": "user", "content": "spacious words " * 40_000}])
    run = f"{sys.executable} -m compaction run {big} --budget 400 --log {disk}/a.db"
    verify = f"{sys.executable} -m compaction audit verify {disk}/a.db"
    script = f"mount -t tmpfs -o size=400k none {disk} && {run}; echo code $?; {verify}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, env=environment())
    if "code 2" not in done.stdout and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip("this machine lets nobody mount a small disk")

    assert done.stdout.startswith("code 2\nok: ")
    assert done.stderr.count("\n") == 1 and "no space left on the device" in done.stderr


@pytest.mark.model
def test_a_budget_below_the_floor(talk: Path, tmp_path: Path) -> None:
    """Turns that cannot fit are counted, both numbers and the parts are said, all messages are logged, exit code 3."""
    db = tmp_path / "small.db"

    line = complaint_of_misfits(talk, db)

    assert line.startswith("5 turns could not fit the budget; first before message 2 of 'talk-1'")
    assert "needs 35 tokens (template 14, last_user 21) but the room for a prompt is 16" in line
    assert verified(db)


def complaint_of_misfits(talk: Path, db: Path) -> str:
    command = ["run", talk, "--budget", 20, "--max-new-tokens", 4, "--log", db, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "compaction", *map(str, command)], capture_output=True, text=True, env=environment()
    )
    found = json.loads(done.stdout)
    assert (done.returncode, found["unsatisfiable"], found["messages"], found["turns"]) == (3, 5, len(TALK), 5)
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


@pytest.mark.model
def test_a_log_of_another_conversation(db: Path, tmp_path: Path) -> None:
    """A logged conversation that differs from the transcript is named with the place, and left as it is."""
    other = write_talk(tmp_path, [*TALK[:5], {"role": "user", "content": "something else"}], "other.jsonl")

    line = complaint("run", other, "--budget", 300, "--log", db)

    assert f"conversation '{NAME}' is in the log already and differs: message 5" in line
    assert verified(db)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--budget", 400), "not --budget 400"),
        (("--kv-budget", "1MiB"), "not --kv-budget 1048576"),
        (("--budget", 300, "--reserve", 20), "not --budget 300 --reserve 20"),
    ],
)
def test_a_log_of_another_budget(options: tuple[object, ...], words: str, db: Path, talk: Path) -> None:
    """A run under another budget than the log's is refused with both, before a model is loaded or anything written."""
    before = kinds(db)

    line = complaint("run", talk, *options, "--model", "./nonesuch", "--log", db)

    assert line == (
        f"error: conversation '{NAME}' is in the log under --budget 300, {words}: "
        "give --budget 300 to go on with it, or another --log"
    )
    assert kinds(db) == before
