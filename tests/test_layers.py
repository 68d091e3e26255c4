"""The house of DESIGN.md, executable: an import points down, never sideways between two rooms of a floor.

Read from the source, so that imports for type checking only, and those inside functions, count as well.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"compaction": "compaction", "store": "compaction.store", "policies": "compaction.policies"}
FACADE = "compaction"

# From the top floor down. A room is a module of `compaction`, or a package with all its files.
HOUSE: tuple[frozenset[str], ...] = (
    frozenset({"__main__"}),
    frozenset({"cli", "testing"}),
    frozenset({"adapters", "metrics", "replay", FACADE}),
    frozenset({"manager"}),
    frozenset({"middleware", "plugins", "engines"}),
    frozenset({"kv"}),
    frozenset({"session", "policies", "store", "tokens", "transcripts"}),
    frozenset({"compacting"}),
    frozenset({"ledger"}),
    frozenset({"fulfil", "counting", "prepared"}),
    frozenset({"decide"}),
    frozenset({"state", "core_clamp"}),
    frozenset({"ports"}),
    frozenset({"view"}),
    frozenset({"applying"}),
    frozenset({"entries"}),
    frozenset({"events"}),
    frozenset({"plan", "grammar"}),
    frozenset({"messages", "budget", "kv.geometry"}),
    frozenset({"asynchronous", "responses"}),
    frozenset({"errors"}),
)
FLOOR = {room: number for number, rooms in enumerate(HOUSE) for room in rooms}
# Policies are independent of each other; what composes them is not.
COMPOSING_POLICIES = {"compaction.policies.pipeline", "compaction.policies.fallback"}
# Not numpy: sqlite-utils imports it where it is installed, and copes where it is not.
HEAVY = (
    "torch",
    "transformers",
    "httpx",
    "requests",
    "openai",
    "matplotlib",
    "tiktoken",
    "langchain_core",
    "prometheus_client",
)


class Import(NamedTuple):
    """One import statement's target."""

    path: Path
    line: int
    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.source} imports {self.target}"


def python_files(*folders: str) -> list[Path]:
    """All Python files under these folders of the repository; the links in compaction/ are not followed."""
    return sorted(path for folder in folders for path in _walk(ROOT / folder))


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        elif path.suffix == ".py":
            yield path


def module_name(path: Path) -> str:
    """The name a file is imported under."""
    first, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES.get(first, first), *(part for part in rest if part != "__init__")])


def imports(path: Path, known: frozenset[str]) -> Iterator[Import]:
    """Everything a file imports; `from package import module` is an import of that module."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            targets = [
                full if (full := f"{node.module}.{alias.name}") in known else node.module for alias in node.names
            ]
        else:
            continue
        for target in targets:
            yield Import(path.relative_to(ROOT), node.lineno, module_name(path), target)


def room(module: str) -> str:
    """The room of the house a module lies in."""
    parts = module.split(".")[1:]
    if not parts:
        return FACADE
    return "kv.geometry" if parts[:2] == ["kv", "geometry"] else parts[0]


def holds_policy(path: Path) -> bool:
    """Whether a file defines a class with a method `plan`."""
    return any(
        isinstance(node, ast.ClassDef) and any(getattr(item, "name", "") == "plan" for item in node.body)
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
    )


def points_down(item: Import) -> bool:
    """Whether the import stays in its room or leads to a lower floor; a module without a room has its own test."""
    source, target = room(item.source), room(item.target)
    return source == target or source not in FLOOR or target not in FLOOR or FLOOR[source] < FLOOR[target]


SOURCES = python_files("compaction", "store", "policies")
MODULES = frozenset(module_name(path) for path in SOURCES)
OWN_IMPORTS = [item for path in SOURCES for item in imports(path, MODULES) if item.target.split(".")[0] == "compaction"]


def test_every_module_has_a_room() -> None:
    """Each module stands somewhere in the house."""
    homeless = sorted(module for module in MODULES if room(module) not in FLOOR)

    assert homeless == [], "give it a floor in HOUSE, and in [tool.importlinter] of pyproject.toml"


def test_imports_point_down() -> None:
    """No module imports from a higher floor, or from another room of its own floor."""
    forbidden = [str(item) for item in OWN_IMPORTS if not points_down(item)]

    assert forbidden == []


def test_policies_do_not_know_each_other() -> None:
    """Of the files that hold a policy, only pipeline and fallback import another one, or the package of all."""
    policies = {"compaction.policies", *(module_name(path) for path in python_files("policies") if holds_policy(path))}
    forbidden = [
        str(item)
        for item in OWN_IMPORTS
        if {item.source, item.target} <= policies and item.source not in {"compaction.policies", *COMPOSING_POLICIES}
    ]

    assert forbidden == []


def test_no_relative_imports() -> None:
    """Imports are absolute: relative ones do not resolve where a tool looks at store/ alone."""
    relative = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level
    ]

    assert relative == []


def test_bare_store_and_policies_are_never_imported() -> None:
    """Nobody writes `import store`: the module would be a second copy, or a stranger's."""
    bare = [
        str(item)
        for path in python_files("compaction", "store", "policies", "tests", "demos")
        for item in imports(path, MODULES)
        if item.target.split(".")[0] in {"store", "policies"}
    ]

    assert bare == []


def test_no_assert_outside_tests() -> None:
    """Validation raises: an assert vanishes under `python -O`."""
    asserts = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files("compaction", "store", "policies", "demos")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Assert)
    ]

    assert asserts == []


def test_every_module_says_what_it_is_for() -> None:
    """Each module of the library has a docstring."""
    silent = [
        str(path.relative_to(ROOT)) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]

    assert silent == []


def test_every_test_states_the_behaviour() -> None:
    """Each test function has a docstring."""
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in python_files("tests")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]

    assert silent == []


@pytest.mark.parametrize(
    "module",
    [
        "compaction",
        "compaction.store",
        "compaction.policies",
        "compaction.engines",
        "compaction.cli",
        "compaction.metrics",
    ],
)
def test_importing_is_light(module: str) -> None:
    """Importing the library, or any of its public packages, loads no model, network or drawing code."""
    code = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)

    assert loaded.stdout.split() == []
