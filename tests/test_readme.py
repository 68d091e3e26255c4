"""README and docs cannot lie: what they show is run, and what they list is what there is."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from compaction import Prepared, Reply, Session, SessionManager, errors
from compaction.cli import cli
from compaction.events import KINDS
from compaction.plugins import parse_policy
from compaction.policies import BUILTIN
from compaction.ports import Usage
from compaction.store import AuditLog
from compaction.store.log import _SqliteLog

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
ELLIPSIS = "…"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of that language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def table(page: Path, heading: str) -> dict[str, str]:
    """The first table whose first column is called `heading`: each row's code-marked name, and the whole row."""
    lines = iter(page.read_text("utf-8").splitlines())
    for line in lines:
        if line.startswith(f"| {heading} |"):
            next(lines)
            rows = list(iter(lambda: next(lines, ""), ""))
            return {name: row for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    pytest.fail(f"{page.name} has no table of {heading!r}")


def sessions(page: Path) -> Iterator[tuple[str, str]]:
    """The commands of the console blocks with what is said to follow; blocks about `make` are CI's own business."""
    for block in blocks(page, "console"):
        if block.startswith("$ make "):
            continue
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            yield command, printed


def matches(expected: str, printed: str) -> bool:
    """Whether the output is as expected; `…` stands for any text in a line, alone on a line for any lines."""
    pattern = ""
    for line in expected.rstrip().splitlines():
        if line.strip() == ELLIPSIS:
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*?".join(map(re.escape, line.rstrip().split(ELLIPSIS))) + r"\n"
    lines = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
    return re.fullmatch(pattern, lines.strip("\n") + "\n" if lines.strip() else "") is not None


def environment() -> dict[str, str]:
    """The interpreter's own commands in front, a wide terminal, and no hub to wait for."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    extra = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
    return {**os.environ, **extra}


def run_python(code: str, folder: Path) -> str:
    """What a snippet prints in a process of its own."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{code}\n{done.stderr}"
    return done.stdout


@pytest.mark.model
@pytest.mark.parametrize("number", range(len(blocks(README, "python"))))
def test_the_readme_s_python_runs(number: int, tmp_path: Path) -> None:
    """Each snippet runs as it stands, in an empty folder, and prints something."""
    printed = run_python(blocks(README, "python")[number], tmp_path)

    assert printed.strip()


def snippets() -> Iterator[Any]:
    """The Python of the docs; what loads an engine is marked so."""
    for name in ("policies.md", "library.md", "splice.md"):
        for number, code in enumerate(blocks(DOCS / name, "python")):
            marks = [pytest.mark.model] if "compaction.engines" in code else []
            yield pytest.param(code, id=f"{name}-{number}", marks=marks)


@pytest.mark.parametrize("code", list(snippets()))
def test_the_docs_python_runs(code: str, tmp_path: Path) -> None:
    """So does each snippet of the docs."""
    assert run_python(code, tmp_path).strip()


def test_the_policies_of_the_docs_commands_are_there() -> None:
    """Every --policy of docs/policies.md is one."""
    given = [shlex.split(command) for command, _ in sessions(DOCS / "policies.md")]
    texts = [words[words.index("--policy") + 1] for words in given]
    found = [parse_policy(text).name for text in texts]

    assert found == ["quantize", "quantize", "scored_eviction", "pipeline", "fallback", "pipeline"]


def test_the_docs_sql_runs(tmp_path: Path) -> None:
    """Every query of docs/log.md is valid on a log."""
    path = tmp_path / "a.db"
    AuditLog(path).close()
    connection = sqlite3.connect(path)

    for block in blocks(DOCS / "log.md", "sql"):
        connection.executescript(block)


@pytest.mark.model
def test_the_readme_s_commands_print_what_it_says(tmp_path: Path) -> None:
    """All commands of the README, in order, in a folder with the sample data, print what stands there."""
    shutil.copytree(ROOT / "demos" / "data", tmp_path / "demos" / "data")
    wrong = []
    for command, expected in sessions(README):
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=280
        )
        printed = done.stdout + done.stderr
        if not matches(expected, printed):
            wrong.append(f"$ {command}\n{printed}--- README says ---\n{expected}")

    assert not wrong, "\n".join(wrong)


