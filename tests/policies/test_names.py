"""Policies by name: built-in, installed, and from a command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import compaction.policies as package
from compaction.errors import InvalidPolicy
from compaction.plugins import make_policy, parse_policy, policies
from compaction.policies import BUILTIN, ClearToolResults, Fallback, NoOp, Pipeline, SlidingWindow, Truncate, make

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
from compaction.policies import Truncate
class Mine(Truncate):
    name = "mine"
broken = 3
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a distribution with entry points, as pip would leave it on disk."""

    def put(name: str, **points: str) -> None:
        (tmp_path / "mine_policies.py").write_text(MODULE)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = "".join(f"{key} = {value}\n" for key, value in points.items())
        (info / "entry_points.txt").write_text(f"[compaction.policies]\n{lines}")

    monkeypatch.syspath_prepend(str(tmp_path))
    return put


def test_every_public_name_is_there() -> None:
    """`__all__` names what the package has, in order."""
    assert all(hasattr(package, name) for name in package.__all__)
    assert list(package.__all__) == sorted(package.__all__)


def test_nested_policies_are_made_again() -> None:
    """Parameters of composed policies hold names and parameters of what they are made of."""
    policy = Fallback(Pipeline([ClearToolResults(exclude=("grep",)), NoOp()]), SlidingWindow(sinks=3))

    assert make(policy.name, policy.params) == policy


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("truncat", {}, "there are clamp_oversized, clear_tool_results"),
        ("truncate", {"keep": 1}, "its parameters are keep_last"),
        ("noop", {"x": 1}, "its parameters are none"),
        ("truncate", {"keep_last": "many"}, "keep_last"),
        ("truncate", {"keep_last": -1}, "at least 0"),
        ("pipeline", {}, "'stages' is missing"),
        ("pipeline", {"stages": [{"name": "nobody"}]}, "unknown policy 'nobody'"),
        ("clear_tool_results", {"exclude": [1]}, "exclude"),
    ],
)
def test_what_cannot_be_made_is_refused_with_what_there_is(name: str, params: dict[str, Any], says: str) -> None:
    """One line that says what would be right."""
    with pytest.raises(InvalidPolicy, match=says) as caught:
        make_policy(name, params)

    assert "\n" not in str(caught.value)


def test_built_in_policies_need_no_entry_points() -> None:
    """They are known from a bare checkout."""
    assert set(policies()) >= set(BUILTIN)


def test_an_installed_policy_is_found(install: Any) -> None:
    """A package registers a class under the entry-point group; it nests in pipelines too."""
    install("theirs", mine="mine_policies:Mine")

    mine = make_policy("mine", {"keep_last": 2})
    nested = make_policy("pipeline", {"stages": [{"name": "mine", "params": {"keep_last": 1}}]})

    assert mine.name == "mine"
    assert mine.params == {"keep_last": 2}
    assert isinstance(nested, Pipeline)
    assert nested.stages[0].name == "mine"


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ({"truncate": "mine_policies:Mine"}, "claimed by kv-compaction and by theirs"),
        ({"mine": "mine_policies:Missing"}, "cannot be loaded"),
        ({"mine": "mine_policies:broken"}, "no factory"),
    ],
)
def test_a_bad_entry_point_is_named(install: Any, points: dict[str, str], says: str) -> None:
    """No package replaces a built-in policy, and a broken one is named with its package."""
    install("theirs", **points)

    with pytest.raises(InvalidPolicy, match=says):
        policies()


def test_two_packages_cannot_claim_one_name(install: Any) -> None:
    """Which of the two would run must not depend on the order of installation."""
    install("theirs", mine="mine_policies:Mine")
    install("others", mine="mine_policies:Mine")

    with pytest.raises(InvalidPolicy, match="claimed by others and by theirs"):
        policies()


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("truncate", Truncate()),
        (" truncate:keep_last=4 ", Truncate(keep_last=4)),
        ("sliding_window:sinks=2,sink_share=0.5", SlidingWindow(sinks=2, sink_share=0.5)),
        ("clear_tool_results:exclude=grep+read", ClearToolResults(exclude=("grep", "read"))),
        ('pipeline:{"stages": [{"name": "noop"}]}', Pipeline([NoOp()])),
    ],
)
def test_a_policy_can_be_written_on_a_command_line(text: str, policy: object) -> None:
    """Name, colon, parameters."""
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    "text", ["", "nobody", "truncate:4", "truncate:=4", "truncate:keep_last=1,keep_last=2", "noop:{"]
)
def test_a_command_line_that_cannot_be_read_is_refused(text: str) -> None:
    """Never a traceback, never a guess."""
    with pytest.raises(InvalidPolicy):
        parse_policy(text)


def test_the_bare_name_is_refused() -> None:
    """`import policies` says what to import instead."""
    done = subprocess.run([sys.executable, "-c", "import policies"], cwd=ROOT, capture_output=True, text=True)

    assert "import compaction.policies" in done.stderr
