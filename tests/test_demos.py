"""The demos, run as their readers run them, and the tools of the agent demo."""

from __future__ import annotations

import importlib.util
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

DEMOS = Path(__file__).resolve().parent.parent / "demos"
SHORT = DEMOS / "data" / "support_short.jsonl"
REDUCED = (str(SHORT), "--limit", "1", "--budget", "400", "--max-new-tokens", "2")

# Script, arguments, and what it must have said.
NO_MODEL = [
    (
        "04_audit_restore_replay.py",
        (),
        ("restored equals the file: True", "5 of 5 decisions identical", "verifies: False"),
    ),
]
QUICK = [
    ("00_main_job.py", REDUCED, ("spans, byte for byte", "decisions identical", "verifies: ", "main_job.png")),
    ("01_first_compaction.py", (), ("compacted zoe: ", "What left the context", "found again: ")),
    ("05_many_conversations.py", (), ("compacted", "released: 0 bytes", "verifies: True")),
]
LONG = [
    ("02_three_policies.py", (), ("truncate", "sliding_window", "summarize", "three_policies.png")),
    ("03_agent_loop.py", (), ("compacted", "calculate", "query", "log verifies: True")),
    ("06_live_cache.py", (), ("apply='splice'", "verifies: True", "('quantize',)", "restores: ")),
]


def run(script: str, arguments: tuple[str, ...], folder: Path) -> str:
    """What a demo prints when run in that folder."""
    root = str(DEMOS.parent)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(DEMOS / script), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(("script", "arguments", "said"), NO_MODEL)
def test_a_demo_without_a_model(script: str, arguments: tuple[str, ...], said: tuple[str, ...], tmp_path: Path) -> None:
    """The demo ends well and shows what it promises."""
    printed = run(script, arguments, tmp_path)

    assert [words for words in said if words not in printed] == []


@pytest.mark.model
@pytest.mark.parametrize(("script", "arguments", "said"), QUICK)
def test_a_demo_with_a_model(script: str, arguments: tuple[str, ...], said: tuple[str, ...], tmp_path: Path) -> None:
    """The demo ends well and shows what it promises, with the real model."""
    printed = run(script, arguments, tmp_path)

    assert [words for words in said if words not in printed] == []


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("script", "arguments", "said"), LONG)
def test_a_long_demo(script: str, arguments: tuple[str, ...], said: tuple[str, ...], tmp_path: Path) -> None:
    """The demo ends well and shows what it promises, with the real model over many turns."""
    printed = run(script, arguments, tmp_path)

    assert [words for words in said if words not in printed] == []


def test_every_demo_is_run_and_listed() -> None:
    """Each numbered script has a test here and a line in demos/README.md."""
    scripts = {path.name for path in DEMOS.glob("0*.py")}
    listed = (DEMOS / "README.md").read_text("utf-8")

    assert scripts == {script for script, _, _ in (*NO_MODEL, *QUICK, *LONG)}
    assert [script for script in scripts if f"`{script}`" not in listed] == []


@pytest.fixture
def tools() -> ModuleType:
    """The module demos/agent_tools.py."""
    spec = importlib.util.spec_from_file_location("agent_tools", DEMOS / "agent_tools.py")
    if spec is None or spec.loader is None:
        pytest.fail("demos/agent_tools.py is not there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("expression", "value"), [("40 * 12.50", 500.0), ("-(2 + 3) ** 2 % 7", 3), ("7 / 2", 3.5), ("2 ** -1", 0.5)]
)
def test_the_calculator_calculates(tools: ModuleType, expression: str, value: float) -> None:
    """Arithmetic gives what Python gives."""
    assert tools.calculate(expression) == value


@pytest.mark.parametrize("expression", ["__import__('os')", "a + 1", "[1] * 9", "9 ** 9 ** 9", "'x' * 3", "True + 1"])
def test_the_calculator_takes_nothing_else(tools: ModuleType, expression: str) -> None:
    """Names, calls, lists, strings and towers of powers are refused."""
    with pytest.raises(ValueError, match=r"not arithmetic|exponent"):
        tools.calculate(expression)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("read_file", '{"name": "../common.py"}'), ("query", '{"sql": "DELETE FROM sales"}'), ("calculate", '{"x": "1"}')],
)
def test_a_tool_that_fails_says_so(tools: ModuleType, name: str, arguments: str) -> None:
    """A path out of the folder, a write to the database and a wrong argument are results that begin with error."""
    database = tools.sales_table(sqlite3.connect(":memory:"))

    result = tools.run_tool({"name": name, "arguments": arguments}, DEMOS / "data" / "notes", database)

    assert result.startswith("error: ")