def names(owner: object) -> set[str]:
    """The public attributes of a class."""
    return {name for name in vars(owner) if not name.startswith("_")}


@pytest.mark.parametrize(
    "owner", [SessionManager, Session, Prepared, Reply, Usage, _SqliteLog], ids=lambda owner: owner.__name__
)
def test_the_library_page_names_the_public_api(owner: type) -> None:
    """docs/library.md speaks of every public attribute of what a user holds, but of those the parts use."""
    prose = re.sub(r"^```.*?^```$", "", (DOCS / "library.md").read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    code = " ".join(re.findall(r"`([^`]+)`", prose))
    inner = {"settings", "state", "limits", "started", "interrupt", "to_json", "of", "commit"}

    assert sorted(name for name in names(owner) - inner if not re.search(rf"\b{name}\b", code)) == []


def test_an_expectation_can_fail() -> None:
    """The comparison is one: a wrong word, a missing line and a line too many are seen."""
    assert matches("ok: … events\n…\nend\n", "ok: 12 events\na\nb\nend\n")
    assert not matches("ok: … events\n", "no: 12 events\n")
    assert not matches("a\nb\n", "a\n")
    assert not matches("a\n", "a\nb\n")


def commands(group: click.Group, above: str = "") -> Iterator[str]:
    """The command line's commands, as they are typed."""
    for name, command in group.commands.items():
        typed = f"{above} {name}".strip()
        if isinstance(command, click.Group):
            yield from commands(command, typed)
        else:
            yield typed


def test_the_readme_lists_all_commands() -> None:
    """The table of commands is that of the command line."""
    assert set(table(README, "command")) == set(commands(cli))


@pytest.mark.parametrize("page", [README, DOCS / "policies.md"], ids=lambda page: page.name)
def test_the_policies_are_listed(page: Path) -> None:
    """The table of policies is that of the built-in ones."""
    assert set(table(page, "policy")) == set(BUILTIN)


def test_the_errors_are_listed() -> None:
    """docs/errors.md has a row for each error there is."""
    assert set(table(DOCS / "errors.md", "error")) == set(errors.__all__)


def test_the_events_are_listed() -> None:
    """docs/architecture.md says when each kind of event is written, or that nothing writes it yet."""
    page = DOCS / "architecture.md"
    reserved = re.search(r"^(.*) are reserved:", page.read_text("utf-8"), re.MULTILINE)
    later = set(re.findall("`([^`]+)`", reserved.group(1))) if reserved else set()

    assert set(table(page, "event")) | later == set(KINDS)


def test_the_modules_are_listed() -> None:
    """docs/architecture.md has a place in the house for every module and package."""
    page = (DOCS / "architecture.md").read_text("utf-8")
    house = page[page.index("## The house") :]
    there = {path.stem if path.suffix == ".py" else f"{path.name}/" for path in (ROOT / "compaction").iterdir()}
    there -= {"__main__", "__pycache__/", "py.typed/"}

    assert sorted(name for name in there if f"`{name}`" not in house) == []


@pytest.mark.parametrize(("heading", "kind"), [("table", "table"), ("view", "view")])
def test_the_log_s_columns_are_listed(heading: str, kind: str, tmp_path: Path) -> None:
    """docs/log.md names each table and view with exactly the columns it has."""
    path = tmp_path / "a.db"
    AuditLog(path).close()
    connection = sqlite3.connect(path)
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = ?", (kind,)).fetchall()
    real = {
        name: [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]
        for (name,) in names
        if not name.startswith(("sqlite_", "_", "span_text", "spans_index"))
    }
    listed = {name: row.split("|")[3] for name, row in table(DOCS / "log.md", heading).items()}

    assert {name: re.findall(r"`([^`]+)`", row)[0].split(", ") for name, row in listed.items()} == real


def test_the_two_commands_come_first() -> None:
    """The first thing the README shows is how to see it work and how to test it."""
    assert blocks(README, "console")[0].startswith("$ make demo\n")
    assert "$ make test" in README.read_text("utf-8")
